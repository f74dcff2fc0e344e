"""Runs cells on the device: in a process of its own, for what it needs of memory, and one after the other, for time.

python -m benchmarks.accelerator.running memory FILE CELL [--quick]
python -m benchmarks.accelerator.running budget FILE MODEL [--quick]
python -m benchmarks.accelerator.running time FILE CALIBRATION TARGET CELL [--quick]
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.cells import Cell, Made, made

_GROUP, _GROUPS = 5, 5
_OVER = (1.0, 1.15, 1.3, 1.5)  # batches tried beyond what the bound lets through


def started(cell: Made, plain: bool = False) -> tuple[Any, Any]:
    """A state and a batch of random numbers on the device."""
    key = jax.random.key(0)
    state = jax.jit(cell.init)(key) if plain else cell.parallel.init(cell.init, key, example=(cell.batch,))
    draw = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return draw.integers(0, 10, leaf.shape).astype(leaf.dtype)
        return draw.normal(size=leaf.shape).astype(leaf.dtype)

    return state, jax.device_put(jax.tree.map(filled, cell.batch), jax.devices()[0])


def memory_of(cell: Cell, quick: bool) -> dict[str, Any]:
    """What is predicted of a cell, what its compiler says, and the most that the device held: in bytes. The device's
    allocator counts from the start of the process, so that a cell has a process of its own; arguments are made there
    without copies, and autotuning is off, whose trials would count."""
    each = made(cell, quick)
    predicted = predicted_memory(cell, step=each)
    shapes = jax.eval_shape(each.init, jax.random.key(0))
    compiled = each.parallel.lower(shapes, each.batch).compile().memory_analysis()
    state, batch = started(each)
    for _ in range(2):
        state, _ = each.parallel(state, batch)
    jax.block_until_ready(state)
    stats = jax.devices()[0].memory_stats() or {}
    aliased = compiled.argument_size_in_bytes + compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    return {
        "cell": cell.name, "held_out": cell.is_held_out, **predicted,
        "compiled": aliased + compiled.temp_size_in_bytes, "compiled_arguments": compiled.argument_size_in_bytes,
        "peak": stats.get("peak_bytes_in_use", 0),
    }  # fmt: skip


def predicted_memory(cell: Cell, mesh: Any = None, step: Made | None = None) -> dict[str, int]:
    """The predicted bytes of a step of a cell: `estimate`, upper `bound`, and its `arguments`. `mesh`: as `made` takes
    it. `step`: the cell's, where it is made already."""
    step = made(cell, mesh=mesh) if step is None else step
    found = step.parallel.memory(jax.eval_shape(step.init, jax.random.key(0)), step.batch)
    return {"estimate": found.estimate_bytes, "bound": found.bound_bytes, "arguments": found.argument_bytes}


def budget_of(model: str, quick: bool) -> dict[str, Any]:
    """How large a batch the bound lets through under the memory that this process may use, and which batches run."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**28)

    def predicted(batch: int) -> Any:
        each = made(Cell(model, batch), quick)
        return each.parallel.memory(jax.eval_shape(each.init, jax.random.key(0)), each.batch)

    unit = 8
    few, many = predicted(unit), predicted(4 * unit)
    a_unit = max((many.bound_bytes - few.bound_bytes) / 3, 1)  # nearly proportional to the batch
    units = max(1, int((limit - few.bound_bytes) / a_unit) + 1)
    while units > 1 and predicted(units * unit).bound_bytes > limit:
        units -= max(1, units // 50)
    tried = []
    for over in _OVER:
        batch = max(round(units * over), units) * unit
        figures = predicted(batch)
        tried.append({
            "batch": batch, "bound": figures.bound_bytes, "estimate": figures.estimate_bytes,
            "ran": _runs(made(Cell(model, batch), quick)),
        })  # fmt: skip
        print(model, tried[-1], flush=True)
        if not tried[-1]["ran"]:
            break
    return {"model": model, "limit": limit, "tried": tried}


def _runs(cell: Made) -> bool:
    """Whether two steps of a cell run in the memory that there is."""
    try:
        state, batch = started(cell)
        for _ in range(2):
            state, _ = cell.parallel(state, batch)
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def predicted_times(cell: Cell, calibration: str, target: str, step: Made | None = None) -> dict[str, Any]:
    """The predicted seconds of a step of a cell: by a calibration's file, and by what is published of a `target` (none
    where that is empty); and what takes longest of the first. `step`: the cell's, where it is made already."""
    step = made(cell) if step is None else step
    shapes = jax.eval_shape(step.init, jax.random.key(0))
    measured = step.parallel.time(shapes, step.batch, on=calibration)
    published = step.parallel.time(shapes, step.batch, on=target).seconds if target else None
    return {"predicted": measured.seconds, "published": published, "largest": _largest(measured)}


def time_of(cell: Cell, calibration: str, target: str, quick: bool) -> dict[str, Any]:
    """Predicted and measured seconds of a step of a cell, and of the same step under `jax.jit`."""
    each = made(cell, quick)
    predicted = predicted_times(cell, calibration, target, each)
    own, own_loss = _seconds(each.parallel, started(each))
    plain, plain_loss = _seconds(jax.jit(each.plain, donate_argnums=0), started(each, plain=True))
    return {
        "cell": cell.name, "held_out": cell.is_held_out, **predicted,
        "measured": own, "plain": plain, "loss": own_loss, "plain_loss": plain_loss,
    }  # fmt: skip


def _largest(predicted: Any) -> list[Any]:
    """The operations that a prediction has most seconds for."""
    return [(part.name, part.seconds) for part in predicted.parts[:12]]


def _seconds(step: Any, arguments: tuple[Any, Any]) -> tuple[float, float]:
    """The median time of a step, of groups of steps that do not wait for each other, and the loss of the second step:
    the first one has updated everything, and what rounding does has not grown yet."""
    state, batch = arguments
    state, _ = step(state, batch)
    state, second = step(state, batch)
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    seconds = []
    for _ in range(_GROUPS):
        begun = time.perf_counter()
        for _ in range(_GROUP):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append((time.perf_counter() - begun) / _GROUP)
    return statistics.median(seconds), float(second["loss"])


def main(arguments: list[str]) -> int:
    quick = "--quick" in arguments
    what, file, *rest = [argument for argument in arguments if argument != "--quick"]
    if what == "memory":
        found: Any = memory_of(Cell.parse(rest[0]), quick)
    elif what == "budget":
        found = budget_of(rest[0], quick)
    else:
        calibration, target, name = rest
        found = time_of(Cell.parse(name), calibration, target, quick)
    pathlib.Path(file).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
