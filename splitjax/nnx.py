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

A call splits all of its NNX objects together (a variable that two of them share stays one), runs a plain parallel step
over the variables' values, and writes the new values back. The objects' structure is part of the program: a call that
differs in it (`model.eval()`) is planned and compiled anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
from flax import nnx

from splitjax._filtered.call import Call, Extra, attach, detach, signature
from splitjax._filtered.options import read_options
from splitjax._filtered.step import FilteredStep
from splitjax._nnx_gradient import grad, value_and_grad
from splitjax._nnx_graph import (
    CONSTANTS,
    FIRST,
    STATE,
    Arrays,
    ObjectGraph,
    Slot,
    assign,
    empty,
    fill,
    free_of_names,
    is_object,
    is_slot,
    names_in,
    rank,
    raw,
    refuse_changed,
    same,
    static_changes,
    statics,
)
from splitjax._static import Fixed, Static
from splitjax.errors import DonatedStateError, StateError
from splitjax.step.keywords import ParallelizeOptions, Positions, complete, show_signature
from splitjax.step.positions import ArgumentRoles, Default, call_with, make_options, with_static_defaults

__all__ = ["NNXStep", "grad", "parallelize", "value_and_grad"]

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


_OWN: ParallelizeOptions = {"state_argnums": None, "batch_argnums": None}


@overload
def parallelize(fn: Callable[P, R], **options: Unpack[ParallelizeOptions]) -> NNXStep[P, R]: ...


@overload
def parallelize(
    fn: None = None, **options: Unpack[ParallelizeOptions]
) -> Callable[[Callable[P, R]], NNXStep[P, R]]: ...


