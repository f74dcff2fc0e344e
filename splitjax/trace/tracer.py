"""Builds a `Graph` from a step's jaxpr: runs the passes in order.

flatten (see through calls) -> link (dim rule of every operation) -> refine (split atoms until links line up) -> find
the example dim, parameters and the update region -> unite atoms by strength -> tie state to parameters -> layers and
kinds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splitjax.primitives.operation import Linearity, Trait
from splitjax.primitives.table import qualified_name
from splitjax.trace.activations.added import only_added
from splitjax.trace.activations.joined import find_joined
from splitjax.trace.activations.learned import learned_values
from splitjax.trace.activations.outputs import find_outputs
from splitjax.trace.activations.picks import find_picks
from splitjax.trace.activations.reductions import find_reductions
from splitjax.trace.activations.saved import find_saved
from splitjax.trace.activations.statistics import find_statistics
from splitjax.trace.activations.streams import find_streams
from splitjax.trace.classes import Classes, Strength, align, classify, refine, unite
from splitjax.trace.collecting import uncollected
from splitjax.trace.cuts import find_cuts
from splitjax.trace.dealt import copied_values, find_dealt
from splitjax.trace.flatten import BACKWARD, FlatStep, Op, flatten
from splitjax.trace.flow import Argument, ValueFacts, analyse, batch_values, example_labels, is_floating
from splitjax.trace.foreign import find_foreign
from splitjax.trace.graph import Dim, Gradient, Graph, Leaf, ScannedBatch, Spread, Unknown, Use, itemsize
from splitjax.trace.layers import KnownValues, build_layers, group_params
from splitjax.trace.links import Linked, link, tie
from splitjax.trace.lookups import find_tables
from splitjax.trace.names import Names, name_dims
from splitjax.trace.repeating import count_repetitions
from splitjax.trace.state import fallback_ties, follow
from splitjax.trace.stepping import Stepping, count_turns, find_stepping, find_turned, reads_a_turn
from splitjax.trace.strengths import strengths
from splitjax.trace.suspects import find_suspects
from splitjax.trace.uses import RawUse, find_uses, is_bilinear, weight_sources

# Value -> (operation, operand) of the products between activations that read it.
Twins = dict[int, list[tuple[Op, int]]]


def build_graph(jaxpr: Any, arguments: Sequence[Argument], state_results: Mapping[int, int]) -> Graph:
    """Analyses a traced step.

    **Arguments:**

    - `jaxpr`: the closed jaxpr of the step over its flat arguments.
    - `arguments`: one `Argument` per flat argument.
    - `state_results`: flat argument position of every state leaf -> flat result position of its new value.

    Raises `TraceError` when a registered dim rule does not fit its operation. Primitives without a rule do not fail
    here; they are listed in `Graph.unknown`, and planning fails if something sharded reaches them.
    """
    with uncollected():
        return _analysed(flatten(jaxpr), arguments, state_results)


def _analysed(flat: FlatStep, arguments: Sequence[Argument], state_results: Mapping[int, int]) -> Graph:
    """Analyses a flat step; the arguments are those of `build_graph`."""
    linked = link(flat)
    raw = [*linked.links, *tie([(flat.inputs[i], flat.outputs[o]) for i, o in state_results.items()], flat.shapes)]
    atoms, pairs = refine(linked.shapes, raw)
    # All links together: where examples can be. Strengths need to know that.
    anything = unite(atoms, pairs)
    flow = analyse(flat, arguments, atoms, anything)
    of_link = strengths(flat, linked, flow, raw)
    classes = classify(atoms, pairs, of_link)
    examples = flow.examples
    extra = tie(fallback_ties(flat, arguments, flow, classes), flat.shapes)
    if extra:
        raw += extra
        of_link += [Strength.HARD] * len(extra)
        pairs = align(atoms, raw)
        classes = classify(atoms, pairs, of_link)
        examples, _ = example_labels(flat, arguments, atoms, classes.labels[Strength.SOFT])
    tables = find_tables(flat, state_results, [argument.path for argument in arguments])
    graph = _assemble(flat, linked, flow, arguments, classes, examples)
    of_state = ((leaf.path, state_results.get(leaf.index)) for leaf in graph.leaves if leaf.role == "statistic")
    averages = {path: flat.outputs[result] for path, result in of_state if result is not None}
    params = {flat.inputs[leaf.index]: leaf.path for leaf in graph.leaves if leaf.role == "param"}
    statistics = find_statistics(flat, classes, graph.example_atoms, averages, params)
    return dataclasses.replace(graph, tables=tables, statistics=statistics, added=only_added(flat, params))


def _assemble(
    flat: FlatStep,
    linked: Linked,
    flow: ValueFacts,
    arguments: Sequence[Argument],
    classes: Classes,
    examples: frozenset[int],
) -> Graph:
    """Describes the step's leaves, layers and operations, now that all classes are known."""
    sources = weight_sources(flat, flow)
    uses, head_dims = find_uses(flat, linked, flow, sources)
    dim_names = name_dims(flat, linked, flow, uses, sources)
    names, norms = group_params(arguments, KnownValues(flat, flow, linked, sources), uses, classes, dim_names)
    batch = batch_values(flat, arguments)
    stepping = find_stepping(flat, batch, classes.atoms, classes.labels[Strength.SOFT])
    example_dims = dict(zip(batch, stepping.example_dims, strict=True))
    traced = [_leaf(i, flat, flow, arguments, classes, dim_names, names) for i in range(len(arguments))]
    turns = count_turns(flat, sources)
    traced = [
        dataclasses.replace(leaf, example_dim=example_dims.get(value, 0), turns=turns.get(leaf.index, 1))
        for leaf, value in zip(traced, flat.inputs, strict=True)
    ]
    leaves = follow(traced, classes)
    sizes = {flat.shapes[value][dim] for value, dim in example_dims.items()}
    used = frozenset(use.op for use in uses)
    products, feeds = _products(flat, used), _feeds(flat, used, arguments)
    example_atoms = frozenset(a for a, label in enumerate(classes.labels[Strength.SOFT]) if label in examples)
    repeated = count_repetitions(flat)
    params = frozenset(value for value, is_param in zip(flat.inputs, flow.is_param, strict=True) if is_param)
    learned = learned_values(flat, params)
    vectors = {leaf.index: leaf.path for leaf in leaves if leaf.role == "param" and len(leaf.shape) == 1}
    copied = copied_values(flat, sources)
    used_at = [(flat.ops[use.op].site, names[use.leaves[0]]) for use in uses]
    batch_at = {argument.path: value for argument, value in zip(arguments, flat.inputs, strict=True)}
    return Graph(
        leaves=tuple(leaves),
        layers=build_layers(leaves, names, uses, flat, flow, norms),
        uses=tuple(
            dataclasses.replace(
                _use(use, flat, names, arguments, classes, products, feeds),
                repeated=repeated[use.op],
                reads_learned=use.data is not None and flat.ops[use.op].inputs[use.data] in learned,
                copied=flat.ops[use.op].inputs[use.weight] in copied,
            )
            for use in uses
        ),
        unknown=tuple(_unknown(flat, i, classes) for i in linked.unknown),
        atom_sizes=tuple(classes.atoms.sizes),
        hard=classes.labels[Strength.HARD],
        local=classes.labels[Strength.LOCAL],
        soft=classes.labels[Strength.SOFT],
        example_atoms=example_atoms,
        num_examples=sizes.pop() if len(sizes) == 1 else None,
        num_boundaries=flat.num_boundaries,
        flops=sum(use.flops for use in uses if not use.backward),
        activation_bytes=_activation_bytes(flat, flow),
        suspects=find_suspects(flat, classes),
        gradients=_gradients(flat, arguments, sources),
        spreads=tuple(_spreads(flat, arguments, sources, names, classes, example_atoms)),
        reductions=tuple(find_reductions(flat, classes, example_atoms, used, repeated, learned)),
        picks=tuple(find_picks(flat, classes, example_atoms, used, repeated, learned)),
        foreign=find_foreign(flat, classes),
        inside_heads=frozenset(classes.local(atom) for dim in head_dims for atom in classes.atoms.dim(*dim)),
        joined=tuple(find_joined(flat, classes, example_atoms, used, learned)),
        streams=tuple(find_streams(flat, classes, used, learned)),
        outputs={each.use: each for each in find_outputs(flat, classes, used, sources, vectors)},
        dealt=find_dealt(flat, classes, sources, arguments),
        saved=tuple(find_saved(flat, classes, example_atoms, used_at, learned)),
        scanned=tuple(_scanned(flat, classes, stepping, feeds)),
        turned=tuple(find_turned(flat, classes, stepping, feeds, example_atoms, batch_at)),
        cuts=tuple(find_cuts(flat, classes, feeds, example_atoms)),
    )


