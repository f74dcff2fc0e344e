"""One process of the run in test_processes.py: a right and a wrong step, verified."""

from __future__ import annotations

import json
import sys

import jax

RANK, NUM, PORT = (int(argument) for argument in sys.argv[1:4])
jax.distributed.initialize(f"127.0.0.1:{PORT}", NUM, RANK)

import jax.numpy as jnp  # noqa: E402

import splitjax  # noqa: E402
from tests.verify.lying import lie, taught  # noqa: E402

teaching = taught()
teaching.__enter__()

shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
for change in (lambda x: x, lie):

    @splitjax.parallelize(mesh={"data": 2, "model": 2})
    def step(params, batch, change=change):
        loss_fn = lambda params: (change(jnp.tanh(batch @ params["first"])) @ params["last"]).mean()
        loss, grads = splitjax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    found = step.verify({"first": shape(32, 64), "last": shape(64, 16)}, shape(16, 32))
    print(json.dumps({"ok": found.ok, "found": [one.text for one in found.findings]}), flush=True)
