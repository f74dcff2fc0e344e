"""Traces the call of a step, once for each of its signatures.

A step and a call taken apart come in; a `Traced` comes out: the jaxpr, the graph, where the states stand among the
results, and the same step traced with other numbers of examples. Plans and programs are made of it again and again
without calling the step: when its tables were observed, when a run is resumed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

from splitjax import _compat
from splitjax.errors import MicrobatchError, Refusal, SplitjaxError, TraceError
from splitjax.mesh import inside_mesh
from splitjax.plan import Spec
from splitjax.primitives.walk import Site
from splitjax.rules.pins import Said
from splitjax.step.annotations import (
    Annotation,
    constraints_in,
    has_explicit,
    is_fit_for_auto,
    names_auto,
    refused_types,
    typed_leaf,
    untyped,
)
from splitjax.step.arguments import Bound, abstract, source_names
from splitjax.step.dealing.rewriting import rewritten
from splitjax.step.dealing.values import FusedProduct
from splitjax.step.microbatches import in_microbatches
from splitjax.step.positions import ArgumentRoles, call_with, in_place_of, keyword_only
from splitjax.step.recurrent.rows_apart import with_rows_apart
from splitjax.step.remat.rematerialising import Remat, rematerialised, resolved
from splitjax.step.said import said_of
from splitjax.step.states import as_given, match_states
from splitjax.step.stopping import LineChange, with_line_change
from splitjax.trace.graph import Graph
from splitjax.trace.tracer import build_graph

Retrace = Callable[[Sequence[jax.ShapeDtypeStruct]], _compat.ClosedJaxpr]
Resized = Callable[[int], _compat.ClosedJaxpr | Refusal]
# The closed jaxpr, the result as `ShapeDtypeStruct`s, the annotations, and whether the jaxpr has them as pins.
TracedCall = tuple[_compat.ClosedJaxpr, Any, tuple[Annotation, ...], bool]


class StepFunction(Protocol):
    """Names what tracing reads of a decorated step."""

    @property
    def fn(self) -> Callable[..., Any]:
        """Returns the step as the user wrote it."""
        ...

    @property
    def options(self) -> ArgumentRoles:
        """Returns which of its arguments are state, batch and static."""
        ...

    @property
    def returns_state(self) -> bool:
        """Returns whether the step returns its states; False for an evaluation."""
        ...

    @property
    def microbatches(self) -> int | None:
        """Returns in how many microbatches its gradients are taken where it does not say so itself; None for whole."""
        ...

    @property
    def remat(self) -> Remat:
        """Returns which of its repeated blocks are computed again, where it does not say so itself."""
        ...

    @property
    def name(self) -> str:
        """Returns the name of the step, for messages."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """Holds a call of a step that was traced, and everything that follows from the trace alone.

    **Attributes:**

    - `bound`: the call, taken apart.
    - `jaxpr`: the closed jaxpr of the step over its flat arguments. `graph`: the same, analysed.
    - `result`: the step's result, as a pytree of `ShapeDtypeStruct`s.
    - `matched`: flat argument of a state leaf -> its flat result; empty for an evaluation.
    - `retrace(leaves)`: traces the step for other flat arguments (`ShapeDtypeStruct`s).
    - `resized(num_examples)`: returns the closed jaxpr of the step with another number of examples, and remembers it.
      Returns a refusal where the step cannot be traced so.
    - `annotations`: what the user wrote under Explicit axes. `is_settled`: whether the jaxpr has them as pins; where
      not, the step is to be traced again once it is known where its arguments live.
    - `said`: what the user says of where the arguments live.
    - `remat`: which repeated blocks the jaxpr computes again, where the step does not say so itself.
    - `known`: the call with leaves of the sizes that the step knows, where `bound` has padded ones (`uneven="pad"`);
      None where that is the same.
    """

    bound: Bound
    jaxpr: _compat.ClosedJaxpr
    graph: Graph
    result: Any
    matched: Mapping[int, int]
    retrace: Retrace
    resized: Resized
    annotations: tuple[Annotation, ...] = ()
    is_settled: bool = True
    said: tuple[Said, ...] = ()
    remat: Remat = ()
    known: Bound | None = None

    @property
    def call(self) -> Bound:
        """Returns the call as the step knows it, taken apart."""
        return self.bound if self.known is None else self.known

    def in_microbatches(self, number: int) -> Traced:
        """Returns the same trace with its gradients taken in `number` microbatches, where it does not say so itself."""
        if number == 1:
            return self
        retrace = lambda leaves: in_microbatches(self.retrace(leaves), number)
        resized = resized_trace(self.bound, retrace, [leaf.example_dim for leaf in self.graph.leaves])
        return dataclasses.replace(self, jaxpr=in_microbatches(self.jaxpr, number), retrace=retrace, resized=resized)

    def rematerialised(self, remat: Remat) -> Traced:
        """Returns the same trace with blocks computed again as `remat` says. Raises `GradientError` for a block that
        the step does not have."""
        if not remat:
            return self
        jaxpr, retrace = rematerialised(self.jaxpr, remat), lambda leaves: rematerialised(self.retrace(leaves), remat)
        return dataclasses.replace(_with_jaxpr(self, jaxpr, retrace), remat=resolved(self.jaxpr, remat))

    def said_on(self, mesh: Mesh | AbstractMesh) -> Traced:
        """Returns the same trace with what the user says of where the arguments live on another `mesh`."""
        return dataclasses.replace(self, said=said_of(self.bound, mesh))


def trace_step(
    step: StepFunction,
    bound: Bound,
    matched: Mapping[int, int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    specs: Sequence[Spec] | None = None,
) -> Traced:
    """Traces a call of a step, matches its states and analyses it.

    **Arguments:** `step`: the step. `bound`: the call, taken apart. `matched`: flat argument of a state leaf -> its
    flat result, where the caller knows; None to find out. `mesh`: the user's, whose axes the step may name; None where
    it cannot. `specs`: where every flat argument lives, for a step with annotations under Explicit axes: it is traced
    under them; None while that is not known (`Traced.is_settled`).

    Raises `TraceError` for a step that cannot be traced, and `StateError` for one that does not return its states."""
    leaves = abstract(bound.leaves, bound.signature.avals)
    call = _StepCall(step, bound)
    trace = functools.partial(_trace, call, mesh)
    if specs is not None and mesh is not None:
        trace = functools.partial(_trace_typed, call, mesh, specs)
    elif has_explicit(mesh):
        assert mesh is not None, "a mesh with Explicit axes is one"
        trace = _way_to_trace(call, mesh, leaves)
    jaxpr, result, annotations, is_settled = trace(leaves)
    wanted = step.remat if step.returns_state else ()
    as_asked = lambda jaxpr: in_microbatches(rematerialised(jaxpr, wanted), step.microbatches)
    remat, jaxpr = resolved(jaxpr, wanted), as_asked(jaxpr)
    if matched is None:
        matched = match_states(step.options, bound, result) if step.returns_state else {}
    result = as_given(step.options, bound, result, matched)
    retrace = lambda leaves: as_asked(trace(leaves)[0])
    graph = build_graph(jaxpr, bound.arguments, matched)
    resized = resized_trace(bound, retrace, [leaf.example_dim for leaf in graph.leaves])
    said = said_of(bound, mesh)
    return Traced(bound, jaxpr, graph, result, matched, retrace, resized, annotations, is_settled, said, remat)


def trace_anywhere(step: StepFunction, bound: Bound, nameable: AbstractMesh) -> tuple[Traced, bool]:
    """Traces a call of a step whose mesh is not known yet.

    **Arguments:** `step`, `bound`: as for `trace_step`. `nameable`: a mesh with the axes that it will have.

    Returns the trace, and whether the step names axes of its mesh: then it is traced under `nameable`, and is to be
    traced again on the mesh itself. Raises what `trace_step` raises."""
    try:
        return trace_step(step, bound), False
    except SplitjaxError:
        raise
    except Exception:  # perhaps for want of a mesh; where that is not why, it raises the same again
        return trace_step(step, bound, mesh=nameable), True


def with_dealt(traced: Traced, products: Sequence[FusedProduct]) -> Traced:
    """Returns a traced step in which the fused weights of `products` are dealt out to devices: its trace, and those
    that are made of it later."""
    retrace = lambda leaves: rewritten(traced.retrace(leaves), products)
    return _with_jaxpr(traced, rewritten(traced.jaxpr, products), retrace)


def with_rows_taken_apart(traced: Traced, products: Mapping[Site, int]) -> Traced:
    """Returns a traced step in which `products` of values that lie side by side, by site with the position of these,
    are sums of one product for each: its trace, and those that are made of it later."""
    retrace = lambda leaves: with_rows_apart(traced.retrace(leaves), products)
    return _with_jaxpr(traced, with_rows_apart(traced.jaxpr, products), retrace)


def with_changed_line(traced: Traced, change: LineChange) -> Traced:
    """Returns a traced step with what `change` makes of the sharding constraints at a line, and in the traces that are
    made of it later."""
    retrace = lambda leaves: with_line_change(traced.retrace(leaves), change)
    return _with_jaxpr(traced, with_line_change(traced.jaxpr, change), retrace)


def _with_jaxpr(traced: Traced, jaxpr: _compat.ClosedJaxpr, retrace: Retrace) -> Traced:
    """Returns a traced step with another `jaxpr` of the same arguments and results, analysed, and with how it is traced
    again."""
    graph = build_graph(jaxpr, traced.bound.arguments, traced.matched)
    resized = resized_trace(traced.bound, retrace, [leaf.example_dim for leaf in graph.leaves])
    return dataclasses.replace(traced, jaxpr=jaxpr, graph=graph, retrace=retrace, resized=resized)


class _StepCall:
    """A step over the arguments of a call that are not static, with the name, the place in the source and the names of
    arguments that it has for its user: what JAX says of a traced value (a Python `if`, `numpy.asarray`) says it in
    these.

    **Arguments:** `step`: the step. `bound`: the call.
    """

    def __init__(self, step: StepFunction, bound: Bound) -> None:
        static, keywords = dict(bound.signature.static), keyword_only(step.fn)

        def call(*dynamic: Any) -> Any:
            given = iter(dynamic)
            args = [static[n] if n in static else next(given) for n in range(len(bound.args))]
            return call_with(step.fn, keywords, args)

        call.__name__ = self.name = step.name
        named = _compat.with_argument_names(in_place_of(step.fn, call), source_names(step.options, bound))
        self._call, self._tree = named, bound.signature.tree

    def trace(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Traces the step with its flat `leaves`: the closed jaxpr over these, and what the result is like."""
        return _compat.trace(self._call, *jax.tree.unflatten(self._tree, leaves))


