"""Parallel training steps over Flax NNX objects, which a step changes in place.

```python
@splitjax.nnx.parallelize(mesh={"data": 2, "model": 4})
def train_step(model, optimizer, batch):
    loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

model, optimizer = train_step.init(make_objects, key, example=(batch,))
loss = train_step(model, optimizer, batch)       # model and optimizer hold the new arrays
```

A call splits all of its NNX objects together (a variable that two of them share stays one), runs a plain parallel step over
the variables' values, and writes the new values back. The objects' structure is part of the program: a call that differs in
it (`model.eval()`) is planned and compiled anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from splitjax import _filtered
from splitjax._filtered import Call, Extra, FilteredStep, Fixed, Static
from splitjax._nnx_gradient import grad, value_and_grad
from splitjax.errors import DonatedStateError, StateError, TraceError
from splitjax.lower.arguments import Options, make_options
from splitjax.plan import Plan
from splitjax.rules import RuleSet

__all__ = ["NNXStep", "grad", "parallelize", "value_and_grad"]

# The plain step's arguments: the static one, three groups of arrays, then the user's arguments without their objects.
_STATE, _CONSTANTS, _READ, _FIRST = 1, 2, 3, 4


def parallelize(
    fn: Callable | None = None, *, mesh: Any = None, rules: str | RuleSet = "splitbrain", group_comm: str = "auto",
    sync: Any = "dense", backprop: Any = None, shard_state: bool = False, donate: bool = True, plan: Plan | str | None = None,
    state_argnums: int | Sequence[int] | None = None, batch_argnums: int | Sequence[int] | None = None,
    state_outnums: int | Sequence[int] | None = None, static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (), unknown: str = "error",
) -> Any:
    """`splitjax.parallelize` for steps that change NNX modules, optimizers, metrics and random streams in place.

    **Arguments:** as `splitjax.parallelize`, but

    - `state_argnums`: None for all arguments that are NNX objects, or hold some. Given, it may name plain pytrees too, which
      are found again among the results; NNX objects that it leaves out are only read: whole on every device, and an error if
      the step changes them.
    - `batch_argnums`: None for the first argument without NNX objects. `step(model, optimizer, x, y)` needs `(2, 3)`.
    - `state_outnums`: positions among the results of the states that are plain pytrees.

    **Returns** an `NNXStep`, called like the step itself.
    """
    keywords = {"mesh": mesh, "rules": rules, "group_comm": group_comm, "sync": sync, "backprop": backprop,
                "shard_state": shard_state, "donate": donate, "plan": plan, "unknown": unknown}  # fmt: skip
    numbers = {"state_argnums": state_argnums, "batch_argnums": batch_argnums, "static_argnums": static_argnums,
               "static_argnames": static_argnames}  # fmt: skip
    if fn is None:
        return functools.partial(parallelize, **keywords, **numbers, state_outnums=state_outnums)
    options = _filtered.check(fn, keywords, **numbers)
    return NNXStep(fn, options, keywords, state_outnums, _Given(state_argnums is not None, batch_argnums is not None))


@dataclasses.dataclass(frozen=True)
class _Given:
    """Which argument numbers the user gave."""

    state: bool
    batch: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for an NNX object in a pytree: of the step's arguments, or one that the step made and returned."""

    number: int
    made: bool = False


@jax.tree_util.register_pytree_with_keys_class
class _Arrays:
    """Values of variables with their paths. A value may be a pytree."""

    def __init__(self, paths: tuple[str, ...], values: Sequence[Any]) -> None:
        self.paths, self.values = paths, tuple(values)

    def tree_flatten_with_keys(self) -> tuple[list, Any]:
        return [(jax.tree_util.DictKey(path), value) for path, value in zip(self.paths, self.values, strict=True)], self.paths

    def tree_flatten(self) -> tuple[tuple, Any]:
        return self.values, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Sequence[Any]) -> _Arrays:
        return cls(paths, values)


