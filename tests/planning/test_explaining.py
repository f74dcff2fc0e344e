"""`plan.explain`: each alternative costs what the plan costs that one gets by its rule."""

from __future__ import annotations

import dataclasses
import pickle
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax.errors import PlanError, TargetError, UnavailableError
from splitjax.models import build, make_step
from splitjax.plan import Plan
from splitjax.rules import Rule, load_rules

SIZES = {"data": 2, "model": 4}
CASES = {
    "column-split": ("vgg16", "splitbrain", {}, "dense1"),
    "tied to the next": ("transformer", "megatron", {}, "block1/mlp/up"),
    "by a pair of axes": ("transformer", "transformer", {}, "params/block2/attention/out/kernel"),
    "stored in parts": ("transformer", "fsdp", {}, "logits"),
    "sharded state": ("deepfm", "megatron", {"shard_state": True}, "deepfm/dense1"),
    "whole, in microbatches": ("transformer", "data_parallel", {"microbatches": 4}, "logits"),
}


def step_and_shapes(model, rules, **options):
    spec = build(model)
    init, step, _ = make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    shapes = (jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), spec.example(64))
    mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    return splitjax.parallelize(step, mesh=mesh, rules=rules, **options), shapes


def a_layer(plan, name):
    known = [layer.name for layer in plan.layers]
    ends = [each for each in known if each.endswith(name)]
    return name if ends or "kernel" in name else known[-1]


@pytest.mark.parametrize("case", CASES)
def test_an_alternative_costs_what_its_rule_gives(case):
    model, rules, options, name = CASES[case]
    step, shapes = step_and_shapes(model, rules, **options)
    plan = step.plan(*shapes)
    explained = plan.explain(a_layer(plan, name))
    assert explained.alternatives[0].is_planned and explained.alternatives[0].cost == explained.planned
    assert explained.planned.sent_bytes == sum(each.bytes for each in plan.collectives)
    summed = plan.with_summed_memory().memory
    assert (explained.planned.state_bytes, explained.planned.peak_bytes) == (summed.state_bytes, summed.peak_bytes)
    had = [each for each in explained.alternatives[1:] if each.cost is not None]
    assert had and all(each.rule for each in had)
    assert [each.cost.seconds for each in had] == sorted(each.cost.seconds for each in had)
    for each in had:
        entry = tomllib.loads(each.rule)["rule"][0]
        known = load_rules(rules)
        changed = dataclasses.replace(known, name="changed", rules=(Rule(**entry), *known.rules))
        other = step_and_shapes(model, changed, **options)[0].plan(*shapes).with_summed_memory()
        assert [other.leaf(path).spec for path, _ in each.specs] == [spec for _, spec in each.specs]
        # Whether examples cross in turns is decided anew for a plan of its own, and as planned for an alternative.
        if other.group_comm == plan.group_comm:
            assert each.cost.sent_bytes == sum(c.bytes for c in other.collectives), each.name
            assert each.cost.peak_bytes == other.memory.peak_bytes, each.name
        assert each.cost.state_bytes == other.memory.state_bytes, each.name
        moved = {leaf.path for leaf in other.leaves if leaf.spec != plan.leaf(leaf.path).spec}
        assert {layer.name for layer in plan.layers if moved & set(layer.params)} <= {explained.layer, *each.along}


def mlp_step(params, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    value, gradients = splitjax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


SHAPES = (
    {"up": jax.ShapeDtypeStruct((64, 254), jnp.float32), "down": jax.ShapeDtypeStruct((254, 64), jnp.float32)},
    jax.ShapeDtypeStruct((32, 64), jnp.float32),
)
MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def test_what_does_not_divide_is_named():
    plan = splitjax.parallelize(mlp_step, mesh=MESH, rules="megatron").plan(*SHAPES)
    refused = [each for each in plan.explain("up").alternatives if each.cost is None]
    assert [each.name for each in refused] == ["out split over model"]
    assert "out 254 does not divide by model=4" in refused[0].refused and "out 254" in str(plan.explain("up"))


def test_pins_are_named_and_can_be_taken_out():
    sharding = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(None, "data"))
    up = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=sharding)
    down = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plan = splitjax.parallelize(mlp_step, mesh=MESH, rules="megatron").plan({"up": up, "down": down}, SHAPES[1])
    explained = plan.explain("up")
    assert any("pinned by" in reason and "before every rule" in reason for reason in explained.reasons)
    others = [each for each in explained.alternatives if not each.is_planned]
    assert others and all("taken out" in each.name for each in others)
    assert {spec for each in others for _, spec in each.specs} != {plan.leaf("up").spec}


