"""Plan -> executable."""
