"""Finds what no layout changes about a step: which uses stand next to each other, and which leaves go together.

A traced step and the names of its layers come in, a `StepStructure` comes out, which every prediction of the step
shares: under whatever layout, a prediction only looks at what it says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from splitjax.cost.use_links import UseLinks, link_uses, reads_ids
from splitjax.plan import LayerPlan
from splitjax.trace.activations.statistics import Statistic
from splitjax.trace.dealt import DealtWeight
from splitjax.trace.graph import Graph, Use, itemsize

# Dtypes in which weights are gathered, and their gradients summed, where a parameter is cast to them before its use.
_NARROW = ("bfloat16", "float16", "float32")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, eq=False)
class StepStructure:
    """Holds what no layout changes about a step. *Position* of a use is its place in `links`, of a leaf its place among
    the step's flat arguments.

    **Attributes:**

    - `graph`: the traced step. `links`: of every forward use of a parameter, in program order.
    - `position`: of every leaf, by path. `names`: by path, the layer of each leaf that has one.
    - `uses_of`: by parameter, the positions of its uses.
    - `beside`: by use, the positions of the uses whose producer or consumer it is, and of those that read its columns
      joined with others.
    - `read_alike`: by use, the positions of later uses that read the very same input, of uses whose heads it reads, and
      of those whose outputs are joined with its own, added to a residual stream that it reads, or meet what it made.
    - `fed_from`: by batch leaf, the positions of the uses that read it.
    - `states_of`: by parameter, the positions of the optimizer state that mirrors it (moments; not factored statistics,
      which are small). `mirrors`: the reverse, by path of such a state.
    - `read_back`: the parameters that the backward pass reads, to compute forward values again among other things.
      `read_again`: those that rematerialised calls alone read, outside of loops.
    - `added_to`: by parameter that no use reads (a bias), the positions of its layer's uses to whose output it may be
      added.
    - `beside_columns`: by parameter that no use reads and that is none of these (the scale of a normalisation, an
      embedding of positions), the positions of the uses in whose columns its last dim lies.
    - `added_by`: the reverse of both: by use, the paths of these parameters.
    - `narrowed`: by parameter that all of its uses read in a narrower dtype (bfloat16 of float32), how many times
      fewer bytes its values and gradients have where they travel.
    - `as_bfloat16`: the parameters whose values and gradients travel in bfloat16.
    - `times`: by parameter, how often the whole of it is used, and so has a gradient: twice where a table is the head,
      too. `times_forward`: how often the forward pass gathers it, all lookups together once; `times_back`: how often
      the backward pass does.
    - `dealt`: by parameter, where its columns are dealt out. `statistics`: by running average, what it is made of.
    - `has_groups`: whether it has convolutions with groups that are evaluated device by device: of others no gradient
      is put together of parts. `has_transforms`: whether it has Fourier transforms that are.
    """

    graph: Graph
    links: tuple[UseLinks, ...]
    position: Mapping[str, int]
    names: Mapping[str, str]
    uses_of: Mapping[str, tuple[int, ...]]
    beside: Mapping[int, tuple[int, ...]]
    read_alike: Mapping[int, tuple[int, ...]]
    fed_from: Mapping[str, tuple[int, ...]]
    states_of: Mapping[str, tuple[int, ...]]
    mirrors: Mapping[str, str]
    read_back: frozenset[str]
    read_again: frozenset[str]
    added_to: Mapping[str, tuple[int, ...]]
    beside_columns: Mapping[str, tuple[int, ...]]
    added_by: Mapping[int, tuple[str, ...]]
    narrowed: Mapping[str, int]
    as_bfloat16: frozenset[str]
    times: Mapping[str, int]
    times_forward: Mapping[str, int]
    times_back: Mapping[str, int]
    dealt: Mapping[str, tuple[DealtWeight, ...]]
    statistics: Mapping[str, Statistic]
    has_groups: bool
    has_transforms: bool

    @classmethod
    def of(cls, graph: Graph, layers: Iterable[LayerPlan]) -> StepStructure:
        """Returns the structure of a step, which is made once for its graph. `layers`: the planned layers, which name
        their parameters."""
        return graph.once(cls._of, tuple((layer.name, layer.params) for layer in layers))

    @classmethod
    def _of(cls, graph: Graph, layers: tuple[tuple[str, tuple[str, ...]], ...]) -> StepStructure:
        links = link_uses(graph)
        position = {leaf.path: i for i, leaf in enumerate(graph.leaves)}
        names = {leaf.path: leaf.layer for leaf in graph.leaves if leaf.layer}
        names |= {path: layer for layer, params in layers for path in params}
        names |= _layers_beside((each.leaf for each in graph.statistics), names)
        uses_of = _grouped((each.use.param, i) for i, each in enumerate(links))
        mirrors = {
            leaf.path: leaf.follows
            for leaf in graph.leaves
            if leaf.follows is not None
            and leaf.follows in position
            and graph.leaves[position[leaf.follows]].shape == leaf.shape
        }
        # The backward pass of a lookup adds rows up, and does not read the table.
        back = [i for i, each in enumerate(links) if each.use.reads_learned and not reads_ids(each.use)]
        read_back = {links[i].use.param for i in back} | {
            path for path in position if path not in uses_of and path not in graph.added
        }
        read_back.update(each.use.param for each in links if each.use.repeated)
        in_layer = _grouped(
            (names.get(each.use.param, each.use.layer), i) for i, each in enumerate(links) if not reads_ids(each.use)
        )
        added_to = {path: in_layer[name] for path, name in names.items() if path not in uses_of and name in in_layer}
        by_column = _grouped((each.columns, i) for i, each in enumerate(links) if each.columns is not None)
        beside_columns = {
            leaf.path: by_column[graph.local[leaf.dims[-1][0]]]
            for leaf in graph.params
            if leaf.path not in uses_of and leaf.path not in added_to
            if leaf.dims and leaf.dims[-1] and graph.local[leaf.dims[-1][0]] in by_column
        }
        return cls(
            graph,
            links,
            position,
            names,
            uses_of,
            beside=_grouped(
                (j, i)
                for i, each in enumerate(links)
                for j in dict.fromkeys((each.producer, each.consumer, *each.producers, *each.joins))
                if j is not None
            ),
            read_alike=_grouped(
                (j, i)
                for i, each in enumerate(links)
                for j in (
                    *each.same_value,
                    *(each.heads.readers if each.heads else ()),
                    *(each.compared[1] if each.compared else ()),
                    *(j for j in (each.stream, *each.joined_with) if j is not None and j != i),
                    *((each.met.head,) if each.met else ()),
                )
            ),
            fed_from=_grouped((path, i) for i, each in enumerate(links) for path in each.use.fed_by),
            states_of=_grouped((param, position[path]) for path, param in mirrors.items()),
            mirrors=mirrors,
            read_back=frozenset(read_back),
            read_again=frozenset(
                path
                for path, uses in uses_of.items()
                if all(links[i].use.reread and links[i].use.trips == 1 for i in uses)
            ),
            added_to=added_to,
            beside_columns=beside_columns,
            added_by=_grouped((i, path) for path, uses in (added_to | beside_columns).items() for i in uses),
            narrowed={path: _narrowed(graph, path, [links[i].use for i in uses]) for path, uses in uses_of.items()},
            as_bfloat16=frozenset(
                path for path, uses in uses_of.items() if _is_bfloat16(graph, path, [links[i].use for i in uses])
            ),
            times={path: _times(graph, path, [links[i].use for i in uses]) for path, uses in uses_of.items()},
            times_forward={
                path: _times(graph, path, _lookups_once(links[i].use for i in uses)) for path, uses in uses_of.items()
            },
            times_back={
                path: _times(graph, path, [links[i].use for i in uses if i in set(back)])
                for path, uses in uses_of.items()
            },
            dealt=_grouped((each.param, each) for each in graph.dealt),
            statistics={each.leaf: each for each in graph.statistics},
            has_groups=any(
                suspect.convolution is not None and suspect.convolution.groups and not suspect.backward
                for suspect in graph.suspects
            ),
            has_transforms=any(suspect.transform is not None for suspect in graph.suspects),
        )

    @property
    def adds_up(self) -> bool:
        """Whether every part of a prediction depends on a few leaves and uses near it: what is evaluated device by
        device depends on all of them."""
        return not (self.has_groups or self.has_transforms)

    def around(self, uses: Iterable[int]) -> frozenset[int]:
        """Returns the positions of these `uses` and of those that hand something to one of them, or take it."""
        return frozenset((*uses, *(beside for i in uses for beside in self.beside.get(i, ()))))

    def reweighed(self, uses: Iterable[int], touched: Iterable[int]) -> Iterator[str]:
        """Yields the paths of the parameters whose collectives depend on the flows of `uses`, or on those around the
        `touched` ones; some several times."""
        yield from (self.links[i].use.param for i in uses)
        yield from (path for i in touched for path in self.added_by.get(i, ()))


def _narrowed(graph: Graph, path: str, uses: Iterable[Use]) -> int:
    """Returns how many times fewer bytes a parameter has in the widest dtype in which its `uses` read it. Floating
    point of 16 bits is all that counts: what is narrower is made by scaling, and its gradient is wider."""
    if not any(use.weight_dtype in _NARROW for use in uses):
        return 1
    leaf = graph.leaf(path)
    if leaf.dtype not in ("float32", "float64"):
        return 1
    widest = max(itemsize(use.weight_dtype) if use.weight_dtype in _NARROW else leaf.itemsize for use in uses)
    return leaf.itemsize // widest


def _is_bfloat16(graph: Graph, path: str, uses: Iterable[Use]) -> bool:
    """Tells whether a parameter travels in bfloat16: it is of that dtype, or all of its `uses` cast it to that."""
    dtype = graph.leaf(path).dtype
    return dtype == "bfloat16" or (
        dtype in ("float32", "float64") and {use.weight_dtype for use in uses} == {"bfloat16"}
    )


def _times(graph: Graph, path: str, uses: Iterable[Use]) -> int:
    """Returns how often `uses` read the whole of a parameter: once together where each reads a part of it. One that a
    loop reads whole in every turn counts once, for its turns are added up before anything is sent; so does one of which
    several products of a turn read a part each, the same in every turn."""
    leaf = graph.leaf(path)
    size, own = math.prod(leaf.shape), {atom for dim in leaf.dims for atom in dim}
    read = []
    for use in uses:
        atoms = [atom for dim in use.weight_dims for atom in dim]
        turns = use.trips if own.issuperset(atoms) else 1  # what is cut out of a dim is the same part in every turn
        read.append(turns * math.prod(graph.atom_sizes[atom] for atom in atoms))
    return max(1, round(sum(min(1.0, elements / size) for elements in read if size)))


def _lookups_once(uses: Iterable[Use]) -> Iterator[Use]:
    """Yields `uses` with the first lookup alone: others look up in what was gathered for it."""
    has_lookup = False
    for use in uses:
        is_lookup = reads_ids(use)
        if not (is_lookup and has_lookup):
            yield use
        has_lookup |= is_lookup


def _layers_beside(paths: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Returns, by those of the `paths` of running averages that stand beside the parameters of one layer, the name of
    that: `batch_stats/norm1/mean` stands beside `params/norm1/scale`. `names`: the layers by their parameters."""
    above = lambda path: tuple(path.split("/")[1:-1])
    layers = _grouped((above(path), layer) for path, layer in names.items())
    found = {path: set(layers.get(above(path), ())) for path in paths if above(path)}
    return {path: beside.pop() for path, beside in found.items() if len(beside) == 1}


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, tuple[Value, ...]]:
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in groups.items()}
