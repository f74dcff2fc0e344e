"""Links the uses of weights of a traced step: what each of them reads and writes, and between which uses it stands.

The traced step comes in; a chain of `UseLinks`, one a forward use of a weight in program order, comes out. It holds for
every layout, so that it is made once for a step, and `cost.flow` lays it out as often as a search asks.

A graph does not keep the edges between uses, but its dim classes say enough: where a free dim of one use's weight and a
contracted dim of a later use's weight are in one local class, the later use reads the earlier one's output (through
elementwise operations, reshapes, attention).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Hashable, Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 family with numpy)
import numpy as np

from splitjax.cost.heads import HeadReaders, find_readers
from splitjax.primitives.walk import Site
from splitjax.trace.activations.joined import Joined
from splitjax.trace.activations.picks import Pick
from splitjax.trace.activations.reductions import Reduction
from splitjax.trace.graph import Dim, Graph, Leaf, Use

# Products of rows with the matrix of their group: XLA makes no parts of them, so no token travels to its expert.
RAGGED = "ragged_dot_general"
_CONVOLUTION = "conv_general_dilated"


@dataclasses.dataclass(frozen=True)
class Met:
    """Says what the columns of a use meet that were made before it, element by element: a residual stream that it is
    the first to be added to.

    - `head`: the position of the use that made the earliest part of that.
    - `site`, `operand`: the operation, and which of its operands that is. `dims`: of the operand. `num_bytes`: of it,
      for the whole batch and all repetitions.
    - `label`: the soft label of the columns.
    """

    head: int
    site: Site
    operand: int
    dims: tuple[Dim, ...]
    label: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class UseLinks:
    """Holds what no layout changes about a use of a weight: what it reads and writes, and between which uses it stands.

    **Attributes:**

    - `use`: the operation. `roles`: of its weight's dims: contracted, free, stacked or whole.
    - `data_bytes`, `out_bytes`: bytes of the activations that it reads (0 for lookups of ids) and of its output, for
      the whole batch and all repetitions; `data_batched`, `out_batched`: whether these hold examples.
    - `producer`, `consumer`, `producers`, `recurs`: as for `cost.flow.WeightFlow`.
    - `same_value`: the positions of earlier uses of other weights that read the very same input.
    - `columns_inside`: whether the columns of its producer's output lie inside of a dim that it contracts, behind
      another (the features of several fields, side by side): a device's columns are no consecutive part of that dim.
    - `columns`: the local class of the columns of its output: of the leading atom of its weight's free dim; None where
      the weight has not one of these. `reductions`: those over these columns.
    - `heads`: the heads of an attention that its output has and that more heads read; None for none.
    - `picks`: what sorts the rows that a ragged product reads, and puts back those that it makes.
    - `deals`: whether tokens can be dealt out to the devices of their experts: in a gradient boundary, and where no
      gradient is taken, but for ragged products. A backward pass that plain JAX traced would gather them.
    - `stream`: the position of the convolution that reads what another one made, where its columns are added to that,
      or multiplied with it (a residual stream between convolutions); None for none. `met`: what its columns meet
      elsewhere; None where they meet nothing, or are not the first to meet it.
    - `joined`: the site of the first operation that reads its columns where they are concatenated with other values, or
      put in order, if its weight has one dim of these; None elsewhere. `compared`: of the first where they meet rows of
      tables, and the positions of the lookups of these. `joined_with`: the positions of the other uses whose columns
      are joined or stacked with its own. `joins`: those of the uses whose joined columns it reads.
    """

    use: Use
    roles: tuple[str, ...]
    data_bytes: int
    out_bytes: int
    data_batched: bool
    out_batched: bool
    producer: int | None
    consumer: int | None
    same_value: tuple[int, ...]
    producers: tuple[int, ...] = ()
    recurs: bool = False
    columns_inside: bool = False
    columns: int | None = None
    reductions: tuple[Reduction, ...] = ()
    heads: HeadReaders | None = None
    deals: bool = True
    picks: tuple[Pick, ...] = ()
    stream: int | None = None
    met: Met | None = None
    joined: Site | None = None
    compared: tuple[Site, tuple[int, ...]] | None = None
    joined_with: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()


def link_uses(graph: Graph) -> tuple[UseLinks, ...]:
    """Returns the links of every forward use of a parameter of `graph`, in program order: they hold for every layout.

    What a backward pass sends follows from the forward uses, so uses in a backward pass that plain JAX already traced
    are passed over."""
    traced = {leaf.path: leaf for leaf in graph.leaves}
    uses = [use for use in graph.uses if not use.backward and use.param in traced]
    roles = [_dim_roles(graph, use, traced[use.param]) for use in uses]
    reads = [_classes(graph, use, traced[use.param], role, "contracted") for use, role in zip(uses, roles, strict=True)]
    writes = [_classes(graph, use, traced[use.param], role, "free") for use, role in zip(uses, roles, strict=True)]
    passes = [_passed(graph, use, own) for use, own in zip(uses, writes, strict=True)]
    consumers = _first_readers([read | passed for read, passed in zip(reads, passes, strict=True)], writes)
    columns = _columns(graph, uses, roles)
    free = [
        {graph.soft[dim[0]] for dim, own in zip(graph.leaf(use.param).dims, role, strict=True) if own == "free" and dim}
        for use, role in zip(uses, roles, strict=True)
    ]
    streams = _streams(graph, uses, free, consumers)
    met = _met(graph, uses, free, streams)
    reductions = _reductions(graph, uses, columns)
    heads = dict(find_readers(graph, uses, roles))
    picks = _picks(graph, uses)
    joins = _joins(graph, uses)
    derived = {use.param for use in graph.uses if use.backward}
    last_writer: dict[int, int] = {}
    writers: dict[int, list[int]] = {}
    read_by: dict[int, tuple[Hashable, ...]] = {}  # per use, what it reads
    readers: dict[Hashable, list[int]] = {}  # of one value
    links = []
    for i, use in enumerate(uses):
        # Uses of one value, or of what looks like one and is handed on by neither to the other (copies of a cast).
        alike: tuple[Hashable, ...] = () if use.data_value is None else (use.data_value,)
        if reads[i] != writes[i]:
            alike += ((use.data_shape, use.data_dtype, use.trips, reads[i]),)
        others = sorted({j for value in alike for j in readers.get(value, ())})
        joined = _joined(graph, use, traced[use.param], roles[i])
        producer = max((last_writer[label] for label in reads[i] if label in last_writer), default=None)
        links.append(
            UseLinks(
                use,
                roles[i],
                data_bytes=num_bytes(use.data_shape, use.data_dtype) * use.trips if _reads_activations(use) else 0,
                out_bytes=num_bytes(use.out_shape, use.out_dtype) * use.trips,
                data_batched=any(dim and dim[0] in graph.example_atoms for dim in use.data_dims),
                out_batched=any(dim and dim[0] in graph.example_atoms for dim in use.out_dims),
                producer=producer,
                producers=tuple(sorted({j for label in reads[i] for j in writers.get(label, ())}, reverse=True)),
                recurs=use.reads_state,
                consumer=consumers[i],
                # A weight that is used twice reads two values: it would be the same operation otherwise.
                same_value=tuple(j for j in others if uses[j].param != use.param),
                columns=columns[i],
                columns_inside=producer is not None
                and columns[producer] in _inner_classes(graph, traced[use.param], roles[i]),
                reductions=tuple(reductions.get(i, ())),
                heads=heads.get(i),
                picks=tuple(picks.get(i, ())),
                stream=streams.get(i),
                met=met.get(i),
                deals=use.primitive != RAGGED and (use.in_boundary or use.param not in derived),
                joined=min((each.site for each in joined if not each.tables), default=None),
                compared=_compared(uses, joined),
                joined_with=_used_at(graph, uses, {each.label for each in joined if not each.tables}, i),
                joins=tuple(sorted({j for label in reads[i] for j in joins.get(label, ())})),
            )
        )
        for label in writes[i]:
            # What read a layer's input together writes together: query, key and value.
            beside = [j for j in writers.get(label, ()) if set(alike) & set(read_by.get(j, ()))]
            writers[label] = [*beside, i]
        read_by[i] = alike
        last_writer.update(dict.fromkeys(writes[i], i))
        for value in alike:
            readers.setdefault(value, []).append(i)
    return tuple(links)


def num_bytes(shape: Sequence[int], dtype: str) -> int:
    """Returns the bytes of an array of this `shape` and `dtype`."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def reads_ids(use: Use) -> bool:
    """Returns whether a use looks rows up by ids: its derivative reads the ids again, not the weight."""
    return use.data is not None and np.dtype(use.data_dtype).kind in "iub"


