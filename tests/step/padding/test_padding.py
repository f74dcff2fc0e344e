"""Leaves that are stored padded: the numbers of one device, everywhere the sizes that the step knows, and programs like
those of a size that divides."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.plan import Plan
from tests.step.padded_model import FEATURES, X64, assert_equal, language_model, reference, tokens, trained

MESH = {"data": 2, "model": 4}


def padded_shapes(plan):
    return {leaf.path: (leaf.logical, leaf.shape) for leaf in plan.leaves if leaf.logical is not None}


def test_a_vocabulary_that_does_not_divide_trains_as_on_one_device():
    with X64(True):
        step, init = language_model()
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        state = parallel.init(init, jax.random.key(0), example=(tokens(0),))
        assert state["params"]["table"].shape == (260, FEATURES)
        assert {shard.data.shape for shard in state["params"]["table"].addressable_shards} == {(65, FEATURES)}
        assert_equal(trained(parallel, init, state), reference())
        assert len(parallel.compiles) == 1
        plan = parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        shapes = padded_shapes(plan)
        assert shapes["params/table"] == ((257, FEATURES), (260, FEATURES))
        assert shapes["params/bias"] == ((257,), (260,)) and len(shapes) == 6  # with two moments of each
        assert any("stored padded" in note and "params/table 257 x 16 as 260 x 16" in note for note in plan.notes)
        assert {leaf.padding_bytes for leaf in plan.leaves if leaf.logical == (257, FEATURES)} == {96}  # 3 rows of 16


def test_gate_and_up_in_one_weight_are_padded_each():
    """Thirteen hidden features of each on two devices: the padding of both stands at the end of the weight."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            gate, up = jnp.split(x @ layer["gate_up"]["kernel"], 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]["kernel"]
        return ((x - batch["y"]) ** 2).mean()

    def stepping(gradient):
        def step(state, batch):
            loss, grads = gradient(loss_fn)(state["params"], batch)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        return step

    with X64(True):
        rng = np.random.default_rng(0)
        make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3)
        params = [{"gate_up": {"kernel": make(12, 26)}, "down": {"kernel": make(13, 12)}} for _ in range(2)]
        state, batch = {"params": params, "opt": tx.init(params)}, {name: make(8, 12) for name in "xy"}
        mesh = {"data": 4, "model": 2}
        parallel = splitjax.parallelize(
            stepping(splitjax.value_and_grad), mesh=mesh, rules="megatron", uneven="pad", donate=False
        )
        shapes = padded_shapes(parallel.plan(state, batch))
        assert shapes["params/0/gate_up/kernel"] == ((12, 26), (12, 28))
        assert shapes["params/1/down/kernel"] == ((13, 12), (14, 12))
        report = parallel.report(state, batch)
        assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
        alone, own = state, state
        for _ in range(3):
            alone, expected = jax.jit(stepping(jax.value_and_grad))(alone, batch)
            own, loss = parallel(own, batch)
            np.testing.assert_allclose(loss, expected, rtol=1e-10)
        assert_equal((parallel.logical(own), []), (alone, []))


def test_states_come_and_go_in_the_sizes_that_the_step_knows():
    with X64(True):
        step, init = language_model()
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        made = jax.jit(init)(jax.random.key(0))
        assert_equal(trained(parallel, init, parallel.place(made, example=(tokens(0),))), reference())
        state, _ = parallel(jax.tree.map(jnp.copy, made), tokens(0))  # logical leaves are padded by the call
        assert state["params"]["table"].shape == (260, FEATURES) and len(parallel.compiles) == 1
        whole = parallel.logical(state)
        assert whole["params"]["table"].shape == (257, FEATURES)
        assert whole["params"]["table"].sharding.spec == jax.P(None, "model")  # which does divide

        def evaluate(params, batch):
            return params["table"][batch["x"]] @ params["table"].T + params["bias"], params["table"].sum(0)

        expected = evaluate(whole["params"], tokens(1))
        for params in (state["params"], whole["params"]):
            for own, other in zip(parallel.like(evaluate)(params, tokens(1)), expected, strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-10)
        described = parallel.abstract_state(init, jax.random.key(0), example=(tokens(0),))
        assert described["params"]["table"].shape == (260, FEATURES)
        with pytest.raises(splitjax.errors.StateError, match="2 states"):
            parallel.logical(state, state)


