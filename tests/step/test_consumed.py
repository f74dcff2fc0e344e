"""States that a call consumed: noticed before the call, and which call it was."""

from __future__ import annotations

import sys

import jax.numpy as jnp

from splitjax.step.consumed import CallLog, look_at_states


def test_an_array_that_stands_twice_is_noticed():
    array = jnp.ones(2)
    assert look_at_states(({"a": array, "b": jnp.ones(2)}, array), (0,)) == (None, False)
    assert look_at_states(({"a": array, "b": array},), (0,)) == (None, True)
    assert look_at_states(({"a": array}, jnp.ones(2), [array]), (0, 2)) == (None, True)


def test_a_consumed_array_is_noticed_with_its_argument():
    gone = jnp.ones(2)
    gone.delete()
    assert look_at_states((jnp.ones(2), {"a": gone}), (0, 1)) == (1, False)
    assert look_at_states((jnp.ones(2), {"a": gone}), (0,)) == (None, False)


def test_the_last_call_that_took_a_state_is_named():
    log, state = CallLog(), object()
    log.count()
    log.note(state, sys._getframe())
    log.count()
    line = sys._getframe().f_lineno + 1
    log.note(state, sys._getframe())
    assert log.place_of(state) == f"call 2 of the step, at {__file__}:{line}"
    assert log.place_of(object()) == "an earlier call"
