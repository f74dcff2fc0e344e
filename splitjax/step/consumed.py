"""States that a call consumed: which they are, and which call it was.

A donated state's arrays are gone after the call, and JAX says so late and without a name (jax 0.10 can even crash the
process). A step's arguments come in before the call; whether one of them is gone, or stands in them twice, comes out,
and the file and line of the call that took it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
from jax.core import Tracer

from splitjax import _compat
from splitjax.errors import DonatedStateError
from splitjax.step.positions import ArgumentRoles

# How many calls a step remembers.
_REMEMBERED_CALLS = 4096
# How many leaves of a state are looked at before a call: that is far below the time of a dispatch.
_SAMPLED_LEAVES = 24


class CallLog:
    """Remembers by which call each state was consumed, for the last few thousand calls of a step."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._calls: collections.deque[tuple[int, int, Any, int]] = collections.deque(maxlen=_REMEMBERED_CALLS)

    def count(self) -> None:
        """Counts a call."""
        self._num_calls += 1

    def note(self, state: Any, frame: FrameType) -> None:
        """Notes that the call counted last, made in `frame`, consumed `state`."""
        self._calls.append((id(state), self._num_calls, frame.f_code, frame.f_lineno))

    def place_of(self, state: Any) -> str:
        """Returns which call consumed `state`, with its file and line, or "an earlier call" where it is forgotten."""
        wanted = id(state)
        for consumed, number, code, line in reversed(self._calls):
            if consumed == wanted:
                return f"call {number} of the step, at {code.co_filename}:{line}"
        return "an earlier call"


def look_at_states(args: Sequence[Any], state_argnums: Sequence[int]) -> tuple[int | None, bool]:
    """Looks at the states among `args`, at the positions `state_argnums`, before they are given away.

    Returns the number of the first argument that holds a consumed array (None if none does; a sample of its leaves is
    looked at), and whether any array stands in the states a second time.
    """
    seen: set[int] = set()
    count, concrete = 0, _compat.CONCRETE_ARRAY
    for number in state_argnums:
        leaves = jax.tree.leaves(args[number])
        for leaf in leaves[:: len(leaves) // _SAMPLED_LEAVES + 1] + leaves[-1:]:
            # The type first: `isinstance` of both kinds takes four times as long, 24 times a call.
            is_concrete = type(leaf) is concrete or (isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer))
            if is_concrete and leaf.is_deleted():
                return number, False
        count += len(leaves)
        seen.update(map(id, leaves))
    return None, len(seen) != count


class GivenStates:
    """Guards the states that a step's calls give away: refuses those that an earlier call consumed, and says which call
    that was.

    **Arguments:**

    - `step_name`: the name of the step, for messages.
    - `options`: which of its arguments are states.
    - `donates`: whether its calls consume them.
    """

    def __init__(self, step_name: str, options: ArgumentRoles, donates: bool) -> None:
        self._step_name, self._options, self._donates = step_name, options, donates
        self._log = CallLog()

    def check(self, args: tuple[Any, ...]) -> bool:
        """Looks at the states among `args` before they are given away, and returns whether any array stands in them a
        second time. Raises `DonatedStateError` for a state that an earlier call consumed."""
        consumed, is_shared = look_at_states(args, self._options.state_argnums)
        if self._donates and consumed is not None:
            raise self.error(args, consumed)
        return is_shared

    def called(self, args: tuple[Any, ...], frame: FrameType) -> None:
        """Notes a call with `args`, made in `frame`, which has consumed its states if calls do."""
        self._log.count()
        if self._donates:
            self._log.note(args[self._first], frame)

    def error(self, args: tuple[Any, ...], number: int | None = None) -> DonatedStateError:
        """Returns the error for the state among `args` at position `number`, by default the first, which an earlier
        call consumed."""
        number = self._first if number is None else number
        where = self._log.place_of(args[self._first])
        name = self._options.names[number] if number < len(self._options.names) else f"argument {number}"
        return DonatedStateError(
            f"the state {name!r} was consumed by {where}; its arrays are gone",
            value=name,
            place=f"call of {self._step_name}",
            remedy=(
                f"use the state that the call returned ({name} = step({name}, ...)), or pass donate=False to keep the"
                " old one"
            ),
        )

    @property
    def _first(self) -> int:
        return self._options.state_argnums[0] if self._options.state_argnums else 0
