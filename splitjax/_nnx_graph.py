"""NNX objects as values: their joint graph, its arrays in groups, what is static in it, and what a step changed in
it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from splitjax._static import Fixed
from splitjax.errors import SplitjaxError, StateError, TraceError

# The groups of arrays, and their positions among the plain step's arguments (0 is the static one): variables of states,
# bare arrays of states, and arrays of objects that are only read. The user's arguments follow, without their objects.
STATE, CONSTANTS, READ, FIRST = 1, 2, 3, 4


def is_object(value: Any) -> bool:
    """Returns whether `value` is an NNX object: a module, optimizer, metric, random stream, or a lone variable."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for an NNX object in a pytree: of the step's arguments, or one that the step made and returned."""

    number: int
    made: bool = False


@jax.tree_util.register_pytree_with_keys_class
class Arrays:
    """Values of variables with their paths. A value may be a pytree."""

    def __init__(self, paths: tuple[str, ...], values: Sequence[Any]) -> None:
        self.paths, self.values = paths, tuple(values)

    def tree_flatten_with_keys(self) -> tuple[list, Any]:
        """Returns the values, each with its path as a key, and all paths, as JAX asks of a pytree node."""
        return [
            (jax.tree_util.DictKey(path), value) for path, value in zip(self.paths, self.values, strict=True)
        ], self.paths

    def tree_flatten(self) -> tuple[tuple, Any]:
        """Returns the values and their paths, as JAX asks of a pytree node."""
        return self.values, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Sequence[Any]) -> Arrays:
        """Makes the values of variables at `paths` of their `values`, as JAX asks of a pytree node."""
        return cls(paths, values)

    def splitjax_source_names(self) -> list[str]:
        """Returns the name of every array as the user's source has it, for `splitjax.step.arguments`."""
        names: list[str] = []
        for path, value in zip(self.paths, self.values, strict=True):
            name = attribute_text(path.split("/")).removeprefix(".")
            names += [name + jax.tree_util.keystr(within) for within, _ in jax.tree_util.tree_leaves_with_path(value)]
        return names


@dataclasses.dataclass(frozen=True)
class ObjectGraph:
    """The static part of a call's objects: their joint graph, and per leaf of it its path and group of arrays."""

    graphdef: Any
    names: tuple[str, ...]  # of the objects
    paths: tuple[str, ...]
    groups: tuple[int, ...]
    said: tuple[tuple[int, int, str, Any, Any], ...] = ()  # annotations: see `splitjax.step.said`

    @classmethod
    def of(cls, graphdef: Any, flat: Any, names: tuple[str, ...], is_state: Sequence[bool]) -> ObjectGraph:
        """Makes the graph of `graphdef` and `flat`, which `nnx.flatten` gave for a tuple of objects. `names`: of the
        objects; `is_state`: for each whether it is a state."""
        paths, groups = [], []
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            is_variable = isinstance(leaf, nnx.Variable)
            paths.append(text(path, names))
            groups.append(READ if not is_state[path[0]] else STATE if is_variable else CONSTANTS)
            if is_variable and nnx.variablelib.is_array_ref(leaf.get_raw_value()):
                raise TraceError(
                    "a variable holds an array reference, which a parallel step cannot shard",
                    value=type(leaf).__name__,
                    place=paths[-1],
                    remedy="make the variable without ref=True",
                )
        graph = cls(graphdef, names, tuple(paths), tuple(groups))
        return dataclasses.replace(graph, said=tuple(_said(graph, flat)))

    @functools.cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """Group -> its leaves."""
        return {
            group: tuple(k for k, group_of_leaf in enumerate(self.groups) if group_of_leaf == group)
            for group in (STATE, CONSTANTS, READ)
        }

    @functools.cached_property
    def paths_of(self) -> dict[int, tuple[str, ...]]:
        """Group -> the paths of its leaves."""
        return {group: tuple(self.paths[k] for k in members) for group, members in self.members.items()}

    def split(self, values: Sequence[Any]) -> tuple[Arrays, ...]:
        """Sorts the `values` of all leaves into the three groups."""
        return tuple(
            Arrays(self.paths_of[group], [values[k] for k in members]) for group, members in self.members.items()
        )

    def join(self, state: Sequence[Any], constants: Sequence[Any], read: Sequence[Any]) -> list[Any]:
        """Puts the values of the groups `state`, `constants` and `read` back in the order of all leaves: the inverse of
        `split`."""
        sources = {STATE: iter(state), CONSTANTS: iter(constants), READ: iter(read)}
        return [next(sources[group]) for group in self.groups]


