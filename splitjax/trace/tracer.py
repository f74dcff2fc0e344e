"""Step + example arguments -> `Graph`: the passes in order.

flatten (see through calls) -> link (dim rule of every operation) -> refine (split atoms until links line up) -> find the
example dim, parameters and the update region -> unite atoms by strength -> tie state to parameters -> layers and kinds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax import _compat
from splitjax.trace import dims_elementwise, dims_fused, dims_mixing, dims_shape  # noqa: F401  (they fill the registry)
from splitjax.trace.classes import Atoms, Classes, Link, Strength, classify, refine
from splitjax.trace.flatten import Flat, flatten
from splitjax.trace.flow import Argument, Flow, analyse, example_labels, first_effect, strengths
from splitjax.trace.graph import Dim, Graph, Leaf, Unknown, Use, itemsize
from splitjax.trace.layers import build_layers, find_norms, group_params, with_layers
from splitjax.trace.links import Linked, RawLink, link, tie
from splitjax.trace.state import fallback_ties, follow
from splitjax.trace.uses import RawUse, find_uses, weight_sources


def build_graph(jaxpr: Any, arguments: Sequence[Argument], state_results: Mapping[int, int]) -> Graph:
    """Analyses a traced step.

    **Arguments:**

    - `jaxpr`: the closed jaxpr of the step over its flat arguments.
    - `arguments`: one `Argument` per flat argument.
    - `state_results`: flat argument position of every state leaf -> flat result position of its new value.

    Raises `TraceError` when a registered dim rule does not fit its operation. Primitives without a rule do not fail here;
    they are listed in `Graph.unknown`, and planning fails if something sharded reaches them.
    """
    flat = flatten(jaxpr)
    linked = link(flat)
    ties = tie([(flat.inputs[i], flat.outputs[o]) for i, o in state_results.items()], flat.shapes)
    raw = [*linked.links, *ties]
    atoms, pairs = refine(linked.shapes, [Link(r.left, r.right, Strength.SOFT) for r in raw])
    everything = classify(atoms, [Link(r.left, r.right, Strength.SOFT) for r in raw], pairs)
    examples = example_labels(flat, arguments, atoms, everything.labels[Strength.SOFT])
    flow = analyse(flat, arguments, atoms, everything.labels[Strength.SOFT], examples)
    strength = strengths(flat, linked, flow, arguments)
    links = [Link(r.left, r.right, strength(r)) for r in raw]
    classes = classify(atoms, links, pairs)
    missing = fallback_ties(flat, arguments, flow, classes)
    if missing:
        extra = tie(missing, flat.shapes)
        links += [Link(r.left, r.right, Strength.HARD) for r in extra]
        atoms, pairs = refine(linked.shapes, links)
        classes = classify(atoms, links, pairs)
        examples = frozenset(classes.labels[Strength.SOFT][a] for v, g in zip(flat.inputs, arguments, strict=True)
                             if g.is_batch and flat.shapes[v] for a in atoms.dim(v, 0))
    return _assemble(flat, linked, flow, arguments, classes, examples, links, pairs)


def _assemble(flat: Flat, linked: Linked, flow: Flow, arguments, classes: Classes, examples, links, pairs) -> Graph:
    uses = find_uses(flat, linked, flow, arguments)
    leaves = [_leaf(i, flat, flow, arguments, classes) for i in range(len(arguments))]
    leaves = follow(leaves, classes)
    leaves = _name_dims(leaves, flat, flow, linked, uses, classes)
    names = group_params(arguments, flow, uses, flat, classes)
    sources = weight_sources(flat, flow)
    layers = build_layers(leaves, names, uses, flat, find_norms(flat, flow, linked.mixing, sources),
                          first_effect(flat, flow.carrying))
    leaves = with_layers(leaves, names)
    batch = [flat.shapes[v][0] for v, g in zip(flat.inputs, arguments, strict=True) if g.is_batch and flat.shapes[v]]
    return Graph(
        leaves=leaves,
        layers=layers,
        uses=tuple(_use(use, flat, names, arguments, classes) for use in uses),
        unknown=tuple(_unknown(flat, i, classes) for i in linked.unknown),
        atom_sizes=tuple(classes.atoms.sizes),
        hard=classes.labels[Strength.HARD],
        local=classes.labels[Strength.LOCAL],
        soft=classes.labels[Strength.SOFT],
        example_atoms=frozenset(a for a, label in enumerate(classes.labels[Strength.SOFT]) if label in examples),
        num_examples=batch[0] if batch else None,
        num_boundaries=flat.num_boundaries,
        flops=sum(use.flops for use in uses if not use.backward),
        activation_bytes=_activation_bytes(flat, linked, flow),
    )


def _leaf(index: int, flat: Flat, flow: Flow, arguments, classes: Classes) -> Leaf:
    value, argument = flat.inputs[index], arguments[index]
    role = "input"
    if argument.is_batch:
        role = "batch"
    elif argument.is_state:
        role = "param" if flow.is_param[index] else "statistic"
    shape = flat.shapes[value]
    return Leaf(index, argument.path, shape, flat.dtypes[value], role, argument.is_state, classes.dims(value, len(shape)))


def _name_dims(leaves, flat: Flat, flow: Flow, linked: Linked, uses: Sequence[RawUse], classes: Classes) -> tuple[Leaf, ...]:
    """Gives each parameter dim the name it has in the operation that uses it, followed through casts and reshapes."""
    sources = weight_sources(flat, flow)
    views = _view_labels(flat, linked, sources, classes.atoms)
    named: dict[int, list[str | None]] = {}
    for use in uses:
        operand = flat.ops[use.op].inputs[use.weight]
        by_label: dict[int, str] = {}
        for position, name in enumerate(use.names):
            for atom in classes.atoms.dim(operand, position):
                by_label.setdefault(views(atom), name)
        for leaf in use.leaves:
            dims = leaves[leaf].dims
            found = [next((by_label[views(a)] for a in dim if views(a) in by_label), None) for dim in dims]
            known = named.setdefault(leaf, [None] * len(dims))
            for d, name in enumerate(found):
                known[d] = known[d] or name
    out = []
    for leaf in leaves:
        names = named.get(leaf.index)
        if names is not None and None in names:
            # A leading dim that a scan slices away is a stack of layers.
            names = ["stack" if name is None and d == 0 and len(leaf.dims) > 2 else name for d, name in enumerate(names)]
        out.append(dataclasses.replace(leaf, dim_names=tuple(names) if names else (None,) * len(leaf.shape)))
    return tuple(out)


def _view_labels(flat: Flat, linked: Linked, sources, atoms: Atoms):
    """Labels that unite atoms only through operations on weights, before any data meets them."""
    links: list[RawLink] = [r for r in linked.links if r.op >= 0 and not linked.mixing[r.op]
                            and any(sources[v] for v in flat.ops[r.op].outputs)]
    as_links = [Link(r.left, r.right, Strength.HARD) for r in links]
    labels = classify(atoms, as_links, [atoms.align(one) for one in as_links]).labels[Strength.HARD]
    return lambda atom: labels[atom]


def _use(use: RawUse, flat: Flat, names: dict[int, str], arguments, classes: Classes) -> Use:
    op = flat.ops[use.op]
    out = op.outputs[0]
    data = op.inputs[use.data] if use.data is not None else out
    return Use(
        layer=names[use.leaves[0]], primitive=op.primitive, site=op.site, param=arguments[use.leaves[0]].path,
        weight=use.weight, data=use.data,
        data_shape=flat.shapes[data], data_dims=classes.dims(data, len(flat.shapes[data])), data_dtype=flat.dtypes[data],
        out_shape=flat.shapes[out], out_dims=classes.dims(out, len(flat.shapes[out])), out_dtype=flat.dtypes[out],
        flops=use.flops, trips=op.trips, source=_compat.source_line(op.eqn), backward=use.backward, editable=op.editable,
    )


def _unknown(flat: Flat, index: int, classes: Classes) -> Unknown:
    op = flat.ops[index]

    def dims(values: Sequence[int]) -> tuple[tuple[Dim, ...], ...]:
        return tuple(classes.dims(v, len(flat.shapes[v])) for v in values)

    return Unknown(op.primitive, op.site, _compat.source_line(op.eqn), dims(op.inputs), dims(op.outputs))


# Linear in each operand (or mere moves): the backward pass needs no copy of their operands.
_LINEAR = frozenset(
    "add sub neg reshape broadcast_in_dim transpose squeeze convert_element_type copy reduce_sum slice pad concatenate add_any "
    "_scan_in _scan_out _carry_in _carry_back _branch _gradient select_n split stack unstack rev expand_dims".split()
)


def _activation_bytes(flat: Flat, linked: Linked, flow: Flow) -> int:
    """Bytes of example-carrying forward values that some backward pass reads: operands of what is not linear."""
    kept: dict[int, int] = {}
    for op in flat.ops:
        if op.primitive in _LINEAR or (op.eqn is not None and "transpose(" in _compat.name_stack(op.eqn)):
            continue
        for v in op.inputs:
            if flow.carrying[v] and flat.dtypes[v].startswith(("float", "bfloat", "complex")):
                kept[v] = max(kept.get(v, 0), op.trips)
    return sum(math.prod(flat.shapes[v]) * itemsize(flat.dtypes[v]) * trips for v, trips in kept.items())

