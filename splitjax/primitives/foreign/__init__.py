"""What operations do whose code splitjax does not partition itself: a user's own `shard_map`, and kernels that are kept
whole.

Importing the package states their dim rules in the table of operations.
"""

from splitjax.primitives.foreign import manual, wrapped

__all__ = ["manual", "wrapped"]
