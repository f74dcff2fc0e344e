"""A process of the run of `tests/test_meshes.py`: trains on a mesh with Explicit axes over several processes."""

from __future__ import annotations

import sys

import jax

rank, num, port = map(int, sys.argv[1:4])
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank)

import numpy as np  # noqa: E402

import splitjax  # noqa: E402
from tests.test_meshes import assert_on, batch_of, evaluate, linen_init, linen_step, storage_rules  # noqa: E402

NAMES = ("data", "fsdp", "model")


def values(tree):
    return [
        np.asarray(jax.experimental.multihost_utils.process_allgather(x, tiled=True)) for x in jax.tree.leaves(tree)
    ]


def check(mesh):
    step = splitjax.parallelize(linen_step, mesh=mesh, rules=storage_rules())
    want = linen_init(jax.random.key(0))
    state = step.init(linen_init, jax.random.key(0), example=(batch_of(),))
    assert_on(step.mesh, state)
    for number in range(2):
        whole = batch_of(number)
        local = jax.tree.map(lambda x: x[rank * 8 // num : (rank + 1) * 8 // num], whole)
        want, expected = jax.jit(linen_step)(want, whole)
        state, metrics = step(state, splitjax.global_batch(local))
        assert_on(step.mesh, (state, metrics))
        np.testing.assert_allclose(np.asarray(metrics["loss"]), expected["loss"], rtol=0, atol=1e-10)
    logits = step.like(evaluate)(state, batch_of())
    for a, b in zip(values((state, logits)), jax.tree.leaves((want, evaluate(want, batch_of()))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    assert_on(step.mesh, step.place(want, example=(batch_of(),)))
    return step.mesh


explicit = jax.make_mesh((2, 2, 2), NAMES)
with jax.set_mesh(explicit):
    check(explicit)
# Processes are nodes here: what is said to cross the slow network has another process along it, the rest has not.
hybrid = check({"data": 2, "fsdp": {"dcn": 2, "ici": 1}, "model": -1})
owners = np.vectorize(lambda device: device.process_index)(hybrid.devices)
assert owners.shape == (2, 2, 2) and (owners[:, 0] == 0).all() and (owners[:, 1] == 1).all()
print("all well")
