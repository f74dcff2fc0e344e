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
    count = 0
    for number in state_argnums:
        leaves = jax.tree.leaves(args[number])
        for leaf in leaves[:: len(leaves) // _SAMPLED_LEAVES + 1] + leaves[-1:]:
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
                return number, False
        count += len(leaves)
        seen.update(map(id, leaves))
    return None, len(seen) != count
