"""Chooses the sizes that a traced step shrinks to: a smaller size for every class of dims that must be of equal size.

A closed jaxpr goes in, new sizes by class of dims come out, so that a step of any size can be verified on one device.
The classes are those of the trace (`trace.classes`), united by every link there is. Each class becomes the smallest
size that has the same common divisors with the number of devices, so that a layout divides the small dims exactly where
it divides the given sizes. Every operation is then asked, by JAX's own shape rules, whether it takes the new sizes; the
classes of dims that it does not let go of (windows, fixed slices, the rows of a constant) keep theirs, until nothing
changes any more.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from splitjax import _compat
from splitjax.trace.classes import Atoms, refine, unite
from splitjax.trace.flatten import Flat, Op, flatten
from splitjax.trace.links import Linked, RawLink, link, tie
from splitjax.verify.parameters import AS_TRACED, Shape, resized

Site: TypeAlias = tuple[int, ...]
# Calls whose bodies are rewritten with them: all others keep the sizes that they were traced with.
OPEN_CALLS: frozenset[str] = frozenset({
    "jit", "pjit", "closed_call", "core_call", "core_closed_call", "call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "composite", "custom_vmap_call", "call_hi_primitive",
})  # fmt: skip


class Misfit(Exception):
    """Reports that an operation does not take the sizes that were chosen.

    `site`: of the operation, or of the call that it stands in; `why`: the reason in words.
    """

    def __init__(self, site: Site, why: str) -> None:
        super().__init__(why)
        self.site = site


@dataclasses.dataclass(frozen=True)
class Sized:
    """Holds new shapes of everything in a jaxpr.

    - `inputs`, `constants`: of the outermost jaxpr, in order.
    - `results`: of every operation, by site.
    - `stacked`: of what scans stack, by their site.
    """

    inputs: tuple[Shape, ...]
    constants: tuple[Shape, ...]
    results: Mapping[Site, tuple[Shape, ...]]
    stacked: Mapping[Site, tuple[Shape, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """Holds a flat jaxpr with the classes of its dims.

    - `flat`, `linked`: the jaxpr, and the links between its dims.
    - `atoms`: the factors of its dims.
    - `labels`: the class of each atom, by its number.
    """

    flat: Flat
    linked: Linked
    atoms: Atoms
    labels: tuple[int, ...]

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """Maps each class to the size of its atoms."""
        return {self.labels[a]: size for a, size in enumerate(self.atoms.sizes)}

    @functools.cached_property
    def dims(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The classes of the atoms of every dim of every value, major first."""
        return tuple(
            tuple(tuple(self.labels[a] for a in self.atoms.dim(value, d)) for d in range(len(shape)))
            for value, shape in enumerate(self.flat.shapes)
        )

    def shape(self, value: int, new: Mapping[int, int]) -> Shape:
        """Returns the shape of the value of number `value` once the classes in `new` have these sizes."""
        return tuple(math.prod(new.get(label, self.sizes[label]) for label in dim) for dim in self.dims[value])

    def sized(self, new: Mapping[int, int], num_constants: int) -> Sized:
        """Returns all shapes once the classes in `new` have these sizes; `num_constants` of the outermost jaxpr."""
        results = {op.site: tuple(self.shape(v, new) for v in op.outputs) for op in self.flat.ops if op.eqn is not None}
        stacked: dict[Site, tuple[Shape, ...]] = {}
        for op in self.flat.ops:
            if op.primitive == "_scan_out":
                stacked[op.site] = (*stacked.get(op.site, ()), self.shape(op.outputs[0], new))
        constants = tuple(self.shape(v, new) for v in self.flat.constants[:num_constants])
        return Sized(tuple(self.shape(v, new) for v in self.flat.inputs), constants, results, stacked)


def analyse(jaxpr: Any, state_results: Mapping[int, int] | None = None) -> Analysis:
    """Finds the classes of the dims of a closed `jaxpr`.

    `state_results` maps the flat argument of each state leaf to its flat result: they are of equal shape.
    """
    flat = flatten(jaxpr)
    linked = link(flat)
    shapes = list(linked.shapes)
    ties = tie([(flat.inputs[i], flat.outputs[o]) for i, o in (state_results or {}).items()], flat.shapes)
    atoms, pairs = refine(shapes, [*linked.links, *ties, *part_links(flat, shapes)])
    return Analysis(flat, linked, atoms, unite(atoms, pairs))


