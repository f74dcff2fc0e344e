"""What a stranger meets: times from a clone, the site, its search and its pages (`python -m benchmarks product`)."""
