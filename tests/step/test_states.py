"""Which result is the state that the next step gets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from splitjax.errors import StateError
from splitjax.step.arguments import bind
from splitjax.step.positions import make_options
from splitjax.step.states import match_states

STATE = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
BATCH = jnp.zeros((4, 3))


def matched(step, state_outnums=None):
    """Maps the paths of the state to the flat results that they come back as."""
    options = make_options(step, 0, 1, (), (), state_outnums)
    bound = bind(step, options, (STATE, BATCH))
    found = match_states(options, bound, jax.eval_shape(step, STATE, BATCH))
    return {bound.arguments[argument].path: result for argument, result in found.items()}


def test_the_outermost_of_several_is_the_state():
    averaged = lambda state: {"inner": {"ema": jax.tree.map(lambda x: x * 0.5, state)}}
    assert matched(lambda state, batch: (averaged(state), state)) == {"b": 2, "w": 3}
    assert matched(lambda state, batch: (state, averaged(state))) == {"b": 0, "w": 1}


def test_of_equals_the_given_one_is_the_state():
    both = lambda state, batch: (state, jax.tree.map(jnp.ones_like, state))
    with pytest.raises(StateError, match="could be any of 2 results"):
        matched(both)
    assert matched(both, state_outnums=1) == {"b": 2, "w": 3}


def test_a_state_that_comes_back_changed_is_refused_with_its_path():
    with pytest.raises(StateError, match=r"w goes in as float32\[3, 2\] and comes out as float16\[3, 2\]"):
        matched(lambda state, batch: ({**state, "w": state["w"].astype(jnp.float16)}, batch.sum()))
