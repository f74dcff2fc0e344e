"""Makes the gradients of a worker a function of the worker's number, for any number of workers on one device.

A built step and a number of workers come in; a function to be traced comes out, which profiles and measurements of
noise reduce on the device.

A worker's gradient is its summand of the global batch's gradient: its examples, with the whole batch's denominators and
its part of the whole batch's random bits, by the analysis that accumulates microbatches (`microbatch.prepare`). A loss
that is no sum over examples (batch norm) has no such summands: the step is then traced with one worker's examples, as
the worker would run it alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry
from splitjax.errors import BatchError, ProfileError, Refusal
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.microbatch import Accumulation, local_examples, prepare
from splitjax.lower.products.interpret import Hooks, evaluate
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.ways import example_dim, make_twin
from splitjax.planning.workers import Workers
from splitjax.primitives.walk import Site, boundaries, equation_at
from splitjax.step.arguments import Bound
from splitjax.step.boundary import boundary_forward, boundary_of, expand
from splitjax.sync.analysis import Tensor
from splitjax.trace.graph import itemsize


@dataclasses.dataclass(frozen=True)
class WorkerGradient:
    """Names a gradient of the step.

    **Attributes:** `tensor`: its name, shape and dtype. `site`: the boundary that it comes from. `result`: its position
    among the results of the boundary. `position`: that of its operand.
    """

    tensor: Tensor
    site: Site
    result: int
    position: int


@dataclasses.dataclass(frozen=True)
class WorkerGradients:
    """Evaluates the gradients of a worker, for a signature of a step and a number of workers.

    **Attributes:**

    - `gradients`: what is evaluated, in the order of the boundaries' operands.
    - `run(*leaves, worker)`: the flat arguments of the whole batch and the worker's number (i32) -> its gradients. To
      be traced.
    - `notes`: in which way they are not summands of the global gradient.
    """

    gradients: tuple[WorkerGradient, ...]
    run: Callable[..., list[Any]]
    notes: tuple[str, ...]


def worker_gradients(entry: CompiledEntry, mesh: Mesh, num_workers: int, place: str) -> WorkerGradients:
    """Returns the gradients of the workers of a step, each of which has an equal slice of the batch.

    **Arguments:** `entry`: the step. `mesh`: its devices; what is returned runs on one device. `num_workers`: among how
    many workers the batch is divided, without remainder. `place`: where errors say that they are.

    Raises `ProfileError` for a boundary in a loop, `BatchError` for a step that is another program for one worker's
    examples.
    """
    sites = tuple(_boundary_sites(entry.jaxpr, place))
    bare, num_examples = StepLayout(MeshContext(mesh)), entry.graph.num_examples
    assert num_examples is not None, "`check_examples` lets no step without examples pass"
    if num_workers == 1:
        gradients = _gradients(entry, sites, {})
        return WorkerGradients(
            gradients, functools.partial(_alone, bare, entry.jaxpr, gradients, entry.bound, num_examples), ()
        )
    share = num_examples // num_workers
    divided = _divided(entry, bare, sites, num_workers, share)
    if isinstance(divided, Refusal):
        raise BatchError(
            f"the step cannot be measured with the {share} examples of one of {num_workers} workers: {divided.message}",
            value=share,
            place=place,
            remedy="write the step for any batch size, or profile with num_workers=1",
        ) from divided.cause
    return divided


def _divided(
    entry: CompiledEntry, bare: StepLayout, sites: Sequence[Site], num_workers: int, share: int
) -> WorkerGradients | Refusal:
    """Returns the gradients of several workers, or a refusal where the step is another program for their share of the
    batch."""
    twin_of = make_twin(entry.graph, entry.traced.resized)
    size = local_examples(share * num_workers, num_workers, Workers())
    if isinstance(size, Refusal):
        return size
    eqns = {site: equation_at(entry.jaxpr, site) for site in sites}
    twins = {}
    for site, eqn in eqns.items():
        twins[site] = twin_of(eqn, site, size)
        if isinstance(twins[site], Refusal):
            return twins[site]
    dims = {site: _example_dims(eqn, twins[site]) for site, eqn in eqns.items()}
    gradients = _gradients(entry, sites, dims)
    forwards = {site: boundary_forward(twin)[0] for site, twin in twins.items()}
    jobs: dict[Site, PreparedBoundary | None] = {}
    for site, eqn in eqns.items():
        job = prepare(eqn.params, Accumulation(dims[site], forwards[site], num_workers))
        if isinstance(job, Refusal):
            others = [twin_of(eqn, site, share) for site, eqn in eqns.items()]
            alone = next((other for other in others if isinstance(other, Refusal)), entry.traced.resized(share))
            if isinstance(alone, Refusal):
                return alone
            note = f"every worker's gradients are those of a step with its examples alone: {job.message}"
            run = functools.partial(_alone, bare, alone, gradients, entry.bound, share)
            return WorkerGradients(gradients, run, (note,))
        jobs[site] = job
    return WorkerGradients(gradients, functools.partial(_summands, bare, entry.jaxpr, gradients, jobs), ())


def _example_dims(eqn: Any, twin: Any) -> list[int | None]:
    """Returns the dim that holds examples of every operand of a boundary; None for an operand without examples."""
    return [example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)]


def _boundary_sites(jaxpr: _compat.ClosedJaxpr | _compat.Jaxpr, place: str) -> Iterator[Site]:
    """Yields the sites of the boundaries of a step, none of which may stand in a loop or a branch: what a boundary
    returns is handed out, which only inlined calls let through."""
    for visit in boundaries(jaxpr):
        if visit.not_inline is not None:
            raise ProfileError(
                f"the step takes gradients inside a {visit.not_inline.primitive.name}, where there is not one per call",
                value=visit.eqn.params["label"],
                place=place,
                remedy="profile a step that takes them once, such as the loop's body",
            )
        yield visit.site


def _gradients(
    entry: CompiledEntry, sites: Sequence[Site], dims: Mapping[Site, Sequence[int | None]]
) -> tuple[WorkerGradient, ...]:
    """Returns every gradient that workers would add up: not those of what holds examples. `dims`: by site, the example
    dims of the operands."""
    graph = entry.graph
    params = {(traced.site, traced.result): traced.param for traced in graph.gradients}
    tables = {table.param: table for table in graph.tables}
    batches = {leaf.path for leaf in graph.leaves if leaf.role == "batch"}
    gradients = []
    for site in sites:
        eqn = equation_at(entry.jaxpr, site)
        boundary = boundary_of(eqn.params)
        for result, position in boundary.gradients:
            path, aval = params.get((site, result), boundary.names[position]), eqn.outvars[result].aval
            if path in batches or not aval.size or (site in dims and dims[site][position] is not None):
                continue
            table = tables.get(path)
            is_table = table is not None and tuple(aval.shape[:1]) == (table.num_rows,)
            reason = table.reason if table is not None and is_table else ""
            dtype = str(aval.dtype)
            gradients.append(
                WorkerGradient(
                    Tensor(path, tuple(aval.shape), dtype, boundary.label, is_table, reason, itemsize(dtype)),
                    site,
                    result,
                    position,
                )
            )
    return tuple(gradients)


def _summands(
    bare: StepLayout,
    jaxpr: _compat.ClosedJaxpr,
    gradients: Sequence[WorkerGradient],
    jobs: Mapping[Site, PreparedBoundary | None],
    *values: Any,
) -> list[Any]:
    """Returns the summands of a worker. A loss that does not depend on the batch has the same gradient on all workers.
    `values`: the flat arguments and the worker's number."""
    *leaves, worker = values
    evaluated: dict[tuple[Site, int], Any] = {}

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable[..., Any]) -> list[Any]:
        results, job = expand(eqn.params, operands, forward), jobs[site]
        summands = job.summands(operands, eqn.params["positions"], worker) if job is not None else {}
        for wanted in gradients:
            if wanted.site == site:
                value = summands[wanted.position] if job is not None else results[wanted.result]
                evaluated[site, wanted.result] = value
        return results

    evaluate(bare, jaxpr, leaves, Hooks(hook))
    return [evaluated[wanted.site, wanted.result] for wanted in gradients]


def _alone(
    bare: StepLayout,
    jaxpr: _compat.ClosedJaxpr,
    gradients: Sequence[WorkerGradient],
    bound: Bound,
    share: int,
    *values: Any,
) -> list[Any]:
    """Returns the gradients of a step with one worker's `share` examples. `jaxpr`: the step, traced for so many.
    `values`: the flat arguments and the worker's number."""
    *leaves, worker = values
    own = [
        lax.dynamic_slice_in_dim(leaf, worker * share, share) if argument.is_batch and jnp.ndim(leaf) else leaf
        for leaf, argument in zip(leaves, bound.arguments, strict=True)
    ]
    results: dict[Site, list[Any]] = {}

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable[..., Any]) -> list[Any]:
        results[site] = expand(eqn.params, operands, forward)
        return results[site]

    evaluate(bare, jaxpr, own, Hooks(hook))
    return [results[wanted.site][wanted.result] for wanted in gradients]


def abstract_leaves(entry: CompiledEntry) -> list[jax.ShapeDtypeStruct]:
    """Returns the flat arguments that the step `entry` was traced for, as `ShapeDtypeStruct`s."""
    avals = [v.aval for v in _compat.open_jaxpr(entry.jaxpr)[0].invars]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals]
