"""Says which operations call the host: callbacks, whose function sees whole arrays, on one device.

No rule says what they do to dims. What is split of their operands is gathered (`planning.sites.callbacks`).
"""

from __future__ import annotations

from typing import Any

from splitjax import _compat
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

CALLBACKS: frozenset[str] = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})

OPERATIONS.state(" ".join(sorted(CALLBACKS)), Trait.FOREIGN)


def is_ordered(eqn: Any) -> bool:
    """Returns whether the callback `eqn` runs in the order of the program with others, which JAX supports on one device
    only."""
    return _compat.has_ordered_effects(eqn)