def _scanned(
    flat: FlatStep, classes: Classes, stepping: Stepping, feeds: Sequence[frozenset[str]]
) -> Iterator[ScannedBatch]:
    """Yields what loops around the gradient scan, and that holds examples behind the dim that they count."""
    soft = classes.labels[Strength.SOFT]
    for op in flat.ops if stepping.turns else ():
        if reads_a_turn(op, flat) and op.editable:
            dims = classes.dims(op.inputs[0], len(flat.shapes[op.inputs[0]]))
            if dims[0] and stepping.turns.issuperset(soft[atom] for atom in dims[0]):
                is_scan = op.primitive == "_scan_in"
                site, operand = (op.site[:-1], op.params["operand"]) if is_scan else (op.site, 0)
                yield ScannedBatch(site, operand, dims, feeds[op.inputs[0]])


_JOINS = frozenset({"add", "sub", "mul", "div", "max", "min", "pow", "broadcast_in_dim"})


def _spreads(
    flat: FlatStep,
    arguments: Sequence[Argument],
    sources: Sequence[frozenset[int]],
    names: Mapping[int, str],
    classes: Classes,
    examples: frozenset[int],
) -> Iterator[Spread]:
    """Yields the operations that lay what is made of one parameter along the examples."""
    for op in flat.ops:
        if op.primitive not in _JOINS or not op.inside or not op.editable:
            continue
        dims = classes.dims(op.outputs[0], len(flat.shapes[op.outputs[0]]))
        example_dim = next((d for d, atoms in enumerate(dims) if atoms and atoms[0] in examples), None)
        if example_dim is None:
            continue
        for operand, value in enumerate(op.inputs):
            shape = flat.shapes[value]
            if len(sources[value]) != 1 or math.prod(shape) < 2:
                continue
            if op.primitive == "broadcast_in_dim":
                free = example_dim not in op.params["broadcast_dimensions"]
            else:
                free = len(shape) == len(dims) and shape[example_dim] == 1
            if free:
                (index,) = sources[value]
                layer = names.get(index, arguments[index].path)
                yield Spread(
                    op.site,
                    layer,
                    arguments[index].path,
                    operand,
                    classes.dims(value, len(shape)),
                    example_dim,
                    flat.shapes[op.outputs[0]][example_dim],
                    op.trips,
                )


