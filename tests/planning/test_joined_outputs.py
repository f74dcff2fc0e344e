"""Columns that are concatenated with other values are gathered for it, once, and all that is sent is planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from benchmarks.corpus.cells import Unit
from benchmarks.corpus.steps import ready
from splitjax.plan import Phase, PurposeKind

MESH = {"data": 2, "tensor": 4}
EXAMPLES, WIDTH, HIDDEN, COLUMNS, ROWS = 8, 12, 16, 8, 24


def joined_twice(params, batch):
    """The columns stand before their own products with others, as in a DLRM."""
    x = jax.nn.relu(jax.nn.relu(batch["x"] @ params["up"]) @ params["down"])
    columns = jax.nn.relu(x @ params["columns"] + params["bias"])
    products = jnp.einsum("bfk,bk->bf", params["table"][batch["ids"]], columns)
    return jnp.mean((jnp.concatenate([columns, products], 1) @ params["last"] - batch["y"]) ** 2)


def read_by_rows(params, batch):
    """A row-split product reads the very columns that are concatenated, too."""
    columns = jax.nn.relu(batch["x"] @ params["up"])
    joined = jnp.concatenate([columns, params["table"][batch["ids"]][:, :, 0]], 1)
    return jnp.mean((columns @ params["down"]) ** 2) + jnp.mean(joined**2)


def setup():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4)
    params = {"up": make(WIDTH, HIDDEN), "down": make(HIDDEN, WIDTH), "columns": make(WIDTH, COLUMNS)}
    params |= {"bias": make(COLUMNS), "last": make(COLUMNS + 3, 4), "table": make(ROWS, COLUMNS)}
    batch = {"x": make(EXAMPLES, WIDTH), "y": make(EXAMPLES, 4)}
    batch["ids"] = jnp.asarray(rng.integers(0, ROWS, (EXAMPLES, 3)), jnp.int32)
    return params, batch


def stepping(value_and_grad, loss):
    def step(params, batch):
        value, grads = value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def gathers(plan):
    return [one for one in plan.collectives if one.purpose.kind == PurposeKind.WHOLE_OUTPUT]


@pytest.mark.parametrize("rules", ["megatron", "transformer"])
def test_columns_that_are_concatenated_are_gathered_once(rules):
    with jax.enable_x64(True):
        params, batch = setup()
        step = stepping(splitjax.value_and_grad, joined_twice)
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, donate=False)
        alone = jax.jit(stepping(jax.value_and_grad, joined_twice))(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    planned = [one for one in report.collectives if one.planned is not None]
    assert sum(one.bytes for one in planned) == report.total.predicted_bytes
    # A device sends the columns that it has, a quarter of 4 examples, around a ring of four.
    assert [(one.op, one.axis, one.bytes) for one in gathers(plan)] == [
        ("all_gather", "tensor", 3 * (EXAMPLES // 2) * (COLUMNS // 4) * 8)
    ]


@pytest.mark.parametrize("tower", ["first", "second"])
def test_towers_that_are_stacked_with_one_that_is_concatenated_are_gathered(tower):
    """Columns of towers that are stacked are one dim for the trace: which tower is joined, it has to look up. Were the
    other left in parts, XLA would cut up the first again, and sum their products over devices."""

    def towers(params, batch):
        made = {
            name: jax.nn.relu(jax.nn.relu(batch[name] @ params[f"{name}_up"]) @ params[f"{name}_down"] @ params[name])
            for name in ("first", "second")
        }
        stacked = jnp.stack([*made.values()], 1)
        products = jnp.einsum("bfk,bgk->bfg", stacked, stacked).reshape(EXAMPLES, 4)
        return jnp.mean((jnp.concatenate([made[tower], products], 1) @ params["last"] - batch["y"]) ** 2)

    with jax.enable_x64(True):
        made, batch = setup()
        params = {"last": made["last"][:1].repeat(COLUMNS + 4, 0)}
        for name in ("first", "second"):
            params |= {f"{name}_up": made["up"], f"{name}_down": made["down"], name: made["columns"]}
        batch = {"first": batch["x"], "second": 2 * batch["x"], "y": batch["y"]}
        step = stepping(splitjax.value_and_grad, towers)
        parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron", donate=False)
        alone = jax.jit(stepping(jax.value_and_grad, towers))(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    columns = 3 * (EXAMPLES // 2) * (COLUMNS // 4) * 8
    assert [(one.layer, one.bytes) for one in gathers(plan)] == [("first", columns), ("second", columns)]


def test_columns_that_are_reduced_before_they_are_joined_are_summed_over_devices():
    """A norm of columns in parts is a sum over devices; one of columns that are whole already is none."""

    def normed(columns):
        return columns / jnp.sqrt(jnp.sum(columns * columns, -1, keepdims=True) + 1)

    def loss(params, batch):
        columns = normed(jnp.tanh(batch["x"] @ params["columns"]))
        joined = jnp.concatenate([columns, batch["x"]], 1) @ params["last"]
        return jnp.mean((joined - batch["y"]) ** 2 * jnp.max(columns, -1, keepdims=True))

    with jax.enable_x64(True):
        made, batch = setup()
        params = {"columns": made["columns"], "last": made["last"][:1].repeat(20, 0)}
        step = stepping(splitjax.value_and_grad, loss)
        parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron")
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    of_columns = [one for one in plan.collectives if one.purpose.kind == PurposeKind.REDUCED_FEATURES]
    # Of the sum of each of 4 examples, and of the cotangent of what columns are divided by, a device sends a quarter
    # around a ring of four, twice.
    assert [(one.op, one.layer, one.bytes, one.purpose.phase) for one in of_columns] == [
        ("all_reduce", "columns", 2 * 3 * 8, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    assert [one.bytes for one in report.collectives if one.planned in of_columns] == [2 * 3 * 8] * 2
    assert report.missing == ()


def test_a_tower_that_is_not_joined_stays_in_parts():
    """Nothing but a sum ties the columns of two towers, and one is concatenated afterwards."""

    def towers(params, batch):
        first, second = jnp.tanh(batch["x"] @ params["first"]), jnp.tanh(2 * batch["x"] @ params["second"])
        joined = jnp.concatenate([first, batch["x"]], 1) @ params["last"]
        return jnp.mean((joined - batch["y"]) ** 2) + jnp.mean((second - first) ** 2)

    with jax.enable_x64(True):
        made, batch = setup()
        params = {"first": made["columns"], "second": made["columns"], "last": made["last"][:1].repeat(20, 0)}
        step = stepping(splitjax.value_and_grad, towers)
        plan = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron").plan(params, batch)
    assert [one.layer for one in gathers(plan)] == ["first"]


def test_columns_that_rows_read_stay_in_parts():
    with jax.enable_x64(True):
        params, batch = setup()
        step = stepping(splitjax.value_and_grad, read_by_rows)
        plan = splitjax.parallelize(step, mesh=MESH, rules="megatron").plan(params, batch)
    assert not gathers(plan)


def test_a_dlrm_sends_nothing_beside_its_plan():
    made = ready(Unit("dlrm", "linen", "1"))
    step = made.parallelize(made.step, mesh={"tensor": 4}, rules="transformer")
    report = step.report(*made.arguments)
    assert report.missing == () and report.unplanned == ()
    assert report.total.compiled_bytes == report.total.predicted_bytes
    assert len(gathers(step.plan(*made.arguments))) == 1


def sampled(params, batch):
    """A sampled softmax: columns meet the rows of the true class and of drawn ones."""
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    hidden = hidden @ params["down"] if "down" in params else hidden
    hidden = jnp.tanh(hidden @ params["columns"])
    true = jnp.sum(hidden * params["table"][batch["ids"][:, 0]], -1, keepdims=True)
    drawn = jnp.einsum("bk,bfk->bf", hidden, params["table"][batch["ids"]])
    return jnp.mean(jax.nn.softplus(drawn - true))


def columns_of(**shards):
    """Rules that split the parameters of these names so, and leave the rest whole."""
    own = (splitjax.Rule(name, path=f"*{name}", shard=[shard], ties="hard") for name, shard in shards.items())
    return splitjax.RuleSet("own", (*own, splitjax.Rule("rest", path="**", shard=[])), replicated_batch="data")


# The last product reads what rows leave whole, or the columns of another one.
COLUMNS_BEHIND_COLUMNS = columns_of(up={"out": "tensor"}, columns={"out": "tensor"}, table={"vocab": "tensor"})


@pytest.mark.parametrize(
    "rules", ["megatron", "transformer", COLUMNS_BEHIND_COLUMNS], ids=["megatron", "transformer", "columns"]
)
def test_columns_that_meet_rows_of_a_table_are_gathered_once(rules):
    """XLA summed logits over the devices, and took the parts of the rows' cotangents to the table by all-to-alls."""
    with jax.enable_x64(True):
        made, batch = setup()
        params = {name: made[name] for name in ("up", "down", "columns", "table")}
        if rules is COLUMNS_BEHIND_COLUMNS:
            params |= {"columns": made["columns"][:1].repeat(HIDDEN, 0)}
            del params["down"]
        step = stepping(splitjax.value_and_grad, sampled)
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, donate=False)
        alone = jax.jit(stepping(jax.value_and_grad, sampled))(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert "tensor" in plan.leaf("table").axes_by_dim[0] and plan.leaf("columns").spec[1] == "tensor"
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    assert [(one.op, one.axis, one.bytes) for one in gathers(plan) if one.layer == "columns"] == [
        ("all_gather", "tensor", 3 * (EXAMPLES // 2) * (COLUMNS // 4) * 8)
    ]


def test_columns_that_meet_columns_of_a_table_stay_in_parts():
    """Each device has the same parts of both: it multiplies what it has."""
    rules = columns_of(table={"features": "tensor"}, columns={"out": "tensor"})
    params, batch = setup()
    parallel = splitjax.parallelize(stepping(splitjax.value_and_grad, sampled), mesh=MESH, rules=rules)
    plan = parallel.plan(params, batch)
    assert plan.leaf("table").spec[1] == "tensor" and plan.leaf("columns").spec[1] == "tensor"
    assert gathers(plan) == []


def routed(params, batch):
    """Two of four experts for each token, by the scores of a router whose columns are split."""
    x = jnp.tanh(batch["x"] @ params["up"] @ params["down"])
    gates = jax.nn.softmax(x @ params["router"])
    best, chosen = jax.lax.top_k(gates, 2)
    mixed = jnp.einsum("bk,bkd->bd", best, params["table"][chosen][..., :4])
    return jnp.mean((mixed - batch["y"]) ** 2) + jnp.mean(gates**2)


def test_scores_that_are_put_in_order_are_gathered_once():
    """XLA took the best of each device's columns, exchanged them, and split what was made of the places."""
    with jax.enable_x64(True):
        made, batch = setup()
        params = {name: made[name] for name in ("up", "down", "table")} | {"router": made["columns"][:, :4]}
        step = stepping(splitjax.value_and_grad, routed)
        parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron", donate=False)
        alone = jax.jit(stepping(jax.value_and_grad, routed))(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert [(one.layer, one.bytes) for one in gathers(plan)] == [("router", 3 * (EXAMPLES // 2) * (4 // 4) * 8)]
    # XLA's compiler for CPUs gathers the examples, too, for what takes the largest.
    beside = [(one.op, one.axis) for one in report.unplanned if one.compiled.shape]
    assert report.missing == () and set(beside) <= {("all_gather", "data")}


def test_what_is_put_in_order_keeps_its_examples_where_the_layer_has_them():
    """XLA dealt the examples out over the columns' axis, too, in place of the planned gather: the layer behind has them
    so."""

    def loss(params, batch):
        best, _ = jax.lax.top_k(jnp.tanh(batch["x"] @ params["columns"]), 4)
        return jnp.mean((best @ params["last"] - batch["y"]) ** 2)

    keys = jax.random.split(jax.random.key(0), 2)
    params = {"columns": jax.random.normal(keys[0], (48, 32)) / 8, "last": jnp.ones((4, 8))}
    batch = {"x": jax.random.normal(keys[1], (16, 48)), "y": jnp.ones((16, 8))}
    rules = splitjax.RuleSet("columns", (splitjax.Rule("by", kind="dense", shard=[{"out": "model"}], ties="hard"),))
    mesh = {"data": 2, "model": 4}
    parallel = splitjax.parallelize(stepping(splitjax.value_and_grad, loss), mesh=mesh, rules=rules, donate=False)
    assert [(one.layer, one.bytes) for one in gathers(parallel.plan(params, batch))][:1] == [("columns", 3 * 8 * 8 * 4)]
    assert parallel.report(params, batch).missing == ()
    alone = jax.jit(stepping(jax.value_and_grad, loss))(params, batch)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, parallel(params, batch), alone)


def test_the_largest_of_a_vocabulary_are_taken_where_its_columns_lie():
    """Of many columns the best few are less than all of them."""

    def loss(params, batch):
        logits = jnp.tanh(batch["x"] @ params["up"] @ params["down"]) @ params["last"]
        best, _ = jax.lax.top_k(logits, 2)
        return jnp.mean(best**2) + jnp.mean(logits**2)

    params, batch = setup()
    params["last"] = jnp.ones((WIDTH, 64), jnp.float32)
    step = stepping(splitjax.value_and_grad, loss)
    plan = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron").plan(params, batch)
    assert gathers(plan) == []