@dataclasses.dataclass(frozen=True)
class _Graph:
    """The static part of a call's objects: their joint graph, and per leaf of it its path and group of arrays."""

    graphdef: Any
    names: tuple[str, ...]  # of the objects
    paths: tuple[str, ...]
    groups: tuple[int, ...]

    def split(self, values: Sequence[Any]) -> tuple[_Arrays, ...]:
        """Values of all leaves -> the three groups."""
        groups = []
        for group in (_STATE, _CONSTANTS, _READ):
            chosen = [k for k, one in enumerate(self.groups) if one == group]
            groups.append(_Arrays(tuple(self.paths[k] for k in chosen), [values[k] for k in chosen]))
        return tuple(groups)

    def join(self, state: Sequence[Any], constants: Sequence[Any], read: Sequence[Any]) -> list[Any]:
        """The inverse of `split`."""
        sources = {_STATE: iter(state), _CONSTANTS: iter(constants), _READ: iter(read)}
        return [next(sources[group]) for group in self.groups]


@dataclasses.dataclass
class _Objects:
    """A call's objects, to write to."""

    graph: _Graph
    objects: tuple[Any, ...]
    variables: list[nnx.Variable]  # of the state, in order


class NNXStep(FilteredStep):
    """A decorated step over NNX objects. Call it like the function it wraps; the methods show, place, compile and reuse its
    plan. Arguments of `plan` and `lower` may be abstract, as `nnx.eval_shape` makes them."""

    def __init__(self, fn: Callable, options: Options, keywords: dict[str, Any], state_outnums: Any, given: _Given,
                 parent: NNXStep | None = None) -> None:
        super().__init__(fn, options, keywords, state_outnums, parent)
        self._given = given
        self._object_names: frozenset[str] = frozenset()

    def place(self, *states: Any, example: Sequence[Any]) -> Any:
        """Moves the objects' arrays onto the plan, in place. Returns the states: the same objects, and plain states moved."""
        call = self._pack(self._arguments(states, example))
        moved = call.step.place(*(call.args[n] for n in call.state_numbers), example=call.example)
        objects, *plain = moved if len(call.state_numbers) > 1 else (moved,)
        self._write(call, objects.values)
        by_number = dict(zip(call.state_numbers[1:], plain, strict=True))
        numbers = self._state_positions(len(states))
        placed = tuple(by_number.get(n + _FIRST, state) for n, state in zip(numbers, states, strict=True))
        return placed[0] if len(placed) == 1 else placed

    def like(self, fn: Callable, *, state_argnums: int | Sequence[int] | None = None,
             batch_argnums: int | Sequence[int] | None = None, static_argnums: int | Sequence[int] = (),
             static_argnames: str | Sequence[str] = ()) -> NNXStep:
        """A step on the same mesh and layouts for evaluation and prediction. Nothing is donated. What it changes in its
        objects (metrics, random streams) is written back.

        The layouts are those of the plan that this step used last, by the objects' argument names, or where a name is new by
        paths within the object."""
        options = make_options(fn, state_argnums, batch_argnums, static_argnums, static_argnames, None)
        given = _Given(state_argnums is not None, batch_argnums is not None)
        return NNXStep(fn, options, self._keywords, None, given, parent=self)

    # A call, taken apart.

    def _pack(self, args: tuple) -> Call:
        found: list[tuple[int, str, Any]] = []  # argument number, name, object
        shells: list[Any] = []
        fixed: list[tuple[int, Fixed]] = []
        for number, arg in enumerate(args):
            if number in self._options.static_argnums:
                fixed.append((number, Fixed(arg)))
                shells.append(None)
            else:
                shells.append(self._take_objects(number, arg, found))
        order = sorted(range(len(found)), key=lambda k: _rank(found[k][2]))
        slots = {k: position for position, k in enumerate(order)}
        shells = jax.tree.map(lambda leaf: _Slot(slots[leaf.number]) if isinstance(leaf, _Slot) else leaf, shells, is_leaf=_is_slot)
        found = [found[k] for k in order]
        numbers = self._numbers(args, {number for number, _, _ in found})
        graph, leaves = self._graph(found, numbers["state"])
        objects = tuple(one for _, _, one in found)
        self._object_names = frozenset(graph.names)
        static = Static((graph, tuple(fixed)), self._name, lambda: _statics(graph.graphdef, graph.names))
        static.graph, static.fixed = graph, dict(fixed)
        states = (_STATE, *(n + _FIRST for n in numbers["plain"]))
        step = self._step((len(args), *numbers.values()), lambda: self._over_arrays(len(args), states, numbers["batch"]))
        groups = graph.split([_raw(leaf) for leaf in leaves])
        variables = [leaf for leaf, group in zip(leaves, graph.groups, strict=True) if group == _STATE]
        more = _Objects(graph, objects, variables)
        return Call(step, (static, *groups, *shells), states, self._rebuilder(graph, groups, shells, numbers), more,
                    made_numbers=(_STATE, _CONSTANTS, *states[1:]))

    def _take_objects(self, number: int, arg: Any, found: list[tuple[int, str, Any]]) -> Any:
        """The argument with slots in place of its objects, which go to `found`."""
        names = self._options.names
        name = names[number] if number < len(names) else f"arg{number}"
        leaves, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=_is_object)
        shell = []
        for path, leaf in leaves:
            if _is_object(leaf):
                inner = jax.tree_util.keystr(path, simple=True, separator="/")
                found.append((number, f"{name}/{inner}" if inner else name, leaf))
                leaf = _Slot(len(found) - 1)
            shell.append(leaf)
        return jax.tree.unflatten(tree, shell)

    def _numbers(self, args: tuple, holders: set[int]) -> dict[str, tuple[int, ...]]:
        """Argument numbers by role: `state` (objects), `plain` (other states), `batch`."""
        options = self._options
        state = tuple(n for n in options.state_argnums if n < len(args)) if self._given.state else tuple(sorted(holders))
        plain = tuple(n for n in state if n not in holders)
        batch = options.batch_argnums
        if not self._given.batch:
            taken = {*holders, *state, *options.static_argnums}
            batch = tuple(n for n in range(len(args)) if n not in taken)[:1]
        elif set(batch) & holders:
            raise StateError(
                "an argument with NNX objects cannot be a batch", value=sorted(set(batch) & holders), place=f"call of {self._name}",
                remedy="name the arguments that hold examples in batch_argnums",
            )
        return {"state": tuple(n for n in state if n in holders), "plain": plain, "batch": batch}

    def _graph(self, found: Sequence[tuple[int, str, Any]], state: Sequence[int]) -> tuple[_Graph, list[Any]]:
        """The joint graph of the objects, and its leaves: variables, and bare arrays."""
        graphdef, flat = nnx.flatten(tuple(one for _, _, one in found))
        names = self._names([name for _, name, _ in found])
        leaves = list(flat.leaves)
        paths, groups = [], []
        for path, leaf in zip(flat.paths, leaves, strict=True):
            number = found[path[0]][0]
            parts = [str(part) for part in path[1:]]
            paths.append("/".join([names[path[0]], *parts] if names[path[0]] else parts))
            groups.append(_READ if number not in state else _STATE if isinstance(leaf, nnx.Variable) else _CONSTANTS)
            if isinstance(leaf, nnx.Variable) and nnx.variablelib.is_array_ref(leaf.get_raw_value()):
                raise TraceError(
                    "a variable holds an array reference, which a parallel step cannot shard", value=type(leaf).__name__,
                    place=paths[-1], remedy="make the variable without ref=True",
                )
        return _Graph(graphdef, tuple(names), tuple(paths), tuple(groups)), leaves

    def _names(self, names: list[str]) -> list[str]:
        """Object names for paths. One that the training step does not know gets none: its layouts go by the rest of the path."""
        if self._parent is None:
            return names
        strange = [name for name in names if name not in self._parent._object_names]
        return ["" if name in strange else name for name in names] if len(strange) == 1 else names

    def _state_positions(self, count: int) -> tuple[int, ...]:
        return self._options.state_argnums if self._given.state else tuple(range(count))

    def _is_single(self, states: Any) -> bool:
        return super()._is_single(states) if self._given.state else type(states) not in (tuple, list)

    def _rebuilder(self, graph: _Graph, groups: Sequence[_Arrays], shells: list[Any], numbers: dict) -> Callable:
        state = sorted({*numbers["state"], *numbers["plain"]})
        if self._given.state:
            state = [n for n in self._options.state_argnums if n < len(shells)]

        def rebuild(leaves: Sequence[Any]) -> tuple:
            like = [groups[0], groups[1], *(shells[n] for n in numbers["plain"])]
            mine, constants, *plain = jax.tree.unflatten(jax.tree.structure(like), leaves)
            objects = nnx.unflatten(graph.graphdef, graph.join(mine.values, constants.values, groups[2].values))
            by_number = dict(zip(numbers["plain"], plain, strict=True))
            return tuple(_fill(by_number.get(n, shells[n]), objects) for n in state)

        return rebuild

    # The step over arrays.

    def _over_arrays(self, num_args: int, states: tuple[int, ...], batch: tuple[int, ...]) -> tuple[Callable, dict[str, Any]]:
        fn, name, writes_all = self._fn, self._name, self._parent is None

        def over_arrays(static: Static, *arrays: Any) -> tuple:
            graph, groups, shells = static.graph, arrays[: _FIRST - 1], arrays[_FIRST - 1 :]
            before = graph.join(*(group.values for group in groups))
            objects = nnx.unflatten(graph.graphdef, before)
            args = [static.fixed[n].value if n in static.fixed else _fill(shell, objects) for n, shell in enumerate(shells)]
            result = fn(*args)
            graphdef, after = nnx.flatten(objects, with_paths=False)
            changes = _changes(graph, graphdef, name)
            _refuse_changed(graph, before, after, name)
            result, made_graph, made = _empty(result, objects)
            new = graph.split(after)[0].values
            if not writes_all:
                new = {k: value for k, (value, old) in enumerate(zip(new, groups[0].values, strict=True)) if not _same(value, old)}
            else:
                new = _Arrays(groups[0].paths, new)
            return (new, made, *_filtered.attach(result, more=(changes, made_graph)))

        over_arrays.__signature__ = _filtered.signature(("graph", "state", "constants", "read"), fn, num_args)
        outnums = None
        if self._state_outnums is not None:
            given = (self._state_outnums,) if isinstance(self._state_outnums, int) else tuple(self._state_outnums)
            outnums = (0, *(n + 2 for n in given))
        return over_arrays, {"state_argnums": states, "batch_argnums": tuple(n + _FIRST for n in batch), "static_argnums": (0,),
                             "state_outnums": outnums}  # fmt: skip

    def _unpack(self, call: Call, result: Any) -> Any:
        new, made, *rest = result
        extra: Extra = rest[-1]
        changes, made_graph = extra.more
        self._write(call, new if isinstance(new, dict) else new.values)
        for path, value in changes:
            _assign(call.more.objects, path, value)
        made_objects = nnx.unflatten(made_graph, list(made)) if made else ()
        return _fill(_filtered.detach(rest), call.more.objects, made_objects)

    def _write(self, call: Call, new: Sequence[Any] | dict[int, Any]) -> None:
        """Puts new values into the variables. Values of a step made by `like` go where its next call wants them."""
        variables = call.more.variables
        if not isinstance(new, dict):
            for variable, value in zip(variables, new, strict=True):
                variable.set_raw_value(value)
            return
        if new:
            state = jax.tree.unflatten(jax.tree.structure(call.args[_STATE]), call.shardings((_STATE,)))
            for k, value in new.items():
                variables[k].set_raw_value(jax.device_put(value, state.values[k]))

    def _donated(self, args: tuple, error: DonatedStateError) -> DonatedStateError:
        return DonatedStateError(
            "an NNX object holds arrays that an earlier call of the step consumed", value=error.value, place=f"call of {self._name}",
            remedy="use the objects that the step was called with (they hold the new arrays); nnx.clone and nnx.split share their "
            "arrays with the original: copy them first (jax.tree.map(jnp.copy, nnx.state(model))), or pass donate=False",
        )


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _is_slot(value: Any) -> bool:
    return isinstance(value, _Slot)