def parallelize(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorates, as `splitjax.parallelize` does, steps that change NNX modules, optimizers, metrics and random streams
    in place.

    **Arguments:** `fn` and `options` as of `splitjax.parallelize`, but

    - `state_argnums`: None for all arguments that are NNX objects, or hold some. Given, it may name plain pytrees too,
      which are found again among the results; NNX objects that it leaves out are only read: whole on every device, and
      an error if the step changes them.
    - `batch_argnums`: None for the first argument without NNX objects. `step(model, optimizer, x, y)` needs `(2, 3)`.
    - `state_outnums`: positions among the results of the states that are plain pytrees.

    **Returns** an `NNXStep`, called like the step itself.
    """
    given = complete("parallelize", options, _OWN)
    if fn is None:
        return functools.partial(parallelize, **options)
    positions, keywords = read_options(fn, given)
    own = _Given(given["state_argnums"] is not None, given["batch_argnums"] is not None)
    step: NNXStep[..., Any] = NNXStep(fn, positions, keywords, given["state_outnums"], own)
    return step._as_method(functools.partial(parallelize, **options))


show_signature(parallelize, _OWN)


@dataclasses.dataclass(frozen=True)
class _Given:
    """Says which argument numbers the user gave."""

    state: bool
    batch: bool


@dataclasses.dataclass
class _Objects:
    """A call's objects, to write to."""

    objects: tuple[Any, ...]
    variables: list[nnx.Variable]  # of the state, in order


class _StaticObjects(Static):
    """The static argument of a step over objects, with what a program of it needs to put them together again."""

    graph: ObjectGraph
    fixed: Mapping[int, Fixed]  # argument number -> the static argument

    def splitjax_annotations(self) -> tuple[tuple[int, int, str, Any, Any], ...]:
        """Returns what the variables' metadata say of where they live, for `splitjax.step.said`."""
        return self.graph.said


class NNXStep(FilteredStep[P, R]):
    """A decorated step over NNX objects. Call it like the function it wraps; the methods show, place, compile and reuse
    its plan. Arguments of `plan` and `lower` may be abstract, as `nnx.eval_shape` makes them."""

    changes_states = True

    def __init__(
        self,
        fn: Callable,
        options: ArgumentRoles,
        keywords: dict[str, Any],
        state_outnums: Any,
        given: _Given,
        parent: NNXStep[..., Any] | None = None,
    ) -> None:
        super().__init__(fn, options, keywords, state_outnums, parent)
        self._training = parent
        self._given = given
        self._paths: tuple[str, ...] = ()  # of the call taken apart last
        self._statics: dict[Any, _StaticObjects] = {}

    def place(self, *states: Any, example: Sequence[Any]) -> Any:
        """Moves the arrays of the `states` onto the plan, in place. `example`: all other arguments of the step, in
        order. Returns the states: the same objects, and plain states moved."""
        call = self._pack(self._arguments(states, example))
        moved: Any = call.step.place(*(call.args[n] for n in call.state_numbers), example=call.example)
        objects, *plain = moved if len(call.state_numbers) > 1 else (moved,)
        self._write(call, objects.values)
        by_number = dict(zip(call.state_numbers[1:], plain, strict=True))
        numbers = self._state_positions(len(states))
        placed = tuple(by_number.get(n + FIRST, state) for n, state in zip(numbers, states, strict=True))
        return placed[0] if len(placed) == 1 else placed

    def like(
        self,
        fn: Callable[Q, S],
        *,
        state_argnums: Positions | None = None,
        batch_argnums: Positions | None = None,
        static_argnums: Positions = (),
        static_argnames: str | Sequence[str] = (),
    ) -> NNXStep[Q, S]:
        """Makes a step of `fn` on the same mesh and layouts for evaluation and prediction. Nothing is donated. What it
        changes in its objects (metrics, random streams) is written back.

        `state_argnums` and `batch_argnums` are found as for the training step unless given; `static_argnums` and
        `static_argnames` are as in `jax.jit`. The layouts are those of the plan that this step used last: an object has
        that of the object of its argument's name there, or else of the first one that holds variables at all of its
        paths.
        """
        options = make_options(fn, state_argnums, batch_argnums, static_argnums, static_argnames, None)
        given = _Given(state_argnums is not None, batch_argnums is not None)
        return NNXStep(fn, options, self._keywords, None, given, parent=self)

    # A call, taken apart.

    def _pack(self, args: tuple) -> Call:
        placed: list[tuple[int, str, Any]] = []  # argument number, name, object
        shells: list[Any] = []
        fixed: list[tuple[int, Fixed]] = []
        args = with_static_defaults(self._options, args)
        for number, arg in enumerate(args):
            if number in self._options.static_argnums or isinstance(arg, Default):
                fixed.append((number, Fixed(arg)))
                shells.append(None)
            else:
                shells.append(self._take_objects(number, arg, placed))
        order = sorted(range(len(placed)), key=lambda k: rank(placed[k][2]))
        slots = {k: position for position, k in enumerate(order)}
        shells = jax.tree.map(
            lambda leaf: Slot(slots[leaf.number]) if isinstance(leaf, Slot) else leaf, shells, is_leaf=is_slot
        )
        placed = [placed[k] for k in order]
        numbers = self._numbers(args, {number for number, _, _ in placed})
        objects = tuple(leaf for _, _, leaf in placed)
        graphdef, flat = nnx.flatten(objects)
        static = self._static(graphdef, flat, placed, numbers["state"], tuple(fixed))
        graph = static.graph
        states = (STATE, *(n + FIRST for n in numbers["plain"]))
        step = self._step(
            (len(args), *numbers.values()), lambda: self._over_arrays(len(args), states, numbers["batch"])
        )
        leaves = list(flat.leaves)
        groups = graph.split([raw(leaf) for leaf in leaves])
        more = _Objects(objects, [leaves[k] for k in graph.members[STATE]])
        return Call(
            step,
            (static, *groups, *shells),
            states,
            self._rebuilder(graph, groups, shells, numbers),
            more,
            made_numbers=(STATE, CONSTANTS, *states[1:]),
        )

    def _static(
        self, graphdef: Any, flat: Any, placed: list[tuple[int, str, Any]], state: tuple[int, ...], fixed: tuple
    ) -> _StaticObjects:
        """The static argument. One object for equal calls, so that the plain step compares it by identity."""
        names = tuple(name for _, name, _ in placed)
        key = (graphdef, names, tuple(number in state for number, _, _ in placed), fixed)
        try:
            known, has_hash = self._statics.get(key), True
        except TypeError:  # `Static` finds a hash for lists and dicts, and says what has none
            known, has_hash = None, False
        if known is None:
            known = _StaticObjects(key, self._name, lambda: statics(graphdef, names))
            if self._training is not None:
                names = names_in(self._training._paths, names, flat.paths)
            known.graph, known.fixed = ObjectGraph.of(graphdef, flat, names, key[2]), dict(fixed)
            if has_hash and (self._training is None or self._training._paths):
                self._statics[key] = known
        self._paths = known.graph.paths
        return known

    def _take_objects(self, number: int, arg: Any, placed: list[tuple[int, str, Any]]) -> Any:
        """The argument with slots in place of its objects, which go to `placed`."""
        names = self._options.names
        name = names[number] if number < len(names) else f"arg{number}"
        leaves, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=is_object)
        shell = []
        for path, leaf in leaves:
            if is_object(leaf):
                inner = jax.tree_util.keystr(path, simple=True, separator="/")
                placed.append((number, f"{name}/{inner}" if inner else name, leaf))
                leaf = Slot(len(placed) - 1)
            shell.append(leaf)
        return jax.tree.unflatten(tree, shell)

    def _numbers(self, args: tuple, holders: set[int]) -> dict[str, tuple[int, ...]]:
        """Argument numbers by role: `state` (objects), `plain` (other states), `batch`."""
        options = self._options
        state = (
            tuple(n for n in options.state_argnums if n < len(args)) if self._given.state else tuple(sorted(holders))
        )
        plain = tuple(n for n in state if n not in holders)
        batch = options.batch_argnums
        if not self._given.batch:
            taken = {
                *holders,
                *state,
                *options.static_argnums,
                *(n for n, arg in enumerate(args) if isinstance(arg, Default)),
            }
            batch = tuple(n for n in range(len(args)) if n not in taken)[:1]
        elif set(batch) & holders:
            raise StateError(
                "an argument with NNX objects cannot be a batch",
                value=sorted(set(batch) & holders),
                place=f"call of {self._name}",
                remedy="name the arguments that hold examples in batch_argnums",
            )
        return {"state": tuple(n for n in state if n in holders), "plain": plain, "batch": batch}

    def _arguments(self, states: Sequence[Any], example: Sequence[Any]) -> tuple:
        for number, state in enumerate(() if self._given.state else states):
            if not any(map(is_object, jax.tree.leaves(state, is_leaf=is_object))):
                raise StateError(
                    f"state {number} holds no NNX object",
                    value=type(state).__name__,
                    place=self._name,
                    remedy="say which arguments are states with state_argnums",
                )
        return super()._arguments(states, example)

    def _batch_positions(self, args: tuple) -> tuple[int, ...]:
        holders = {n for n, arg in enumerate(args) if any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))}
        return self._numbers(args, holders)["batch"]

    def _state_positions(self, count: int) -> tuple[int, ...]:
        return self._options.state_argnums if self._given.state else tuple(range(count))

    def _making(self, make_fn: Callable) -> Callable:
        return free_of_names(super()._making(make_fn))

    def _is_single(self, states: Any) -> bool:
        return super()._is_single(states) if self._given.state else type(states) not in (tuple, list)

    def _rebuilder(self, graph: ObjectGraph, groups: Sequence[Arrays], shells: list[Any], numbers: dict) -> Callable:
        state = sorted({*numbers["state"], *numbers["plain"]})
        if self._given.state:
            state = [n for n in self._options.state_argnums if n < len(shells)]

        def rebuild(leaves: Sequence[Any]) -> tuple:
            like = [groups[0], groups[1], *(shells[n] for n in numbers["plain"])]
            mine, constants, *plain = jax.tree.unflatten(jax.tree.structure(like), leaves)
            objects = nnx.unflatten(graph.graphdef, graph.join(mine.values, constants.values, groups[2].values))
            by_number = dict(zip(numbers["plain"], plain, strict=True))
            return tuple(fill(by_number.get(n, shells[n]), objects) for n in state)

        return rebuild

    # The step over arrays.

    def _over_arrays(
        self, num_args: int, states: tuple[int, ...], batch: tuple[int, ...]
    ) -> tuple[Callable, dict[str, Any]]:
        fn, keywords, name, writes_all = self._fn, self._keyword_only, self._name, self._parent is None

        def over_arrays(static: _StaticObjects, *arrays: Any) -> tuple:
            graph, groups, shells = static.graph, arrays[: FIRST - 1], arrays[FIRST - 1 :]
            before = graph.join(*(group.values for group in groups))
            objects = nnx.unflatten(graph.graphdef, before)
            args = [
                static.fixed[n].value if n in static.fixed else fill(shell, objects) for n, shell in enumerate(shells)
            ]
            result = call_with(fn, keywords, args)
            graphdef, after = nnx.flatten(objects, with_paths=False)
            changes = static_changes(graph, graphdef, name)
            refuse_changed(graph, before, after, name)
            result, made_graph, made = empty(result, objects)
            new = graph.split(after)[0].values
            if not writes_all:
                new = {
                    k: value
                    for k, (value, old) in enumerate(zip(new, groups[0].values, strict=True))
                    if not same(value, old)
                }
            else:
                new = Arrays(groups[0].paths, new)
            return (new, made, *attach(result, more=(changes, made_graph)))

        over_arrays.__signature__ = signature(("graph", "state", "constants", "read"), fn, num_args)
        given = self.options.state_outnums
        outnums = None if given is None else (0, *(n + 2 for n in given))
        return over_arrays, {
            "state_argnums": states,
            "batch_argnums": tuple(n + FIRST for n in batch),
            "static_argnums": (0,),
            "state_outnums": outnums,
        }

    def _arranged(self, call: Call, shardings: tuple[Any, ...]) -> tuple[Any, ...]:
        graph, groups = call.args[0].graph, shardings[1:FIRST]
        objects = nnx.unflatten(graph.graphdef, graph.join(*(group.values for group in groups)))
        return tuple(fill(argument, [nnx.state(each) for each in objects]) for argument in shardings[FIRST:])

    def _over_states(self, states: tuple[Any, ...], change: Callable[[int, Any], Any]) -> tuple[Any, ...]:
        placed: list[tuple[int, str, Any]] = []
        numbers = self._state_positions(len(states))
        shells = [self._take_objects(number, state, placed) for number, state in zip(numbers, states, strict=True)]
        objects, names = tuple(leaf for _, _, leaf in placed), tuple(name for _, name, _ in placed)
        graphdef, flat = nnx.flatten(objects)
        graph = ObjectGraph.of(graphdef, flat, names, [True] * len(objects))
        mine, *others = graph.split([raw(leaf) for leaf in flat.leaves])
        changed = change(STATE, mine)
        values = graph.join(changed.values, *(group.values for group in others))
        made = nnx.unflatten(graphdef, values)
        holds = lambda shell: any(map(is_slot, jax.tree.leaves(shell, is_leaf=is_slot)))
        pairs = zip(numbers, shells, strict=True)
        return tuple(fill(shell if holds(shell) else change(number + FIRST, shell), made) for number, shell in pairs)

    def _unpack(self, call: Call, result: Any) -> Any:
        new, made, *rest = result
        extra: Extra = rest[-1]
        changes, made_graph = extra.more
        self._write(call, new if isinstance(new, dict) else new.values)
        for path, value in changes:
            assign(call.more.objects, path, value)
        made_objects = nnx.unflatten(made_graph, list(made)) if made else ()
        return fill(detach(rest), call.more.objects, made_objects)

    def _write(self, call: Call, new: Sequence[Any] | dict[int, Any]) -> None:
        """Puts new values into the variables. Values of a step made by `like` go where its next call wants them."""
        variables = call.more.variables
        if not isinstance(new, dict):
            for variable, value in zip(variables, new, strict=True):
                variable.set_raw_value(value)
            return
        if new:
            state = jax.tree.unflatten(jax.tree.structure(call.args[STATE]), call.shardings((STATE,)))
            for k, value in new.items():
                variables[k].set_raw_value(jax.device_put(value, state.values[k]))

    def _donated(self, args: tuple, call: Call) -> DonatedStateError:
        return DonatedStateError(
            "an NNX object holds arrays that an earlier call of the step consumed",
            value=call.first_deleted(),
            place=f"call of {self._name}",
            remedy=(
                "use the objects that the step was called with (they hold the new arrays); nnx.clone and nnx.split"
                " share their arrays with the original: copy them first (jax.tree.map(jnp.copy, nnx.state(model))), or"
                " pass donate=False"
            ),
        )
