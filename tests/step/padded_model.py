"""A language model whose vocabulary divides by nothing, for tests of padded states."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import splitjax

X64 = jax.enable_x64
FEATURES, HIDDEN = 16, 32


def language_model(vocabulary=257, tied=True, gradient=splitjax.value_and_grad, tx=None):
    """A step like GPT-2's: a table, a rematerialised block in a scan, logits over the vocabulary with a bias; Adam
    behind a clipped norm. Returns it with what makes its state."""
    tx = tx or optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def step(state, batch):
        def loss_fn(p):
            block = jax.checkpoint(lambda h: h + jax.nn.relu(h @ p["up"] + p["up_bias"]) @ p["down"])
            hidden, _ = jax.lax.scan(lambda h, _: (block(h), None), p["table"][batch["x"]], None, length=2)
            logits = hidden @ (p["table"].T if tied else p["head"]) + p["bias"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = gradient(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def init(key):
        keys = jax.random.split(key, 4)
        params = {
            "table": jax.random.normal(keys[0], (vocabulary, FEATURES)),
            "up": jax.random.normal(keys[1], (FEATURES, HIDDEN)),
            "up_bias": jnp.zeros(HIDDEN),
            "down": 0.1 * jax.random.normal(keys[2], (HIDDEN, FEATURES)),
            "bias": jnp.zeros(vocabulary),
        }
        if not tied:
            params["head"] = jax.random.normal(keys[3], (FEATURES, vocabulary))
        return {"params": params, "opt": tx.init(params)}

    return step, init


def tokens(seed, vocabulary=257, examples=16):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, vocabulary, (examples, 6)) for name in "xy"}


def trained(parallel, init, state=None, steps=3):
    """The logical state after some steps, and the losses."""
    if state is None:
        state = parallel.init(init, jax.random.key(0), example=(tokens(0),))
    losses = []
    for seed in range(steps):
        state, loss = parallel(state, tokens(seed))
        losses.append(float(loss))
    return parallel.logical(state), losses


@functools.cache
def reference(tied=True):
    with X64(True):
        step, init = language_model(tied=tied)
        return trained(splitjax.parallelize(step, mesh={"data": 1}, rules="data_parallel"), init)


def assert_equal(found, expected):
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10)
    for own, other in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(other), rtol=1e-10, atol=1e-10)
