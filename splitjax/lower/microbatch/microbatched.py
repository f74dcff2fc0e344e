"""Runs a gradient boundary in microbatches: the way that `microbatch.prepare` prepares.

A step and a boundary of it come in, a `Microbatched` comes out, or the reason why the boundary cannot run so. The step
is traced a second time with as many examples as one microbatch of one worker has; the boundary at the same site of that
trace is the local forward, and operand dims whose sizes differ between the traces are the example dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from splitjax.errors import Refusal
from splitjax.lower.microbatch.islands import Request
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.microbatch import (
    Accumulation,
    local_examples,
    prepare,
    traced_examples,
)
from splitjax.lower.microbatch.places import Runner, Together, WorkerLoops
from splitjax.lower.products.groups import Copies
from splitjax.lower.products.interpret import evaluate_equation
from splitjax.lower.way import Whole
from splitjax.planning.sites.exchange import EXAMPLES, SCATTER, SWAP, Exchange
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.ways import BoundaryCall, DecidedStep, SumWithin, example_dim
from splitjax.planning.workers import Workers
from splitjax.primitives.walk import Site
from splitjax.step.boundary import boundary_forward


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatched:
    """Runs a boundary in a loop over microbatches, with one exchange of gradients behind it.

    - `job`: the analysed boundary.
    - `why`: why it runs so, as a clause.
    - `whole_over`: the axes along which devices share the examples of a worker in every layer: the batch is not split
      over them.
    """

    job: PreparedBoundary
    why: str = ""
    whole_over: tuple[str, ...] = ()
    how: str = dataclasses.field(default="microbatches", init=False)

    @property
    def num_parts(self) -> int:
        """The number of microbatches."""
        return self.job.split.num_microbatches

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """The axes along which the workers lie, each with a loop."""
        return self.job.split.workers.axes

    def sum_within(self, position: int) -> SumWithin:
        """Returns how the gradient of the operand at `position` is added up within a worker: outside of islands, each
        device sees all of the worker's examples."""
        islands, operand = self.job.islands, self.job.analysis.body.inputs[position]
        return SumWithin.AT_ONCE if islands is not None and operand in islands.params else SumWithin.NEVER

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`, whose workers all do the same."""
        return self.run(call, Together())

    def run(self, call: BoundaryCall, runner: Runner[WorkerLoops]) -> list[Any]:
        """Returns the results of the boundary `call`, with the loops of the workers run by `runner`."""
        job, positions = placed(self.job, call), call.eqn.params["positions"]
        return job.results(call.operands, positions, {}, self.whole_over, runner)


def microbatched(
    step: DecidedStep, eqn: Any, site: Site, number: int, workers: Workers
) -> Microbatched | Whole | Refusal:
    """Prepares a boundary to run in microbatches.

    **Arguments:**

    - `step`: the step around the boundary. `eqn`, `site`: the boundary's equation, and where it stands.
    - `number`: of microbatches.
    - `workers`: who share the batch, in a loop each.

    Returns `Whole` for a boundary that needs no loop, and a refusal where the loss is no sum over examples, or the
    batch does not divide.
    """
    size = local_examples(step.num_examples, number, workers)
    if isinstance(size, Refusal):
        return size
    job = _prepared(step, eqn, site, number, workers, size) if number > 1 or workers.axes else None
    if isinstance(job, Refusal):
        return job
    if job is None:
        return Whole("nothing of it holds examples")
    whole_over = workers.shared_axes if _shares_examples(step, site) else ()
    if not job.evaluator.program.has_per_microbatch:
        return Microbatched(job, whole_over=whole_over)
    return Microbatched(job, f"what is taken per microbatch is the mean over {_groups(job)}", whole_over)


def _groups(job: PreparedBoundary) -> str:
    """Returns in words how many examples each microbatch of each worker has."""
    return f"{job.split.num_contributions} groups of {job.evaluator.batch.run} examples"


def uneven_jobs(
    step: DecidedStep, eqn: Any, site: Site, shares: Collection[int], workers: Workers
) -> dict[int, PreparedBoundary] | Refusal:
    """Prepares a boundary for workers that have different numbers of examples.

    **Arguments:**

    - `step`: the step around the boundary. `eqn`, `site`: the boundary's equation, and where it stands.
    - `shares`: the numbers of examples that workers have.
    - `workers`: who share the batch, in a loop each.

    Returns the prepared loop by number of examples, in which a number is left out where no loop is needed, or a refusal
    where the loss is no sum over examples.
    """
    jobs: dict[int, PreparedBoundary] = {}
    for share in sorted(set(shares)):
        job = _prepared(step, eqn, site, 1, workers, traced_examples(share), share)
        if isinstance(job, Refusal):
            return job
        if job is not None:
            jobs[share] = job
    return jobs


def _prepared(
    step: DecidedStep, eqn: Any, site: Site, number: int, workers: Workers, size: int, share: int | None = None
) -> PreparedBoundary | Refusal | None:
    """Prepares the boundary `eqn` at `site` to run in `number` microbatches of `size` traced examples. `share`: the
    examples of the place, where places have different numbers of them."""
    twin = step.twin_of(eqn, site, size)
    if isinstance(twin, Refusal):
        return twin
    islands = _islands(step, eqn, site, number, workers, share)
    if isinstance(islands, Refusal):
        return islands
    dims = [example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)]
    loop = Accumulation(dims, boundary_forward(twin)[0], number, workers, islands, share)
    return prepare(eqn.params, loop)


def placed(job: PreparedBoundary, call: BoundaryCall) -> PreparedBoundary:
    """Returns a prepared boundary whose equations are evaluated with the layout of a call.

    `job`: the boundary; `call`: its evaluation."""
    prefix, copies, manual = (*call.site, 0), Copies({}), job.split.workers.axes
    layout, inside = call.layout, call.layout.without(manual)
    # Nothing is shared inside an island.
    bare = StepLayout(
        MeshContext(layout.mesh, (*manual, *(job.islands.axes if job.islands else ()))),
        dataclasses.replace(layout.sites, by_site={}, inside=frozenset(), exchanges={}, sums={}, uses=()),
    )
    return job.placed(
        layout.mesh,
        lambda eqn, values, at: evaluate_equation(inside, eqn, values, (*prefix, *at), copies),
        lambda eqn, values, at: evaluate_equation(bare, eqn, values, (*prefix, *at), {}),
    )


def _islands(
    step: DecidedStep, eqn: Any, site: Site, number: int, workers: Workers, share: int | None
) -> Request | Refusal | None:
    """Returns what a loop is told of replicated layers whose examples are over the axes that split other layers; None
    where there are none. `share`: the examples of the place, where places have different numbers of them."""
    group = workers.shared_axes
    split = _split_uses(step, site)
    if not group or not _exchanges(step, site) or all(split.values()):
        return None
    if share:
        size = traced_examples(share // workers.devices_each)
    else:
        size = local_examples(step.num_examples, number, workers.divided(group))
    twin = size if isinstance(size, Refusal) else step.twin_of(eqn, site, size)
    if isinstance(twin, Refusal):
        return twin
    return Request(
        group,
        boundary_forward(twin)[0],
        tuple(at for at, is_split in split.items() if is_split),
        tuple(at for at, is_split in split.items() if not is_split),
        tuple(at[len(site) + 1 :] for at in step.sites.leaving if at[: len(site) + 1] == (*site, 0)),
    )


def _split_uses(step: DecidedStep, site: Site) -> dict[Site, bool]:
    """Returns by site in the boundary at `site` which uses of weights are split."""
    prefix = (*site, 0)
    return {use.site[len(prefix) :]: bool(use.axes) for use in step.sites.uses if use.site[: len(prefix)] == prefix}


def _exchanges(step: DecidedStep, site: Site) -> list[Exchange]:
    """Returns the exchanges of split layers in the boundary at `site`."""
    prefix = (*site, 0)
    return [exchange for at, exchange in step.sites.exchanges.items() if at[: len(prefix)] == prefix]


def _shares_examples(step: DecidedStep, site: Site) -> bool:
    """Tells whether devices of a group share their examples in the whole boundary at `site`: all of its layers are
    split, and none of them exchanges examples with layers that are not."""
    exchanges = _exchanges(step, site)
    crossing = any(each.enter in (EXAMPLES, SWAP) or each.leave == SCATTER for each in exchanges)
    return bool(exchanges) and not crossing and all(_split_uses(step, site).values())
