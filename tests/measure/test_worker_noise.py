"""How much the gradients of workers differ, against the gradients of each worker's examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.measure.worker_noise import WorkerNoise
from splitjax.partial.stages import BackpropStages, Stage

NUM_WORKERS, NUM_EXAMPLES = 4, 8


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["first"])
    return jnp.mean((hidden @ params["last"] - batch["y"]) ** 2)


def train_step(params, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda value, grad: value - 0.1 * grad, params, grads), loss


def test_variance_and_norm_are_unbiased():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    params, batch = {"first": draw(3, 5), "last": draw(5, 2)}, {"x": draw(NUM_EXAMPLES, 3), "y": draw(NUM_EXAMPLES, 2)}
    step = splitjax.parallelize(train_step, mesh={"data": NUM_WORKERS}, rules="data_parallel")
    entry = step._programs.entry((params, batch))
    stages = BackpropStages((Stage("first", (0,), 60, 1.0, 1, 4), Stage("last", (1,), 40, 1.0, 1, 4)), 1.0)
    measured = WorkerNoise(entry, step.mesh, NUM_WORKERS, stages, "here")
    leaves = jax.tree.leaves((params, batch))
    noise, norms = measured.measure([leaves[position] for position in measured.used])
    size = NUM_EXAMPLES // NUM_WORKERS
    of_workers = [
        jax.grad(loss_of)(params, jax.tree.map(lambda array, w=w: array[w * size : (w + 1) * size], batch))
        for w in range(NUM_WORKERS)
    ]
    for number, name in enumerate(("first", "last")):
        grads = np.stack([np.ravel(worker[name]) for worker in of_workers]).astype(np.float64)
        variance = grads.var(axis=0, ddof=1).sum()
        assert noise[number] == pytest.approx(variance, rel=1e-4)
        assert norms[number] == pytest.approx((grads.mean(axis=0) ** 2).sum() - variance / NUM_WORKERS, rel=1e-3)
