"""The cells whose step time is predicted and measured, and what measures one: models, layouts, batches on two devices
or four.

Whether a cell is held out follows from its name alone, as for memory: what the model does was looked at with the
others, and only those that are held out are quoted. Nothing is fitted to any of them: constants come from
`splitjax calibrate`, which times single operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from typing import Any

from benchmarks.planner.cells import is_held_out

FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# Rules, and the mesh axis over all devices.
LAYOUTS: dict[str, tuple[str, str]] = {
    "data_parallel": ("data_parallel", "data"),
    "fsdp": ("fsdp", "data"),
    "megatron": ("megatron", "model"),
}
MODELS = ("mlp", "vgg16", "transformer", "llama", "scanned", "deepfm")
BATCHES = (32, 128)
ONE_PROCESS = "one process"  # of two virtual devices


@dataclasses.dataclass(frozen=True)
class Place:
    """Processes of one core's worth each, and the rate of the links between them; None for the loopback."""

    num_processes: int
    link: str | None


PLACES: dict[str, Place] = {
    "100 Mb/s": Place(2, "100mbit"),
    "1 Gb/s": Place(2, "1gbit"),
    "loopback": Place(2, None),
    "four processes, 1 Gb/s": Place(4, "1gbit"),
}
# Of two processes, by name.
LINKS: dict[str, str | None] = {name: place.link for name, place in PLACES.items() if place.num_processes == 2}


def num_devices(where: str) -> int:
    return PLACES[where].num_processes if where in PLACES else 2


@dataclasses.dataclass(frozen=True)
class SpeedCell:
    """One combination: `model` of `MODELS`, `layout` of `LAYOUTS`, `batch` the examples of the global batch, `where`
    one process or one of `PLACES`."""

    model: str
    layout: str
    batch: int
    where: str = ONE_PROCESS

    @property
    def name(self) -> str:
        return f"{self.model}/{self.layout}/{self.batch}/{self.where}"

    @property
    def is_held_out(self) -> bool:
        """Whether the cell is held out: by a hash of its name, so that nobody chooses."""
        return is_held_out(self.name)


def every_cell(where: str = ONE_PROCESS) -> list[SpeedCell]:
    return [SpeedCell(*each, where) for each in itertools.product(MODELS, LAYOUTS, BATCHES)]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What steps of a cell took: `seconds` of each, by the clock; `halves`: those of its first and second half of the
    rounds, counted as `splitjax calibrate` counts (`timing.typical`); `others`: the load average of the machine
    meanwhile, this run included."""

    seconds: float
    halves: tuple[float, float]
    others: float


def made(cell: SpeedCell) -> tuple[Any, Any, Any]:
    """The step of a cell, what makes its state, and its batch as shapes."""
    import optax

    import splitjax
    from benchmarks.planner.steps import SIZES, own_init, own_step
    from splitjax.models import build, make_step

    if cell.model in SIZES:
        name, options = SIZES[cell.model]
        spec = build(name, **options)
        init, step, _ = make_step(spec, optax.sgd(0.01, momentum=0.9), value_and_grad=splitjax.value_and_grad)
        batch = spec.example(cell.batch)
    else:
        step, (_, batch) = own_step(cell.model, cell.batch)
        init = own_init(cell.model)
    rules, axis = LAYOUTS[cell.layout]
    return splitjax.parallelize(step, mesh={axis: num_devices(cell.where)}, rules=rules), init, batch


def run(cell: SpeedCell, rounds: int, processor: bool) -> Measured:
    """Runs the steps of a cell on the devices of this run. `rounds`: how many. `processor`: whether processor time over
    the cores counts, instead of the wall's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from splitjax.measure.calibrating.timing import num_cores, typical

    step, init, shapes = made(cell)
    state = step.init(init, jax.random.key(0), example=(shapes,))
    draw = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return draw.integers(0, 10, leaf.shape).astype(leaf.dtype)
        return draw.normal(size=leaf.shape).astype(leaf.dtype)

    values = jax.tree.map(filled, shapes)
    batch = jax.tree.map(
        lambda value, sharding: jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]),
        values, step.shardings(state, shapes)[1],
    )  # fmt: skip
    cores = min(num_devices(cell.where) // jax.process_count(), num_cores())
    clock = (lambda: time.process_time() / cores) if processor else time.perf_counter
    seconds: list[float] = []
    busy = [_busy()]
    for number in range(rounds + 2):
        started = clock()
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        if number > 1:
            seconds.append(clock() - started)
    busy.append(_busy())
    half = len(seconds) // 2
    return Measured(typical(seconds), (typical(seconds[:half]), typical(seconds[half:])), statistics.mean(busy))


def _busy() -> float:
    return os.getloadavg()[0]