def _way_to_trace(
    call: _StepCall, mesh: Mesh | AbstractMesh, leaves: Sequence[jax.ShapeDtypeStruct]
) -> Callable[[Sequence[jax.ShapeDtypeStruct]], TracedCall]:
    """Chooses how a step is traced before it is known where its arguments live, on a `mesh` with Explicit axes: under
    them where it has annotations, and plainly otherwise. `call`: the step, over flat `leaves`."""
    plain = functools.partial(_trace, call, mesh)
    typed = functools.partial(_trace_typed, call, mesh, None)
    try:
        return typed if typed(leaves)[2] else plain
    except TraceError as error:
        failed = error
    # What a step asserts of its arrays may hold once its arguments are laid out: until then it is traced without, or
    # on a single device.
    try:
        annotations = constraints_in(plain(leaves)[0])
        return (lambda leaves: (*plain(leaves)[:2], annotations, False)) if annotations else plain
    except Exception as error:
        if type(error) is type(failed.__cause__) and str(error) == str(failed.__cause__):
            raise  # a mistake that has nothing to do with axes
    alone = functools.partial(_trace_typed, call, _of_size_one(mesh), None)
    try:
        with _compat.axes_of_size_one_are_no_types():
            alone(leaves)
    except TraceError:
        raise failed from failed.__cause__

    def bootstrap(leaves: Sequence[jax.ShapeDtypeStruct]) -> TracedCall:
        with _compat.axes_of_size_one_are_no_types():
            jaxpr, result, annotations, _ = alone(leaves)
        return jaxpr, result, annotations, False

    return bootstrap


