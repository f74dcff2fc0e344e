"""What `splitjax.equinox` and `splitjax.nnx` share: a step over objects, and behind it one over their arrays."""
