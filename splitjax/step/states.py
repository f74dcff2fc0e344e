"""Finds a step's states again among its results, by structure, shapes and dtypes.

A call taken apart and the shape of the step's result come in; a map from flat arguments to flat results comes out. With
it the program donates old states, lays new ones out like them, and knows which results are updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from splitjax._layout_names import written_names
from splitjax.errors import StateError
from splitjax.step.arguments import Bound, TreeStructure
from splitjax.step.positions import ArgumentRoles


@dataclasses.dataclass(frozen=True)
class _Place:
    """Names a subtree of the result.

    **Attributes:** `positions`: of the nodes that lead to it from the result, each among the children of the one
    before. `tree`: its structure. `start`, `stop`: its range among the flat results.
    """

    positions: tuple[int, ...]
    tree: TreeStructure
    start: int
    stop: int

    def path(self, result: Any) -> str:
        """Returns where it stands in the `result`, as Python would index it."""
        path, node = "result", result
        for position in self.positions:
            children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x, node=node: x is not node)
            key, node = children[position]
            path += jax.tree_util.keystr(key)
        return path


def match_states(options: ArgumentRoles, bound: Bound, result: Any) -> dict[int, int]:
    """Maps the flat argument position of every state leaf to the flat result position of its new value.

    **Arguments:** `options`: which arguments are states. `bound`: the call, taken apart. `result`: the step's result as
    a pytree of `ShapeDtypeStruct`s.

    Raises `StateError` when a state does not come
    back (naming the first path that differs), or comes back in more than one place of the same depth (of several, the
    outermost is the state).
    """
    leaves, whole = jax.tree.flatten(result)
    places = list(_places(whole, (), 0))
    matched: dict[int, int] = {}
    for order, number in enumerate(options.state_argnums):
        start, stop = bound.spans[number]
        if start == stop:
            continue
        tree = jax.tree.structure(bound.args[number])
        name = options.names[number] if number < len(options.names) else f"argument {number}"
        if options.state_outnums is not None:
            place = (options.state_outnums[order],) if isinstance(result, (tuple, list)) else ()
            chosen = next((p for p in places if p.positions == place), places[0])
            if chosen.tree != tree:
                raise _missing(name, bound, number, places, result)
        else:
            same = [p for p in places if p.stop - p.start == stop - start and p.tree == tree]
            fitting = [p for p in same if _fits(p, start, bound, leaves)]
            outermost = [p for p in fitting if len(p.positions) == min(len(other.positions) for other in fitting)]
            if len(outermost) > 1 and len({(p.start, p.stop) for p in outermost}) > 1:
                raise StateError(
                    f"the state {name!r} could be any of {len(outermost)} results of the same structure",
                    value=[p.path(result) for p in outermost],
                    place=f"results of the step, state argument {number}",
                    remedy="say which results are the states with state_outnums=(...), positions in the returned tuple",
                )
            if not outermost:
                raise _missing(name, bound, number, same or places, result)
            chosen = outermost[0]
        changed = _changed(chosen, start, bound, result, name)
        if changed is not None:
            raise changed
        matched.update((start + k, chosen.start + k) for k in range(stop - start))
    return matched


def as_given(options: ArgumentRoles, bound: Bound, result: Any, matched: Mapping[int, int]) -> Any:
    """Returns the `result` of a step with its states in the nodes that they came in. Nodes that are equal may hold
    other values: `nn.scan` of Flax makes the boxes of mutable variables anew, with the names that stand in them and
    without those that their user wrote (`_layout_names`).

    The arguments are those of `match_states`; `matched`: what that returned."""
    leaves, whole = jax.tree.flatten(result)
    places = list(_places(whole, (), 0))
    for number in options.state_argnums:
        start, stop = bound.spans[number]
        if not written_names(bound.args[number]) or start not in matched:
            continue
        tree, first = jax.tree.structure(bound.args[number]), matched[start]
        place = next((place for place in places if place.start == first and place.tree == tree), None)
        if place is not None:
            result = _replaced(result, place.positions, jax.tree.unflatten(tree, leaves[first : first + stop - start]))
    return result


def _replaced(node: Any, positions: Sequence[int], new: Any) -> Any:
    """Returns a pytree with the node at `positions`, as `_Place` has them, replaced by `new`."""
    if not positions:
        return new
    children, tree = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    children[positions[0]] = _replaced(children[positions[0]], positions[1:], new)
    return jax.tree.unflatten(tree, children)


def _places(tree: TreeStructure, positions: tuple[int, ...], start: int) -> Iterator[_Place]:
    """Yields the places of a subtree of the result and of everything below it, parents first.

    **Arguments:** `tree`: its structure. `positions`, `start`: as for `_Place`."""
    yield _Place(positions, tree, start, start + tree.num_leaves)
    for position, child in enumerate(tree.children()):
        yield from _places(child, (*positions, position), start)
        start += child.num_leaves


def _fits(place: _Place, start: int, bound: Bound, leaves: Sequence[Any]) -> bool:
    """Returns whether shapes and dtypes at a place are those of the state whose flat arguments begin at `start`."""
    return all(
        tuple(leaf.shape) == bound.signature.avals[start + k][0]
        and str(leaf.dtype) == bound.signature.avals[start + k][1]
        for k, leaf in enumerate(leaves[place.start : place.stop])
    )


def _changed(place: _Place, start: int, bound: Bound, result: Any, name: str) -> StateError | None:
    """Makes the error for the state called `name` where it comes back with another shape or dtype; None where it does
    not."""
    for k, leaf in enumerate(jax.tree.leaves(result)[place.start : place.stop]):
        shape, dtype, _ = bound.signature.avals[start + k]
        if (tuple(leaf.shape), str(leaf.dtype)) != (shape, dtype):
            path = bound.arguments[start + k].path
            return StateError(
                f"the state {name!r} comes back changed: {path} goes in as {dtype}{list(shape)} and comes out as "
                f"{leaf.dtype}{list(leaf.shape)}",
                value=path,
                place=place.path(result),
                remedy="return the new state with the shapes and dtypes it came with (cast it back, as with .astype)",
            )
    return None


def _missing(name: str, bound: Bound, number: int, places: Sequence[_Place], result: Any) -> StateError:
    """Makes the error for a state that does not come back: what changed, where its structure does come back."""
    start, stop = bound.spans[number]
    tree = jax.tree.structure(bound.args[number])
    for place in places:
        if place.tree == tree:  # right structure, wrong arrays: say which
            changed = _changed(place, start, bound, result, name)
            if changed is not None:
                return changed
    mine = [a.path for a in bound.arguments[start:stop]]
    return StateError(
        f"the state {name!r} does not come back: no result of the step has its structure "
        f"({stop - start} arrays, first {mine[0]})",
        value=sorted({p.path(result) for p in places})[:12],
        place=f"results of the step, state argument {number}",
        remedy="return the new state with the same pytree structure; for a step that only reads it (evaluation) use "
        "step.like(fn), and for steps that mutate NNX modules splitjax.nnx.parallelize",
    )