def _of_size_one(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """Returns the axes of `mesh` over a single device."""
    return mesh.abstract_mesh.update(axis_sizes=(1,) * len(mesh.axis_names))


def _trace_typed(
    call: _StepCall,
    mesh: Mesh | AbstractMesh,
    specs: Sequence[Spec] | None,
    leaves: Sequence[jax.ShapeDtypeStruct],
) -> TracedCall:
    """Traces a step under the axis types of `mesh`, with its flat `leaves` where `specs` say, or whole; then takes the
    types out again."""
    placed = [typed_leaf(leaf, mesh, specs[n] if specs else ()) for n, leaf in enumerate(leaves)]
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            typed, result = call.trace(placed)
    except SplitjaxError:
        raise
    except Exception as error:
        # Before it is known where its arguments live, a step that Auto axes would do for has been traced under these.
        does_under_auto = specs is not None and _does_under_auto(call, mesh, leaves)
        raise refused_types(error, mesh, f"trace of {call.name}", does_under_auto) from error
    jaxpr, annotations = untyped(typed, pins=specs is not None)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), result)
    return jaxpr, shapes, annotations, specs is not None or not annotations


def _does_under_auto(call: _StepCall, mesh: Mesh | AbstractMesh, leaves: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Returns whether a step could be traced, with all that it says of arrays, if the axes of `mesh` were Auto."""
    try:
        return is_fit_for_auto(_trace(call, mesh, leaves)[0])
    except Exception:
        return False


def _trace(call: _StepCall, mesh: Mesh | AbstractMesh | None, leaves: Sequence[jax.ShapeDtypeStruct]) -> TracedCall:
    """Traces a step over arrays that name no mesh; where that cannot be done, under the axes of `mesh`, all Auto."""
    try:
        inside = None if mesh is None else inside_mesh(mesh)
        return *naming_axes(call.trace, inside, f"trace of {call.name}")(leaves), (), True
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"the step uses a collective over an axis that only exists under pmap or shard_map ({error})",
            place=f"trace of {call.name}",
            remedy=(
                "a parallel step is written for the global batch: take out pmean, psum and axis_name; the mean over the"
                " batch is already the mean over all devices"
            ),
        ) from error


def naming_axes(fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None, place: str) -> Callable[..., Any]:
    """Returns `fn`, run under the axes of `mesh` where it fails without: it may name them, as in
    `jax.lax.with_sharding_constraint(x, PartitionSpec("data"))`. None for no mesh.

    Where `fn` fails under the mesh, too, it raises what it does there, or what it did before where only the mesh was
    wrong; and `TraceError` at `place` for an annotation that only Explicit axes take and that names one of type Auto.
    """

    def run(*args: Any) -> Any:
        try:
            return fn(*args)
        except SplitjaxError:
            raise
        except Exception as error:
            if mesh is None or mesh.empty:
                raise
            failed = error
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return fn(*args)
        except SplitjaxError:
            raise
        except Exception as error:
            if (refused := names_auto(error, mesh, place)) is not None:
                raise refused from error
            if _is_of_mesh(failed) or not _is_of_mesh(error):
                raise
        raise failed

    return run


def _is_of_mesh(error: Exception) -> bool:
    """Returns whether an error speaks of a mesh, or of shardings on one."""
    text = f"{type(error).__name__} {error}".lower()
    return "mesh" in text or "sharding" in text


def resized_trace(bound: Bound, retrace: Retrace, example_dims: Sequence[int]) -> Resized:
    """Returns a function that traces the step with another number of examples: number -> closed jaxpr.

    **Arguments:** `bound`: the call of the step: its arguments, and which of them are the batch. `retrace`: as
    `Traced.retrace`. `example_dims`: of every leaf, the dim that holds examples if it is a batch.

    The function remembers what it traced, and returns a refusal where the step cannot be traced.
    """

    @functools.cache
    def resized(num_examples: int) -> _compat.ClosedJaxpr | Refusal:
        leaves = [
            jax.ShapeDtypeStruct(
                (*leaf.shape[:dim], num_examples, *leaf.shape[dim + 1 :]), leaf.dtype, weak_type=leaf.weak_type
            )
            if argument.is_batch and leaf.shape
            else leaf
            for leaf, argument, dim in zip(
                abstract(bound.leaves, bound.signature.avals), bound.arguments, example_dims, strict=True
            )
        ]
        try:
            return retrace(leaves)
        except (MicrobatchError, TraceError) as error:  # made of another, or annotated, and cannot be had at this size
            return Refusal(error.message, error.value, error.place, error.remedy, cause=error)
        except SplitjaxError:
            raise
        except Exception as error:
            return Refusal(
                f"the step cannot be traced with {num_examples} examples: {error}",
                value=num_examples,
                place="microbatches",
                remedy="write the step for any batch size, or use microbatches=None",
                cause=error,
            )

    return resized
