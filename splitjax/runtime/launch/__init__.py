"""Joins, starts and watches the processes of a run, tells them from each other, and ends them together.

A command and a number of processes come in; a `LaunchOutcome` with every worker's end comes out. What a worker needs to
join (`initialize`) is light, because `import splitjax` goes through it.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["LaunchConfig", "Run", "start"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("splitjax.runtime.launch.launch"), name)
    raise AttributeError(f"module 'splitjax.runtime.launch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