def _said(graph: ObjectGraph, flat: Any) -> Iterator[tuple[int, int, str, Any, Any]]:
    """Returns what the metadata of variables say of where they live (`out_sharding`, which has been called `sharding`
    and `sharding_names`): group, number of the array in it, who says so, names, logical axis rules."""
    for group, members in graph.members.items():
        number = 0
        for k in members:
            leaf = flat.leaves[k]
            size = len(jax.tree.leaves(raw(leaf)))
            said = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}
            if said.get("out_sharding") is not None and size == 1:
                how = "nnx.with_partitioning" if "mesh" in said else "out_sharding="
                place = ".".join(map(str, flat.paths[k][1:])) or graph.paths[k]
                names = getattr(said["out_sharding"], "sharding", said["out_sharding"])  # of a `Format`
                yield group, number, f"{how} of {place}", names, said.get("sharding_rules")
            number += size


def free_of_names(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `make`, which makes objects, and does so too where their annotations name no axes of the mesh: NNX splits
    a variable by its names as soon as it is made, and cannot then. They are annotations all the same, and logical axis
    rules may tell later what they mean. Where it fails without them, too, that is what is wrong with it."""

    def run(*args: Any) -> Any:
        try:
            return make(*args)
        except SplitjaxError:
            raise
        except Exception:  # perhaps for the names; where that is not why, it raises the same again
            pass
        with nnx.use_eager_sharding(False):
            return make(*args)

    return run


def names_in(known: Sequence[str], names: Sequence[str], paths: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Returns names for objects, such that their variables have paths in `known` as far as there is an object like
    them.

    `names` are the objects' own. `paths` are those of the objects' leaves, the first part being the object's number. An
    object keeps its own name if its paths are known under it; else it has the first name under which they are, and
    which no other object has.
    """
    chosen: list[str] = []
    every = set(known)
    for number, own in enumerate(names):
        inner = ["/".join(map(str, path[1:])) for path in paths if path[0] == number and len(path) > 1]
        starts = [path.removesuffix("/" + inner[0]) for path in known if path.endswith("/" + inner[0])] if inner else []
        fitting = [start for start in starts if all(f"{start}/{rest}" in every for rest in inner)]
        free = [start for start in fitting if start not in chosen and (start == own or start not in names)]
        chosen.append(own if own in fitting or not free else free[0])
    return tuple(chosen)


def is_slot(value: Any) -> bool:
    """Returns whether `value` stands for an object."""
    return isinstance(value, Slot)


def rank(value: Any) -> int:
    """Returns where the object `value` stands in the order of a call's objects: modules name the variables that they
    share with others, so they come first; optimizers come last."""
    return 0 if isinstance(value, nnx.Module) else 2 if isinstance(value, nnx.Optimizer) else 1


def raw(leaf: Any) -> Any:
    """Returns the array, or the pytree, that `leaf` holds: a variable, or the value itself."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def fill(tree: Any, objects: Sequence[Any], made: Sequence[Any] = ()) -> Any:
    """Returns the pytree `tree` with objects in place of its slots: those of the call from `objects`, those that the
    step made from `made`."""

    def put(leaf: Any) -> Any:
        return (made if leaf.made else objects)[leaf.number] if is_slot(leaf) else leaf

    return jax.tree.map(put, tree, is_leaf=lambda leaf: is_slot(leaf) or is_object(leaf))


def empty(result: Any, objects: Sequence[Any]) -> tuple[Any, Any, tuple]:
    """Replaces the NNX objects in a step's `result` by slots.

    Returns the result with slots, and the graph and the values of those objects that the step made: `objects` are those
    that it was given.
    """
    leaves, tree = jax.tree.flatten(result, is_leaf=is_object)
    known = {id(given): number for number, given in enumerate(objects)}
    made: list[Any] = []
    for position, leaf in enumerate(leaves):
        if is_object(leaf):
            if id(leaf) in known:
                leaves[position] = Slot(known[id(leaf)])
            else:
                made.append(leaf)
                leaves[position] = Slot(len(made) - 1, made=True)
        elif isinstance(leaf, (bool, int, float, complex)):
            leaves[position] = jnp.asarray(leaf)  # as jax.jit returns Python numbers
    result = jax.tree.unflatten(tree, leaves)
    if not made:
        return result, None, ()
    graphdef, values = nnx.flatten(tuple(made), with_paths=False)
    return result, graphdef, tuple(values)


def same(new: Any, old: Any) -> bool:
    """Returns whether a variable that came with the arrays `old` still holds them as `new`."""
    news, olds = jax.tree.leaves(new), jax.tree.leaves(old)
    return len(news) == len(olds) and all(a is b for a, b in zip(news, olds, strict=True))


def refuse_changed(graph: ObjectGraph, before: Sequence[Any], after: Sequence[Any], name: str) -> None:
    """Raises `StateError` where the step `name` changed an array of `graph` that is no state: from its value in
    `before` to the one in `after`."""
    for path, group, old, new in zip(graph.paths, graph.groups, before, after, strict=True):
        if group != STATE and not same(new, old):
            raise StateError(
                "the step changes an array that is no state",
                value=path,
                place=f"result of {name}",
                remedy="name the argument in state_argnums" if group == READ else "hold the array in an nnx.Variable",
            )


# Structure.


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Says what a node of a graph is: its type and, for a variable, its metadata."""

    name: str
    metadata: tuple = ()

    def __repr__(self) -> str:
        return self.name + (f"({', '.join(f'{k}={v!r}' for k, v in self.metadata)})" if self.metadata else "")


def _anatomy(graphdef: Any) -> Iterator[tuple[tuple, Any]]:
    """(path, value) of a graph's nodes and variables (`_Kind`) and static attributes (`Fixed`)."""
    objects = nnx.unflatten(graphdef, [0] * graphdef.num_leaves)
    for path, value in nnx.iter_graph(objects):
        if any(str(part).startswith(("_pytree__", "_object__")) for part in path):
            continue
        if isinstance(value, nnx.Variable):
            yield (
                path,
                _Kind(type(value).__name__, tuple((k, Fixed(v)) for k, v in sorted(value.get_metadata().items()))),
            )
        elif nnx.graphlib.is_node(value):
            yield path, _Kind(type(value).__name__)
        else:
            yield path, Fixed(value)


def statics(graphdef: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns path -> static value for all that is static in `graphdef`, the graph of objects with these `names`."""
    return {text(path, names): value for path, value in _anatomy(graphdef) if path}


def text(path: Sequence[Any], names: Sequence[str]) -> str:
    """Returns a `path` within a tuple of objects as text, the first part by the object's name in `names`."""
    number: int = path[0]
    return "/".join(part for part in (names[number], *map(str, path[1:])) if part)


def attribute_text(path: Sequence[Any]) -> str:
    """Returns a `path` within an object as the user's source has it behind the object: `.layers[0].bias`."""
    return "".join(f"[{part}]" if str(part).isdecimal() else f".{part}" for part in path)


def static_changes(graph: ObjectGraph, after: Any, name: str) -> tuple[tuple[tuple, Any], ...]:
    """Returns the static attributes that the step `name` set on the objects of `graph`, which `after` describes, as
    pairs (path, value). Raises `StateError` for any other change."""
    if after == graph.graphdef:
        return ()
    old, new = dict(_anatomy(graph.graphdef)), dict(_anatomy(after))
    different = [path for path in [*old, *(p for p in new if p not in old)] if path and old.get(path) != new.get(path)]
    if old.keys() == new.keys() and all(isinstance(old[p], Fixed) and isinstance(new[p], Fixed) for p in different):
        changes = tuple((path, new[path].value) for path in different)
        objects = nnx.unflatten(graph.graphdef, [0] * graph.graphdef.num_leaves)
        for path, value in changes:
            assign(objects, path, value)
        if nnx.flatten(objects)[0] == after:
            return changes
    path = different[0] if different else ()
    was, now = (repr(tree[path]) if path in tree else "absent" for tree in (old, new))
    what = (
        f"{text(path, graph.names)} goes in {was} and comes out {now}"
        if different
        else "variables are shared otherwise than before"
    )
    raise StateError(
        f"the step changes the structure of its NNX objects: {what}",
        value=[text(p, graph.names) for p in different][:12],
        place=f"result of {name}",
        remedy=(
            "add variables and modules before the first step; take out what a step sows with nnx.pop inside the step"
        ),
    )


def assign(objects: Sequence[Any], path: Sequence[Any], value: Any) -> None:
    """Sets the attribute, or the entry, at `path` within `objects` to `value`."""
    node = _at(objects, path[:-1])
    if isinstance(node, (list, dict)):
        node[path[-1]] = value
    else:
        setattr(node, str(path[-1]), value)


def _at(objects: Sequence[Any], path: Sequence[Any]) -> Any:
    node: Any = objects
    for key in path:
        node = node[key] if isinstance(node, (tuple, list, dict)) else getattr(node, str(key))
    return node


def shared_as(like: Any, copies: Any) -> Any:
    """Returns `copies`, a pytree that was put together from the leaves of `like`, with every variable that `like` has
    in several places (tied weights) one again: as pytrees, NNX objects have such a variable in each place."""
    is_variable = lambda value: isinstance(value, nnx.Variable)
    variables, copied = (jax.tree.leaves(tree, is_leaf=is_variable) for tree in (like, copies))
    # the first place counts
    by_id = {id(old): new for old, new in reversed(list(zip(variables, copied, strict=True))) if is_variable(old)}
    if len(by_id) == sum(map(is_variable, variables)):
        return copies
    leaves, tree = jax.tree.flatten(like, is_leaf=is_object)
    places = [k for k, leaf in enumerate(leaves) if is_object(leaf)]
    new = jax.tree.leaves(copies, is_leaf=is_object)
    old_objects, new_objects = ([all_leaves[k] for k in places] for all_leaves in (leaves, new))
    graphdef, flat = nnx.flatten(tuple(old_objects))
    values = [
        raw(by_id[id(leaf)]) if is_variable(leaf) else _at(new_objects, path)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    for k, rebuilt in zip(places, nnx.unflatten(graphdef, values), strict=True):
        new[k] = rebuilt
    return jax.tree.unflatten(tree, new)
