"""Checkpoints of a training run: asynchronous, atomic, verified, for any number of processes.

A state, and what a step carries besides, comes in; folders that are whole or not there come out, and states from them
on whatever mesh the run has then. `docs/checkpoints.md` tells what can be asked.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {"CheckpointOptions": "options", "Checkpoints": "checkpoints", "Restored": "options"}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    # When it is first used: it brings orbax, and `import splitjax` comes through rooms that need none.
    if name in _PLACES:
        return getattr(importlib.import_module(f"splitjax.runtime.checkpoint.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'splitjax.runtime.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
