"""The models whose gradients are mostly tables learn, on any layout with the numbers of one device."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import splitjax
from splitjax import models
from tests.steps import largest_difference, train

SIZES = (16, 8, 24, 32)
SMALL = {
    "lstm": {"vocab_size": 128, "max_len": 8, "bptt": 4, "embedding_width": 8, "hidden_width": 16, "negatives": 12},
    "deepfm": {"field_sizes": SIZES, "num_dense": 3, "embedding_width": 16, "features": (16, 8)},
    "dlrm": {"field_sizes": SIZES, "num_dense": 3, "embedding_width": 16, "bottom_features": 16, "features": (16, 8)},
}
LAYOUTS = {"data_parallel": {"data": 8}, "splitbrain": {"data": 2, "model": 4}, "fsdp": {"data": 4}}
STEPS, RATE = 8, 0.5


def batch_for(spec):
    """Examples in which there is something to learn: the next word, or a click, follows from what is given."""
    rng = np.random.default_rng(0)
    if spec.reads == "text":
        tokens = (rng.integers(0, 8, (16, 1)) + np.arange(9)) % 8
        return {"tokens": tokens.astype(np.int32), "negatives": rng.integers(0, 128, (16, 12)).astype(np.int32)}
    ids = np.stack([rng.integers(0, size, 16) for size in SIZES], 1).astype(np.int32)
    return {"ids": ids, "values": rng.random((16, 3)).astype(np.float32), "label": (ids[:, 0] % 2).astype(np.int32)}


@functools.cache
def one_device(name):
    """The step, a state, its batch, and what one device makes of them: the state behind, the losses, and its
    evaluation."""
    spec = models.build(name, **SMALL[name])
    init_fn, step, evaluate = models.make_step(spec, optax.adagrad(RATE), value_and_grad=splitjax.value_and_grad)
    batch = batch_for(spec)
    state = jax.tree.map(np.asarray, init_fn(jax.random.key(0)))
    want_state, want = train(jax.jit(step), state, [batch] * STEPS)
    test = {name: array for name, array in batch.items() if name != "negatives"}
    return spec, step, evaluate, state, batch, want_state, want, test, jax.jit(evaluate)(want_state, test)


@pytest.mark.parametrize("rules", LAYOUTS)
@pytest.mark.parametrize("name", SMALL)
def test_every_layout_has_the_numbers_of_one_device(name, rules):
    _, step, evaluate, state, batch, want_state, want, test, want_test = one_device(name)
    assert want[-1] < 0.8 * want[0]
    parallel = splitjax.parallelize(step, mesh=LAYOUTS[rules], rules=rules)
    placed = parallel.place(state, example=(batch,))
    got_state, got = train(parallel, placed, [batch] * STEPS)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert largest_difference(got_state, want_state) <= 1e-5
    got_test = parallel.like(evaluate)(got_state, test)
    assert largest_difference(got_test, want_test) <= 1e-4
    assert all(table.is_sparse for table in parallel.graph(got_state, batch).tables)
    table = got_state["params"]["embedding"]["embedding"]
    assert table.sharding.is_fully_replicated == (rules == "data_parallel")


def test_microbatches_have_the_numbers_of_the_whole_batch():
    spec, _, _, state, batch, _, want, *_ = one_device("lstm")
    boundary = functools.partial(splitjax.value_and_grad, microbatches=2)
    _, step, _ = models.make_step(spec, optax.adagrad(RATE), value_and_grad=boundary)
    parallel = splitjax.parallelize(step, mesh={"data": 4}, rules="data_parallel")
    _, got = train(parallel, parallel.place(state, example=(batch,)), [batch] * 3)
    np.testing.assert_allclose(got, want[:3], rtol=0, atol=1e-5)
