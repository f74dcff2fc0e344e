"""Measures what one worker's share of a step takes on one device, differentiated to several depths.

A built step with its arguments on a device comes in; seconds, and bytes as compiled, come out, by depth
(`WorkerCosts`).

Each depth is a program of its own: the step traced with a worker's examples, whose boundary differentiates the last
layers only, without what no gradient needs (the update). Programs take turns in being timed, so that a machine's moods
meet all of them, and medians count unless asked otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry
from splitjax.errors import BatchError, Refusal
from splitjax.lower.products.interpret import Hooks, evaluate
from splitjax.partial.stages import BackpropStages, Stage
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.walk import Site
from splitjax.step.boundary import expand

# So many depths are compiled at most; what stands between two of them is divided by predicted time. The first ones
# stand at equal parts of the predicted time; further ones where most measured time is undivided: small convolutions
# take many times what their flops suggest.
MAX_CUTS, FIRST_CUTS = 9, 5
_STEP = "step"  # among the programs that are timed, the whole step
_FEW_ROUNDS, _MIN_ROUNDS, _MAX_ROUNDS = 2, 5, 40
_ENOUGH_SECONDS = 4.0  # of timing, once there are rounds enough


@dataclasses.dataclass(frozen=True)
class WorkerCosts:
    """Holds what a worker's share of a step takes.

    **Attributes:**

    - `num_examples`: the examples of the worker.
    - `forward_seconds`: the time of the forward pass.
    - `cuts`: the stages from which on programs differentiate, ascending, the first 0.
    - `seconds`: by cut, the time of forward pass and backward pass to it.
    - `num_bytes`: by cut, temporaries and results of its program.
    - `update_seconds`: what the whole step takes beyond the full backward pass; 0 unless asked for.
    """

    num_examples: int
    forward_seconds: float
    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]
    update_seconds: float = 0.0

    def backward(self, stages: BackpropStages) -> tuple[tuple[float, ...], tuple[bool, ...]]:
        """Returns, by stage of `stages`, the seconds that going back through it adds, and whether both its ends were
        timed. Cuts whose times stand in the wrong order (noise) count as not timed."""
        ends, totals = [*self.cuts, len(stages.stages)], [*self.seconds, self.forward_seconds]
        kept = [(ends[-1], totals[-1])]  # from the loss on
        for cut, total in list(zip(ends, totals, strict=True))[-2::-1]:
            # there is no pass beyond the full one that could take its time
            while cut == 0 and total <= kept[-1][1] and len(kept) > 1:
                kept.pop()
            if total > kept[-1][1] or cut == 0:
                kept.append((cut, max(total, kept[-1][1])))
        seconds, timed = [0.0] * len(stages.stages), [False] * len(stages.stages)
        for (stop, before), (start, after) in zip(kept, kept[1:], strict=False):
            inside = stages.stages[start:stop]
            whole = sum(stage.backward for stage in inside)
            for number, stage in enumerate(inside, start):
                share = stage.backward / whole if whole else 1 / len(inside)
                seconds[number], timed[number] = (after - before) * share, len(inside) == 1
        return tuple(seconds), tuple(timed)

    def bytes_from(self, stage: int) -> int:
        """Returns the bytes of a program that differentiates from a `stage` on: those of the nearest program that was
        compiled and goes at least so far."""
        return dict(zip(self.cuts, self.num_bytes, strict=True))[max(cut for cut in self.cuts if cut <= stage)]


def choose_cuts(stages: BackpropStages, most: int = FIRST_CUTS) -> tuple[int, ...]:
    """Returns the stages from which on to differentiate first: all of `stages`, or, where these are more than `most`,
    those nearest to equal parts of the predicted time."""
    count = len(stages.stages)
    if count <= most:
        return tuple(range(count))
    nearest = lambda share: min(range(count), key=lambda stage: abs(stages.share(stage) - share))
    return tuple(sorted({0, count - 1, *(nearest((k + 1) / (most - 1)) for k in range(most - 2))}))


def next_cut(costs: WorkerCosts, stages: BackpropStages) -> int | None:
    """Returns the stage of `stages` to cut at next: about the middle, by predicted time, of the stages between two cuts
    that take most measured time by `costs`; None if all are cut."""
    ends, totals = [*costs.cuts, len(stages.stages)], [*costs.seconds, costs.forward_seconds]
    between = [
        (before - after, start, stop)
        for start, stop, before, after in zip(ends, ends[1:], totals, totals[1:], strict=False)
        if stop - start > 1
    ]
    if not between:
        return None
    _, start, stop = max(between)
    bounds = stages.share(start), stages.share(stop) if stop < len(stages.stages) else 0.0
    return min(range(start + 1, stop), key=lambda stage: abs(stages.share(stage) - sum(bounds) / 2))


@dataclasses.dataclass(frozen=True, eq=False)
class DepthPrograms:
    """Compiles the programs of a worker, by depth.

    **Attributes:**

    - `entry`: the step. `site`: its gradient boundary. `stages`: the stages of that boundary.
    - `mesh`: the mesh of the step; programs run on one device.
    - `leaves`: the step's flat arguments on one device, whole.
    - `place`: where errors say that they are.
    """

    entry: CompiledEntry
    site: Site
    stages: BackpropStages
    mesh: Mesh
    leaves: Sequence[Any]
    place: str

    def compile(self, num_examples: int, first: int | None) -> tuple[jax.stages.Compiled, list[Any]]:
        """Compiles the program of a worker with `num_examples` examples that differentiates from the stage `first` on
        (None: its forward pass). Returns it, and its arguments.

        Raises `BatchError` where the step cannot be traced with so few examples."""
        stages: Sequence[Stage] = () if first is None else self.stages.stages[first:]
        positions = tuple(position for stage in stages for position in stage.operands)
        jaxpr = self._traced(num_examples)
        return self._compiled(
            "forward_pass" if first is None else f"backward_to_{self.stages.stages[first].name}",
            num_examples,
            functools.partial(_truncated, StepLayout(MeshContext(self.mesh)), jaxpr, self.site, positions),
        )

    def compile_step(self, num_examples: int) -> tuple[jax.stages.Compiled, list[Any]]:
        """Compiles the whole step of a worker with `num_examples` examples, with its update. Returns and raises as
        `compile` does."""
        jaxpr = self._traced(num_examples)
        return self._compiled(
            "step_of_a_worker",
            num_examples,
            lambda *leaves: evaluate(StepLayout(MeshContext(self.mesh)), jaxpr, leaves),
        )

    def _compiled(self, name: str, num_examples: int, run: Callable[..., Any]) -> tuple[jax.stages.Compiled, list[Any]]:
        """Compiles a function of the step's flat arguments, without what its result does not need, as a program called
        `name`."""
        jaxpr, own = self._traced(num_examples), self._own(num_examples)
        closed = _compat.trace(
            run, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _compat.open_jaxpr(jaxpr)[0].invars]
        )[0]
        closed, used = _compat.drop_unused(closed)
        values = [value for value, is_used in zip(own, used, strict=True) if is_used]
        return jax.jit(_compat.named_evaluator(closed, name)).lower(*values).compile(), values

    def _traced(self, num_examples: int) -> _compat.ClosedJaxpr:
        """Traces the step with so many examples."""
        jaxpr = self.entry.traced.resized(num_examples)
        if isinstance(jaxpr, Refusal):
            raise BatchError(
                f"the step cannot be measured with the {num_examples} examples of one worker: {jaxpr.message}",
                value=num_examples,
                place=self.place,
                remedy="write the step for any batch size",
            ) from jaxpr.cause
        return jaxpr

    def _own(self, num_examples: int) -> list[Any]:
        """Returns the flat arguments with only the first examples of the batch."""
        return [
            leaf[:num_examples] if argument.is_batch and getattr(leaf, "ndim", 0) else leaf
            for leaf, argument in zip(self.leaves, self.entry.bound.arguments, strict=True)
        ]


def measure_costs(
    programs: DepthPrograms,
    num_examples: int,
    *,
    with_update: bool = False,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> WorkerCosts:
    """Compiles and times a worker's program for up to `MAX_CUTS` depths, and its forward pass.

    **Arguments:** `programs`: compiles them. `num_examples`: the worker's examples. `with_update`: whether to time the
    whole step too. `statistic`: turns the times of a program, in seconds, into the time that counts.

    Raises `BatchError` where the step cannot be traced with so few examples."""
    compiled: dict[Any, Any] = {
        first: programs.compile(num_examples, first) for first in (None, *choose_cuts(programs.stages))
    }
    runs = {first: functools.partial(program, *values) for first, (program, values) in compiled.items()}
    all_are_cut = len(compiled) > len(programs.stages.stages)
    seconds = {} if all_are_cut else _timed(runs, statistic, _FEW_ROUNDS)
    while (
        not all_are_cut
        and len(runs) <= MAX_CUTS
        and (cut := next_cut(_costs(num_examples, seconds, dict.fromkeys(seconds, 0)), programs.stages)) is not None
    ):
        compiled[cut] = programs.compile(num_examples, cut)
        runs[cut] = functools.partial(compiled[cut][0], *compiled[cut][1])
        seconds |= _timed({cut: runs[cut]}, statistic, _FEW_ROUNDS)
    if with_update:
        program, values = programs.compile_step(num_examples)
        runs[_STEP] = functools.partial(program, *values)
    seconds = _timed(runs, statistic, _MIN_ROUNDS, _MAX_ROUNDS)
    update_seconds = max(0.0, seconds.pop(_STEP, 0.0) - seconds[0])
    return _costs(
        num_examples,
        seconds,
        {first: temporary_bytes(program) for first, (program, _) in compiled.items()},
        update_seconds,
    )


def _costs(
    num_examples: int,
    seconds: Mapping[int | None, float],
    num_bytes: Mapping[int | None, int],
    update_seconds: float = 0.0,
) -> WorkerCosts:
    """Makes the costs from figures by cut; those at None are of the forward pass."""
    cuts = tuple(sorted(cut for cut in seconds if cut is not None))
    return WorkerCosts(
        num_examples,
        seconds[None],
        cuts,
        tuple(seconds[cut] for cut in cuts),
        tuple(num_bytes[cut] for cut in cuts),
        update_seconds,
    )


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of temporaries and results of the program `compiled`; 0 where its backend does not say."""
    stats = compiled.memory_analysis()
    return 0 if stats is None else int(stats.temp_size_in_bytes + stats.output_size_in_bytes)


