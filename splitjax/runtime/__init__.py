"""Leaving a run alone: the training loop, checkpoints, many processes, what one sees of them."""
