"""What operations do whose code splitjax does not partition itself: a user's own `shard_map`, Pallas calls, kernels
that are kept whole, callbacks.

Importing the package states their dim rules in the table of operations.
"""

from splitjax.primitives.foreign import callbacks, grids, manual, wrapped

__all__ = ["callbacks", "grids", "manual", "wrapped"]
