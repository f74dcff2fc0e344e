"""Synchronisation by rows: schemes, training, messages, local work, a table of 5 GB, the choice."""