def test_a_pinned_plan_pads_as_it_says():
    with X64(True):
        step, init = language_model()
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        shapes = jax.eval_shape(init, jax.random.key(0))
        plan = parallel.plan(shapes, tokens(0))
        read = Plan.from_json(plan.to_json())
        assert read == plan and '"logical":' in plan.to_json()
        pinned = splitjax.parallelize(step, mesh=MESH, rules="megatron", plan=read)
        assert not pinned.plan(shapes, tokens(0)).diff(plan)
        assert_equal(trained(pinned, init), reference())
        without = splitjax.parallelize(step, mesh=MESH, rules="megatron").plan(shapes, tokens(0))
        assert '"logical":' not in without.to_json() and not padded_shapes(without)


def test_the_program_is_that_of_a_size_that_divides():
    compiled = {}
    for vocabulary in (1257, 1260):
        step, init = language_model(vocabulary)
        parallel = splitjax.parallelize(step, mesh={"model": 4}, rules="megatron", uneven="pad")
        report = parallel.report(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        compiled[vocabulary] = (
            [(one.op, one.bytes) for one in report.unplanned],
            sorted((one.op, one.bytes) for one in report.collectives),
        )
        argument_bytes = parallel.lower(jax.eval_shape(init, jax.random.key(0)), tokens(0)).compile().memory_analysis()
        compiled[vocabulary] += (argument_bytes.argument_size_in_bytes,)
    assert compiled[1257] == compiled[1260]


def test_without_the_option_the_plan_names_it():
    step, init = language_model()
    parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron")
    plan = parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0))
    assert not padded_shapes(plan)
    assert any('uneven="pad"' in warning.remedy for warning in plan.warnings)
    with pytest.raises(splitjax.errors.SplitjaxError, match="uneven has no such value"):
        splitjax.parallelize(step, uneven="grow")


MATRIX = [
    ("megatron", {"model": 4}, {}),
    ("megatron", {"data": 2, "model": 4}, {"shard_state": True}),
    ("transformer", {"data": 2, "fsdp": 2, "model": 2}, {}),
    ("fsdp", {"data": 8}, {}),
    ("splitbrain", {"data": 2, "model": 4}, {}),
    ("splitbrain", {"data": 2, "model": 4}, {"group_comm": "modulo"}),
    ("embedding_owner", {"data": 8}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["boundary", "plain"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("rules", "mesh", "options"), MATRIX, ids=lambda value: str(value))
def test_every_rule_set(rules, mesh, options, tied, plain):
    if plain and (options.get("group_comm") or rules == "embedding_owner"):
        pytest.skip("asks for the boundary")
    with X64(True):
        step, init = language_model(tied=tied, gradient=jax.value_and_grad if plain else splitjax.value_and_grad)
        parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, uneven="pad", **options)
        assert_equal(trained(parallel, init), reference(tied))


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["megatron", "transformer", "splitbrain"])
def test_microbatches(rules):
    with X64(True):
        step, init = language_model(gradient=functools.partial(splitjax.value_and_grad, microbatches=2))
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, uneven="pad")
        assert_equal(trained(parallel, init), reference())


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["megatron", "transformer"])
def test_explicit_axes(rules):
    with X64(True):
        step, init = language_model()
        parallel = splitjax.parallelize(step, mesh=jax.make_mesh((2, 4), ("data", "model")), rules=rules, uneven="pad")
        assert_equal(trained(parallel, init), reference())


def table_model(tx, lookup):
    """A step whose table is read by look-ups alone."""

    def step(state, batch):
        def loss_fn(p):
            hidden = jnp.tanh(lookup(p["table"], batch["x"]).mean(1) @ p["dense"])
            return ((hidden - batch["y"][:, :1] / 257) ** 2).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def init(key):
        keys = jax.random.split(key)
        params = {
            "table": jax.random.normal(keys[0], (257, FEATURES)),
            "dense": jax.random.normal(keys[1], (FEATURES, 1)),
        }
        return {"params": params, "opt": tx.init(params)}

    return step, init


LOOKUPS = {"indexed": lambda table, ids: table[ids], "taken": lambda table, ids: jnp.take(table, ids, axis=0)}


