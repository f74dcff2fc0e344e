"""Group communication in turns: split layers that run one worker's examples at a time.

A boundary comes in, cut where examples cross into split layers; a loop comes out that fetches the next turn's
activations while it computes, so that the memory of a crossing is that of one turn.
"""
