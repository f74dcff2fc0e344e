"""`microbatches=N` inside a parallel step: the same numbers as the whole batch, one exchange, and errors where it cannot."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import MicrobatchError
from tests.steps import attention_case, conv_case, largest_difference, train

MESH = {"data": 2, "model": 4}


@pytest.mark.parametrize("rules", ["splitbrain", "megatron", "fsdp", "data_parallel"])
def test_same_numbers_as_the_whole_batch(rules):
    """Dropout slices the global bits, the mask's sum is the whole batch's, clipping sees the whole gradient."""
    with jax.enable_x64(True):
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))
        options = {"dtype": np.float64, "batch_norm": False, "dropout": 0.3, "size": 32, "steps": 4}
        whole, parts = conv_case(tx, **options), conv_case(tx, microbatches=4, **options)
        state = whole.init(jax.random.key(0))
        want_state, want = train(jax.jit(whole.step), state, whole.batches)
        step = splitjax.parallelize(parts.step, mesh=MESH, rules=rules)
        got_state, got = train(step, step.place(state, example=(whole.batches[0],)), whole.batches)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
        assert largest_difference(got_state, want_state) < 1e-10


def test_attention_with_dropout():
    whole, parts = attention_case(dropout=0.2), attention_case(dropout=0.2, microbatches=2)
    state = whole.init(jax.random.key(0))
    want_state, want = train(jax.jit(whole.step), state, whole.batches)
    step = splitjax.parallelize(parts.step, mesh=MESH, rules="megatron")
    got_state, got = train(step, step.place(state, example=(whole.batches[0],)), whole.batches)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert largest_difference(got_state, want_state) < 1e-5


def test_batch_norm_across_microbatches_is_an_error():
    case = conv_case(batch_norm=True, microbatches=2)
    step = splitjax.parallelize(case.step, mesh={"data": 8}, rules="data_parallel")
    state = case.init(jax.random.key(0))
    with pytest.raises(MicrobatchError, match="cannot be accumulated"):
        step(state, case.batches[0])


def test_a_batch_that_does_not_divide():
    case = conv_case(batch_norm=False, microbatches=3)
    step = splitjax.parallelize(case.step, mesh={"data": 8}, rules="data_parallel")
    with pytest.raises(MicrobatchError, match="24"):
        step(case.init(jax.random.key(0)), case.batches[0])
