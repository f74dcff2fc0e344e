"""Ties state to its parameter: by dataflow first, by tree structure where dataflow did not reach.

Leaves and dim classes go in; the role `optimizer` and the parameter that a leaf follows come out, so that optimizer
state is sharded like its parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.trace.classes import Classes, Strength
from splitjax.trace.flatten import FlatStep
from splitjax.trace.flow import Argument, ValueFacts
from splitjax.trace.graph import Leaf


def fallback_ties(
    flat: FlatStep, arguments: Sequence[Argument], flow: ValueFacts, classes: Classes
) -> list[tuple[int, int]]:
    """Pairs floating-point state that dataflow left alone with a parameter of equal shape: the one whose path ends
    alike, else that of a subtree of parameters which has the shapes of a subtree of such state in the same order.
    Averages are such state, in a program of the step that hands them on as they are where another one updates them.

    **Arguments:**

    - `flat`: the flat step.
    - `arguments`: one per flat argument.
    - `flow`: facts about its values.
    - `classes`: the dim classes so far.

    **Returns** pairs (state value, parameter value), such as of `opt/0/mu/Dense_0/kernel` and
    `params/Dense_0/kernel`.
    """
    hard = classes.labels[Strength.HARD]
    params = [i for i, is_param in enumerate(flow.is_param) if is_param]
    tied = {hard[a] for i in params for a in _atoms(flat, classes, i)}
    pairs, open_state = [], {}
    for index, argument in enumerate(arguments):
        if flow.is_param[index] or not argument.is_state:
            continue
        value, own = flat.inputs[index], _atoms(flat, classes, index)
        if not own or any(hard[a] in tied for a in own):
            continue
        if not flat.dtypes[value].startswith(("float", "bfloat", "complex")) or flow.carrying[value]:
            continue
        open_state[index] = argument.path
    shapes = {index: flat.shapes[flat.inputs[index]] for index in (*params, *open_state)}
    alike = _alike_subtrees(open_state, {i: arguments[i].path for i in params}, shapes) if open_state else {}
    for index, path in open_state.items():
        same = [i for i in params if shapes[i] == shapes[index]]
        best = _best_by_path(path, [arguments[i].path for i in same])
        param = same[best] if best is not None else alike.get(index)
        if param is not None:
            pairs.append((flat.inputs[index], flat.inputs[param]))
    return pairs


def _alike_subtrees(
    state: Mapping[int, str], params: Mapping[int, str], shapes: Mapping[int, tuple[int, ...]]
) -> dict[int, int]:
    """Pairs the leaves of the largest subtrees of `state` with those of the one subtree of `params` that has the same
    shapes in the same order. Both are flat positions of leaves with their paths; a subtree is named by the beginning of
    its paths, and has two leaves or more, some of them matrices: vectors of equal lengths say nothing (the running
    means and variances of a norm, and its biases and scales)."""
    subtrees, of_params = _subtrees(state), _subtrees(params)
    by_shapes: dict[tuple[tuple[int, ...], ...], set[tuple[int, ...]]] = {}
    for leaves in of_params.values():
        by_shapes.setdefault(tuple(shapes[i] for i in leaves), set()).add(leaves)
    found: dict[int, int] = {}
    for _, leaves in sorted(subtrees.items(), key=lambda item: -len(item[1])):
        fits = by_shapes.get(tuple(shapes[i] for i in leaves), ())
        tells = len(fits) == 1 and len(leaves) > 1 and any(len(shapes[i]) > 1 for i in leaves)
        if tells and not any(i in found for i in leaves):
            found.update(zip(leaves, next(iter(fits)), strict=True))
    return found


def _subtrees(paths: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Returns the beginnings of paths, each with the positions of the leaves below it, in order."""
    below: dict[str, list[int]] = {}
    for index, path in paths.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            below.setdefault("/".join(parts[:depth]), []).append(index)
    return {beginning: tuple(leaves) for beginning, leaves in below.items()}


def _atoms(flat: FlatStep, classes: Classes, index: int) -> list[int]:
    """Returns the atoms of all dims of the leaf at `index`."""
    value = flat.inputs[index]
    return [a for dim in classes.dims(value, len(flat.shapes[value])) for a in dim]


def _best_by_path(path: str, candidates: Sequence[str]) -> int | None:
    """Returns the position of the candidate with the longest common path ending, of at least two parts; None when there
    is none or a draw."""
    scores = [_common_ending(path, candidate) for candidate in candidates]
    best = max(scores, default=0)
    return scores.index(best) if best >= 2 and scores.count(best) == 1 else None


def _common_ending(a: str, b: str) -> int:
    """Counts the trailing parts that two paths have in common."""
    count = 0
    for x, y in zip(reversed(a.split("/")), reversed(b.split("/")), strict=False):
        if x != y:
            break
        count += 1
    return count


def follow(leaves: Sequence[Leaf], classes: Classes) -> list[Leaf]:
    """Gives every state leaf whose dims are hard-tied to a parameter's the role `optimizer` and that parameter's path;
    so it does with blocks that hold a parameter flattened and filled up, which share no dim with it.

    `leaves` are all leaves in flat order, and `classes` the dim classes; the leaves come back in order. Where
    several parameters share the class, the one with most dims in common wins, then equal shape, then path ending.
    """
    hard = classes.labels[Strength.HARD]
    params = [leaf for leaf in leaves if leaf.role == "param"]
    owners: dict[int, list[Leaf]] = {}
    for param in params:
        for label in {hard[a] for dim in param.dims for a in dim}:
            owners.setdefault(label, []).append(param)
    out = []
    for leaf in leaves:
        mine = {hard[a] for dim in leaf.dims for a in dim}
        if leaf.role == "statistic" and leaf.is_state and mine:
            candidates = {p.path: p for label in mine for p in owners.get(label, ())}.values()
            if candidates:
                best = max(
                    candidates,
                    key=lambda p: (
                        len(mine & {hard[a] for dim in p.dims for a in dim}),
                        p.shape == leaf.shape,
                        _common_ending(p.path, leaf.path),
                    ),
                )
                leaf = dataclasses.replace(leaf, role="optimizer", follows=best.path)
        if leaf.role == "statistic" and leaf.is_state and (padded := _padded_of(leaf, params)) is not None:
            leaf = dataclasses.replace(leaf, role="optimizer", follows=padded.path)
        out.append(leaf)
    return out


def _padded_of(leaf: Leaf, params: Sequence[Leaf]) -> Leaf | None:
    """Returns the parameter that `leaf` holds in blocks, flattened and filled up to the last of them, by the names that
    their paths have in common; None where it holds none."""
    if len(leaf.shape) != 2 or leaf.shape[-1] < 2:
        return None
    names = leaf.path.split("/")
    scores = [
        (_common_run(param.path.split("/")[1:], names), param)
        for param in params
        if param.size < leaf.size < param.size + leaf.shape[-1]
    ]
    best = max((score for score, _ in scores), default=0)
    found = [param for score, param in scores if score == best]
    return found[0] if best and len(found) == 1 else None


def _common_run(ending: Sequence[str], names: Sequence[str]) -> int:
    """Counts the names at the end of `ending` that stand in `names` one after the other."""
    for length in range(len(ending), 0, -1):
        run = list(ending[-length:])
        if any(list(names[at : at + length]) == run for at in range(len(names) - length + 1)):
            return length
    return 0