def test_a_pinned_plan_is_explained_and_a_read_one_is_not(tmp_path):
    shapes = ({name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in ("up", "down")}, SHAPES[1])
    plan = splitjax.parallelize(mlp_step, mesh=MESH, rules="fsdp").plan(*shapes)
    plan.save(tmp_path / "plan.json")
    pinned = splitjax.parallelize(mlp_step, mesh=MESH, plan=tmp_path / "plan.json").plan(*shapes)
    explained = pinned.explain("up")
    assert all("pinned for the step" in reason for reason in explained.reasons[:1])
    costs = {each.specs: each.cost for each in plan.explain("up").alternatives}
    assert len(costs) > 2 and {each.specs: each.cost for each in explained.alternatives} == costs
    for other in (Plan.load(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan)), dataclasses.replace(plan)):
        with pytest.raises(UnavailableError, match="does not know the step") as caught:
            other.explain("up")
        assert caught.value.remedy
    assert plan == Plan.load(tmp_path / "plan.json") and "explainer" not in plan.to_json()


def test_arrays_of_no_layer_and_seconds_of_a_target():
    step, shapes = step_and_shapes("vgg16", "splitbrain")
    plan = step.plan(*shapes)
    batch = next(leaf for leaf in plan.leaves if leaf.role == "batch")
    explained = plan.explain(batch.path)
    assert explained.alternatives == () and "examples" in explained.reasons[0]
    moment = next(leaf for leaf in plan.leaves if leaf.role == "optimizer" and leaf.path.endswith("dense1/kernel"))
    assert plan.explain(moment.path).layer == plan.explain("dense1").layer
    here, there = plan.explain("dense1"), plan.explain("dense1", on="tpu:v5e:2x4")
    assert there.planned.seconds < here.planned.seconds and there.planned.sent_bytes == here.planned.sent_bytes
    assert "tpu:v5e:2x4" in str(there) and "<table" in there._repr_html_()


@pytest.mark.parametrize(
    ("name", "on", "error", "words"),
    [
        ("dense9", None, PlanError, "no such layer"),
        ("kernel", None, PlanError, "means"),
        ("dense1", "tpu:v5e:4x4", TargetError, "devices"),
        ("dense1", "abacus", TargetError, "target"),
    ],
)
def test_mistakes(name, on, error, words):
    step, shapes = step_and_shapes("vgg16", "splitbrain")
    with pytest.raises(error, match=words) as caught:
        step.plan(*shapes).explain(name, on)
    assert caught.value.remedy and caught.value.place


def test_a_gate_is_compared_with_those_that_a_product_reads_with_it():
    spec = build("lstm", vocab_size=64, max_len=4, embedding_width=8, hidden_width=16, negatives=4)
    init, step, _ = make_step(spec, optax.sgd(0.1), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init, jax.random.key(0)), spec.example(8)
    plan = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron").plan(*arguments)
    hidden = {f"params/lstm1/cell/h{gate}" for gate in "fgio"}
    first, other = (plan.explain(f"params/lstm1/cell/{gate}") for gate in ("hf", "hg"))
    assert not first.alike and any("one product reads its weight with those of" in why for why in first.reasons)
    costs = []
    for explained in (first, other):
        whole = next(each for each in explained.alternatives if each.name == "whole")
        assert {*whole.along, explained.layer} == hidden
        costs.append(whole.cost)
    assert costs[0] == costs[1], "it is the same layout"
