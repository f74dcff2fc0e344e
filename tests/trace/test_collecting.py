"""Python's collector of cycles rests while a step is planned, and goes on afterwards."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.errors import TraceError
from splitjax.trace.collecting import uncollected

STATE = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
BATCH = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}


def planned(seen, raises=False):
    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(state, batch):
        seen.append(gc.isenabled())
        if raises:
            raise KeyError("of the user's")
        loss, grads = splitjax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w["w"]) ** 2))(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step.plan(STATE, BATCH)


def test_it_rests_while_a_step_is_planned():
    seen: list[bool] = []
    planned(seen)
    assert seen and not any(seen) and gc.isenabled()


def test_it_goes_on_after_an_error():
    with pytest.raises((KeyError, TraceError)):
        planned([], raises=True)
    assert gc.isenabled()


def test_what_the_caller_switched_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
