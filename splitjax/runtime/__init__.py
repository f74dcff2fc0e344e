"""Leaving a run alone: the training loop, checkpoints, many processes, what one sees of them.

What scripts of one's own use is here by name; it is imported when it is first used, because `import splitjax` comes through here.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CheckpointOptions": "checkpoint_options", "Checkpoints": "checkpoint", "JsonLines": "metrics", "Ledger": "ledger",
    "LoopOptions": "loop", "Placement": "placing", "Profile": "profiling", "StopRequest": "stopping", "Table": "metrics",
    "TensorBoard": "metrics", "TrainingProgress": "progress", "batch_layout": "placing", "read_metrics": "metrics", "restore": "stepping", "train": "loop",
}  # fmt: skip

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"splitjax.runtime.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'splitjax.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
