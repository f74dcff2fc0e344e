"""Measures the bytes of a device: what a placed state takes, and what XLA compiled for a step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from splitjax.display.document import Document, Section, Table
from splitjax.display.figures import bytes_text


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Holds the bytes per device of a way to train.

    - `name`: of the way.
    - `state_bytes`: of parameters and optimizer state.
    - `step_bytes`: of the whole step: arguments, temporaries, and outputs that are not written over arguments.
    """

    name: str
    state_bytes: int
    step_bytes: int


def measure(name: str, step: Any, init: tuple[Any, Any], batch: Any) -> MemoryUse:
    """Returns what a decorated `step` takes, compiled for shapes alone.

    **Arguments:** `name`: of this way to train. `init`: its init_fn and the key for it. `batch`: the shapes of a batch.
    """
    state = step.abstract_state(*init, example=(batch,))
    stats = step.lower(state, batch).compile().memory_analysis()
    # `peak_memory_in_bytes` is only the arguments on a CPU.
    step_bytes = (
        stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    )
    return MemoryUse(name, sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(state)), step_bytes)


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def comparison(base: MemoryUse, compared: MemoryUse) -> Document:
    """Returns a document with `base` and `compared` side by side, and what the second saves."""
    rows = tuple(
        (label, bytes_text(before), bytes_text(after), f"{100 * (after / before - 1):+.0f} %")
        for label, before, after in (
            ("state (parameters and optimizer)", base.state_bytes, compared.state_bytes),
            ("whole step as XLA compiled it", base.step_bytes, compared.step_bytes),
        )
    )
    table = Table.of(("", base.name, compared.name, "difference"), rows, (1, 2, 3))
    return Document("", (Section("memory per device", (table,)),))
