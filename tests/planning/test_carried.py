"""What a step keeps between calls: schemes, capacities and residuals, in checkpoints and in pinned plans."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.errors import CheckpointError, DonatedStateError, PlanError
from splitjax.mesh import make_mesh
from splitjax.plan import Plan
from splitjax.planning import observing
from splitjax.planning.carried import Carried, Seen, inputs_of
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints
from splitjax.step.arguments import bind
from splitjax.sync import ByRows

ROWS, STEPS = 64, 7
ROUNDED = ByRows("row_exchange", wire_dtype="bfloat16")


def one_table(state, batch):
    """A table whose gradient bfloat16 does not have: what rounding takes away adds up, step after step."""
    loss, grads = splitjax.value_and_grad(lambda params: jnp.mean(params["table"][batch["ids"]] * batch["by"]))(state)
    return {"table": state["table"] - grads["table"]}, loss


def batch_of(number):
    """One in between has fewer examples."""
    rng, examples = np.random.default_rng(number), 8 if number == 3 else 12
    return {
        "ids": rng.integers(0, 40, (examples, 3)).astype(np.int32),
        "by": rng.uniform(1.0, 1.1, (examples, 3, 4)).astype(np.float32),
    }


def make(sync, rules="data_parallel", mesh=None, **options):
    return splitjax.parallelize(one_table, mesh=mesh or {"data": 4}, rules=rules, sync=sync, **options)


def start():
    return {"table": np.zeros((ROWS, 4), np.float32)}


def train(step, state, first, last, between=lambda number, state: None):
    for number in range(first, last):
        state, _ = step(state, batch_of(number))
        between(number + 1, state)
    return state


@pytest.fixture(scope="module")
def exact():
    return np.asarray(train(make("dense", mesh={"data": 1}), start(), 0, STEPS)["table"])


@pytest.fixture(
    scope="module", params=["data_parallel", pytest.param("embedding_owner", marks=pytest.mark.one_version)]
)
def saved(request, tmp_path_factory):
    """A run with rounded values, undisturbed: its step, table and checkpoints after 2 steps (while they are observed)
    and 5."""
    folder = tmp_path_factory.mktemp("run")
    step = make(ROUNDED, request.param)
    with Checkpoints(CheckpointOptions(folder, keep_last=None)) as checkpoints:

        def save(number, state):
            if number in (2, 5):
                assert checkpoints.save(number, state, carried=step.carried())

        state = train(step, start(), 0, STEPS, save)
    return step, request.param, np.asarray(state["table"]), folder


def test_what_rounding_takes_away_comes_back_in_later_steps(saved, exact):
    step, rules, table, _ = saved
    residual = np.asarray(step.carried().residuals["table"])
    assert residual.shape == (4, ROWS, 4) and np.abs(residual).max() > 0
    np.testing.assert_allclose(table - residual.sum(0), exact, atol=1e-6)  # nothing is lost
    batch, times, gradient = batch_of(0), 25, np.zeros((ROWS, 4))
    np.add.at(gradient, batch["ids"], batch["by"] / batch["by"].size)
    off = {}
    for forgets in (False, True):  # the same gradient again and again: what is not kept is lost in the same direction
        state = start()
        for number in range(times):
            if forgets or number == 0:
                step.resume(dataclasses.replace(step.carried(), residuals={}))
            state, _ = step(state, batch)
        off[forgets] = np.abs(np.asarray(state["table"]) + times * gradient).max()
    one_rounding = np.abs(gradient).max() / 256
    assert off[False] < 3 * one_rounding and off[True] > 3 * off[False]
    sync = step.plan(start(), batch_of(0)).syncs[0]
    assert "are rounded to bfloat16 on the wire, which changes the numbers" in sync.why and sync.options == {
        "wire_dtype": "bfloat16"
    }
    assert len(step.compiles) == 3


@pytest.mark.parametrize("number", [2, 5])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(saved, number):
    _, rules, table, folder = saved
    if number == 2 and rules != "data_parallel":
        pytest.skip("one layout is enough")
    step = make(ROUNDED, rules)
    like = step.abstract_state(start, example=(batch_of(0),))
    with Checkpoints(CheckpointOptions(folder, read_only=True)) as checkpoints:
        restored = checkpoints.restore(like, number)
    # Each device has its own worker's residual, also on the way from the disk.
    assert number == 2 or {shard.data.shape[0] for shard in restored.carried.residuals["table"].addressable_shards} == {
        1
    }
    step.resume(restored.carried)
    state = train(step, restored.state, number, STEPS)
    assert np.asarray(state["table"]).tobytes() == table.tobytes()
    observed, resumed = (
        sum(record.reason == reason for record in step.compiles)
        for reason in ("its tables were observed", "a run is resumed")
    )
    assert (observed, resumed, len(step.compiles)) == ((1, 0, 3) if number == 2 else (0, 1, 2))
    json.dumps(step.carried().to_json(), allow_nan=False)


@pytest.mark.one_version
def test_another_mesh_takes_over_the_residuals_and_observes_anew(saved):
    _, rules, _, folder = saved
    if rules != "data_parallel":
        pytest.skip("one layout is enough")
    with Checkpoints(CheckpointOptions(folder, read_only=True)) as checkpoints:
        restored = checkpoints.restore(start(), 5)
    step, batch = make(ROUNDED, mesh={"data": 3}), batch_of(5)
    step.resume(restored.carried)
    step(step.place(restored.state, example=(batch,)), batch)
    before, after = np.asarray(restored.carried.residuals["table"]), np.asarray(step.carried().residuals["table"])
    assert before.shape[0] == 4 and after.shape[0] == 3
    # sent with the gradients
    assert not any(after[worker, batch["ids"][4 * worker : 4 * worker + 4]].any() for worker in range(3))
    untouched = np.setdiff1d(np.arange(ROWS), batch["ids"])
    np.testing.assert_allclose(after.sum(0)[untouched], before.sum(0)[untouched], atol=1e-9)
    assert before[:, untouched].any() and "first 3 steps are observed" in step.plan(restored.state, batch).syncs[0].why


def test_what_was_carried_is_consumed_by_the_next_call(saved):
    step, rules, _, _ = saved
    carried = step.carried()
    state = train(step, step.place(start(), example=(batch_of(0),)), 0, 1)
    step.resume(carried)
    with pytest.raises(DonatedStateError, match="consumed by a later call"):
        step(state, batch_of(1))
    with pytest.raises(CheckpointError, match="consumed"):
        from splitjax.runtime.checkpoint.carrying import taken_apart

        taken_apart(carried)
    step.resume(None)
    assert not step.carried().residuals


@pytest.fixture(scope="module")
def plan():
    """The plan of a step with observed tables."""
    step = make("all_gather")
    state = train(step, start(), 0, 4)
    plan = step.plan(state, batch_of(0))
    assert plan.syncs[0].capacities
    return plan


def test_a_pinned_plan_builds_the_final_program_at_once(plan):
    step = make("dense", plan=Plan.from_json(plan.to_json()))
    lowered = step.lower(start(), batch_of(0))
    _, observed = lowered.out_info
    assert set(observed["table"]) == {"fell_back"}  # the program of the first steps returns ids
    assert step.plan(start(), batch_of(0)).diff(plan) == () and step.plan(start(), batch_of(0)).digest == plan.digest
    train(step, start(), 2, 5)  # one of these has fewer examples than the plan was made from
    assert len(step.compiles) == 2 and step.plan(start(), batch_of(3)).syncs[0].capacities == plan.syncs[0].capacities


@pytest.mark.one_version
def test_a_pinned_plan_stays_and_warns_where_its_capacities_do_not_suffice(plan, monkeypatch, caplog):
    monkeypatch.setattr(observing, "CHECKED_STEPS", 2)
    monkeypatch.setattr(observing, "MOST_FALLBACKS", 1)
    small = dataclasses.replace(plan, syncs=(dataclasses.replace(plan.syncs[0], capacities={"local": 2, "union": 4}),))
    step, dense = make("dense", plan=small), make("dense", mesh={"data": 1})
    batch = {"ids": np.arange(36, dtype=np.int32).reshape(12, 3), "by": np.ones((12, 3, 4), np.float32)}
    state, expected = start(), start()
    for _ in range(3):
        (state, _), (expected, _) = step(state, batch), dense(expected, batch)
    np.testing.assert_allclose(state["table"], expected["table"], atol=1e-6)
    assert len(step.compiles) == 1 and "more rows than the pinned plan has room for" in caplog.text


def test_a_pinned_plan_whose_tables_are_others_is_an_error(plan):
    pin = lambda **changes: dataclasses.replace(plan, syncs=(dataclasses.replace(plan.syncs[0], **changes),))
    for changes, words in (
        ({"param": "other"}, "has a table 'other', of which the step looks up no rows"),
        ({"rows": 65}, "65 rows in the plan and 64 in the step"),
        ({"scheme": "owner_sharded", "options": {}}, "owned by rows in the plan and not in the step"),
        ({"axis": "model"}, "over model in the plan"),
        ({"lazy": True}, "lazy in the plan and not in the step"),
        ({"scheme": "telepathy"}, "no scheme of this name"),
        ({"options": {"speed": 3}}, "all_gather has no such option"),
        ({"capacities": {"levels": 3}}, "capacities have no such size"),
    ):
        with pytest.raises(PlanError, match=words):
            make("dense", plan=pin(**changes)).plan(start(), batch_of(0))

    def tied(state, batch):
        loss, grads = splitjax.value_and_grad(
            lambda params: jnp.mean(params["table"][batch["ids"]] * batch["by"]) + params["table"].sum()
        )(state)
        return {"table": state["table"] - grads["table"]}, loss

    with pytest.raises(
        PlanError,
        match="synchronised by all_gather in the plan and stays dense in the step: it is also read by reduce_sum",
    ):
        splitjax.parallelize(tied, mesh={"data": 4}, rules="data_parallel", plan=plan).plan(start(), batch_of(0))
    undecided = pin(capacities={})
    assert (
        make("all_gather", plan=undecided)
        .plan(start(), batch_of(0))
        .syncs[0]
        .why.startswith("the first 3 steps are observed")
    )
    with pytest.raises(PlanError, match=r"syncs\[0\].capacities.local"):
        Plan.from_json(plan.to_json().replace('"local": ', '"local": -'))


def test_a_step_that_carries_nothing_says_so():
    assert not make("dense").carried() and not Carried()


def test_what_is_carried_is_read_back():
    sample = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
    carried = Carried({"here": Seen((), {"table": sample}, 3, {"table": 1})}, {"table": np.ones((2, 3))}, 5)
    again = Carried.parse(json.loads(json.dumps(carried.to_json())), carried.arrays())
    assert again.num_steps == 5 and again.seen.keys() == {"here"}
    assert (again.seen["here"].num_steps, again.seen["here"].fell_back) == (3, {"table": 1})
    np.testing.assert_array_equal(again.seen["here"].samples["table"], sample)
    np.testing.assert_array_equal(again.residuals["table"], np.ones((2, 3)))


def test_signatures_differ_by_the_mesh():
    step = make("dense")
    bound = bind(one_table, step.options, (start(), batch_of(0)))
    meshes = [make_mesh(sizes) for sizes in ({"data": 4}, {"data": 2, "model": 2}, {"data": 2})]
    assert len({inputs_of(bound, mesh) for mesh in meshes}) == 3
    other = bind(one_table, step.options, (start(), batch_of(3)))  # of fewer examples
    assert inputs_of(bound, meshes[0]) != inputs_of(other, meshes[0])


@pytest.mark.parametrize("data", [4, 2])
def test_what_is_carried_moves_between_paddings(tmp_path, data):
    """Of a table whose rows have seven numbers, split over two devices, stored as eight and as they are."""

    def step_fn(state, batch):
        def loss_fn(table):
            return (table[batch["ids"]].sum(-1) * batch["by"].mean(-1)).mean()

        loss, gradient = splitjax.value_and_grad(loss_fn)(state["table"])
        return {"table": state["table"] - gradient}, loss

    def made(mesh, **options):
        columns = splitjax.RuleSet(
            "columns", (splitjax.Rule("columns", shard=({1: "model"},)),), replicated_batch=("data",)
        )
        return splitjax.parallelize(step_fn, mesh=mesh, rules=columns, sync=ROUNDED, **options)

    first = lambda: {"table": np.zeros((ROWS, 7), np.float32)}
    padded = made({"data": 4, "model": 2}, uneven="pad")
    with Checkpoints(tmp_path) as checkpoints:
        state = train(padded, first(), 0, 5)
        assert state["table"].shape == (ROWS, 8)
        carried = padded.carried()
        assert carried.residuals["table"].shape == (4, ROWS, 7) and np.abs(carried.residuals["table"]).max() > 0
        assert checkpoints.save(5, padded.logical(state), carried=carried)
        restored = checkpoints.restore(first(), 5)
    for other in (made({"data": data}), made({"data": data, "model": 2}, uneven="pad")):
        other.resume(restored.carried)
        batch = batch_of(5) | {"by": np.zeros((12, 3, 4), np.float32)}  # of which only what was kept back is sent
        other(other.place(restored.state, example=(batch,)), batch)
        before, after = (np.asarray(each.residuals["table"]) for each in (restored.carried, other.carried()))
        assert after.shape == (data, ROWS, 7)
        untouched = np.setdiff1d(np.arange(ROWS), batch["ids"])
        np.testing.assert_allclose(after.sum(0)[untouched], before.sum(0)[untouched], atol=1e-9)
        assert before[:, untouched].any()
