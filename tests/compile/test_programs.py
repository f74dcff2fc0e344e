"""Which calls share a program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from splitjax.compile.programs import signature_key
from splitjax.step.arguments import bind
from splitjax.step.positions import make_options


def step(state, batch, mode):
    return state, batch.sum()


def key_of(state, batch, mode="train"):
    return signature_key(bind(step, make_options(step, 0, 1, 2, (), None), (state, batch, mode)))


def test_a_signature_has_shapes_dtypes_and_static_values():
    state, batch = np.zeros(3, np.float32), np.zeros((4, 2), np.float32)
    known = key_of(state, batch)
    assert known == key_of(state + 1, jnp.asarray(batch)), "values and the kind of array change no program"
    others = [
        key_of(state, np.zeros((8, 2), np.float32)),
        key_of(state, batch.astype(np.int32)),
        key_of(state, {"x": batch}),
        key_of(state, batch, "test"),
        key_of(state[:2], batch),
    ]
    assert len({known, *others}) == 6
