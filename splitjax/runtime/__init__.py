"""Leaving a run alone: the training loop, checkpoints, many processes, what one sees of them.

What scripts of one's own use is here by name; it is imported when it is first used, because `import splitjax` comes
through here.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CheckpointOptions": "checkpoint.options",
    "Checkpoints": "checkpoint.checkpoints",
    "JsonLines": "training.metrics",
    "Ledger": "training.ledger",
    "LoopOptions": "training.loop",
    "NumberGuard": "training.guard",
    "NumberOptions": "training.guard",
    "Place": "launch.whereabouts",
    "Placement": "training.placing",
    "Profile": "training.profiling",
    "StepRecorder": "launch.whereabouts",
    "StopRequest": "training.stopping",
    "Table": "training.metrics",
    "TensorBoard": "training.metrics",
    "TrainingProgress": "training.progress",
    "WeightsAndBiases": "training.metrics",
    "batch_layout": "training.placing",
    "read_metrics": "training.metrics",
    "restore": "training.stepping",
    "run_mesh": "training.mesh_choice",
    "train": "training.loop",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"splitjax.runtime.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'splitjax.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
