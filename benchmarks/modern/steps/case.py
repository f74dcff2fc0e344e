"""Describes a training step that is compared with one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

State = Any  # a tree of arrays, or whatever a step takes for its state
Batch = Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step that is ready to run, with its first state and its batches, all of one dtype.

    - `step`: `(state, batch) -> (state, metrics)`, pure; `metrics["loss"]` is a scalar. Not jitted.
    - `state`: before the first step; numpy or JAX arrays. It is not changed.
    - `batches`: those of the steps, in order; leading dims are divided by eight devices.
    """

    step: Callable[[State, Batch], tuple[State, Mapping[str, Any]]]
    state: State
    batches: tuple[Batch, ...]


@dataclasses.dataclass(frozen=True)
class ModernStep:
    """Describes a step by what a reader knows it for.

    - `name`: short, such as `LLaMA, scanned and rematerialised`; no two steps have the same.
    - `idiom`: whose way of writing it follows: `MaxText`, `nanoGPT`, `Gemma`, `ViT`, `DiT`, ...
    - `make`: `dtype -> Problem`, `float64` or `float32`; called under `jax.enable_x64` where it is float64. The numbers
      are drawn with fixed seeds.
    - `has`: words for what the step contains, such as `scan`, `remat`, `rope`, `ema`.
    - `dtype`: the widest that the step allows: a step that computes in bfloat16 or quantises is compared in float32.
    - `tolerance`: absolute for what is below one and relative above, of losses and new state. 1e-10 in float64.
    - `num_experts`: of a mixture, which may lie over an axis of its own; 0 for none.
    """

    name: str
    idiom: str
    make: Callable[[str], Problem]
    has: tuple[str, ...]
    dtype: str = "float64"
    tolerance: float = 1e-10
    num_experts: int = 0
