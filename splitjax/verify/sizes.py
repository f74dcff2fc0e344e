"""Chooses the sizes that a traced step shrinks to: a smaller size for every class of dims that must be of equal size.

A closed jaxpr goes in, new sizes by class of dims come out, so that a step of any size can be verified on one device.
The classes are those of `verify.dim_classes`. Each class becomes the smallest size that has the same common divisors
with the number of devices, so that a layout divides the small dims exactly where it divides the given sizes. Every
operation is then asked, by JAX's own shape rules, whether it takes the new sizes; the classes of dims that it does not
let go of (windows, fixed slices, the rows of a constant) keep theirs, until nothing changes any more.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax.primitives.calls import MEANS_ITS_BODY, CallKind, kind_of
from splitjax.trace.flatten import Op
from splitjax.verify.dim_classes import Analysis, Misfit, Sized, analyse, grouped
from splitjax.verify.parameters import AS_TRACED, Shape, resized

# Calls whose bodies are rewritten with them: all others keep the sizes that they were traced with.
OPEN_CALLS: frozenset[CallKind | None] = MEANS_ITS_BODY | {CallKind.RULE}


def smallest_together(group: Mapping[int, int], sizes: Mapping[int, int], devices: int) -> dict[int, int]:
    """Chooses new sizes for the classes of `group`, which differ by fixed numbers; `sizes` are those before.

    Each has the same common divisors with `devices` as before.
    """
    base = min(sizes[label] for label in group)
    for start in range(2, base + 1):
        if all(math.gcd(start + offset, devices) == math.gcd(sizes[label], devices) for label, offset in group.items()):
            return {label: start + offset for label, offset in group.items()}
    return {label: sizes[label] for label in group}


def smallest(size: int, devices: int) -> int:
    """Returns the smallest size above 1 with the same common divisors with `devices` as `size`."""
    if size < 2:
        return size
    common = math.gcd(size, devices)
    return next(n for n in range(2, size + 1) if math.gcd(n, devices) == common)


@dataclasses.dataclass(frozen=True)
class KeptSize:
    """Describes a class of dims, `label`, that keeps its `size`: `why` names the operation and its line."""

    label: int
    size: int
    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class SizeChoice:
    """Holds the sizes that were chosen.

    - `analysis`: of the step as traced.
    - `new`: {class: new size}, for all classes whose size changes.
    - `kept`: the classes that had to keep theirs.
    """

    analysis: Analysis
    new: Mapping[int, int]
    kept: tuple[KeptSize, ...]


def choose_sizes(
    analysis: Analysis, num_constants: int, devices: int, examples: Mapping[int, int], frozen: Mapping[int, str]
) -> SizeChoice:
    """Chooses new sizes for every class.

    **Arguments:**

    - `analysis`: of the step as traced.
    - `num_constants`: of the outermost jaxpr; what bodies further in close over keeps its shape.
    - `devices`: their number.
    - `examples`: {class of the example dim: its new size}.
    - `frozen`: {class that must keep its size: the reason}.
    """
    flat, kept = analysis.flat, dict(frozen)
    for value in flat.constants[num_constants:]:
        kept |= {
            label: "a constant inside a loop or call has this size"
            for dim in analysis.dims[value]
            for label in dim
            if label not in kept
        }
    together = {label: group for group in grouped(analysis) for label in group}
    for group in together.values():
        why = next(
            (kept[member] for member in group if member in kept),
            "it differs by a fixed number from the number of examples",
        )
        if not kept.keys().isdisjoint(group) or not examples.keys().isdisjoint(group):
            kept |= {member: why for member in group if member not in kept and member not in examples}
    new = {
        label: examples.get(label, smallest(size, devices))
        for label, size in analysis.sizes.items()
        if label not in kept
    }
    for group in {id(group): group for group in together.values()}.values():
        if kept.keys().isdisjoint(group):
            new |= smallest_together(group, analysis.sizes, devices)
    new = {label: size for label, size in new.items() if size != analysis.sizes[label]}
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for index, op in enumerate(flat.ops):
        for label in {c for v in (*op.inputs, *op.outputs) for dim in analysis.dims[v] for c in dim}:
            readers[label].append(index)
    waiting = dict.fromkeys(range(len(flat.ops)))
    known: dict[Any, bool] = {}
    while waiting:
        index = next(iter(waiting))
        del waiting[index]
        op = flat.ops[index]
        if _takes(analysis, op, new, known):
            continue
        pinned = _to_freeze(analysis, index, new)
        for label in dict.fromkeys(
            member for pin in pinned for member in (pin, *together.get(pin, ())) if member in new
        ):
            kept[label] = f"{op.primitive} at {op.source}" if op.source else op.primitive
            del new[label]
            waiting |= dict.fromkeys(readers[label])
        waiting[index] = None
    return SizeChoice(analysis, new, tuple(KeptSize(label, analysis.sizes[label], why) for label, why in kept.items()))


def _to_freeze(analysis: Analysis, index: int, new: Mapping[int, int]) -> list[int]:
    """Returns the classes that an operation pins: those of dims that do not run through it, if any of them were to
    change; else all of them.
    """
    op, dim_map = analysis.flat.ops[index], analysis.linked.maps[index]
    values = (*op.inputs, *op.outputs)
    changed = lambda dims: [member for value, d in dims for member in analysis.dims[value][d] if member in new]
    everything = [(value, d) for value in values for d in range(len(analysis.dims[value]))]
    if dim_map is not None:
        labels = collections.Counter(
            label for tensor in (*dim_map.inputs, *dim_map.outputs) for dim in tensor for label in dim
        )
        alone = [
            (value, d)
            for value, tensor in zip(values, (*dim_map.inputs, *dim_map.outputs), strict=True)
            for d, dim in enumerate(tensor)
            if any(labels[label] == 1 for label in dim)
        ]
        if changed(alone):
            return list(dict.fromkeys(changed(alone)))
    return list(dict.fromkeys(changed(everything)))


def _takes(analysis: Analysis, op: Op, new: Mapping[int, int], known: dict[Any, bool]) -> bool:
    """Tells whether an operation takes its operands' new shapes and gives its results' new shapes."""
    old = [analysis.flat.shapes[v] for v in op.inputs], [analysis.flat.shapes[v] for v in op.outputs]
    now = [analysis.shape(v, new) for v in op.inputs], [analysis.shape(v, new) for v in op.outputs]
    if old == now:
        return True
    if op.eqn is None:
        return _hands_on(op.primitive, *now)
    if op.primitive in AS_TRACED or any(kind_of(call) not in OPEN_CALLS for call in op.calls):
        return False
    try:
        key = (
            op.primitive,
            tuple(map(tuple, now[0])),
            tuple(map(tuple, now[1])),
            tuple(map(tuple, old[0])),
            tuple(sorted(op.eqn.params.items(), key=lambda p: p[0])),
            tuple(str(v.aval.dtype) for v in op.eqn.invars),
        )
        if key in known:
            return known[key]
    except TypeError:  # parameters that cannot be hashed
        key = None
    takes = _accepts(op.eqn, old, now)
    if key is not None:
        known[key] = takes
    return takes


def _accepts(eqn: Any, old: Any, now: Any) -> bool:
    """Tells whether JAX's shape rule gives the wanted result shapes."""
    types = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, v in zip(now[0], eqn.invars, strict=True)]
    try:
        changed = _compat.with_params(eqn, **resized(eqn.primitive.name, eqn.params, old, now))
        results = jax.eval_shape(lambda *values: _compat.bind_equation(changed, values), *types)
    except Exception:  # whatever a shape rule says about sizes that it does not take
        return False
    return [tuple(result.shape) for result in results] == [tuple(result) for result in now[1]]


