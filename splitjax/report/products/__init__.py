"""Reads the products that XLA compiled for a step: compiled programs go in, how much a device computes comes out."""
