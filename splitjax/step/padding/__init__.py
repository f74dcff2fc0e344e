"""Rewrites a traced step over leaves that are stored larger than the step knows them (`uneven="pad"`)."""