def _gradients(
    flat: FlatStep, arguments: Sequence[Argument], sources: Sequence[frozenset[int]]
) -> tuple[Gradient, ...]:
    """Finds the results of boundaries that are gradients of one parameter (which may have been cast before)."""
    gradients: list[Gradient] = []
    for op in flat.ops:
        if op.primitive == "_gradient" and len(sources[op.inputs[0]]) == 1 and op.editable:
            (index,) = sources[op.inputs[0]]
            gradients.append(Gradient(op.site, op.params["result"], arguments[index].path, flat.shapes[op.outputs[0]]))
    return tuple(gradients)


def _leaf(
    index: int,
    flat: FlatStep,
    flow: ValueFacts,
    arguments: Sequence[Argument],
    classes: Classes,
    dim_names: Mapping[int, Names],
    layers: Mapping[int, str],
) -> Leaf:
    value, argument = flat.inputs[index], arguments[index]
    role = "input"
    if argument.is_batch:
        role = "batch"
    elif argument.is_state:
        role = "param" if flow.is_param[index] else "statistic"
    shape = flat.shapes[value]
    return Leaf(
        index,
        argument.path,
        shape,
        flat.dtypes[value],
        role,
        argument.is_state,
        classes.dims(value, len(shape)),
        dim_names.get(index, (None,) * len(shape)),
        layers.get(index),
    )


def _products(flat: FlatStep, uses: frozenset[int]) -> Twins:
    """Maps a value to the products between activations that read it, as (site, operand): in a backward pass that JAX
    already traced, the gradients of the weights that it met."""
    products: Twins = {}
    for index, op in enumerate(flat.ops):
        if op.facts.weights is not None and is_bilinear(op) and index not in uses and op.editable:
            for operand, value in enumerate(op.inputs[:2]):
                products.setdefault(value, []).append((op, operand))
    return products


