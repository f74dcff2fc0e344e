"""Which updates may run on touched rows alone: what the analysis says, and what rows without gradient really do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.trace.flatten import flatten
from splitjax.trace.row_update import WholeTableUpdate, row_update
from splitjax.trace.tables import RowUpdate

NUM_ROWS, WIDTH = 12, 3
TOUCHED, EARLIER = (0, 3, 3, 11), (1, 3, 5, 7)


def make_step(tx):
    def step(state, batch):
        def loss_fn(params):
            return jnp.mean((params["table"][batch["ids"]] @ params["w"] * params["scale"]) ** 2)

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    table = jnp.linspace(-1.0, 1.0, NUM_ROWS * WIDTH).reshape(NUM_ROWS, WIDTH)
    # one number as an array: no row of a table
    params = {"table": table, "w": jnp.ones((WIDTH, 2)), "scale": jnp.ones(1)}
    return step, {"params": params, "opt": tx.init(params)}


def batch_of(ids):
    return {"ids": jnp.asarray(ids, jnp.int32)}


def analyse(step, state):
    """The verdict on the table `params/table`, and the paths of the leaves."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
    leaves, tree = jax.tree.flatten((state, batch_of(TOUCHED)))
    flat = flatten(jax.make_jaxpr(lambda *xs: jax.tree.leaves(step(*jax.tree.unflatten(tree, xs))))(*leaves))
    table = paths.index("params/table")
    gradient = next(
        op.outputs[0] for op in flat.ops if op.primitive == "_gradient" and op.inputs[0] == flat.inputs[table]
    )
    return row_update(flat, gradient, table, {n: n for n in range(len(paths))}, paths), paths


def resting_rows_change(step, state):
    """Paths of the leaves of which rows that the last step did not touch have other values behind it."""
    state, _ = jax.jit(step)(state, batch_of(EARLIER))  # so that moments are not zero
    after, _ = jax.jit(step)(state, batch_of(TOUCHED))
    resting = np.setdiff1d(np.arange(NUM_ROWS), TOUCHED)
    found = set()
    for (path, old), new in zip(jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(after), strict=True):
        if np.shape(old)[:1] == (NUM_ROWS,) and not np.array_equal(np.asarray(old)[resting], np.asarray(new)[resting]):
            found.add(jax.tree_util.keystr(path, simple=True, separator="/"))
    return found


ROW_BY_ROW = {
    "sgd": (optax.sgd(0.1), 1),
    "a schedule": (optax.sgd(optax.cosine_decay_schedule(0.1, 10)), 1),
    "adagrad": (optax.adagrad(0.1), 2),
    "clipped values": (optax.chain(optax.clip(0.01), optax.sgd(0.1)), 1),
    "clipped norm": (optax.chain(optax.clip_by_global_norm(0.01), optax.adagrad(0.1)), 2),
    "signs": (optax.sign_sgd(0.1), 1),
    "centred rows": (optax.chain(optax.centralize(), optax.sgd(0.1)), 1),
    "a trained part": (optax.masked(optax.adagrad(0.1), {"table": True, "w": False, "scale": False}), 2),
    "multi transform": (
        optax.multi_transform({"a": optax.adagrad(0.1), "b": optax.adam(0.1)}, {"table": "a", "w": "b", "scale": "b"}),
        2,
    ),
}
DECAYING = {
    "momentum": (optax.sgd(0.1, momentum=0.9), "opt/0/trace/table changes, by mul"),
    "adam": (optax.adam(0.1), "opt/0/mu/table changes, by mul"),
    "rmsprop": (optax.rmsprop(0.1), "opt/0/nu/table changes, by mul"),
    "lion": (optax.lion(0.1), "opt/0/mu/table changes, by mul"),
    "weight decay": (optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1)), "params/table changes, by mul"),
    "an average of updates": (optax.chain(optax.sgd(0.1), optax.ema(0.9)), "opt/1/ema/table changes, by mul"),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "an array of shape (12, 3) that is no state"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_updates_that_leave_resting_rows_alone(name):
    tx, num_leaves = ROW_BY_ROW[name]
    step, state = make_step(tx)
    found, paths = analyse(step, state)
    assert isinstance(found, RowUpdate), found
    assert len(found.leaves) == num_leaves and paths[found.leaves[0]] == "params/table"
    assert all(paths[leaf].endswith("table") for leaf in found.leaves)
    assert bool(found.totals) == (name == "clipped norm")
    assert resting_rows_change(step, state) == set()


@pytest.mark.parametrize("name", DECAYING)
def test_updates_that_do_not_are_refused_with_the_operation_that_changes_them(name):
    tx, reason = DECAYING[name]
    step, state = make_step(tx)
    found, _ = analyse(step, state)
    assert isinstance(found, WholeTableUpdate) and reason in found.reason and "test_row_update.py" in found.source
    assert resting_rows_change(step, state)


@pytest.mark.parametrize(
    ("tx", "reason"),
    [(optax.sm3(0.1), "reduce_max takes rows without gradient in"),
     (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), "loop or a condition")],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_too(tx, reason):
    found, _ = analyse(*make_step(tx))
    assert isinstance(found, WholeTableUpdate) and reason in found.reason


def test_a_decay_written_by_hand_and_a_gradient_that_leaves_the_step_are_seen():
    def decaying(state, batch):
        loss, grads = splitjax.value_and_grad(lambda p: jnp.sum(p["table"][batch["ids"]]))(state["params"])
        return {"params": jax.tree.map(lambda p, g: 0.99 * p - g, state["params"], grads)}, {"loss": loss}

    def leaking(state, batch):
        loss, grads = splitjax.value_and_grad(lambda p: jnp.sum(p["table"][batch["ids"]]))(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, {"grads": grads["table"]}

    state = {"params": {"table": jnp.ones((NUM_ROWS, WIDTH))}}
    assert "params/table changes, by mul" in analyse(decaying, state)[0].reason
    assert "beside its state" in analyse(leaking, state)[0].reason


def test_other_parameters_behind_a_norm_of_all_gradients_are_not_this_tables():
    """A bias of one number looks like a row that is laid out over all of them."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adagrad(0.1))

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda p: jnp.mean((p["table"][batch["ids"]].sum(-1) + p["bias"]) ** 2))(
            state["params"]
        )
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    params = {"table": jnp.linspace(-1.0, 1.0, NUM_ROWS * WIDTH).reshape(NUM_ROWS, WIDTH), "bias": jnp.ones(1)}
    state = {"params": params, "opt": tx.init(params)}
    found, paths = analyse(step, state)
    assert isinstance(found, RowUpdate), found
    assert {paths[leaf] for leaf in found.leaves} == {"params/table", "opt/1/0/sum_of_squares/table"}
    assert resting_rows_change(step, state) == set()
