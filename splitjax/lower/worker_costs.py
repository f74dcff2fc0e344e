"""What one worker's share of a step takes on one device, differentiated to several depths: seconds, and bytes as compiled.

Each depth is a program of its own: the step traced with a worker's examples, whose boundary differentiates the last layers only, without what no gradient
needs (the update). Programs take turns in being timed, so that a machine's moods meet all of them, and medians count.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.errors import BatchError, MicrobatchError
from splitjax.lower import gradient
from splitjax.lower.entry import Entry
from splitjax.lower.layout import Hooks, Layout, Site, evaluate
from splitjax.lower.microbatching import resized_trace
from splitjax.partial.stages import Stage, Stages

# So many depths are compiled at most; what stands between two of them is divided by predicted time.
MAX_CUTS = 8
_MIN_ROUNDS, _MAX_ROUNDS = 5, 40
_ENOUGH_SECONDS = 4.0  # of timing, once there are rounds enough


@dataclasses.dataclass(frozen=True)
class WorkerCosts:
    """Of a worker with `num_examples`.

    - `forward_seconds`, `forward_bytes`: of the forward pass. `cuts`: the stages from which on programs differentiate, ascending, the first 0.
    - `seconds`: forward and backward to each cut. `num_bytes`: temporaries and results of its program.
    """

    num_examples: int
    forward_seconds: float
    forward_bytes: int
    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]

    def backward(self, found: Stages) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """By stage the seconds that going back through it adds, and whether both its ends were timed. Cuts whose times stand in the wrong order
        (noise) count as not timed."""
        ends, totals = [*self.cuts, len(found.stages)], [*self.seconds, self.forward_seconds]
        kept = [(ends[-1], totals[-1])]  # from the loss on
        for cut, total in list(zip(ends, totals, strict=True))[-2::-1]:
            if total > kept[-1][1] or cut == 0:
                kept.append((cut, max(total, kept[-1][1])))
        seconds, timed = [0.0] * len(found.stages), [False] * len(found.stages)
        for (stop, before), (start, after) in zip(kept, kept[1:], strict=False):
            inside = found.stages[start:stop]
            whole = sum(stage.backward for stage in inside)
            for number, stage in enumerate(inside, start):
                share = stage.backward / whole if whole else 1 / len(inside)
                seconds[number], timed[number] = (after - before) * share, len(inside) == 1
        return tuple(seconds), tuple(timed)

    def bytes_from(self, stage: int) -> int:
        """Of a program that differentiates from a stage on: of the nearest one that was compiled and goes at least so far."""
        return dict(zip(self.cuts, self.num_bytes, strict=True))[max(cut for cut in self.cuts if cut <= stage)]


def choose_cuts(found: Stages, most: int = MAX_CUTS) -> tuple[int, ...]:
    """The stages from which on to differentiate: all, or those nearest to equal parts of the predicted time."""
    count = len(found.stages)
    if count <= most:
        return tuple(range(count))
    nearest = lambda share: min(range(count), key=lambda stage: abs(found.share(stage) - share))
    return tuple(sorted({0, count - 1, *(nearest((k + 1) / (most - 1)) for k in range(most - 2))}))


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerPrograms:
    """The programs of one worker. `leaves`: the step's flat arguments on one device, whole."""

    entry: Entry
    site: Site
    found: Stages
    mesh: Mesh
    leaves: Sequence[Any]
    place: str

    def compile(self, num_examples: int, first: int | None) -> tuple[Any, list[Any]]:
        """The compiled program of a worker with so many examples that differentiates from a stage on (None: its forward pass), and its arguments.

        Raises `BatchError` where the step cannot be traced with so few examples."""
        jaxpr, own = self._traced(num_examples), self._own(num_examples)
        stages: Sequence[Stage] = () if first is None else self.found.stages[first:]
        positions = tuple(position for stage in stages for position in stage.operands)
        run = functools.partial(_truncated, Layout(self.mesh, {}, frozenset()), jaxpr, self.site, positions)
        closed = _compat.trace(run, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _compat.open_jaxpr(jaxpr)[0].invars])[0]
        closed, used = _compat.drop_unused(closed)
        values = [value for value, is_used in zip(own, used, strict=True) if is_used]
        return jax.jit(functools.partial(_compat.eval_jaxpr, closed, ())).lower(*values).compile(), values

    def _traced(self, num_examples: int) -> Any:
        try:
            return resized_trace(self.entry.bound, self.entry.trace)(num_examples)
        except MicrobatchError as error:
            raise BatchError(
                f"the step cannot be measured with the {num_examples} examples of one worker: {error.message}", value=num_examples, place=self.place,
                remedy="write the step for any batch size",
            ) from error

    def _own(self, num_examples: int) -> list[Any]:
        """The first examples of the batch, and everything else."""
        return [
            leaf[:num_examples] if argument.is_batch and getattr(leaf, "ndim", 0) else leaf
            for leaf, argument in zip(self.leaves, self.entry.bound.arguments, strict=True)
        ]


def measure_costs(programs: WorkerPrograms, num_examples: int) -> WorkerCosts:
    """Compiles and times a worker's program for up to `MAX_CUTS` depths, and its forward pass."""
    cuts = choose_cuts(programs.found)
    compiled = {first: programs.compile(num_examples, first) for first in (None, *cuts)}
    seconds = _medians({first: functools.partial(program, *values) for first, (program, values) in compiled.items()})
    sizes = {first: temporary_bytes(program) for first, (program, _) in compiled.items()}
    return WorkerCosts(num_examples, seconds[None], sizes[None], cuts, tuple(seconds[cut] for cut in cuts), tuple(sizes[cut] for cut in cuts))


def temporary_bytes(compiled: Any) -> int:
    """Temporaries and results of a compiled program; 0 where its backend does not say."""
    stats = compiled.memory_analysis()
    return 0 if stats is None else int(stats.temp_size_in_bytes + stats.output_size_in_bytes)


def _medians(programs: Mapping[Any, Any]) -> dict[Any, float]:
    for run in programs.values():
        jax.block_until_ready(run())
    found: dict[Any, list[float]] = {name: [] for name in programs}
    begun = time.perf_counter()
    for number in range(_MAX_ROUNDS):
        for name, run in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            found[name].append(time.perf_counter() - started)
        if number + 1 >= _MIN_ROUNDS and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
    return {name: statistics.median(times) for name, times in found.items()}


def _truncated(bare: Layout, jaxpr: Any, site: Site, positions: tuple[int, ...], *leaves: Any) -> list[Any]:
    """Loss, what comes with it, and the gradients of some operands of the boundary at `site`."""
    found: list[Any] = []

    def hook(eqn: Any, operands: Sequence[Any], here: Site, forward: Any) -> list[Any]:
        whole = eqn.outvars[len(eqn.outvars) - len(eqn.params["positions"]) :]
        values = _expanded(eqn, operands, forward, positions if here == site else eqn.params["positions"])
        if here != site:
            return values
        found[:] = values
        # What follows reads zeros, and is dropped with the update.
        return [*values[: len(values) - len(positions)], *(jax.numpy.zeros(v.aval.shape, v.aval.dtype) for v in whole)]

    evaluate(bare, jaxpr, leaves, Hooks(hook))
    return found


def _expanded(eqn: Any, operands: Sequence[Any], forward: Any, positions: tuple[int, ...]) -> list[Any]:
    if not positions:
        return list(forward(eqn.params["forward"], operands))
    return gradient.expand({**eqn.params, "positions": positions}, operands, forward)