@pytest.mark.slow
@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adagrad(0.1)], ids=["sgd", "adagrad"])
@pytest.mark.parametrize(
    ("rules", "mesh", "sync"),
    [("megatron", MESH, "zen"), ("megatron", MESH, "auto"), ("embedding_owner", {"data": 8}, "row_exchange")],
)
def test_padded_tables_go_by_rows(rules, mesh, sync, tx, lookup):
    with X64(True):
        step, init = table_model(tx, LOOKUPS[lookup])
        expected = trained(splitjax.parallelize(step, mesh={"data": 1}, rules="data_parallel"), init, steps=6)
        parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, uneven="pad", sync=sync)
        assert_equal(trained(parallel, init, steps=6), expected)
        plan = parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        assert "params/table" in padded_shapes(plan)
        assert [sync.scheme for sync in plan.syncs] != ["dense"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_partial_backpropagation(tied):
    with X64(True):
        step, init = language_model(tied=tied)
        options = {"mesh": MESH, "rules": "megatron", "backprop": splitjax.PartialBackprop((1.0, 0.5))}
        padded = splitjax.parallelize(step, uneven="pad", **options)
        assert_equal(trained(padded, init), trained(splitjax.parallelize(step, **options), init))


def test_annotations_pin_the_padded_dim():
    """Of Linen, which names the axes of an array of 33 columns."""
    columns = nn.Dense(33, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))
    model = nn.Sequential([columns, nn.relu, nn.Dense(7)])
    shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def step(params, batch):
        loss, grads = splitjax.value_and_grad(lambda params: (model.apply(params, batch) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    init = lambda key: model.init(key, jnp.zeros((8, 16)))
    shapes = jax.eval_shape(init, jax.random.key(0))
    plan = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad").plan(shapes, shape)
    assert padded_shapes(plan)["params/layers_0/kernel/value"] == ((16, 33), (16, 36))
    assert plan.spec("params/layers_0/kernel/value") == jax.P(None, "model")
    assert plan.spec("params/layers_2/kernel") == jax.P("model", None)  # what it meets is padded and split with it
    with pytest.raises(splitjax.errors.PinError, match="does not divide by 4"):
        splitjax.parallelize(step, mesh=MESH, rules="megatron").plan(shapes, shape)


@pytest.mark.parametrize("pooled", [False, True], ids=["maps", "pooled maps"])
@pytest.mark.parametrize("gradient", [splitjax.value_and_grad, jax.value_and_grad], ids=["boundary", "plain"])
def test_rows_that_maps_were_flattened_to_are_padded_by_whole_rows_of_the_map(pooled, gradient):
    """[7, 7, 5] maps make 245 rows, which no 4 devices share: the height is stored as 8, for 280 rows. Maps themselves
    and images have the sizes that the step knows."""
    size = 14 if pooled else 7
    optimizer = optax.adam(1e-2)

    def loss_fn(params, batch):
        maps = jax.lax.conv_general_dilated(
            batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        maps = nn.max_pool(jax.nn.relu(maps), (2, 2), (2, 2)) if pooled else jnp.tanh(maps)
        hidden = jnp.tanh(maps.reshape(maps.shape[0], -1) @ params["rows"] + params["bias"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["last"], batch["y"]).mean()

    def step(state, batch):
        loss, grads = gradient(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def init(key):
        shapes = {"conv": (3, 3, 2, 5), "rows": (245, 6), "bias": (6,), "last": (6, 3)}
        params = {
            name: jax.random.normal(jax.random.fold_in(key, i), shape) / 4
            for i, (name, shape) in enumerate(shapes.items())
        }
        return {"params": params, "opt": optimizer.init(params)}

    def batch(seed):
        rng = np.random.default_rng(seed)
        return {"x": rng.normal(size=(8, size, size, 2)), "y": rng.integers(0, 3, 8)}

    rows = splitjax.Rule("rows", path="**rows", shard=[{"in": "model"}])
    rules = splitjax.RuleSet("rows", (rows, splitjax.Rule("rest", path="**", shard=[])), replicated_batch="data")
    with X64(True):
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, uneven="pad")
        state = parallel.init(init, jax.random.key(0), example=(batch(0),))
        alone, jitted = jax.jit(init)(jax.random.key(0)), jax.jit(step)
        shapes = padded_shapes(parallel.plan(jax.eval_shape(init, jax.random.key(0)), batch(0)))
        assert shapes["params/rows"] == ((245, 6), (280, 6)) and len(shapes) == 3  # with two moments
        for seed in range(3):
            state, loss = parallel(state, batch(seed))
            alone, expected = jitted(alone, batch(seed))
            np.testing.assert_allclose(loss, expected, rtol=1e-10)
        for own, other in zip(jax.tree.leaves(parallel.logical(state)), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-10)