def _joined(graph: Graph, use: Use, leaf: Leaf, roles: Sequence[str]) -> list[Joined]:
    """Returns where the columns of a use's output are read as values that are concatenated along them with others, put
    in order along them, or meet rows of tables; nowhere where its weight, `leaf`, has not one free dim. `roles`: of its
    dims."""
    free = [dim for dim, role in zip(leaf.dims, roles, strict=True) if role == "free"]
    if len(free) != 1 or not free[0]:
        return []
    label = graph.local[free[0][0]]
    # What is only put in order is worth it where it is narrow: a router's scores, not the logits of a vocabulary.
    is_narrow = math.prod(use.out_shape) <= math.prod(use.data_shape)
    return [
        each
        for each in graph.joined
        if each.label == label and use.site in each.uses and (is_narrow or not each.is_ordered)
    ]


def _used_at(graph: Graph, uses: Sequence[Use], labels: Container[int], i: int) -> tuple[int, ...]:
    """Returns the positions of the uses, but the one at `i`, whose columns of these `labels` are joined with others."""
    sites = {site for each in graph.joined if each.label in labels and not each.tables for site in each.uses}
    return tuple(j for j, use in enumerate(uses) if use.site in sites and j != i) if sites else ()


def _joins(graph: Graph, uses: Sequence[Use]) -> dict[int, set[int]]:
    """Returns by the label of a joined dim the positions of the uses whose columns are parts of it."""
    at = {use.site: i for i, use in enumerate(uses)} if graph.joined else {}
    found: dict[int, set[int]] = {}
    for each in graph.joined:
        if each.into is not None:
            found.setdefault(each.into, set()).update(at[site] for site in each.uses if site in at)
    return found


