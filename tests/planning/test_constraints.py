"""Where XLA is told a sharding inside the step: what two layouts that meet there cost without it."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import splitjax
from benchmarks.modern.models import Decoder, make_step

DECODER = Decoder(
    layers=2, width=32, hidden=64, vocab=64, seq=16, examples=8, heads=4, kv_heads=4, head_dim=8, remat=True
)


def state():
    params = DECODER.init(jax.random.key(0))
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


@pytest.fixture(scope="module")
def batch():
    draws = np.random.default_rng(0)
    return {name: draws.integers(0, DECODER.vocab, (8, 16)).astype(np.int32) for name in ("tokens", "targets")}


def test_a_mesh_without_data_spreads_the_examples_behind_a_split_table(batch):
    """The batch lies over `model` alone, over which the table is split, too: every layer behind the table has the
    examples of one device again, as on a mesh of as many devices for data."""
    steps = [
        splitjax.parallelize(make_step(DECODER, splitjax.value_and_grad), mesh=mesh, rules="embedding_owner")
        for mesh in ({"data": 1, "model": 8}, {"data": 8})
    ]
    plan = steps[0].plan(jax.eval_shape(state), batch)
    assert {one.layer for one in plan.constraints if "every device is a worker" in one.why} >= {
        "params/layers/q", "params/layers/down", "params/head",
    }  # fmt: skip
    compiled = [step.report(jax.eval_shape(state), batch).compute.compiled for step in steps]
    assert compiled[0] == compiled[1]
    (new, loss), (expected, at) = (
        steps[0](state(), batch),
        jax.jit(make_step(DECODER, jax.value_and_grad))(state(), batch),
    )
    np.testing.assert_allclose(loss, at, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), new["params"], expected["params"])
