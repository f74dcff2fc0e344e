"""Keeps Python's collector of cycles away from work that makes many objects and no cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Leaves cycles of objects uncollected meanwhile: to trace, analyse and plan a step makes some hundred thousand
    objects that stay, and the collector would look through all of them again and again, for up to a fifth of the time.
    What the caller switched off stays off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