def part_links(flat: Flat, shapes: list[Shape]) -> Iterator[RawLink]:
    """Yields links for dims of `flat` that are cut into equal parts, laid end to end from them (a fused projection, the
    halves of a rotation), or read in windows that tile them: the whole is (parts, part).

    What computes with them does not need the links, but sizes do. Appends virtual values to `shapes`, as `link` does.
    """
    for index, op in enumerate(flat.ops):
        if op.primitive in _WINDOWED:
            whole, number = op.inputs[0], op.outputs[0]
            for d, e, stride in _strides(op):
                size = flat.shapes[whole][d]
                if stride > 1 and flat.shapes[number][e] > 1 and size == flat.shapes[number][e] * stride:
                    shapes.append((flat.shapes[number][e], stride))
                    yield RawLink(((whole, d),), ((len(shapes) - 1, 0), (len(shapes) - 1, 1)), index, 0)
                    yield RawLink(((number, e),), ((len(shapes) - 1, 0),), index, 0)
            continue
        wholes, parts = _wholes_and_parts(op)
        for d, size in enumerate(flat.shapes[wholes[0]] if wholes else ()):
            sizes = {flat.shapes[part][d] for part in parts}
            part = min(sizes)
            if (
                len(sizes) > 1
                or part in (0, 1, size)
                or size % part
                or (op.primitive == "slice" and (op.params["start_indices"][d] % part or _step(op, d) != 1))
            ):
                continue
            shapes.append((size // part, part))
            virtual = len(shapes) - 1
            yield RawLink(((wholes[0], d),), ((virtual, 0), (virtual, 1)), index, 0)
            yield from (RawLink(((cut, d),), ((virtual, 1),), index, 0) for cut in parts)


_WINDOWED = frozenset(
    {"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "conv_general_dilated"}
)


def _strides(op: Op) -> list[tuple[int, int, int]]:
    """Lists (the operand's dim, the result's, the stride) of each window dim."""
    strides = op.params["window_strides"]
    if op.primitive != "conv_general_dilated":
        return [(d, d, stride) for d, stride in enumerate(strides)]
    numbers = op.params["dimension_numbers"]
    return list(zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strides, strict=True))


def _wholes_and_parts(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if op.primitive == "concatenate":
        return op.outputs, op.inputs
    return (op.inputs[:1], op.outputs) if op.primitive in ("split", "slice") else ((), ())


def _step(op: Op, d: int) -> int:
    return 1 if op.params["strides"] is None else op.params["strides"][d]


def offsets(analysis: Analysis) -> Iterator[tuple[int, int, int]]:
    """Yields classes of `analysis` that differ by a fixed number: (longer, shorter, number).

    What a slice leaves out at the ends, a padding or a concatenation adds.
    """
    shapes, dims = analysis.flat.shapes, analysis.dims
    for op in analysis.flat.ops:
        if op.primitive == "slice":
            pairs = [(op.inputs[0], op.outputs[0], d) for d in range(len(shapes[op.outputs[0]])) if _step(op, d) == 1]
        elif op.primitive == "pad":
            pairs = [
                (op.outputs[0], op.inputs[0], d)
                for d, (_, _, inner) in enumerate(op.params["padding_config"])
                if inner == 0
            ]
        elif op.primitive == "concatenate":
            d = op.params["dimension"]
            long = [v for v in op.inputs if shapes[v][d] != 1]
            pairs = [(op.outputs[0], long[0], d)] if len(long) == 1 else []
        else:
            continue
        for longer, shorter, d in pairs:
            if shapes[longer][d] < shapes[shorter][d]:
                longer, shorter = shorter, longer
            if len(dims[longer][d]) == len(dims[shorter][d]) == 1 and shapes[longer][d] != shapes[shorter][d]:
                yield dims[longer][d][0], dims[shorter][d][0], shapes[longer][d] - shapes[shorter][d]


def grouped(analysis: Analysis) -> list[dict[int, int]]:
    """Groups classes of `analysis` that change together: {class: how much it is larger than the smallest}."""
    groups: dict[int, dict[int, int]] = {}
    for longer, shorter, number in offsets(analysis):
        left, right = groups.setdefault(longer, {longer: 0}), groups.setdefault(shorter, {shorter: 0})
        if left is right:
            continue
        shift = left[longer] - number - right[shorter]
        left |= {member: offset + shift for member, offset in right.items()}
        groups |= dict.fromkeys(right, left)
    unique = {id(group): group for group in groups.values()}.values()
    return [{member: offset - min(group.values()) for member, offset in group.items()} for group in unique]


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
class Kept:
    """Describes a class of dims, `label`, that keeps its `size`: `why` names the operation and its line."""

    label: int
    size: int
    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Holds the sizes that were chosen.

    - `analysis`: of the step as traced.
    - `new`: {class: new size}, for all classes whose size changes.
    - `kept`: the classes that had to keep theirs.
    """

    analysis: Analysis
    new: Mapping[int, int]
    kept: tuple[Kept, ...]


def choose_sizes(
    analysis: Analysis, num_constants: int, devices: int, examples: Mapping[int, int], frozen: Mapping[int, str]
) -> Choice:
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
    return Choice(analysis, new, tuple(Kept(label, analysis.sizes[label], why) for label, why in kept.items()))


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
    if op.primitive in AS_TRACED or any(call.primitive.name not in OPEN_CALLS for call in op.calls):
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


def transferred(choice: Choice, there_analysis: Analysis, changed: Collection[int]) -> dict[int, int]:
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
