"""Builds a step at other sizes or in float64 as two programs: the plan's, and the same step on one device.

A `Variant` of a step goes in, a `Pair` of functions comes out, which take the same leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from splitjax import _compat
from splitjax.compile.building import build_entry
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import MicrobatchError
from splitjax.plan import Plan
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step
from splitjax.verify.dim_classes import Misfit, Sized, analyse
from splitjax.verify.parameters import wide
from splitjax.verify.rewriting import Rewriter
from splitjax.verify.sizes import Shape, SizeChoice, transferred
from splitjax.verify.taps import NONE, Tap, Taps

# Programs that run once: with few of LLVM's optimisations, which come behind everything that is verified here. With
# none at all, XLA's CPU compiler computes an operand of a maximum otherwise than the copy that its derivative compares
# with the maximum, and gradients get lost (jax 0.10.2).
_QUICKLY = {"cpu": {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}}


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """Describes a step at other sizes or in another precision.

    - `entry`: the step as the user calls it.
    - `choice`: its sizes; None for those given.
    - `float64`: compute in float64 throughout.
    - `microbatches`: keep the microbatches of its boundaries.
    - `traced_wide`: JAX's 64-bit numbers were on when the step was traced.
    """

    entry: CompiledEntry
    choice: SizeChoice | None
    float64: bool
    microbatches: bool = True
    traced_wide: bool = False

    @functools.cached_property
    def sized(self) -> Sized | None:
        """The new shapes of everything in the step; None where none changes."""
        if self.choice is None or not self.choice.new:
            return None
        inner, _ = _compat.open_jaxpr(self.entry.jaxpr)
        return self.choice.analysis.sized(self.choice.new, len(inner.constvars))

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the flat arguments."""
        if self.sized is not None:
            return self.sized.inputs
        return tuple(leaf.shape for leaf in self.entry.plan.leaves)

    @functools.cached_property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the flat arguments."""
        inner, _ = _compat.open_jaxpr(self.entry.jaxpr)
        dtype = wide if self.float64 else lambda it: it
        return tuple(
            jax.ShapeDtypeStruct(shape, dtype(v.aval.dtype)) for shape, v in zip(self.shapes, inner.invars, strict=True)
        )

    def evaluate(self, leaves: Sequence[Any], taps: Taps = NONE, constrained: bool = True) -> list[Any]:
        """Evaluates the step on its flat `leaves` and returns its flat results.

        `taps` see its operations; `constrained` keeps its own sharding constraints. Leaves with another number of
        examples than this variant's are those of a microbatch.
        """
        jaxpr, sized = self.entry.jaxpr, self.sized
        given = tuple(tuple(np.shape(leaf)) for leaf in leaves)
        if given != self.shapes:
            jaxpr, sized = self._resized(given)
        rewriter = Rewriter(sized, self.float64, constrained, self.microbatches, self.traced_wide)
        return rewriter.run(jaxpr, leaves, (), taps)

    def _resized(self, shapes: tuple[Shape, ...]) -> tuple[Any, Sized | None]:
        """Traces the step for another number of examples, and returns its jaxpr and its new shapes."""
        arguments = self.entry.bound.arguments
        types = []
        for number, (shape, argument) in enumerate(zip(shapes, arguments, strict=True)):
            leaf = self.entry.plan.leaves[number]
            aval = _compat.open_jaxpr(self.entry.jaxpr)[0].invars[number].aval
            is_batch = argument.is_batch and bool(shape)
            types.append(
                jax.ShapeDtypeStruct(
                    (shape[0], *leaf.shape[1:]) if is_batch else leaf.shape,
                    aval.dtype,
                    weak_type=bool(getattr(aval, "weak_type", False)),
                )
            )
        with jax.enable_x64(self.traced_wide):
            jaxpr = self.entry.traced.retrace(types)
        if self.sized is None or self.choice is None:
            return jaxpr, None
        resized = analyse(jaxpr)
        examples = {
            label
            for value, argument in zip(resized.flat.inputs, arguments, strict=True)
            if argument.is_batch and resized.dims[value]
            for label in resized.dims[value][0]
        }
        try:
            new = transferred(self.choice, resized, examples)
        except Misfit as error:
            raise MicrobatchError(str(error), place="verify", remedy="verify the given sizes") from error
        inner, _ = _compat.open_jaxpr(jaxpr)
        return jaxpr, resized.sized(new, len(inner.constvars))


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """Holds the two programs of a variant, which return the flat results of the step, then the values of the taps.

    - `entry`: the step at the variant's sizes, planned.
    - `subject`: flat leaves -> arrays, under the plan.
    - `reference`: flat leaves -> arrays, on one device.
    - `taps`: what the values of the taps are, in order.
    """

    entry: CompiledEntry
    subject: Callable[[Sequence[Any]], list[Any]]
    reference: Callable[[Sequence[Any]], list[Any]]
    taps: list[Tap]


def make_pair(variant: Variant, recipe: Recipe, mesh: jax.sharding.Mesh, make_taps: Callable[[], Taps]) -> Pair:
    """Builds both programs of `variant`; nothing is compiled yet.

    **Arguments:**

    - `recipe`: the step's, with the options that are verified.
    - `mesh`: the devices of the plan.
    - `make_taps`: makes the taps that see the operations of an evaluation.
    """
    entry, dynamic = (
        variant.entry,
        [n for n in range(len(variant.entry.bound.args)) if n not in recipe.options.static_argnums],
    )
    seen: list[Tap] = []

    def evaluate(leaves: Sequence[Any], constrained: bool) -> tuple[list[Any], list[Any]]:
        taps = make_taps()
        results = variant.evaluate(leaves, taps, constrained)
        seen[:] = taps.taps
        return results, taps.values

    def step(*args: Any) -> Any:
        return evaluate(jax.tree.leaves([args[n] for n in dynamic]), constrained=True)

    step.__name__ = step.__qualname__ = recipe.name
    platform = mesh.devices.flat[0].platform
    args = list(entry.bound.args)
    for number, (start, stop) in enumerate(entry.bound.spans):
        if number in dynamic:
            args[number] = jax.tree.unflatten(jax.tree.structure(args[number]), variant.types[start:stop])
    pinned = _pinned(entry.plan, variant.types)
    mine = dataclasses.replace(recipe, fn=step, pinned=pinned, donate=False, backprop=None, microbatches=None, remat=())
    bound = bind(step, mine.options, tuple(args))
    built = build_entry(mine, mesh, trace_step(mine, bound, entry.matched, mesh))

    programs: dict[str, Any] = {}

    def subject(leaves: Sequence[Any]) -> list[Any]:
        call = list(args)
        for number in dynamic:
            call[number] = jax.tree.unflatten(
                jax.tree.structure(args[number]), leaves[slice(*entry.bound.spans[number])]
            )
        call = tuple(call)
        if mesh.is_multi_process:
            call = built.across_processes(mine, call)
        residuals = {name: np.zeros(operand.shape, operand.dtype) for name, operand in built.residuals.items()}
        operands = built.operands(call, residuals)
        static = {len(operands) - len(call) + number for number in mine.options.static_argnums}
        if "subject" not in programs:
            programs["subject"] = built.program(0).lower(*operands).compile(_QUICKLY.get(platform))
        outputs = programs["subject"](*(operand for number, operand in enumerate(operands) if number not in static))
        results, values = outputs[0] if built.sparse is not None else outputs
        # All processes look at all parts, and so come to the same conclusions.
        return process_allgather([*results, *values], tiled=True) if mesh.is_multi_process else [*results, *values]

    device = mesh.local_devices[0]

    def step_on_one_device(leaves: Sequence[Any]) -> Any:
        return evaluate(leaves, constrained=False)

    alone = jax.jit(step_on_one_device)

    def reference(leaves: Sequence[Any]) -> list[Any]:
        with jax.default_device(device):
            placed = [jax.device_put(leaf, device) for leaf in leaves]
            if "reference" not in programs:
                programs["reference"] = alone.lower(placed).compile(_QUICKLY.get(platform))
            results, values = programs["reference"](placed)
        return [*results, *values]

    return Pair(built, subject, reference, seen)


def _pinned(plan: Plan, types: Sequence[jax.ShapeDtypeStruct]) -> Plan:
    """Returns the plan for leaves of other shapes and dtypes."""
    leaves = tuple(
        dataclasses.replace(leaf, shape=tuple(like.shape), dtype=str(like.dtype))
        for leaf, like in zip(plan.leaves, types, strict=True)
    )
    # The memory by lifetimes is predicted when it is read: here, where types are wider, the step would be another.
    return dataclasses.replace(plan.with_summed_memory(), leaves=leaves, syncs=(), partial=None)
