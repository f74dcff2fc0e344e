"""Finds what XLA rematerialises involuntarily, and says what to do about it."""