def _compared(uses: Sequence[Use], joined: Sequence[Joined]) -> tuple[Site, tuple[int, ...]] | None:
    """Returns the first site of `joined` where columns meet rows of tables, and the positions of the lookups of these
    among the `uses`; None where they meet none."""
    tables = {site for each in joined for site in each.tables}
    positions = tuple(i for i, use in enumerate(uses) if use.site in tables) if tables else ()
    return (min(each.site for each in joined if each.tables), positions) if positions else None


def _columns(graph: Graph, uses: Sequence[Use], roles: Sequence[Sequence[str]]) -> list[int | None]:
    """Returns, for each use, the local class of the columns of its output, as `UseLinks` describes it. `roles`: of the
    weights' dims."""
    columns: list[int | None] = []
    for use, role in zip(uses, roles, strict=True):
        free = [dim for dim, own in zip(graph.leaf(use.param).dims, role, strict=True) if own == "free"]
        columns.append(graph.local[free[0][0]] if len(free) == 1 and free[0] else None)
    return columns


def _reductions(graph: Graph, uses: Sequence[Use], columns: Sequence[int | None]) -> dict[int, list[Reduction]]:
    """Returns the reductions over columns of the last output before them, by the position of its use. `columns`: as
    `_columns` gives them."""
    found: dict[int, list[Reduction]] = {}
    for reduction in graph.reductions:
        before = (i for i in reversed(range(len(uses))) if uses[i].site < reduction.site)
        source = next((i for i in before if columns[i] in reduction.labels), None)
        if source is not None:
            found.setdefault(source, []).append(reduction)
    return found


def _streams(
    graph: Graph, uses: Sequence[Use], free: Sequence[Container[int]], consumers: Sequence[int | None]
) -> dict[int, int]:
    """Returns by the position of a use that of the first reader of the earliest columns that its own meet, where
    convolutions made and read these, which have their examples over all devices. Elsewhere columns lie as their readers
    want them: split layers behind a convolution alone (a ViT's) run in turns, which layers in between would end, and a
    search that prices pairs of layers would lose sight of what three make of each other. `free`: by position, the soft
    labels of a use's columns. `consumers`: by position, that of the first reader."""
    at = {use.site: i for i, use in enumerate(uses)}
    pairs = (
        (at[each.site], at[each.head], each.label) for each in graph.streams if {each.site, each.head} <= at.keys()
    )
    is_convolution = lambda position: position is not None and uses[position].primitive == _CONVOLUTION
    return {
        i: reader
        for i, head, label in pairs
        if label in free[i]
        and is_convolution(head)
        and is_convolution(reader := consumers[head])
        and reader is not None
    }


def _met(graph: Graph, uses: Sequence[Use], free: Sequence[Container[int]], streams: Container[int]) -> dict[int, Met]:
    """Returns by position what the columns of a use meet that an earlier one made, for the first that meets these: so
    that two layers alone decide what is sent. Where both run equally often, and the examples are in what is met.
    `free`: by position, the soft labels of a use's columns. `streams`: the positions of uses of which it is known
    otherwise."""
    at = {use.site: i for i, use in enumerate(uses)}
    found: dict[int, Met] = {}
    heads = set[tuple[int, int]]()
    for stream in graph.streams:
        i, head = at.get(stream.site), at.get(stream.head)
        if i is None or head is None or stream.label not in free[i] or (head, stream.label) in heads:
            continue
        heads.add((head, stream.label))
        dims = stream.met_dims
        if i in streams or uses[head].trips != uses[i].trips or not any(graph.is_example(dim) for dim in dims):
            continue
        size = math.prod(graph.atom_sizes[atom] for dim in dims for atom in dim)
        num = size * np.dtype(uses[head].out_dtype).itemsize * uses[i].trips
        found.setdefault(i, Met(head, stream.met_at, stream.met_operand, dims, stream.label, num))
    return found