def _rank(value: Any) -> int:
    """Modules name the variables that they share with others; optimizers come last."""
    return 0 if isinstance(value, nnx.Module) else 2 if isinstance(value, nnx.Optimizer) else 1


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _fill(tree: Any, objects: Sequence[Any], made: Sequence[Any] = ()) -> Any:
    """The pytree with objects in place of its slots."""
    return jax.tree.map(
        lambda leaf: (made if leaf.made else objects)[leaf.number] if _is_slot(leaf) else leaf, tree, is_leaf=lambda x: _is_slot(x) or _is_object(x)
    )


def _empty(result: Any, objects: Sequence[Any]) -> tuple[Any, Any, tuple]:
    """A step's result with slots in place of NNX objects, and the graph and values of those that the step made."""
    leaves, tree = jax.tree.flatten(result, is_leaf=_is_object)
    known = {id(one): number for number, one in enumerate(objects)}
    made: list[Any] = []
    for position, leaf in enumerate(leaves):
        if _is_object(leaf):
            if id(leaf) in known:
                leaves[position] = _Slot(known[id(leaf)])
            else:
                made.append(leaf)
                leaves[position] = _Slot(len(made) - 1, made=True)
        elif isinstance(leaf, (bool, int, float, complex)):
            leaves[position] = jnp.asarray(leaf)  # as jax.jit returns Python numbers
    result = jax.tree.unflatten(tree, leaves)
    if not made:
        return result, None, ()
    graphdef, values = nnx.flatten(tuple(made), with_paths=False)
    return result, graphdef, tuple(values)