def _hands_on(primitive: str, ins: Sequence[Shape], outs: Sequence[Shape]) -> bool:
    """Tells whether new shapes suit one of the pseudo-operations of `trace.flatten`."""
    if primitive == "_scan_in":
        return ins[0][1:] == outs[0]
    if primitive == "_scan_out":
        return outs[0][1:] == ins[0]
    if primitive == "_scan_index":
        return len({shape[0] for shape in ins}) == 1
    return all(shape == ins[0] for shape in (*(ins if primitive != "_gradient" else ins[:1]), *outs))


def local_sizes(jaxpr: Any, inputs: Sequence[Shape]) -> Sized | None:
    """Returns the shapes inside a closed `jaxpr`, such as a derivative rule's, once its inputs have the shapes
    `inputs`.

    None where they have these shapes already.

    Raises `Misfit` where they do not follow from those of the inputs."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    if all(tuple(v.aval.shape) == tuple(shape) for v, shape in zip(inner.invars, inputs, strict=True)):
        return None
    analysis = analyse(jaxpr)
    new: dict[int, int] = {}
    for value, shape in zip(analysis.flat.inputs, inputs, strict=True):
        for dim, size in zip(analysis.dims[value], shape, strict=True):
            was = math.prod(analysis.sizes[label] for label in dim)
            if was == size:
                continue
            if len(dim) != 1 or new.setdefault(dim[0], size) != size:
                raise Misfit((), f"a dim of {was} inside a derivative rule does not follow from its operands")
    known: dict[Any, bool] = {}
    for op in analysis.flat.ops:
        if not _takes(analysis, op, new, known):
            raise Misfit((), f"{op.primitive} inside a derivative rule keeps its sizes")
    return analysis.sized(new, len(inner.constvars))


def transferred(choice: SizeChoice, there_analysis: Analysis, changed: Collection[int]) -> dict[int, int]:
    """Carries a `choice` of sizes over to `there_analysis`, of the same program with another number of examples.

    `changed`: classes of the examples there.

    Raises `Misfit` where the traces are not the same program, or their dims are made of other factors."""
    mine = choice.analysis
    if [op.primitive for op in mine.flat.ops] != [op.primitive for op in there_analysis.flat.ops] or len(
        mine.dims
    ) != len(there_analysis.dims):
        raise Misfit((), "the step is another program for another number of examples")
    new: dict[int, int] = {}
    for here, there in zip(mine.dims, there_analysis.dims, strict=True):
        for dim, dim_there in zip(here, there, strict=True):
            for label, label_there in zip(dim, dim_there, strict=False):
                if (
                    mine.sizes[label] == there_analysis.sizes[label_there]
                    and label_there not in changed
                    and label in choice.new
                ):
                    if new.setdefault(label_there, choice.new[label]) != choice.new[label]:
                        raise Misfit((), "dims are made of other factors for another number of examples")
    return new
