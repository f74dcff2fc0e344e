"""Groups parameters into layers: the operations that use one parameter set, with a kind.

A flat step, its uses of weights and the paths of its arguments go in; a layer name per parameter, then one
`graph.Layer` per name come out. Rules match on a layer's kind, and a layer's parameters are laid out together.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep
from splitjax.trace.flow import Argument, ValueFacts
from splitjax.trace.graph import Layer, Leaf
from splitjax.trace.links import Linked
from splitjax.trace.names import Names
from splitjax.trace.uses import RawUse

# Dims of a weight that what is added to its result may have too.
_RESULT_NAMES = ("out", "features", "expert", "stack")


@dataclasses.dataclass(frozen=True, eq=False)
class KnownValues:
    """Holds a flat step with what is known of its values.

    - `flat`, `flow`, `linked`: the flat step, facts about its values, and its links.
    - `sources`: per value the parameters (leaf indices) that it is made of.
    """

    flat: FlatStep
    flow: ValueFacts
    linked: Linked
    sources: Sequence[frozenset[int]]


def group_params(
    arguments: Sequence[Argument],
    values: KnownValues,
    uses: Sequence[RawUse],
    classes: Classes,
    dim_names: Mapping[int, Names],
) -> tuple[dict[int, str], frozenset[int]]:
    """Names the layer of every parameter, and finds the parameters that scale or shift a normalised value.

    **Arguments:**

    - `arguments`: one per flat argument of the step.
    - `values`: the flat step, with what is known of its values.
    - `uses`: all uses of weights in program order.
    - `classes`: the dim classes.
    - `dim_names`: leaf index -> name per dim, for parameters.

    **Returns** leaf index -> layer name, for parameters; and the leaf indices of the parameters of norms.

    A layer is what shares a parent path (`params/Dense_0/{kernel,bias}`). Where one parent holds several unrelated
    weights (`params/{w1,b1,w2,b2}`), or whole modules beside parameters, each weight is a layer of its own, and the
    others join the weight to whose result they are added; the weights of one recurrent cell stay together. A norm's
    parameters are never part of a weight's layer.
    """
    flat, flow, linked, sources = values.flat, values.flow, values.linked, values.sources
    parents: dict[str, list[int]] = collections.defaultdict(list)
    for index, argument in enumerate(arguments):
        if flow.is_param[index]:
            parents[_parent(argument.path)].append(index)
    weights = {leaf for use in uses for leaf in use.leaves[:1]}
    cells = {leaf for use in uses if use.recurrent for leaf in use.leaves}
    norms = find_norms(flat, flow, linked.mixing, sources)
    added = _added_to(flat, flow, linked, uses, sources)
    names: dict[int, str] = {}
    containers = {path[:end] for path in parents for end, letter in enumerate(path) if letter == "/"}
    for parent, members in parents.items():
        heavy = [i for i in members if i in weights]
        is_module = bool(parent) and parent not in containers
        if is_module and (len(heavy) <= 1 or cells.issuperset(heavy)):
            for i in members:
                names[i] = arguments[i].path if heavy and i in norms and i not in heavy else parent
            continue
        cell = [i for i in heavy if i in cells]
        names.update((i, arguments[cell[0] if i in cell else i].path) for i in heavy)
        for i in members:
            if i not in names:
                owner = None if i in norms else _owner(i, heavy, added, flat, classes, dim_names)
                names[i] = arguments[i].path if owner is None else names[owner]
    return names, norms


def _parent(path: str) -> str:
    parts = path.split("/")
    # NNX and Equinox wrap an array in a leaf of its own (`kernel/value`).
    if parts[-1] in ("value", "raw_value") and len(parts) > 2:
        parts = parts[:-1]
    return "/".join(parts[:-1])


def _owner(
    index: int,
    heavy: Sequence[int],
    added: Mapping[int, int],
    flat: FlatStep,
    classes: Classes,
    dim_names: Mapping[int, Names],
) -> int | None:
    """Finds the weight beside a parameter whose result has all of its dims: the one it is added to, else the first."""
    mine = {classes.local(a) for dim in _dims(index, flat, classes) for a in dim}
    fitting = []
    for leaf in heavy:
        names = dim_names.get(leaf, ())
        result = {
            classes.local(a)
            for dim, name in zip(_dims(leaf, flat, classes), names, strict=False)
            if name in _RESULT_NAMES
            for a in dim
        }
        if mine and mine <= result:
            fitting.append(leaf)
    return added[index] if added.get(index) in fitting else fitting[0] if fitting else None


def _dims(index: int, flat: FlatStep, classes: Classes) -> tuple[tuple[int, ...], ...]:
    """Returns the atoms of every dim of the leaf at `index`."""
    return classes.dims(flat.inputs[index], len(flat.shapes[flat.inputs[index]]))


def _added_to(
    flat: FlatStep, flow: ValueFacts, linked: Linked, uses: Sequence[RawUse], sources: Sequence[frozenset[int]]
) -> dict[int, int]:
    """Maps a parameter to the weight whose result it meets first, elementwise and before anything mixes."""
    at = {use.op: use.leaves[0] for use in uses}
    made_by: dict[int, int] = {}
    added: dict[int, int] = {}
    for index, op in enumerate(flat.ops):
        if op.phase == BACKWARD or not op.outputs:
            continue
        if linked.mixing[index]:
            weight = at.get(index)
        else:
            weight = next((made_by[v] for v in op.inputs if v in made_by), None)
        if weight is None or not flow.effective[op.outputs[0]]:
            continue
        if linked.joins[index]:
            for v in op.inputs:
                for leaf in sources[v]:
                    added.setdefault(leaf, weight)
        made_by.update((v, weight) for v in op.outputs)
    return added


def build_layers(
    leaves: Sequence[Leaf],
    names: Mapping[int, str],
    uses: Sequence[RawUse],
    flat: FlatStep,
    flow: ValueFacts,
    norms: frozenset[int],
) -> tuple[Layer, ...]:
    """Builds the layers in program order, weight first among their parameters.

    **Arguments:**

    - `leaves`: all leaves in flat order.
    - `names`: leaf index -> layer name, for parameters.
    - `uses`: all uses of weights in program order.
    - `flat`, `flow`: the flat step and facts about its values.
    - `norms`: leaf indices of the parameters of norms.
    """
    members: dict[str, list[Leaf]] = collections.defaultdict(list)
    for index, name in names.items():
        members[name].append(leaves[index])
    by_layer: dict[str, list[RawUse]] = collections.defaultdict(list)
    flops: dict[str, int] = collections.defaultdict(int)
    for use in uses:
        for name in dict.fromkeys(names[leaf] for leaf in use.leaves):
            by_layer[name].append(use)
        if not use.backward:
            for name, share in _shares(use, names, leaves).items():
                flops[name] += share
    layers = []
    for name, group in members.items():
        own = by_layer[name]
        rank = {leaf: k for k, leaf in enumerate(dict.fromkeys(leaf for use in own for leaf in use.leaves))}
        group = sorted(group, key=lambda leaf: (rank.get(leaf.index, len(rank)), leaf.index))
        if own:
            order = min(use.op for use in own)
        else:
            effects = [flow.effect[flat.inputs[leaf.index]] for leaf in group]
            order = min((e for e in effects if e is not None), default=len(flat.ops))
        source = flat.ops[own[0].op].source if own else ""
        kind = _kind(own, flat, group, norms)
        layer = Layer(
            name, kind, tuple(leaf.path for leaf in group), flops[name], sum(leaf.num_bytes for leaf in group), source
        )
        layers.append((order, group[0].index, layer))
    return tuple(layer for _, _, layer in sorted(layers, key=lambda item: item[:2]))


def _shares(use: RawUse, names: Mapping[int, str], leaves: Sequence[Leaf]) -> dict[str, int]:
    """Divides the flops of a use by layer: a weight put together from several layers' parameters is theirs by size."""
    sizes: dict[str, int] = collections.defaultdict(int)
    for leaf in use.leaves:
        sizes[names[leaf]] += leaves[leaf].size
    total = sum(sizes.values())
    shares = {name: use.flops * size // total if total else 0 for name, size in sizes.items()}
    first = next(iter(shares))
    shares[first] += use.flops - sum(shares.values())
    return shares


def _kind(uses: Sequence[RawUse], flat: FlatStep, group: Sequence[Leaf], norms: frozenset[int]) -> str:
    """Tells the kind of a layer from its uses, and from its parameters where it has none."""
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
    if any("expert" in use.names for use in forward):
        return "expert"
    return "dense"


def find_norms(
    flat: FlatStep, flow: ValueFacts, mixing: Sequence[bool], sources: Sequence[frozenset[int]]
) -> frozenset[int]:
    """Finds the parameters that meet, before anything mixes, a value scaled by an inverse root.

    **Arguments:**

    - `flat`, `flow`: the flat step and facts about its values.
    - `mixing`: per operation whether it mixes.
    - `sources`: per value the parameters (leaf indices) that it is made of.

    Those are the parameters of batch, layer, group and RMS norm. Only the way to the loss counts: an optimizer
    divides by roots too, and every parameter meets those.
    """
    tagged = [False] * len(flat.shapes)
    norms: set[int] = set()
    for index, op in enumerate(flat.ops):
        if not op.outputs or op.phase == BACKWARD:
            continue
        if op.primitive in ("rsqrt", "sqrt") and flow.data[op.inputs[0]] and not flow.weights[op.inputs[0]]:
            tag = True
        elif mixing[index]:
            tag = False
        else:
            tag = any(tagged[v] for v in op.inputs)
            if tag and len(op.inputs) > 1 and flow.effective[op.outputs[0]]:
                for v in op.inputs:
                    norms.update(sources[v])
        if tag:
            for v in op.outputs:
                tagged[v] = True
    return frozenset(norms)
