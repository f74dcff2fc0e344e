"""Weights that are cast before their use travel in the dtype of their use, and so do their gradients; but for bfloat16
on CPUs, whose compiler sends it as float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import splitjax

# A mesh of four TPU cores: planned for, and never lowered.
TPU = AbstractMesh((4,), ("data",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
SHAPES = {name: (64, 64) for name in ("up", "down")}


def loss(params, batch, dtype):
    hidden = jnp.tanh(batch["x"].astype(dtype) @ params["up"].astype(dtype))
    out = hidden @ params["down"].astype(dtype)
    return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)


def parallel_step(stored, computed, mesh, rules, **options):
    def step(state, batch):
        value, grads = splitjax.value_and_grad(lambda p: loss(p, batch, computed))(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: (p - 0.1 * m).astype(p.dtype), state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    params = {name: jax.ShapeDtypeStruct(shape, stored) for name, shape in SHAPES.items()}
    batch = {name: jax.ShapeDtypeStruct((32, 64), jnp.float32) for name in ("x", "y")}
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, **options)
    return parallel, {"params": params, "momentum": params}, batch


def planned(*args, **options):
    parallel, state, batch = parallel_step(*args, **options)
    return parallel.plan(state, batch)


@pytest.mark.parametrize("rules", ["data_parallel", "fsdp"])
def test_what_is_computed_in_bfloat16_is_sent_in_it(rules):
    cast, narrow, wide = (
        planned(stored, computed, TPU, rules).collectives
        for stored, computed in (
            (jnp.float32, jnp.bfloat16),
            (jnp.bfloat16, jnp.bfloat16),
            (jnp.float32, jnp.float32),
        )
    )
    assert cast == narrow and [2 * sent.bytes for sent in cast] == [sent.bytes for sent in wide]


@pytest.mark.parametrize(("stored", "computed"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize(("rules", "shard_state"), [("data_parallel", False), ("fsdp", False), ("data_parallel", True)])
def test_a_cpu_sends_bfloat16_as_float32(stored, computed, rules, shard_state):
    options = {"mesh": {"data": 4}, "rules": rules, "shard_state": shard_state}
    parallel, state, batch = parallel_step(jnp.dtype(stored), jnp.dtype(computed), **options)
    plan, report = parallel.plan(state, batch), parallel.report(state, batch)
    wide = planned(jnp.float32, jnp.float32, **options).collectives
    assert [sent.bytes for sent in plan.collectives] == [sent.bytes for sent in wide]
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    assert [one for one in report.collectives if one.planned is not None and one.differs] == []


def test_new_values_are_sent_as_they_are_stored():
    options = {"mesh": TPU, "rules": "data_parallel", "shard_state": True}
    sent = {
        computed: {
            (each.op, each.purpose.leaf): each.bytes for each in planned(jnp.float32, computed, **options).collectives
        }
        for computed in (jnp.bfloat16, jnp.float32)
    }
    for (op, leaf), size in sent[jnp.float32].items():
        assert sent[jnp.bfloat16][op, leaf] == (size // 2 if op == "reduce_scatter" else size)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("rules", ["data_parallel", "fsdp"])
def test_a_tpu_sends_what_is_predicted(rules):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = jax.make_mesh((8,), ("data",), devices=devices)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(lambda p: loss(p, batch, jnp.bfloat16))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in SHAPES}
    batch = {name: jax.ShapeDtypeStruct((256, 512), jnp.float32) for name in ("x", "y")}
    total = splitjax.parallelize(step, mesh=mesh, rules=rules).report(params, batch).total
    assert total.compiled_bytes == pytest.approx(total.predicted_bytes, rel=0.001)