def _feeds(flat: FlatStep, uses: frozenset[int], arguments: Sequence[Argument]) -> list[frozenset[str]]:
    """Finds, per value, the batch leaves that reach it without passing a use of a weight."""
    nothing: frozenset[str] = frozenset()
    feeds = [nothing] * len(flat.shapes)
    for value, argument in zip(flat.inputs, arguments, strict=True):
        if argument.is_batch:
            feeds[value] = frozenset((argument.path,))
    for index, op in enumerate(flat.ops):
        batch_leaves = nothing
        for v in op.inputs:
            own = feeds[v]
            if own and own is not batch_leaves:
                batch_leaves = batch_leaves | own if batch_leaves else own
        if batch_leaves and index not in uses:
            for v in op.outputs:
                feeds[v] = batch_leaves
    return feeds


def _use(
    use: RawUse,
    flat: FlatStep,
    names: Mapping[int, str],
    arguments: Sequence[Argument],
    classes: Classes,
    products: Twins,
    feeds: Sequence[frozenset[str]],
) -> Use:
    op = flat.ops[use.op]
    out = op.outputs[0]
    data = op.inputs[use.data] if use.data is not None else out
    twins = products.get(data, ()) if use.data is not None else ()
    return Use(
        layer=names[use.leaves[0]],
        primitive=op.primitive,
        site=op.site,
        param=arguments[use.leaves[0]].path,
        weight=use.weight,
        data=use.data,
        data_shape=flat.shapes[data],
        data_dims=classes.dims(data, len(flat.shapes[data])),
        data_dtype=flat.dtypes[data],
        out_shape=flat.shapes[out],
        out_dims=classes.dims(out, len(flat.shapes[out])),
        out_dtype=flat.dtypes[out],
        flops=use.flops,
        trips=op.trips,
        source=op.source,
        backward=use.backward,
        editable=op.editable,
        fed_by=tuple(sorted(feeds[data])),
        data_twins=tuple((twin.site, operand) for twin, operand in twins),
        weight_dims=classes.dims(op.inputs[use.weight], len(flat.shapes[op.inputs[use.weight]])),
        weight_names=use.names,
        in_boundary=op.inside,
        weight_dtype=flat.dtypes[op.inputs[use.weight]],
        data_value=None if use.data is None else data,
        by_labels=use.by_labels,
        adds_up=use.adds_up,
        reread=len(op.remats) if op.inside and not op.phase else 0,
        reads_state=use.reads_state,
        beside=_beside(use.leaves, flat, arguments),
    )


def _beside(leaves: Sequence[int], flat: FlatStep, arguments: Sequence[Argument]) -> tuple[str, ...]:
    """Returns the paths of the parameters among `leaves` of the shape of the first, without that."""
    shape = flat.shapes[flat.inputs[leaves[0]]]
    return tuple(arguments[each].path for each in leaves[1:] if flat.shapes[flat.inputs[each]] == shape)


def _unknown(flat: FlatStep, index: int, classes: Classes) -> Unknown:
    op = flat.ops[index]

    def dims(values: Sequence[int]) -> tuple[tuple[Dim, ...], ...]:
        return tuple(classes.dims(v, len(flat.shapes[v])) for v in values)

    return Unknown(qualified_name(op.primitive, op.params), op.site, op.source, dims(op.inputs), dims(op.outputs))


def _needs_no_operands(op: Op) -> bool:
    """Tells whether a backward pass needs no copy of an operation's operands: it is linear in all of them together."""
    linear = op.facts.linear
    if linear is None or Trait.COUNTED in op.facts.traits:
        return False
    return linear.how is Linearity.TOGETHER and linear.operands is None


def _activation_bytes(flat: FlatStep, flow: ValueFacts) -> int:
    """Sums the bytes of forward values of the batch that some backward pass reads: operands of what is not linear."""
    kept: dict[int, int] = {}
    widths = {dtype: itemsize(dtype) for dtype in set(flat.dtypes) if is_floating(dtype)}
    for op in flat.ops:
        if op.phase == BACKWARD or _needs_no_operands(op):
            continue
        for v in op.inputs:
            if (flow.carrying[v] or (flow.data[v] and flow.effect[v] is not None)) and flat.dtypes[v] in widths:
                kept[v] = max(kept.get(v, 0), op.trips)
    return sum(math.prod(flat.shapes[v]) * widths[flat.dtypes[v]] * trips for v, trips in kept.items())
