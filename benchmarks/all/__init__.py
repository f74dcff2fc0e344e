"""Every benchmark at a tiny size: which commands walk through it, what stands in for data, and what runs them."""
