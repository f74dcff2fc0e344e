"""`splitbrain_fsdp`: convolutions stored in parts and gathered where they are used, dense layers split over the group.
Numbers of one device, crossing in turns and with sharded state; what is sent, to the byte; memory; the refusal."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import MeshError
from splitjax.models import build, make_step
from tests.steps import largest_difference

MESH = {"data": 2, "model": 4}
NUM_EXAMPLES = 32
OPTIONS = {
    "modulo": {"group_comm": "modulo"},
    "sharded state": {"group_comm": "gather", "shard_state": True},
}


def problem():
    spec = build("vgg11", width=0.25, head_features=64)
    init, step, _ = make_step(spec, optax.sgd(0.1, momentum=0.9), value_and_grad=splitjax.value_and_grad)
    rng = np.random.default_rng(0)
    batch = {
        name: (rng.normal(size=one.shape) if name == "image" else rng.integers(0, 10, one.shape)).astype(one.dtype)
        for name, one in spec.example(NUM_EXAMPLES).items()
    }
    return init, step, batch


@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in OPTIONS.items()])
def test_numbers_of_one_device(options):
    init, step, batch = problem()
    state = jax.jit(init)(jax.random.key(0))
    parallel = splitjax.parallelize(step, mesh=MESH, rules="splitbrain_fsdp", donate=False, **options)
    own = parallel.init(init, jax.random.key(0), example=(batch,))
    for _ in range(2):
        state, wanted = jax.jit(step)(state, batch)
        own, found = parallel(own, batch)
        assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=2e-5)
    assert largest_difference(own["params"], state["params"]) < 1e-4
    kernel = own["params"]["conv2_1"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8


def planned(rules, **options):
    init, step, batch = problem()
    parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, group_comm="gather", **options)
    state = parallel.abstract_state(init, jax.random.key(0), example=(batch,))
    return parallel, state, batch


def test_what_is_sent_is_what_is_compiled():
    parallel, state, batch = planned("splitbrain_fsdp", shard_state=True)
    report = parallel.report(state, batch)
    assert not report.missing
    assert sum(each.compiled.bytes for each in report.unplanned) <= 8  # scalars of the mean loss
    plan = parallel.plan(state, batch)
    sizes = {
        leaf.path.removesuffix("/kernel"): np.prod(leaf.shape)
        for leaf in plan.leaves
        if leaf.role == "param" and "conv" in leaf.path and leaf.path.endswith("/kernel")
    }
    # A gather in the forward and one in the backward pass, over all eight devices; small weights stay whole.
    stored = {layer for layer, size in sizes.items() if size >= 1024}
    gathers = [
        each
        for each in plan.collectives
        if each.op == "all_gather" and each.layer in stored and each.bytes > 1024  # less: new biases
    ]
    assert len(stored) == len(sizes) - 1 and len(gathers) == 2 * len(stored)
    assert {each.axis for each in gathers} == {"data+model"}
    assert sum(each.bytes for each in gathers) == sum(2 * 4 * sizes[layer] * 7 // 8 for layer in stored)


def test_less_memory_than_whole_convolutions():
    plans = [
        parallel.plan(state, batch)
        for parallel, state, batch in (planned(rules, shard_state=True) for rules in ("splitbrain", "splitbrain_fsdp"))
    ]
    whole, stored = (plan.memory.state_bytes for plan in plans)
    assert stored < 0.6 * whole
    assert [plan.spec("params/dense1/kernel") for plan in plans] == [plans[0].spec("params/dense1/kernel")] * 2


def test_a_group_alone_is_refused():
    init, step, batch = problem()
    parallel = splitjax.parallelize(step, mesh={"data": 1, "model": 8}, rules="splitbrain_fsdp")
    with pytest.raises(MeshError, match="over model alone, whose devices are one group") as caught:
        parallel.init(init, jax.random.key(0), example=(batch,))
    assert "{'data': 2, 'model': 4}" in str(caught.value)
