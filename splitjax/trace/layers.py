"""Layers: the operations that use one parameter set, with a kind."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from splitjax import _compat
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import Flat
from splitjax.trace.flow import Argument, Flow, first_effect
from splitjax.trace.graph import Layer, Leaf
from splitjax.trace.uses import RawUse


def group_params(arguments: Sequence[Argument], flow: Flow, uses: Sequence[RawUse], flat: Flat, classes: Classes) -> dict[int, str]:
    """Leaf index -> layer name, for parameters.

    A layer is what shares a parent path (`params/Dense_0/{kernel,bias}`). Where one parent holds several unrelated weights
    (`params/{w1,b1,w2,b2}`), each weight is a layer of its own and the others join the weight whose result dim they run
    along, latest before them in program order.
    """
    parents: dict[str, list[int]] = collections.defaultdict(list)
    for index, argument in enumerate(arguments):
        if flow.is_param[index]:
            parents[_parent(argument.path)].append(index)
    weights = {leaf for use in uses for leaf in use.leaves[:1]}
    recurrent = {leaf for use in uses if use.recurrent for leaf in use.leaves}
    names: dict[int, str] = {}
    for parent, members in parents.items():
        heavy = [i for i in members if i in weights]
        if any(other.startswith(f"{parent}/") for other in parents) or not parent:
            # Parameters that stand beside whole modules (a position embedding at the top) belong to none of them.
            names.update((i, arguments[i].path) for i in members)
            continue
        if len(heavy) <= 1 or any(i in recurrent for i in heavy):
            names.update((i, parent or arguments[members[0]].path) for i in members)
            continue
        names.update((i, arguments[i].path) for i in heavy)
        for index in members:
            if index not in names:
                names[index] = arguments[_companion(index, heavy, uses, flat, classes)].path
    return names


def _parent(path: str) -> str:
    parts = path.split("/")
    # NNX and Equinox wrap an array in a leaf of its own (`kernel/value`).
    if parts[-1] in ("value", "raw_value") and len(parts) > 2:
        parts = parts[:-1]
    return "/".join(parts[:-1])


def _companion(index: int, heavy: Sequence[int], uses: Sequence[RawUse], flat: Flat, classes: Classes) -> int:
    mine = {classes.local(a) for d in range(len(flat.shapes[flat.inputs[index]])) for a in classes.atoms.dim(flat.inputs[index], d)}
    effect = {leaf: use.op for use in reversed(uses) for leaf in use.leaves}
    for leaf in sorted(heavy, key=lambda i: effect.get(i, 0)):
        use = next(u for u in uses if leaf in u.leaves)
        op = flat.ops[use.op]
        out = {classes.local(a) for d in range(len(flat.shapes[op.outputs[0]])) for a in classes.atoms.dim(op.outputs[0], d)}
        ins = {classes.local(a) for d, n in enumerate(use.names) if n == "out" for a in classes.atoms.dim(op.inputs[use.weight], d)}
        if mine and (mine <= out or mine <= ins):
            return leaf
    return heavy[-1]


def build_layers(leaves: Sequence[Leaf], names: dict[int, str], uses: Sequence[RawUse], flat: Flat, norms: frozenset[int],
                 effects: Sequence[int | None]) -> tuple[Layer, ...]:
    """Layers in program order, weight first among their parameters."""
    members: dict[str, list[Leaf]] = collections.defaultdict(list)
    for index, name in names.items():
        members[name].append(leaves[index])
    by_layer: dict[str, list[RawUse]] = collections.defaultdict(list)
    for use in uses:
        for leaf in use.leaves:
            if not by_layer[names[leaf]] or by_layer[names[leaf]][-1] is not use:
                by_layer[names[leaf]].append(use)
    layers = []
    for name, group in members.items():
        own = by_layer[name]
        weights = [leaf for use in own for leaf in use.leaves]
        group = sorted(group, key=lambda leaf: (weights.index(leaf.index) if leaf.index in weights else len(weights), leaf.index))
        order = min((use.op for use in own), default=None)
        if order is None:
            found = [effects[flat.inputs[leaf.index]] for leaf in group]
            order = min((e for e in found if e is not None), default=len(flat.ops))
        source = _compat.source_line(flat.ops[own[0].op].eqn) if own else ""
        kind = _kind(own, flat, group, norms)
        layer = Layer(name, kind, tuple(leaf.path for leaf in group), sum(u.flops for u in own if not u.backward),
                      sum(leaf.num_bytes for leaf in group), source)
        layers.append((order, group[0].index, layer))
    return tuple(layer for _, _, layer in sorted(layers, key=lambda item: item[:2]))


def _kind(uses: Sequence[RawUse], flat: Flat, group: Sequence[Leaf], norms: frozenset[int]) -> str:
    if not uses:
        return "norm" if any(leaf.index in norms for leaf in group) else "other"
    forward = [use for use in uses if not use.backward] or list(uses)
    primitives = [flat.ops[use.op].primitive for use in forward]
    if any(use.recurrent for use in forward):
        return "recurrent"
    if "gather" in primitives:
        return "embedding"
    if "conv_general_dilated" in primitives:
        return "conv"
    if any(use.attention for use in forward):
        return "attention"
    if any("expert" in use.names for use in forward) or any(p.startswith("ragged_dot") for p in primitives):
        return "expert"
    return "dense"


def find_norms(flat: Flat, flow: Flow, mixing: Sequence[bool], sources: Sequence[frozenset[int]]) -> frozenset[int]:
    """Parameters that meet, before anything mixes, a value scaled by an inverse root (batch, layer, group and RMS norm). Only
    the way to the loss counts: an optimizer divides by roots too, and every parameter meets those."""
    tagged = [False] * len(flat.shapes)
    reaches = first_effect(flat, flow.carrying)
    norms: set[int] = set()
    for index, op in enumerate(flat.ops):
        if op.primitive in ("rsqrt", "sqrt") and flow.data[op.inputs[0]]:
            tag = True
        elif mixing[index]:
            tag = False
        else:
            tag = any(tagged[v] for v in op.inputs)
            forward = any(flow.carrying[v] or reaches[v] is not None for v in op.outputs)
            if tag and forward and len(op.inputs) > 1:
                for v in op.inputs:
                    norms.update(sources[v])
        for v in op.outputs:
            tagged[v] = tag
    return frozenset(norms)


def with_layers(leaves: Sequence[Leaf], names: dict[int, str]) -> tuple[Leaf, ...]:
    return tuple(dataclasses.replace(leaf, layer=names.get(leaf.index)) for leaf in leaves)