def _same(new: Any, old: Any) -> bool:
    """Whether a variable holds the very arrays that it came with."""
    news, olds = jax.tree.leaves(new), jax.tree.leaves(old)
    return len(news) == len(olds) and all(a is b for a, b in zip(news, olds, strict=True))


def _refuse_changed(graph: _Graph, before: Sequence[Any], after: Sequence[Any], name: str) -> None:
    for path, group, old, new in zip(graph.paths, graph.groups, before, after, strict=True):
        if group != _STATE and not _same(new, old):
            raise StateError(
                "the step changes an array that is no state", value=path, place=f"result of {name}",
                remedy="name the argument in state_argnums" if group == _READ else "hold the array in an nnx.Variable",
            )


# Structure.


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a node of a graph is: its type and, for a variable, its metadata."""

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
            yield path, _Kind(type(value).__name__, tuple((k, Fixed(v)) for k, v in sorted(value.get_metadata().items())))
        elif nnx.graphlib.is_node(value):
            yield path, _Kind(type(value).__name__)
        else:
            yield path, Fixed(value)


def _statics(graphdef: Any, names: Sequence[str]) -> dict[str, str]:
    """Path -> text of all that is static in a graph."""
    return {_text(path, names): repr(value) for path, value in _anatomy(graphdef) if path}


def _text(path: Sequence[Any], names: Sequence[str]) -> str:
    return "/".join(part for part in (names[path[0]], *map(str, path[1:])) if part)


def _changes(graph: _Graph, after: Any, name: str) -> tuple[tuple[tuple, Any], ...]:
    """Static attributes that the step sets on its objects, as (path, value). Raises `StateError` for any other change."""
    if after == graph.graphdef:
        return ()
    old, new = dict(_anatomy(graph.graphdef)), dict(_anatomy(after))
    different = [path for path in [*old, *(p for p in new if p not in old)] if path and old.get(path) != new.get(path)]
    if old.keys() == new.keys() and all(isinstance(old[p], Fixed) and isinstance(new[p], Fixed) for p in different):
        changes = tuple((path, new[path].value) for path in different)
        objects = nnx.unflatten(graph.graphdef, [0] * graph.graphdef.num_leaves)
        for path, value in changes:
            _assign(objects, path, value)
        if nnx.flatten(objects)[0] == after:
            return changes
    path = different[0] if different else ()
    say = [repr(tree[path]) if path in tree else "absent" for tree in (old, new)]
    raise StateError(
        "the step changes the structure of its NNX objects: "
        + (f"{_text(path, graph.names)} goes in {say[0]} and comes out {say[1]}" if different else "variables are shared otherwise than before"),
        value=[_text(p, graph.names) for p in different][:12], place=f"result of {name}",
        remedy="add variables and modules before the first step; take out what a step sows with nnx.pop inside the step",
    )


def _assign(objects: Sequence[Any], path: Sequence[Any], value: Any) -> None:
    node: Any = objects
    for key in path[:-1]:
        node = node[key] if isinstance(node, (tuple, list, dict)) else getattr(node, str(key))
    if isinstance(node, (list, dict)):
        node[path[-1]] = value
    else:
        setattr(node, str(path[-1]), value)
