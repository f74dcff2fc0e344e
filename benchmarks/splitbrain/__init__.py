"""SplitBrain's claims: memory, crossings, scaling, bytes, numbers."""
