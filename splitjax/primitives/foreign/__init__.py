"""What operations do whose code splitjax does not partition itself: a user's own `shard_map`, Pallas calls, and kernels
that are kept whole.

Importing the package states their dim rules in the table of operations.
"""

from splitjax.primitives.foreign import grids, manual, wrapped

__all__ = ["grids", "manual", "wrapped"]
