"""Measures what partial backpropagation needs to know of a step, and compares it with a smaller batch.

It is behind `step.advise`: a step, batches and what is asked about come in, a `partial.advice.Advice` comes out.

On one device, one worker's share at a time: seconds and compiled bytes of truncated programs (`worker_costs.py`), the
noise of gradients over the given batches (`worker_noise.py`). Bytes sent come from the plan, seconds on the wire from
the link. Nothing is updated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from splitjax.compile.building import build_entry
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import PartialError, ProfileError, Refusal
from splitjax.measure.profiling import OnDevice, check_examples
from splitjax.measure.worker_costs import DepthPrograms, WorkerCosts, measure_costs, temporary_bytes
from splitjax.measure.worker_noise import WorkerNoise
from splitjax.mesh import inside_mesh
from splitjax.partial.advice import (
    OPTIMAL_ROW,
    SPATIAL_ROW,
    Advice,
    AdviceRow,
    StageAdvice,
)
from splitjax.partial.balance import balanced_examples
from splitjax.partial.contributors import handing, in_groups
from splitjax.partial.depths import Depths, find_depths
from splitjax.partial.recommending import recommend, uniform_is_optimal
from splitjax.partial.request import LINEAR, OPTIMAL, SPATIAL, TEMPORAL, Measured, PartialBackprop
from splitjax.partial.stages import BackpropStages, with_times
from splitjax.partial.ways import Measurements, PredictedExchange
from splitjax.plan import DENSE_GRADIENTS
from splitjax.planning.examples import check_shares
from splitjax.planning.partial_plan import predict_partial
from splitjax.planning.partial_step import PartialStep, find_partial, stages_of
from splitjax.primitives.walk import equation_at
from splitjax.step.arguments import Bound, bind
from splitjax.step.traced import trace_step
from splitjax.sync.costs.schemes import Link
from splitjax.sync.link import measure_link, of_process_0


def advise_calls(
    recipe: Recipe,
    mesh: Mesh,
    check: Callable[[tuple[Any, ...]], object],
    calls: Iterable[tuple[Any, ...]],
    backprop: PartialBackprop,
    link: Link | None,
) -> Advice:
    """Measures a step and gives advice on it.

    **Arguments:**

    - `recipe`: the step. `mesh`: the user's.
    - `check`: raises for the arguments of a call whose state is gone.
    - `calls`: the arguments of every call, each with a batch of its own. In a run of several processes all of them make
      the calls together; what process 0 measured counts.
    - `backprop`: the partial backpropagation that is asked about.
    - `link`: the link between workers; None measures that of the mesh.

    Raises `PartialError` for no batch, one worker, no gradient boundary or no legal cut; `BatchError` for batches that
    do not divide.
    """
    place = f"{recipe.name}.advise"
    if not isinstance(backprop, PartialBackprop):
        raise PartialError(
            "advise takes what parallelize takes as backprop",
            value=backprop,
            place=place,
            remedy="pass a splitjax.PartialBackprop",
        )
    if link is not None and not isinstance(link, Link):
        raise PartialError(
            "link is a link between workers",
            value=link,
            place=place,
            remedy="pass splitjax.sync.Link(latency_seconds, bytes_per_second)",
        )
    plain = dataclasses.replace(recipe, backprop=None)
    measuring: _Measuring | None = None
    for args in calls:
        check(args)
        bound = bind(recipe.fn, recipe.options, args)
        if measuring is None:
            entry = build_entry(plain, mesh, trace_step(plain, bound, mesh=mesh))
            check_shares(entry.graph, entry.plan.mesh, recipe.rules.batch_axes(entry.plan.mesh), "an advice", place)
            measuring = _Measuring.of(entry, inside_mesh(mesh), backprop, place)
        elif bound.signature != measuring.entry.bound.signature:
            raise PartialError(
                "the batches have different shapes",
                value=[aval[0] for aval in bound.signature.avals][:4],
                place=place,
                remedy="give batches of one shape",
            )
        measuring.add(bound)
    if measuring is None:
        raise PartialError(
            "there is no batch to measure", place=place, remedy="pass at least one batch; more make the noise surer"
        )
    return measuring.advice(recipe.name, backprop, link)


@dataclasses.dataclass(eq=False)
class _Measuring:
    """Measures a signature of a step, batch by batch.

    **Attributes:**

    - `entry`: the step, planned for full backpropagation. `mesh`: its devices. `place`: where errors say that they are.
    - `num_examples`: the examples of a batch.
    - `base`: partial backpropagation of the step at some depths, which says who its workers are.
    - `stages`: the stages of its boundary, by predicted time.
    - `noise`: measures the noise of a batch. `noises`: (sigma^2, squared norm) by stage, of every batch so far.
    - `on_device`: copies arguments to the device. `leaves`: the flat arguments of the last batch, there.
    """

    entry: CompiledEntry
    mesh: Mesh
    num_examples: int
    base: PartialStep
    stages: BackpropStages
    noise: WorkerNoise
    place: str
    on_device: OnDevice
    noises: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    leaves: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, entry: CompiledEntry, mesh: Mesh, backprop: PartialBackprop, place: str) -> _Measuring:
        """Prepares to measure an entry; raises what `advise_calls` raises for the step."""
        # the optimal ones need what is measured here
        depths = LINEAR if backprop.depths == OPTIMAL else backprop.depths
        simple = dataclasses.replace(backprop, depths=depths, measured=None, budget=None, rebalance=False)
        base = find_partial(simple, None, entry.graph, entry.jaxpr, entry.plan, place)
        assert base is not None, "a request for partial backpropagation gives some"
        num_examples = check_examples(entry, base.depths.num_slots, place)
        stages, _ = stages_of(entry.graph, entry.jaxpr, base.site)
        return cls(
            entry,
            mesh,
            num_examples,
            base,
            stages,
            WorkerNoise(entry, mesh, base.depths.num_slots, stages, place),
            place,
            OnDevice(mesh),
        )

    @property
    def num_workers(self) -> int:
        """Returns the number of workers of the step."""
        return self.base.depths.num_slots

    def add(self, bound: Bound) -> None:
        """Measures the noise of the batch of a call."""
        try:
            put = lambda i: self.on_device.put(
                bound.leaves[i], bound.arguments[i].path, not bound.arguments[i].is_batch, self.place
            )
            self.leaves = [put(i) for i in range(len(bound.leaves))]
        except ProfileError as error:
            raise PartialError(
                f"an advice needs values: {error.message}", value=error.value, place=error.place, remedy=error.remedy
            ) from error
        self.noises.append(self.noise.measure([self.leaves[i] for i in self.noise.used]))

    def advice(self, name: str, backprop: PartialBackprop, link: Link | None) -> Advice:
        """Times programs of a worker and compares ways to train. `name`: of the step."""
        share = self.num_examples // self.num_workers
        programs = DepthPrograms(self.entry, self.base.site, self.stages, self.mesh, self.leaves, self.place)
        costs = measure_costs(programs, share)
        seconds = of_process_0([*costs.seconds, costs.forward_seconds])
        costs = dataclasses.replace(costs, seconds=tuple(seconds[:-1]), forward_seconds=seconds[-1])
        backward, timed = costs.backward(self.stages)
        # The last digits differ between kinds of processors, and with them depths would: all go by what process 0 has.
        noise, norms = (of_process_0(list(np.mean([batch[k] for batch in self.noises], axis=0))) for k in (0, 1))
        stages = tuple(
            StageAdvice(
                stage.name,
                stage.num_bytes,
                float(noise[k]),
                max(float(norms[k]), 0.0),
                backward[k],
                timed[k],
                costs.bytes_from(k),
            )
            for k, stage in enumerate(self.stages.stages)
        )
        link = measure_link(self.mesh, self.base.workers.axes) if link is None else link
        measured = Measured(
            tuple(stage.name for stage in stages),
            backward,
            costs.forward_seconds,
            tuple(stage.noise for stage in stages),
        )
        compare = _Comparison(self, programs, costs, measured, link, share)
        rows, notes = compare.rows(backprop)
        charged = [*backward[:-1], backward[-1] + costs.forward_seconds]
        uniform = uniform_is_optimal([stage.noise for stage in stages], charged)
        device = self.mesh.devices.flat[0]
        return Advice(
            name,
            self.num_workers,
            share,
            len(self.noises),
            getattr(device, "device_kind", device.platform),
            link.latency_seconds,
            link.bytes_per_second,
            costs.forward_seconds,
            stages,
            rows,
            uniform,
            recommend(rows, uniform),
            (*self._notes(costs, backprop), *notes),
        )

    def _notes(self, costs: WorkerCosts, backprop: PartialBackprop) -> list[str]:
        """Returns what a reader of the advice has to know of how it was measured."""
        notes = list(self.noise.notes)
        if self.noise.notes and backprop.assignment == SPATIAL:
            notes.append('its loss is no sum over examples: depths by worker need PartialBackprop(statistics="local")')
        if len(costs.cuts) < len(self.stages.stages):
            notes.append(
                f"{len(costs.cuts)} of {len(self.stages.stages)} cuts were compiled and timed; what stands between two"
                " is divided by predicted time"
            )
        if len(self.noises) == 1:
            notes.append("one batch was measured: its noise is a guess from as many gradients as workers")
        microbatches = equation_at(self.entry.jaxpr, self.base.site).params["microbatches"]
        if microbatches not in (None, 1):
            notes.append(f"timed without its {microbatches} microbatches: with them memory is less")
        if backprop.estimator != "count":
            notes.append(
                "variances are those of estimator count; mean makes gradients of layers with few contributors smaller,"
                " which is a bias"
            )
        return notes


@dataclasses.dataclass(frozen=True, eq=False)
class _Comparison:
    """Compares the ways to train, a row each.

    **Attributes:** `measuring`: the step. `programs`, `costs`: of a worker with `share` examples. `measured`: what
    `PartialBackprop` takes of that. `link`: between workers.
    """

    measuring: _Measuring
    programs: DepthPrograms
    costs: WorkerCosts
    measured: Measured
    link: Link
    share: int

    @property
    def step(self) -> PartialStep:
        """Returns partial backpropagation of the step at some depths."""
        return self.measuring.base

    def rows(self, backprop: PartialBackprop) -> tuple[tuple[AdviceRow, ...], list[str]]:
        """Returns the rows of the advice on what is asked about, and notes on them."""
        notes: list[str] = []
        names = self.measured.layers
        sizes = {name: float(self.costs.bytes_from(k)) for k, name in enumerate(names)}
        made = Measurements(self.step.depths.num_slots, dict(zip(names, self.measured.noise, strict=True)), sizes)
        mark = lambda assignment: "as asked: " if backprop.assignment == assignment else ""
        asked = dataclasses.replace(backprop, measured=self.measured)
        spatial = self._depths(dataclasses.replace(asked, assignment=SPATIAL))
        shares = None
        if asked.rebalance:
            unit = self.step.workers.devices_each
            examples = balanced_examples(spatial, self.measuring.num_examples, self.measuring.place, unit)
            shares = [of_worker / sum(examples) for of_worker in examples]
        told = f"{asked.depths if isinstance(asked.depths, str) else 'given'} depths"
        full = made.full(spatial, self._full_exchange())
        first = made.spatial(
            SPATIAL_ROW,
            f"{mark(SPATIAL)}{told} by worker{', examples balanced' if shares else ''}, execution {asked.execution}",
            spatial,
            self._exchange(spatial),
            shares,
        )
        in_turn = self._depths(dataclasses.replace(asked, assignment=TEMPORAL, rebalance=False))
        temporal = made.temporal(f"{mark(TEMPORAL)}{told} in turn, all workers alike", in_turn, self._exchange(in_turn))
        wanted = first if backprop.assignment == SPATIAL else temporal
        rows = [full, made.smaller(wanted.device_time, full, self._smaller_bytes(wanted.device_time, notes)), first]
        if asked.depths != OPTIMAL:
            budget = min(1.0, wanted.device_time)
            best = self._depths_or_refusal(
                dataclasses.replace(asked, assignment=SPATIAL, depths=OPTIMAL, budget=budget, rebalance=False)
            )
            if isinstance(best, Refusal):
                notes.append(f"no optimal depths: {best.message}")
            else:
                told_best = "optimal depths by worker, under the same budget"
                rows.append(made.spatial(OPTIMAL_ROW, told_best, best, self._exchange(best)))
        if spatial.is_full:
            notes.append("the depths that were asked for leave nothing out")
        return (*rows, temporal), notes

    def _depths(self, request: PartialBackprop) -> Depths:
        """Chooses the depths that a request asks for, by measured times. Raises `PartialError` where there are none."""
        depths = self._depths_or_refusal(request)
        if isinstance(depths, Refusal):
            raise depths.error()
        return depths

    def _depths_or_refusal(self, request: PartialBackprop) -> Depths | Refusal:
        """Chooses the depths that a request asks for, by measured times; a refusal where there are none."""
        seconds = dict(zip(self.measured.layers, self.measured.backward_seconds, strict=True))
        timed = with_times(self.measuring.stages, seconds, self.measured.forward_seconds)
        return find_depths(timed, request, self.step.depths.num_slots, self.measuring.place)

    def _full_exchange(self) -> PredictedExchange:
        """Returns what full backpropagation sends, and how long that takes as one ring."""
        planned = self.measuring.entry.plan.collectives
        sent = sum(collective.bytes for collective in planned if collective.purpose.kind in DENSE_GRADIENTS)
        return PredictedExchange(
            sent,
            sent / self.link.bytes_per_second
            + self._ring_messages(self.step.depths.num_slots) * self.link.latency_seconds,
        )

    def _exchange(self, depths: Depths) -> PredictedExchange:
        """Returns what the plan says is sent at these depths, and the time of the worker that sends most: segment
        after segment, each as one message a hop."""
        step, count = dataclasses.replace(self.step, depths=depths), depths.num_slots
        platform = self.measuring.mesh.devices.flat[0].platform
        full = self.measuring.entry.plan
        plan, _ = predict_partial(full, full.collectives, step, platform)
        sent = sum(segment.summed_bytes + segment.handed_bytes for segment in plan.segments)
        if step.is_temporal:  # one group of workers, one exchange a step
            return PredictedExchange(
                sent, sent / self.link.bytes_per_second + self._ring_messages(count) * self.link.latency_seconds
            )
        seconds = 0.0
        for segment in plan.segments:
            busiest, messages = float(segment.summed_bytes), self._ring_messages(count)
            if 0 < segment.contributors < count and in_groups(step.workers.axes, platform):
                rounds = len(handing(range(segment.contributors), count))
                busiest = busiest * count / segment.contributors + rounds * segment.num_bytes
                messages = self._ring_messages(segment.contributors) + rounds
            seconds += busiest / self.link.bytes_per_second + (
                messages * self.link.latency_seconds if segment.contributors else 0.0
            )
        return PredictedExchange(sent, seconds)

    def _ring_messages(self, count: int) -> float:
        """Returns how many messages a worker of so many sends one after another in a ring all-reduce."""
        return float(2 * (count - 1))

    def _smaller_bytes(self, fraction: float, notes: list[str]) -> float:
        """Returns the bytes of full backpropagation with a fraction of a worker's examples, as compiled; appends to
        `notes` where that cannot be had."""
        examples = max(1, round(fraction * self.share))
        if examples == self.share:
            return float(self.costs.bytes_from(0))
        if isinstance(self.programs.entry.traced.resized(examples), Refusal):
            notes.append("the step cannot be traced with the smaller batch; its memory is taken to be in proportion")
            return fraction * self.costs.bytes_from(0)
        return float(temporary_bytes(self.programs.compile(examples, 0)[0]))


def split_request(
    args: Sequence[Any], backprop: PartialBackprop | None, own: PartialBackprop | None
) -> tuple[tuple[Any, ...], PartialBackprop]:
    """Splits the arguments of `step.advise` into those of the step and what to advise on.

    **Arguments:** `args`: the positional arguments, the last of which may say what to advise on. `backprop`: the same
    by name; None for none. `own`: what the step was decorated with, which counts where neither says.

    **Returns:** the step's arguments, and the `PartialBackprop`, which `advise_calls` checks."""
    if backprop is None and args and isinstance(args[-1], PartialBackprop):
        return tuple(args[:-1]), args[-1]
    return tuple(args), backprop if backprop is not None else own or PartialBackprop()
