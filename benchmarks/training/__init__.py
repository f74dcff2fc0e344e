"""Training for real: accuracy, input, checkpoints, two processes over real links."""
