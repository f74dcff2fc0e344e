"""Takes values whose columns are dealt out (`step.dealing.values`) into the bodies of loops and rematerialised calls.

An equation and its operands come in; what its body gets of each comes out. It exists because a recurrent layer may
project all of a sequence before its loop and add the state's part inside: both products have to be dealt out alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax

from splitjax import _compat
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.step.dealing.values import Dealt

_ENTERED = frozenset({CallKind.SCAN, CallKind.REMAT})


@dataclasses.dataclass(frozen=True)
class Entering:
    """Says how an operand of a loop or call is handed to its body.

    - `operand`: what the equation gets: an array; None while parts are looked for.
    - `inside`: the dealt value that the body has of it, without numbers; None for an array.
    - `shape`: of the array that stands for `inside` in the body; none where there are no numbers.
    """

    operand: Any
    inside: Dealt | None = None
    shape: tuple[int, ...] = ()


def is_entered(eqn: Any) -> bool:
    """Tells whether dealt values may go into the body of an equation: a loop over a sequence, or a call whose body is
    computed again for the backward pass."""
    return kind_of(eqn) in _ENTERED


def entering(eqn: Any, values: Sequence[Any]) -> list[Entering]:
    """Returns how each of the `values` is handed to the body of a loop or call. What a loop carries from one iteration
    to the next, and what it cuts along columns, are arrays."""
    if kind_of(eqn) is CallKind.REMAT:
        return [_handed_on(value) for value in values]
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    found = []
    for number, value in enumerate(values):
        if number < num_consts:
            found.append(_handed_on(value))
        elif number < num_consts + num_carry or not isinstance(value, Dealt):
            found.append(_as_array(value))
        else:
            found.append(_in_a_turn(value))
    return found


def _handed_on(value: Any) -> Entering:
    """Returns how a value is handed on as it is; of one with copied parts, which are several arrays, as an array."""
    if not isinstance(value, Dealt) or value.others:
        return _as_array(value)
    return Entering(value.value, value.with_value(None, ()), () if value.value is None else value.value.shape)


def _as_array(value: Any) -> Entering:
    """Returns how a value is handed on that has to be an array."""
    return Entering(value.array() if isinstance(value, Dealt) and value.is_known else value)


def _in_a_turn(value: Dealt) -> Entering:
    """Returns how a loop slices a dealt value along the first dim that the program sees of it."""
    order = value.order or tuple(range(len(value.seen)))
    num_split = len(value.split or (value.columns,))
    at, rest = order[0], [d - (d > order[0]) for d in order[1:]]
    if value.others or value.dim <= at < value.dim + num_split:
        return _as_array(value)
    is_before = at < value.dim
    in_shape = at if is_before else at - num_split + 1
    inside = dataclasses.replace(
        value,
        value=None,
        shape=(*value.shape[:in_shape], *value.shape[in_shape + 1 :]),
        dim=value.dim - is_before,
        order=() if rest == sorted(rest) else tuple(rest),
    )
    if value.value is None:
        return Entering(None, inside)
    place = in_shape if is_before else in_shape + 1
    dims = [d for d in range(value.value.ndim) if d != place]
    scanned = lax.transpose(value.value, (place, *dims)) if place else value.value
    return Entering(scanned, inside, scanned.shape[1:])
