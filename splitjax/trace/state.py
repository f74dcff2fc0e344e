"""Ties state to its parameter: by dataflow first, by tree structure where dataflow did not reach.

Leaves and dim classes go in; the role `optimizer` and the parameter that a leaf follows come out, so that optimizer
state is sharded like its parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.trace.classes import Classes, Strength
from splitjax.trace.flatten import FlatStep
from splitjax.trace.flow import Argument, ValueFacts
from splitjax.trace.graph import Leaf


def fallback_ties(
    flat: FlatStep, arguments: Sequence[Argument], flow: ValueFacts, classes: Classes
) -> list[tuple[int, int]]:
    """Pairs floating-point state that dataflow left alone with the one parameter of equal shape whose path ends alike.

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
    pairs = []
    for index, argument in enumerate(arguments):
        if flow.is_param[index] or not argument.is_state:
            continue
        value, own = flat.inputs[index], _atoms(flat, classes, index)
        if not own or any(hard[a] in tied for a in own):
            continue
        if not flat.dtypes[value].startswith(("float", "bfloat", "complex")) or flow.carrying[value]:
            continue
        same = [i for i in params if flat.shapes[flat.inputs[i]] == flat.shapes[value]]
        best = _best_by_path(argument.path, [arguments[i].path for i in same])
        if best is not None:
            pairs.append((value, flat.inputs[same[best]]))
    return pairs


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
    """Gives every state leaf whose dims are hard-tied to a parameter's the role `optimizer` and that parameter's path.

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
        out.append(leaf)
    return out
