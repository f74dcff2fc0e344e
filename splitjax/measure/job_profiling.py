"""Measures what one iteration of a step costs each worker, as the scheduler wants to know it.

It is behind `step.job_profile`: a step and its arguments come in, a `schedule.model.jobs.JobProfile` comes out.

On one device, with one worker's share of the batch: seconds and compiled bytes of truncated programs
(`worker_costs.py`), and the whole step, whose surplus is the update. What a worker keeps between iterations comes from
the plan, the exchange from the plan's bytes and the link. Nothing is updated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from splitjax.compile.building import build_entry
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.cost.ring import all_reduce_bytes
from splitjax.errors import PartialError, ProfileError
from splitjax.measure.profiling import OnDevice, check_examples, check_number
from splitjax.measure.worker_costs import DepthPrograms, WorkerCosts, measure_costs
from splitjax.mesh import inside_mesh
from splitjax.partial.stages import BackpropStages as Cuts
from splitjax.planning.partial_step import find_boundary, stages_of
from splitjax.planning.workers import Workers, workers_of
from splitjax.primitives.walk import equation_at
from splitjax.schedule.model.jobs import Depth, JobProfile, Stages
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step
from splitjax.sync.costs.schemes import Link
from splitjax.sync.link import measure_link, of_process_0

_ENOUGH = 1e-9  # a share that falls short of the whole by so little is the whole


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """Says what a job's profile is of, besides the call.

    - `name`: of the job; None for that of the step.
    - `num_workers`: among how many workers the batch is divided; None for the plan's.
    - `link`: between workers; None measures that of the mesh.
    - `input_seconds`: what making a batch takes a processor, in seconds an iteration.
    - `stages`: whether the profile has seconds by resource; None to decide by whether they matter.
    """

    name: str | None = None
    num_workers: int | None = None
    link: Link | None = None
    input_seconds: float = 0.0
    stages: bool | None = None

    def check(self, place: str) -> None:
        """Raises `ProfileError`, which names `place`, for a number of workers, a link or a time that cannot be."""
        check_number(self.num_workers, place)
        if self.link is not None and not isinstance(self.link, Link):
            raise ProfileError(
                "link is a link between workers",
                value=self.link,
                place=place,
                remedy="pass splitjax.sync.Link(latency_seconds, bytes_per_second)",
            )
        if not 0 <= self.input_seconds < math.inf:
            raise ProfileError(
                "input takes a time of 0 or more",
                value=self.input_seconds,
                place=place,
                remedy="give seconds an iteration",
            )


def profile_job(
    recipe: Recipe,
    mesh: Mesh,
    check: Callable[[tuple[Any, ...]], object],
    args: tuple[Any, ...],
    request: JobRequest,
) -> JobProfile:
    """Profiles a call of a step as a job. In a run of several processes all of them make the call together; what
    process 0 timed counts.

    **Arguments:**

    - `recipe`: the step. `mesh`: the user's.
    - `check`: raises for the arguments of a call whose state is gone. `args`: the positional arguments of the call.
    - `request`: what the profile is of, besides.

    Raises `ProfileError` for a step without one gradient boundary, whose layers are split over devices, or arguments
    without values; `BatchError` for a batch that does not divide.
    """
    place = f"{recipe.name}.job_profile"
    request.check(place)
    check(args)
    bound = bind(recipe.fn, recipe.options, args)
    entry = build_entry(dataclasses.replace(recipe, backprop=None), mesh, trace_step(recipe, bound, mesh=mesh))
    mesh, planned = inside_mesh(mesh), workers_of(entry.plan, gathers=True)
    if planned.mesh.num_devices != planned.num_workers:
        raise ProfileError(
            "a job's workers are whole devices, and the step splits layers over devices",
            value=str(entry.plan.mesh),
            place=place,
            remedy='profile it over data alone: rules="data_parallel", or a mesh with a data axis only',
        )
    num_workers = planned.num_workers if request.num_workers is None else int(request.num_workers)
    num_examples = check_examples(entry, num_workers, place)
    try:
        site = find_boundary(entry.graph, entry.jaxpr, place)
    except PartialError as error:
        raise ProfileError(
            error.message,
            value=error.value,
            place=place,
            remedy="take one gradient of the sum of the losses, outside of loops",
        ) from error
    microbatches = equation_at(entry.jaxpr, site).params["microbatches"] or 1
    on_device = OnDevice(mesh)
    leaves = [
        on_device.put(leaf, argument.path, False, place)
        for leaf, argument in zip(bound.leaves, bound.arguments, strict=True)
    ]
    cuts, _ = stages_of(entry.graph, entry.jaxpr, site)
    programs = DepthPrograms(entry, site, cuts, mesh, leaves, place)
    # The fastest run of each counts: a simulated worker has its device to itself, and what disturbs a run only makes it
    # longer.
    costs = measure_costs(programs, num_examples // num_workers // microbatches, with_update=True, statistic=min)
    *seconds, forward, update = of_process_0([*costs.seconds, costs.forward_seconds, costs.update_seconds])
    costs = dataclasses.replace(costs, seconds=tuple(seconds), forward_seconds=forward, update_seconds=update)
    # by the times that the step would be cut by
    fractions, _ = stages_of(entry.graph, entry.jaxpr, site, recipe.backprop)
    state_bytes, kept_bytes = _kept_bytes(entry, num_workers)
    depths = _depths(fractions, cuts, costs, microbatches, kept_bytes)
    exchange = _exchange_seconds(entry, mesh, planned, num_workers, depths[0].gradient_bytes, request.link)
    compute = microbatches * costs.forward_seconds + depths[0].backward_seconds + costs.update_seconds
    # input that takes longer than the rest cannot hide behind it
    exposed = exchange + max(0.0, request.input_seconds - compute - exchange)
    name = recipe.name if request.name is None else request.name
    profile = JobProfile(
        name, microbatches * costs.forward_seconds, depths, exposed, state_bytes, update_seconds=costs.update_seconds
    )
    has_stages = request.stages
    if has_stages is None:  # where the device is what jobs compete for, seconds of other resources decide nothing
        has_stages = max(exchange, request.input_seconds) > profile.partial_seconds(num_workers)
    by_resource = Stages(cpu_seconds=request.input_seconds, device_seconds=compute, network_seconds=exchange)
    return dataclasses.replace(profile, stages=by_resource) if has_stages else profile


def _kept_bytes(entry: CompiledEntry, num_workers: int) -> tuple[int, int]:
    """Returns the bytes of a worker's state, and of all that is there throughout an iteration: state, its share of the
    batch, other inputs, and whole those parameters that are stored in pieces."""
    plan = entry.plan
    state = sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.is_state)
    gathered = sum(leaf.whole_bytes(plan.mesh) - leaf.bytes_per_device for leaf in plan.leaves if leaf.role == "param")
    batch = [argument.is_batch for argument in entry.bound.arguments]
    inputs = sum(
        -(-leaf.whole_bytes(plan.mesh) // num_workers) if is_batch else leaf.bytes_per_device
        for leaf, is_batch in zip(plan.leaves, batch, strict=True) if not leaf.is_state
    )  # fmt: skip
    return state, state + gathered + inputs


def _depths(fractions: Cuts, cuts: Cuts, costs: WorkerCosts, microbatches: int, kept_bytes: int) -> tuple[Depth, ...]:
    """Returns the legal cuts, full backpropagation first. Of cuts that cover the same share the last counts, as it does
    for a decorated step. `fractions`: the stages by the times that the step is cut by. `cuts`: the same stages by
    predicted time.

    Whatever a worker's depth is, it gets the gradients of all layers from the other workers for its update: they are
    the least that it needs beside what is kept."""
    backward, _ = costs.backward(cuts)
    sizes = [stage.num_bytes for stage in cuts.stages]
    depth_of: dict[float, Depth] = {}  # by share of the backward pass
    for first, stage in enumerate(fractions.stages):
        share = 1.0 if first == 0 else fractions.share(first)
        if first and not 0 < share < 1 - _ENOUGH:
            continue
        gradients = sum(sizes[first:])
        working = costs.bytes_from(first) + (gradients if microbatches > 1 else 0)  # microbatches add up beside it
        depth_of[share] = Depth(
            share, microbatches * sum(backward[first:]), kept_bytes + max(working, sum(sizes)), gradients, stage.name
        )
    return tuple(depth_of.values())


def _exchange_seconds(
    entry: CompiledEntry, mesh: Mesh, planned: Workers, num_workers: int, gradient_bytes: int, link: Link | None
) -> float:
    """Returns the seconds of all that a worker sends in a step, over its link, as one ring. None of it is taken to be
    hidden behind the job's own computing. `planned`: the workers of the step, which the job may have more or less of.
    """
    if num_workers == 1 or (link is None and planned.num_workers == 1):
        return 0.0
    known = measure_link(mesh, planned.axes) if link is None else link
    sent = (
        sum(collective.bytes for collective in entry.plan.collectives)
        if num_workers == planned.num_workers
        else all_reduce_bytes(num_workers, gradient_bytes)
    )
    return sent / known.bytes_per_second + 2 * (num_workers - 1) * known.latency_seconds
