"""Tells whether JSON values are nested more deeply than documents are: the time and the stack of whoever reads or
writes a deep nest grow with its depth."""

from __future__ import annotations

from typing import Any

MAX_DEPTH: int = 100  # lists and objects in each other, of any document


def is_shallow(values: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Tells whether JSON `values` have at most `max_depth` lists and objects in each other."""
    level = [values] if isinstance(values, (dict, list, tuple)) else []
    for _ in range(max_depth):
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, (dict, list, tuple))]
        if not level:
            return True
    return False
