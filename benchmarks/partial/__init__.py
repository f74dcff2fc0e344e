"""Partial backpropagation: bytes and time saved, quality, and links over which it pays."""