def _picks(graph: Graph, uses: Sequence[Use]) -> dict[int, list[Pick]]:
    """Returns what sorts and puts back the rows of ragged products, by the position of the first that stands behind it,
    or else of the last before it."""
    found: dict[int, list[Pick]] = {}
    ragged = [i for i, use in enumerate(uses) if use.primitive == RAGGED and use.in_boundary]
    for pick in graph.picks if ragged else ():
        behind = next((i for i in ragged if uses[i].site > pick.site), None)
        before = next((i for i in reversed(ragged) if uses[i].site < pick.site), None)
        if behind is not None and pick.primitive == "gather":
            # Between two layers: what puts back the results of the first has as many rows as these.
            ends = before is not None and uses[before].out_shape == pick.shape != uses[behind].data_shape
            found.setdefault(before if ends and before is not None else behind, []).append(pick)
        elif before is not None:
            found.setdefault(before, []).append(pick)
    return found


def _first_readers(reads: Sequence[frozenset[int]], writes: Sequence[frozenset[int]]) -> list[int | None]:
    """Returns for every use the position of the first use after it that reads a class that it writes."""
    first: list[int | None] = []
    next_reader: dict[int, int] = {}
    for i in reversed(range(len(reads))):
        first.append(min((next_reader[label] for label in writes[i] if label in next_reader), default=None))
        next_reader.update(dict.fromkeys(reads[i], i))
    return first[::-1]


def _passed(graph: Graph, use: Use, written: frozenset[int]) -> frozenset[int]:
    """Returns those of the classes that a use has `written` that it reads, too: the channels of a convolution of which
    each has its own kernel."""
    if use.primitive != _CONVOLUTION:
        return frozenset()
    return written & {graph.local[atom] for dim in use.data_dims for atom in dim}


def _reads_activations(use: Use) -> bool:
    """Returns whether a use reads activations. A lookup reads ids: nothing is differentiated through them, and they are
    too small to count."""
    return use.data is not None and np.dtype(use.data_dtype).kind not in "iub"


def _classes(graph: Graph, use: Use, leaf: Leaf, roles: Sequence[str], role: str) -> frozenset[int]:
    """Returns the local dim classes of those dims of a weight whose entry in `roles` is `role`."""
    if use.copied and role == "free":
        read = {graph.local[atom] for dim in use.data_dims for atom in dim}
        return frozenset(graph.local[atom] for dim in use.weight_dims for atom in dim) - read
    return frozenset(
        graph.local[atom] for dim, its_role in zip(leaf.dims, roles, strict=True) if its_role == role for atom in dim
    )


def _inner_classes(graph: Graph, leaf: Leaf, roles: Sequence[str]) -> frozenset[int]:
    """Returns the local classes that stand in contracted dims of a weight behind the leading atom, and lead none."""
    contracted = [dim for dim, role in zip(leaf.dims, roles, strict=True) if role == "contracted"]
    inner = {graph.local[atom] for dim in contracted for atom in dim[1:]}
    return frozenset(inner - {graph.local[dim[0]] for dim in contracted if dim})


def _dim_roles(graph: Graph, use: Use, leaf: Leaf) -> tuple[str, ...]:
    """Returns the role of every dim of a use's weight: contracted, free, stacked, or whole (a window's height)."""
    data = {graph.local[atom] for dim in use.data_dims for atom in dim}
    out = {graph.local[atom] for dim in use.out_dims for atom in dim}
    names = leaf.dim_names or (None,) * len(leaf.dims)
    lookup = not _reads_activations(use)
    roles = tuple(
        _dim_role(name, {graph.local[atom] for atom in dim}, data, out, lookup)
        for dim, name in zip(leaf.dims, names, strict=True)
    )
    # Copied columns are whole, however the parameter is split along its own.
    return tuple("whole" if use.copied and role == "free" else role for role in roles)


def _dim_role(name: str | None, classes: set[int], data: set[int], out: set[int], lookup: bool) -> str:
    """Decides the role of a dim by its classes, and by its `name` where classes tie (square recurrent kernels) or say
    nothing. `lookup`: the use reads ids."""
    in_data, in_out = bool(classes & data), bool(classes & out)
    if name == "expert":
        return "stacked"
    if lookup:
        return "contracted" if name == "vocab" or (name is None and not in_out) else "free"
    if in_data != in_out:
        return "contracted" if in_data else "free"
    if name in ("in", "features"):
        return "contracted"
    if name in ("out", "vocab"):
        return "free"
    return "stacked" if in_data else "whole"
