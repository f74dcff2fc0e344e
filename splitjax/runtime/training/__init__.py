"""The training loop and what it uses: batches, placement, metrics, progress, profiles, goodput, a clean end.

Steps of any frontend and batches come in; trained states, a line of metrics a step, and the time that it took come out.
"""
