"""Sums over examples, computed a part at a time, with the numbers of the whole batch.

The loss of a gradient boundary comes in, traced at two batch sizes; how each of its values relates to the examples is
found by rule, and a loop over microbatches comes out that adds up contributions and exchanges their sum once.
"""
