"""Training steps in the idioms that people write today, each compared with one device."""
