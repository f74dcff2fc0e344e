"""Decoders in today's idioms: what rematerialisation repeats, weights that are used twice, fused ones and bfloat16 are
sent as planned, byte for byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import splitjax
from benchmarks.modern.models import Decoder, make_step, state_of
from splitjax.plan import Phase, PurposeKind

SMALL = {"layers": 2, "width": 32, "hidden": 64, "vocab": 64, "seq": 8, "examples": 8, "heads": 4, "kv_heads": 4}
MEGATRON = ("megatron", {"data": 2, "tensor": 4})
TRANSFORMER = ("transformer", {"data": 2, "fsdp": 2, "tensor": 2})
FSDP = ("fsdp", {"fsdp": 8})


def report_of(decoder, rules, mesh):
    step = splitjax.parallelize(make_step(decoder, splitjax.value_and_grad), mesh=mesh, rules=rules)
    return step.plan(state_of(decoder), decoder.batch()), step.report(state_of(decoder), decoder.batch())


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (MEGATRON, {}),
        (MEGATRON, {"fused": True, "tied": True, "dtype": "bfloat16"}),
        (TRANSFORMER, {"tied": True}),
        (TRANSFORMER, {"fused": True, "kv_heads": 2}),
        (FSDP, {"tied": True, "dtype": "bfloat16"}),
        pytest.param(MEGATRON, {"remat": False}, marks=pytest.mark.slow),
        pytest.param(TRANSFORMER, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param(FSDP, {"fused": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_sent_is_what_was_planned(layout, options):
    decoder = Decoder(**SMALL | options)
    _, report = report_of(decoder, *layout)
    assert report.missing == ()
    assert [one for one in report.collectives if one.planned is not None and one.differs] == []
    tokens = decoder.examples * decoder.seq
    assert [one for one in report.unplanned if np.prod(one.compiled.shape) > tokens] == []


def test_what_rematerialisation_repeats_is_in_the_plan_once_more():
    """Of a layer that is computed again the last sum is not: nothing of the backward pass reads it."""
    plans = [report_of(Decoder(**SMALL, remat=remat), *MEGATRON)[0] for remat in (False, True)]
    again = [[one for one in plan.collectives if one.purpose.again] for plan in plans]
    assert again[0] == []
    (repeated,) = again[1]
    assert repeated.purpose.kind == PurposeKind.ROWS_OUTPUT and repeated.purpose.phase == Phase.BACKWARD
    assert repeated.layer == "params/layers/o" and repeated.why.endswith("again where layers are rematerialised")
    assert sum(one.bytes for one in plans[1].collectives) - repeated.bytes == sum(
        one.bytes for one in plans[0].collectives
    )


@pytest.mark.parametrize(
    ("policy", "repeated"),
    [
        (None, 1),
        (jax.checkpoint_policies.dots_saveable, 0),
        (jax.checkpoint_policies.nothing_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names("sum"), 0),
    ],
)
def test_what_a_policy_saves_is_not_repeated(policy, repeated):
    def layer(x, w):
        y = checkpoint_name(jnp.tanh(x @ w["up"]) @ w["down"], "sum")
        return jnp.tanh(x + y), None

    def step(params, batch):
        def loss(params):
            x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), batch["x"] * params["scale"], params["layers"])
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = splitjax.value_and_grad(loss)(params)
        return optax.tree.add_scale(params, -0.1, grads), value

    params = {"layers": {"up": jnp.ones((3, 16, 32)), "down": jnp.ones((3, 32, 16))}, "scale": jnp.ones((16,))}
    batch = {name: jnp.ones((8, 16)) for name in "xy"}
    parallel = splitjax.parallelize(step, mesh={"data": 2, "tensor": 4}, rules="megatron")
    again = [one for one in parallel.plan(params, batch).collectives if one.purpose.again]
    assert len(again) == repeated
    assert parallel.report(params, batch).missing == ()


@pytest.mark.parametrize(
    ("rules", "mesh", "shard_state"),
    [("data_parallel", {"data": 8}, True), ("fsdp", {"data": 8}, False), (*TRANSFORMER, False)],
)
@pytest.mark.parametrize("microbatches", [None, 2])
def test_lookups_share_what_is_gathered_and_are_summed_one_by_one(rules, mesh, shard_state, microbatches):
    """In microbatches a worker adds up what all of them give before anything is sent."""

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        first, then = params["table"][batch["first"]], params["table"][batch["then"]]
        return jnp.mean(((hidden * first) @ params["through"] * then) ** 2)

    options = {} if microbatches is None else {"microbatches": microbatches}
    optimizer = optax.adam(1e-3)

    def step(state, batch):
        value, gradients = splitjax.value_and_grad(loss, **options)(state["params"], batch)
        updates, new = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": new}, value

    f32, ids = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    params = {"up": f32(16, 32), "table": f32(512, 32), "through": f32(32, 32)}
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, shard_state=shard_state)
    report = parallel.report(state, {"x": f32(64, 16), "first": ids, "then": ids})
    assert report.missing == ()
    assert [each for each in report.unplanned if each.bytes >= 100] == []
    kinds = PurposeKind.GRADIENT, PurposeKind.GRADIENT_ONTO_STATE
    planned = [one for each in report.collectives for one in each.realised if one.layer == "params/table"]
    added_before = microbatches is not None and rules == "data_parallel"  # workers have whole tables
    assert sum(one.purpose.kind in kinds for one in planned) == (1 if added_before else 2)
