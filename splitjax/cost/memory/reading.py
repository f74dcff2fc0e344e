"""Reads a jaxpr as a `Program`: calls stand where they are called, loops and branches hold regions.

What no result depends on is left out, as compilers do. A scan's slices and stacked results are nodes of their own, so
that their dims are tied to those of the whole arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.cost.memory.bells import Bells
from splitjax.cost.memory.other_meshes import is_other, same_axes
from splitjax.cost.memory.program import Axes, Kind, Node, Program, Region, Split
from splitjax.plan import spec_axes
from splitjax.primitives.calls import CallKind, call_body, kind_of, scan_parts, while_parts
from splitjax.primitives.dims import DimMap, Shape
from splitjax.primitives.table import OPERATIONS

_VIEWS = frozenset(
    "reshape squeeze expand_dims stop_gradient optimization_barrier sharding_constraint bitcast_convert_type copy"
    " copy_p reduce_precision pcast pvary random_wrap random_unwrap name mesh_cast reshard".split()
)
_COLLECTIVES = frozenset(
    "psum psum_invariant psum2 all_gather all_gather_invariant reduce_scatter all_to_all ppermute pmax pmin"
    " pgather ragged_all_to_all".split()
)
_KERNELS = frozenset(
    "dot_general ragged_dot conv_general_dilated reduce_window reduce_window_sum reduce_window_max reduce_window_min"
    " select_and_scatter_add select_and_gather_add sort top_k approx_top_k scatter scatter-add scatter-mul scatter-min"
    " scatter-max cumsum cumprod cummax cummin cumlogsumexp fft cholesky lu qr householder_product svd eigh"
    " triangular_solve tridiagonal_solve threefry2x32 random_bits rng_bit_generator random_seed random_fold_in"
    " random_split argmax argmin pallas_call custom_call ffi_call".split()
)
_MADE = frozenset(("iota", "axis_index", "create_token", "empty", "random_clone"))


def read(
    jaxpr: Any,
    splits: Sequence[Split | None],
    results: Sequence[Split | None],
    sizes: Mapping[str, int],
    platform: str = "",
) -> Program:
    """Reads the closed `jaxpr` of a step.

    **Arguments:** `splits`, `results`: by argument and by result, how it is split; None where that is open. `sizes`: of
    the mesh axes. `platform`: that it is compiled for, which alone of those that JAX traced for stays
    (`jax.lax.platform_dependent`); all of them stay where none is said."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    reader = _Reader(Program(Region([], [], []), set(), [], [], [], set(), dict(sizes)), platform)
    arguments = [reader.fresh(var.aval) for var in inner.invars]
    for value, split in zip(arguments, splits, strict=True):
        reader.fix(value, split)
    program = reader.program
    nodes: list[Node] = []
    outputs = reader.run(jaxpr, arguments, nodes, frozenset())
    # Results are values of their own, so that an argument that is returned as it is can be told from its result.
    own = []
    for value, split in zip(outputs, results, strict=True):
        result = program.new(program.shapes[value], program.itemsizes[value])
        reader.fix(result, split)
        nodes.append(Node("result", Kind.VIEW, [value], [result], reader.same([value, result])))
        own.append(result)
    program.body = Region(nodes, arguments, own)
    _drop_unused(program.body, set(own))
    return program


def _branch_of(platforms: Sequence[Sequence[str] | None] | None, platform: str) -> int | None:
    """Returns which branch is compiled for a `platform`, of those for `platforms`, of which None stands for all others;
    None where no platform is asked for."""
    if platforms is None or not platform:
        return None
    names = {"cuda", "rocm"} if platform == "gpu" else {platform}
    meant = [number for number, each in enumerate(platforms) if each is not None and names & set(each)]
    others = [number for number, each in enumerate(platforms) if each is None]
    return next(iter((*meant, *others)), None)


