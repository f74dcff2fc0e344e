"""Finds the parameters that a step only adds to activations, as biases are.

A flat step comes in, paths come out. They exist because the backward pass of a sum reads none of its summands: a bias
that is stored in parts is gathered for the forward pass alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from splitjax.trace.flatten import FORWARD, FlatStep

SUMS = frozenset({"add", "add_any", "sub"})
MOVES = frozenset(
    "broadcast_in_dim convert_element_type copy expand_dims reshape sharding_constraint slice squeeze transpose".split()
)


def only_added(flat: FlatStep, params: Mapping[int, str]) -> frozenset[str]:
    """Returns the paths of parameters that the forward computation reads as summands alone, and that no rematerialised
    call reads. `params`: by value, the path of each parameter."""
    holding = {value: frozenset({path}) for value, path in params.items()}  # by value, whose numbers it holds
    added, otherwise = set[str](), set[str]()
    for op in flat.ops:
        paths = frozenset[str]().union(*(holding.get(value, ()) for value in op.inputs))
        if not paths or not (op.inside or op.phase == FORWARD):
            continue
        if op.primitive in MOVES and not op.remats:
            holding.update(dict.fromkeys(op.outputs, paths))
        elif op.primitive in SUMS and not op.remats:
            added |= paths
        else:
            otherwise |= paths
    return frozenset(added - otherwise)
