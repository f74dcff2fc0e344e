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
from splitjax.step.arguments import Bound, abstract
from splitjax.step.positions import ArgumentRoles, call_with, keyword_only
from splitjax.step.states import match_states
from splitjax.trace.graph import Graph
from splitjax.trace.tracer import build_graph

Retrace = Callable[[Sequence[jax.ShapeDtypeStruct]], _compat.ClosedJaxpr]
Resized = Callable[[int], _compat.ClosedJaxpr | Refusal]


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
    """

    bound: Bound
    jaxpr: _compat.ClosedJaxpr
    graph: Graph
    result: Any
    matched: Mapping[int, int]
    retrace: Retrace
    resized: Resized


def trace_step(
    step: StepFunction,
    bound: Bound,
    matched: Mapping[int, int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Traced:
    """Traces a call of a step, matches its states and analyses it.

    **Arguments:** `step`: the step. `bound`: the call, taken apart. `matched`: flat argument of a state leaf -> its
    flat result, where the caller knows; None to find out. `mesh`: where the step may name axes, as in
    `jax.lax.with_sharding_constraint(x, PartitionSpec("data"))`; None where it cannot.

    Raises `TraceError` for a step that cannot be traced, and `StateError` for one that does not return its states."""
    jaxpr, result = _trace(step, bound, abstract(bound.leaves, bound.signature.avals), mesh)
    if matched is None:
        matched = match_states(step.options, bound, result) if step.returns_state else {}
    retrace = lambda leaves: _trace(step, bound, leaves, mesh)[0]
    graph = build_graph(jaxpr, bound.arguments, matched)
    return Traced(bound, jaxpr, graph, result, matched, retrace, resized_trace(bound, retrace))


def _trace(
    step: StepFunction, bound: Bound, leaves: Sequence[jax.ShapeDtypeStruct], mesh: Mesh | AbstractMesh | None
) -> tuple[_compat.ClosedJaxpr, Any]:
    """Traces the step for flat `leaves`; where it cannot be traced so, within `mesh`. Returns its closed jaxpr, and its
    result as a pytree of `ShapeDtypeStruct`s."""
    static, keywords = dict(bound.signature.static), keyword_only(step.fn)

    def flat(*values: Any) -> Any:
        dynamic = iter(jax.tree.unflatten(bound.signature.tree, values))
        args = [static[n] if n in static else next(dynamic) for n in range(len(bound.args))]
        return call_with(step.fn, keywords, args)

    flat.__name__ = step.name
    try:
        return _compat.trace(flat, *leaves)
    except SplitjaxError:
        raise
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"the step uses a collective over an axis that only exists under pmap or shard_map ({error})",
            place=f"trace of {step.name}",
            remedy=(
                "a parallel step is written for the global batch: take out pmean, psum and axis_name; the mean over the"
                " batch is already the mean over all devices"
            ),
        ) from error
    except Exception:
        if mesh is None or mesh.empty:
            raise
        try:
            with jax.sharding.use_abstract_mesh(inside_mesh(mesh).abstract_mesh):
                return _compat.trace(flat, *leaves)
        except SplitjaxError:
            raise
        except Exception:  # it was not for want of a mesh: what is wrong is what JAX said first
            pass
        raise


def resized_trace(bound: Bound, retrace: Retrace) -> Resized:
    """Returns a function that traces the step with another number of examples: number -> closed jaxpr.

    **Arguments:** `bound`: the call of the step: its arguments, and which of them are the batch. `retrace`: as
    `Traced.retrace`.

    The function remembers what it traced, and returns a refusal where the step cannot be traced.
    """

    @functools.cache
    def resized(num_examples: int) -> _compat.ClosedJaxpr | Refusal:
        leaves = [
            jax.ShapeDtypeStruct((num_examples, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type)
            if argument.is_batch and leaf.shape
            else leaf
            for leaf, argument in zip(abstract(bound.leaves, bound.signature.avals), bound.arguments, strict=True)
        ]
        try:
            return retrace(leaves)
        except MicrobatchError as error:  # the step is made of another, which cannot be had at this size
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