def split_of(spec: Sequence[Any], rank: int) -> Split:
    """Returns a `PartitionSpec`, or a spec of a plan, as a split of `rank` dims."""
    entries = [spec_axes((entry,)) if isinstance(entry, (str, tuple)) else () for entry in tuple(spec)[:rank]]
    return (*entries, *((),) * (rank - len(entries)))


def _is_zero(value: Any) -> bool:
    """Whether a literal is the number zero; one of a type without numbers, such as float0, is not."""
    return np.ndim(value) == 0 and np.result_type(value).kind in "biufc" and bool(value == 0)


@dataclasses.dataclass
class _Reader:
    program: Program
    platform: str = ""
    zeros: set[int] = dataclasses.field(default_factory=set)
    products: set[int] = dataclasses.field(default_factory=set)
    bells: Bells = dataclasses.field(default_factory=Bells)
    around: tuple[Any, ...] = ()  # the calls, loops and branches in which it reads
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the `shard_map` in which it reads

    def is_zero(self, atom: Any, value: int) -> bool:
        return value in self.zeros or isinstance(atom, _compat.Literal) and _is_zero(atom.val)

    def fresh(self, aval: Any) -> int:
        shape = tuple(int(size) for size in getattr(aval, "shape", ()))
        return self.program.new(shape, _itemsize(getattr(aval, "dtype", None)))

    def own(self, axes: Axes, mesh: Mapping[str, int]) -> Axes:
        """Returns `axes` of a `mesh` that the user wrote by those of the step's mesh."""
        if not is_other(mesh, self.program.sizes):
            return axes
        found, others = same_axes(axes, mesh, self.program.sizes)
        self.program.others |= others
        return found

    def split(self, spec: Sequence[Any], value: int, mesh: Mapping[str, int]) -> Split:
        """Returns how `spec`, over axes of a `mesh` that the user wrote, splits a value."""
        return tuple(self.own(axes, mesh) for axes in split_of(spec, len(self.program.shapes[value])))

    def has_others(self, split: Split) -> bool:
        """Returns whether a `split` has an axis that the step's mesh lacks. That mesh's axes, which it may cross, split
        no other dim of the value then."""
        return any(axis in self.program.others for axes in split for axis in axes)

    def params(self, eqn: Any) -> Any:
        """Returns the params of an equation, with the axes of a collective by those of the step's mesh."""
        params = eqn.params
        if eqn.primitive.name not in _COLLECTIVES or not is_other(self.mesh, self.program.sizes):
            return params
        (key,) = {"axes", "axis_name"} & set(params)
        named = params[key] if isinstance(params[key], (tuple, list)) else (params[key],)
        return {**params, key: self.own(tuple(axis for axis in self.mesh if axis in named), self.mesh)}

    def fix(self, value: int, split: Split | None) -> None:
        if split is not None:
            self.program.fix(value, split)

    def same(self, values: Sequence[int]) -> DimMap:
        """Ties all dims of values of one shape: the first is read, the others are written."""
        labels = tuple((d,) for d in range(len(self.program.shapes[values[0]])))
        return DimMap((labels,), tuple(labels for _ in values[1:]))

    def constant(self, aval: Any) -> int:
        value = self.fresh(aval)
        self.program.constants.add(value)
        return value

    def literal(self, atom: Any) -> int:
        value = self.constant(atom.aval)
        if _is_zero(atom.val):
            self.program.zeros.add(value)
        return value

    def run(self, jaxpr: Any, arguments: Sequence[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        """Adds the nodes of a jaxpr whose inputs are the values `arguments`; returns its results' values."""
        inner, _ = _compat.open_jaxpr(jaxpr)
        values: dict[Any, int] = {var: self.constant(var.aval) for var in inner.constvars}
        values |= dict(zip(inner.invars, arguments, strict=True))

        def get(atom: Any) -> int:
            return self.literal(atom) if isinstance(atom, _compat.Literal) else values[atom]

        for eqn in inner.eqns:
            outputs = self.equation(eqn, [get(atom) for atom in eqn.invars], nodes, manual)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [get(atom) for atom in inner.outvars]

    def equation(self, eqn: Any, inputs: list[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        self.around = (*self.around, eqn)
        outputs = self.known(eqn, inputs, nodes, manual)
        self.around = self.around[:-1]
        return outputs

    def known(self, eqn: Any, inputs: list[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        kind = kind_of(eqn)
        if kind is CallKind.SCAN:
            return self.scan(eqn, inputs, nodes, manual)
        if kind is CallKind.WHILE:
            return self.loop(eqn, inputs, nodes, manual)
        if kind is CallKind.COND:
            return self.branches(eqn, inputs, nodes, manual)
        if kind is CallKind.MANUAL:
            return self.by_hand(eqn, inputs, nodes, manual)
        body = call_body(eqn)
        if body is not None:
            return self.run(body, inputs, nodes, manual)
        outputs = [self.fresh(var.aval) for var in eqn.outvars]
        name = eqn.primitive.name
        if name in ("broadcast_in_dim", "convert_element_type", "reshape") and self.is_zero(eqn.invars[0], inputs[0]):
            self.zeros.add(outputs[0])
        if name in ("broadcast_in_dim", "convert_element_type") and inputs[0] in self.program.zeros:
            self.program.zeros.add(outputs[0])
        if name in ("add", "add_any"):  # nothing is added: compilers leave it out
            for zero, other in (inputs, inputs[::-1]):
                if zero in self.zeros and self.program.shapes[other] == self.program.shapes[outputs[0]]:
                    nodes.append(Node("plus_zero", Kind.VIEW, [other], outputs, self.same([other, outputs[0]])))
                    return outputs
        if name == "sharding_constraint":
            sharding = eqn.params["sharding"]
            if isinstance(sharding, NamedSharding):
                split = self.split(tuple(sharding.spec), outputs[0], sharding.mesh.shape)
                # What a constraint leaves open, the partitioner decides.
                entries = (*sharding.spec, *(None,) * (len(split) - len(sharding.spec)))
                is_open = [entry is PartitionSpec.UNCONSTRAINED and not self.has_others(split) for entry in entries]
                self.program.fix(outputs[0], [None if is_open[d] else axes for d, axes in enumerate(split)])
        dims, kind = self.dims(eqn, inputs, outputs), _kind(name, eqn)
        known = self.bells.known(name, eqn.params, inputs, outputs)
        if known is not None:
            nodes.append(Node("same", Kind.VIEW, [known], outputs, self.same([known, outputs[0]]), origin=self.around))
            return outputs
        if name == "erfc" and self.program.itemsizes[inputs[0]] >= 4:  # narrower ones are computed in float32
            bell = self.fresh(eqn.outvars[0].aval)
            self.bells.add(inputs[0], bell)
            ties = self.same([inputs[0], bell])
            nodes.append(Node("exp", Kind.LOOP, list(inputs), [bell], ties, manual=manual, origin=self.around))
            inputs, dims = [*inputs, bell], self.dims_of_bell(inputs[0], outputs[0])
        if name == "dot_general":
            self.products.update(outputs)
        if name == "transpose" and inputs[0] in self.products and len(self.program.shapes[inputs[0]]) == 2:
            kind = Kind.VIEW  # compilers multiply the other way round instead
        nodes.append(Node(name, kind, inputs, outputs, dims, self.params(eqn), manual=manual, origin=self.around))
        return outputs

    def dims_of_bell(self, value: int, result: int) -> DimMap:
        """Ties all dims of a value, of one that is made of it, and of a result that is made of both."""
        labels = self.same([value, result]).inputs
        return DimMap((*labels, *labels), labels)

    def dims(self, eqn: Any, inputs: list[int], outputs: list[int]) -> DimMap | None:
        shapes, name = self.program.shapes, eqn.primitive.name
        rule = OPERATIONS.of(name, eqn.params).dims
        if name == "sharding_constraint":
            return self.same([inputs[0], outputs[0]])
        if name in _COLLECTIVES:
            return _dims_of_collective([shapes[v] for v in inputs], [shapes[v] for v in outputs])
        if rule is None:
            return None
        try:
            return rule([shapes[v] for v in inputs], [shapes[v] for v in outputs], eqn.params)
        except Exception:  # what a rule cannot say leaves the operation's dims untied: its operands are read whole
            return None

    def scan(self, eqn: Any, inputs: list[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        parts = scan_parts(eqn, inputs)
        body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        num_carry, inside = len(parts.carry), scan_parts(eqn, body.invars)
        inner: list[Node] = []
        carry = [self.fresh(var.aval) for var in inside.carry]
        slices = []
        for whole, var in zip(parts.xs, inside.xs, strict=True):
            part = self.fresh(var.aval)
            labels = tuple((d,) for d in range(len(self.program.shapes[part])))
            inner.append(Node("slice_of_scan", Kind.PART, [whole], [part], DimMap(((("x",), *labels),), (labels,))))
            slices.append(part)
        results = self.run(eqn.params["jaxpr"], [*parts.consts, *carry, *slices], inner, manual)
        outputs = [self.fresh(var.aval) for var in eqn.outvars]
        stacked = []
        for part, whole in zip(results[num_carry:], outputs[num_carry:], strict=True):
            rank = len(self.program.shapes[part])
            labels = tuple((d,) for d in range(rank))
            done = self.program.new((), 4)
            inner.append(
                Node("fill_of_scan", Kind.FILL, [part, whole], [done], DimMap((labels, (("x",), *labels)), ((),)))
            )
            stacked.append(done)
        region = Region(inner, carry, [*results[:num_carry], *stacked])
        nodes.append(self.loop_of("scan", region, parts.carry, outputs, inputs))
        return outputs

    def loop_of(self, name: str, region: Region, initial: list[int], outputs: list[int], inputs: list[int]) -> Node:
        """Returns the node of a loop whose body is `region`: `initial` is what its carry begins with, among the
        `inputs`; the first `outputs` are what it ends with."""
        ties = [
            Node("carry", Kind.VIEW, [a], [b], self.same([a, b]))
            for begin, carry, handed, end in zip(initial, region.inputs, region.outputs, outputs, strict=False)
            for a, b in ((begin, carry), (carry, end), (handed, end))
        ]
        # The first operands of the node are what the carry begins with.
        rest = [value for value in inputs if value not in set(initial)]
        return Node(name, Kind.REGIONS, [*initial, *rest], outputs, None, ties, (region,), len(initial))

    def loop(self, eqn: Any, inputs: list[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        parts = while_parts(eqn, inputs)
        inner: list[Node] = []
        body, _ = _compat.open_jaxpr(eqn.params["body_jaxpr"])
        carry = [self.fresh(var.aval) for var in while_parts_of_body(eqn, body.invars)]
        results = self.run(eqn.params["body_jaxpr"], [*parts.body_consts, *carry], inner, manual)
        outputs = [self.fresh(var.aval) for var in eqn.outvars]
        nodes.append(self.loop_of("while", Region(inner, carry, results), parts.carry, outputs, inputs))
        return outputs

    def branches(self, eqn: Any, inputs: list[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        chosen = _branch_of(eqn.params.get("branches_platforms"), self.platform)
        if chosen is not None:
            return self.run(eqn.params["branches"][chosen], inputs[1:], nodes, manual)
        outputs = [self.fresh(var.aval) for var in eqn.outvars]
        regions, ties = [], []
        for branch in eqn.params["branches"]:
            inner: list[Node] = []
            results = self.run(branch, inputs[1:], inner, manual)
            regions.append(Region(inner, [], results))
            ties += [
                Node("branch", Kind.VIEW, [a], [b], self.same([a, b])) for a, b in zip(results, outputs, strict=True)
            ]
        nodes.append(Node("cond", Kind.REGIONS, inputs, outputs, None, ties, tuple(regions)))
        return outputs

    def by_hand(self, eqn: Any, inputs: list[int], nodes: list[Node], manual: frozenset[str]) -> list[int]:
        """Adds the body of a `shard_map`, whose values have the shapes of parts."""
        params = eqn.params
        mesh: Mapping[str, int] = params["mesh"].shape
        by_hand = params.get("newly_manual_axes") or params.get("manual_axes") or mesh
        axes = frozenset(self.own(tuple(axis for axis in mesh if axis in by_hand), mesh))
        if axes & set(self.program.others):  # what they leave of the axes that they cross splits nothing by itself
            axes |= set(self.program.sizes)
        body, _ = _compat.open_jaxpr(params["jaxpr"])
        is_whole = axes | manual >= set(self.program.sizes)  # otherwise the compiler splits over the other axes

        def place(value: int, spec: Any) -> None:
            split = self.split(spec, value, mesh)
            if is_whole or self.has_others(split):
                self.program.fix(value, split)
            self.program.splits[value] = split

        def between(name: str, source: int, target: int) -> Node:
            dims = None if is_whole else self.same([source, target])
            return Node(name, Kind.VIEW, [source], [target], dims, manual=axes)

        entered = []
        for value, var, spec in zip(inputs, body.invars, params["in_specs"], strict=True):
            wanted = self.program.new(self.program.shapes[value], self.program.itemsizes[value])
            place(wanted, spec)
            nodes.append(Node("enter", Kind.VIEW, [value], [wanted], self.same([value, wanted])))
            entered.append(self.fresh(var.aval))
            nodes.append(between("part", wanted, entered[-1]))
        outside, self.mesh = self.mesh, mesh
        results = self.run(params["jaxpr"], entered, nodes, manual | axes)
        self.mesh = outside
        outputs = [self.fresh(var.aval) for var in eqn.outvars]
        for value, whole, spec in zip(results, outputs, params["out_specs"], strict=True):
            place(whole, spec)
            nodes.append(between("leave", value, whole))
        return outputs


def _dims_of_collective(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> DimMap | None:
    """Returns how dims run through a collective between devices: those that keep their size do."""
    if [len(shape) for shape in inputs] != [len(shape) for shape in outputs]:
        return None
    label = lambda side, k, d: (k, d) if inputs[k][d] == outputs[k][d] else (side, k, d)
    of = lambda side, shapes: tuple(
        tuple((label(side, k, d),) for d in range(len(shape))) for k, shape in enumerate(shapes)
    )
    return DimMap(of("in", inputs), of("out", outputs))


def while_parts_of_body(eqn: Any, invars: Sequence[Any]) -> list[Any]:
    """Returns those of the body's `invars` that are the carry of the `while` equation `eqn`."""
    return list(invars[eqn.params["body_nconsts"] :])


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _itemsize(dtype: Any) -> int:
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:
        return int(getattr(dtype, "itemsize", 4))


def _kind(name: str, eqn: Any) -> Kind:
    if name in _VIEWS or name == "broadcast_in_dim" and eqn.invars and _size(eqn.invars[0]) == _size(eqn.outvars[0]):
        return Kind.VIEW
    if name in _COLLECTIVES:
        return Kind.COLLECTIVE
    if name in _KERNELS or OPERATIONS.of(name, eqn.params).dims is None and name not in _MADE:
        return Kind.KERNEL
    if name in _MADE or all(not getattr(v.aval, "shape", ()) for v in eqn.invars):
        return Kind.MADE
    return Kind.LOOP


def _drop_unused(region: Region, alive: set[int]) -> None:
    """Drops nodes whose outputs nobody reads. `alive`: what is read of the region, which grows by what it reads."""
    kept = []
    for node in reversed(region.nodes):
        read = node.inputs[1:] if node.kind is Kind.FILL else node.outputs
        if any(value in alive for value in read):
            if node.kind is Kind.REGIONS:
                for inner in node.regions:
                    alive.update(inner.outputs)
                    _drop_unused(inner, alive)
            alive.update(node.inputs)
            kept.append(node)
    region.nodes[:] = reversed(kept)
