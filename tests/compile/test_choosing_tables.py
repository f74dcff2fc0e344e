"""`rules="auto"` where tables go by rows: what they send decides, and tables of any size may have owners."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax

ROWS, WIDTH, EXAMPLES, WORDS = 50_001, 32, 256, 64
MESH = {"data": 4}
TX = optax.adagrad(0.1)


def loss_of(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean((rows @ params["head"]).sum(axis=(1, 2)) ** 2)


def step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(state["params"], batch)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def init(key):
    params = {"table": jax.random.normal(key, (ROWS, WIDTH)), "head": jax.random.normal(key, (WIDTH, 64)) / 8}
    return {"params": params, "opt": TX.init(params)}


def batch():
    return {"ids": np.random.default_rng(0).integers(0, ROWS, (EXAMPLES, WORDS)).astype(np.int32)}


def candidates(**options):
    """Milliseconds by rule set of all that was compared, and what was refused."""
    decorated = splitjax.parallelize(step, mesh=MESH, rules="auto", **options)
    decorated.plan(jax.eval_shape(init, jax.random.key(0)), batch())
    choice = decorated.choice
    return choice.best.rules.name, {one.rules.name: 1e3 * one.seconds for one in choice.candidates}, choice.refused


def test_tables_of_any_size_get_owners_where_padding_is_allowed():
    best, found, refused = candidates(sync="auto", uneven="pad")
    assert best == "embedding_owner" and not refused
    assert found["embedding_owner"] == min(found.values())
    # Without padding the rows do not divide among the workers.
    best, _, refused = candidates(sync="auto")
    assert best != "embedding_owner" and "embedding_owner" in {each.rules for each in refused}


def test_a_table_that_goes_by_rows_is_not_priced_as_if_all_of_it_were_sent():
    (_, dense, _), (_, rows, _) = candidates(uneven="pad"), candidates(sync="auto", uneven="pad")
    assert rows["data_parallel"] < 0.5 * dense["data_parallel"]
    # Its own rule set exchanges rows whether or not the user asks for it.
    assert dense["embedding_owner"] == pytest.approx(rows["embedding_owner"])


def test_the_numbers_of_one_device():
    decorated = splitjax.parallelize(step, mesh=MESH, rules="auto", sync="auto", uneven="pad")
    state, one = decorated.init(init, jax.random.key(0), example=(batch(),)), init(jax.random.key(0))
    for _ in range(5):
        state, loss = decorated(state, batch())
        one, expected = jax.jit(step)(one, batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    # Five steps move elements by up to 0.4, and Adagrad divides by the root of the gradient's squares, so that what a
    # gradient's sum is rounded by counts in full: 2e-6, which is a thousandth of an element that ends near 0.
    np.testing.assert_allclose(state["params"]["table"][:ROWS], one["params"]["table"], rtol=1e-4, atol=5e-6)
    (table,) = decorated.plan(state, batch()).syncs
    assert table.scheme == "owner_sharded" and table.bytes


def clicks(params, batch):
    factors, linear = params["factors"][batch["ids"]], params["linear"][batch["ids"]]
    return jnp.mean((jnp.square(factors.sum(axis=1)).sum(axis=-1) + linear.sum(axis=(1, 2))) ** 2)


def click_step(state, batch):
    loss, grads = splitjax.value_and_grad(clicks)(state["params"], batch)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def click_init(key):
    params = {"factors": jax.random.normal(key, (ROWS, 16)), "linear": jax.random.normal(key, (ROWS, 1))}
    return {"params": params, "opt": TX.init(params)}


CALIBRATION = pathlib.Path(__file__).parents[1] / "codec" / "data" / "calibration.json"


def test_a_narrow_table_lies_with_the_wide_one_that_is_looked_up_by_its_ids():
    decorated = splitjax.parallelize(click_step, mesh=MESH, rules="auto", sync="auto", uneven="pad")
    shapes = jax.eval_shape(click_init, jax.random.key(0)), batch()
    plan = decorated.plan(*shapes)
    assert [sync.scheme for sync in plan.syncs] == ["owner_sharded"] * 2
    assert "looked up by the ids of params/factors" in plan.syncs[1].why
    # The search adds up what both cost together: the sum is what the whole prediction says.
    for answer in decorated.choice.answers:
        assert answer.network_seconds == pytest.approx(answer.candidate.seconds, rel=0.02)


def test_a_program_is_timed_as_it_is_once_its_tables_were_observed():
    """Not as the first steps run, which gather all rows, nor with what runs where there is no room."""
    decorated = splitjax.parallelize(step, mesh=MESH, rules="embedding_owner", sync="auto", uneven="pad")
    shapes = jax.eval_shape(init, jax.random.key(0)), batch()
    assert not decorated.plan(*shapes).syncs[0].is_decided
    time = decorated.time(*shapes, on=CALIBRATION)
    rows = EXAMPLES * WORDS // 4
    # Three quarters of a worker's rows are another's: pulled and pushed, with some room for chance.
    least = 2 * 0.75 * rows * WIDTH * 4
    exchanged = sum(part.sent_bytes for part in time.collectives if part.op in ("all_to_all", "permute"))
    assert least < exchanged < 1.3 * least
    assert sum(part.sent_bytes for part in time.collectives) < 1.4 * least


def test_candidates_are_compared_by_the_programs_behind_the_observed_steps():
    options = {"mesh": MESH, "sync": "auto", "uneven": "pad"}
    decorated = splitjax.parallelize(click_step, rules="auto", target=CALIBRATION, **options)
    shapes = jax.eval_shape(click_init, jax.random.key(0)), batch()
    decorated.plan(*shapes)
    timed = {each.rules.name: each.program_seconds for each in decorated.choice.candidates if each.program_seconds}
    for rules in ("embedding_owner", "data_parallel"):
        alone = splitjax.parallelize(click_step, rules=rules, **options)
        assert timed[rules] == alone.time(*shapes, on=CALIBRATION).seconds


def test_ids_that_every_worker_has_and_fewer_than_there_are_workers():
    def loss_of(params, batch):
        kinds, places = params["kinds"][jnp.arange(3)], params["places"][jnp.arange(64)]
        return jnp.mean((params["table"][batch["ids"]] + places).sum(axis=1) ** 2) + jnp.sum(kinds**2)

    def own_step(params, batch):
        loss, grads = splitjax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    f32 = lambda rows: jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    params = {"table": f32(ROWS), "places": f32(1024), "kinds": f32(8)}
    decorated = splitjax.parallelize(own_step, mesh=MESH, rules="embedding_owner", sync="auto", uneven="pad")
    assert decorated.time(params, batch(), on=CALIBRATION).seconds > 0
    by_param = {sync.param: sync for sync in decorated._programs.observed((params, batch())).plan.syncs}
    assert by_param["places"].capacities["local"] >= 64  # each worker looks up all of them
    assert by_param["kinds"].capacities["local"] >= 3


def test_what_explains_a_table_prices_its_rows():
    decorated = splitjax.parallelize(step, mesh=MESH, rules="embedding_owner", sync="auto", uneven="pad")
    plan = decorated.plan(jax.eval_shape(init, jax.random.key(0)), batch())
    explained = plan.explain("params/table")
    rows, whole = EXAMPLES * WORDS // 4, 2 * 3 / 4 * ROWS * WIDTH * 4
    assert 2 * 0.75 * rows * WIDTH * 4 <= explained.planned.sent_bytes < whole / 2


def test_another_layout_of_an_observed_table_is_priced_by_what_it_can_send():
    def even(key):  # rows that divide: no other layout of a padded table is had
        params = {"factors": jax.random.normal(key, (ROWS - 1, 16)), "linear": jax.random.normal(key, (ROWS - 1, 1))}
        return {"params": params, "opt": TX.init(params)}

    decorated = splitjax.parallelize(click_step, mesh=MESH, rules="embedding_owner", sync="auto")
    state = decorated.init(even, jax.random.key(0), example=(batch(),))
    for _ in range(4):
        state, _ = decorated(state, batch())
    plan = decorated.plan(state, batch())
    assert all(sync.is_decided for sync in plan.syncs)
    explained = plan.explain("params/linear")
    (whole,) = (each for each in explained.alternatives if each.name.startswith("whole"))
    assert explained.planned.sent_bytes == sum(each.bytes for each in plan.collectives)
    # Every worker gets what all others read of it, with ids of its own.
    assert whole.cost.sent_bytes > explained.planned.sent_bytes