def _timed(
    programs: Mapping[Any, Any], statistic: Callable[[Sequence[float]], float], least: int, most: int | None = None
) -> dict[Any, float]:
    """Times programs in turn, over `least` rounds, and on to `most` until enough time was spent. Returns the seconds of
    each."""
    for run in programs.values():
        jax.block_until_ready(run())
    times_of: dict[Any, list[float]] = {name: [] for name in programs}
    begun = time.perf_counter()
    for number in range(least if most is None else most):
        for name, run in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            times_of[name].append(time.perf_counter() - started)
        if number + 1 >= least and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
    return {name: statistic(times) for name, times in times_of.items()}


def _truncated(
    bare: StepLayout, jaxpr: _compat.ClosedJaxpr, site: Site, positions: tuple[int, ...], *leaves: Any
) -> list[Any]:
    """Returns the loss, what comes with it, and the gradients of the operands at `positions` of the boundary at
    `site`."""
    results: list[Any] = []

    def hook(eqn: Any, operands: Sequence[Any], here: Site, forward: Callable[..., list[Any]]) -> list[Any]:
        whole = eqn.outvars[len(eqn.outvars) - len(eqn.params["positions"]) :]
        values = _expanded(eqn, operands, forward, positions if here == site else eqn.params["positions"])
        if here != site:
            return values
        results[:] = values
        # What follows reads zeros, and is dropped with the update.
        return [*values[: len(values) - len(positions)], *(jax.numpy.zeros(v.aval.shape, v.aval.dtype) for v in whole)]

    evaluate(bare, jaxpr, leaves, Hooks(hook))
    return results


def _expanded(
    eqn: Any, operands: Sequence[Any], forward: Callable[..., list[Any]], positions: tuple[int, ...]
) -> list[Any]:
    """Evaluates a boundary, differentiating the operands at `positions` alone."""
    if not positions:
        return list(forward(eqn.params["forward"], operands))
    return expand({**eqn.params, "positions": positions}, operands, forward)
