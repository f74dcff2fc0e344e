"""Numbers that go wrong: what is noticed, what is done, and that it is the same again."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.errors import TrainingError
from splitjax.runtime import CheckpointOptions, Checkpoints, LoopOptions, NumberGuard, NumberOptions, train

NAN = math.nan


class Rows:
    def __init__(self):
        self.rows = []

    def step(self, row):
        self.rows.append(row)

    def close(self):
        pass


@pytest.fixture(scope="module")
def step():
    @splitjax.parallelize(mesh={"data": 1}, rules="data_parallel")
    def step(state, batch):
        def loss_fn(w):
            return ((batch["x"] * w - batch["y"]) ** 2).mean()

        loss, grad = splitjax.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 0.05 * grad, "best": state["best"]}, {"loss": loss}

    return step


def first_state():
    return {"w": jnp.zeros(3), "best": jnp.float32(jnp.inf)}  # infinite from the start: that is no fault


def batches(bad=(), start=0, value=NAN):
    for number in range(start + 1, 40):
        x = np.full((4, 3), 1.0 + number / 10, np.float32)
        if number in bad:
            x[0, 0] = value
        yield number, {"x": x, "y": np.ones((4, 3), np.float32)}


def run(step, options, num_steps=12, bad=(), checkpoints=None, resumed=None, **more):
    seen, (state, done, numbers) = Rows(), resumed or (first_state(), 0, None)
    outcome = train(
        step,
        state,
        batches(bad, done, **more),
        LoopOptions(num_steps, 4, checkpoint_every=4),
        first_step=done + 1,
        guard=NumberGuard(options, numbers),
        checkpoints=checkpoints,
        observers=[seen],
    )
    return np.asarray(outcome.state["w"]), seen.rows


@pytest.mark.parametrize("bad", [(1,), (6,), (4, 5), (12,)])
def test_a_skipped_batch_leaves_the_state_as_if_it_had_not_come(step, bad):
    got, rows = run(step, NumberOptions("skip"), bad=bad)
    state = first_state()
    for number, batch in batches(bad):
        if number <= 12 and number not in bad:
            state, _ = step(state, batch)
    np.testing.assert_array_equal(got, np.asarray(state["w"]))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row.get("setback")] == list(bad)


def test_a_rollback_takes_the_newest_checkpoint_and_the_next_batch(step, tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        got, rows = run(step, NumberOptions("rollback"), bad=(7,), checkpoints=checkpoints)
    state = first_state()
    for number, batch in batches():
        if number <= 12 and number not in (5, 6, 7):  # the checkpoint is that of step 4
            state, _ = step(state, batch)
    np.testing.assert_array_equal(got, np.asarray(state["w"]))
    assert [row["step"] for row in rows if row.get("setback")] == [7]


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_resumed_run_decides_as_an_undisturbed_one(step, tmp_path, action):
    options = NumberOptions(action, spike_factor=3.0)
    more = {"bad": (10, 14), "value": 60.0}  # spikes, known by the losses before the save of step 8
    with Checkpoints(CheckpointOptions(tmp_path / "whole")) as checkpoints:
        whole, rows = run(step, options, 16, checkpoints=checkpoints, **more)
    assert [row["step"] for row in rows if row.get("setback")] == [10, 14]
    with Checkpoints(CheckpointOptions(tmp_path / "parts")) as checkpoints:
        run(step, options, 8, checkpoints=checkpoints, **more)
        restored = checkpoints.restore(first_state())
        resumed = restored.state, restored.step, json.loads(json.dumps(restored.extra["numbers"]))
        parts, rest = run(step, options, 16, checkpoints=checkpoints, resumed=resumed, **more)
    np.testing.assert_array_equal(whole, parts)
    assert [row["loss"] for row in rest] == [row["loss"] for row in rows[8:]]


def test_gradients_that_are_not_finite_behind_a_finite_loss_are_noticed(tmp_path):
    @jax.jit
    def step(state, batch):
        return jnp.where(batch > 5, jnp.nan, state + 1), {"loss": jnp.float32(1)}

    numbers = [jnp.float32(n) for n in range(1, 9)]
    options = lambda n: LoopOptions(n, 1, checkpoint_every=3)
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        with pytest.raises(TrainingError, match="the state after step 6 is not finite"):
            train(step, jnp.float32(0), iter(numbers), options(8), checkpoints=checkpoints)
        assert checkpoints.steps() == (3,)
    skipping = NumberGuard(NumberOptions("skip"))
    assert float(train(step, jnp.float32(0), iter(numbers), options(8), guard=skipping).state) == 5


def test_too_many_setbacks_end_the_run(step):
    with pytest.raises(TrainingError, match="loss of step 5 is nan, after as many setbacks") as caught:
        run(step, NumberOptions("skip", max_setbacks=2), bad=(2, 3, 5))
    assert caught.value.place == "step 5" and caught.value.remedy
    with pytest.raises(TrainingError, match="loss of step 2 is nan, and no checkpoints are kept"):
        run(step, NumberOptions("rollback"), bad=(2,))


def test_what_counts_as_a_spike():
    guard = NumberGuard(NumberOptions("skip", spike_factor=2.0))
    for number in range(1, 8):
        assert guard.problem(number, {"loss": 1.0}) is None
    assert guard.problem(8, {"loss": 50.0}) is None  # too few are known
    assert guard.problem(9, {"loss": 2.0}) is None
    assert "loss of step 10 is 2.1, more than 2 times 1" in guard.problem(10, {"loss": 2.1})
    assert guard.problem(11, {"loss": -5.0}) is None
    again = NumberGuard(guard.options, guard.extra()["numbers"])
    assert again.extra() == guard.extra() and again.problem(12, {"loss": 2.1})
    assert NumberGuard().extra() == {}


def test_values_that_cannot_be():
    for options in ({"action": "ignore"}, {"spike_factor": 1.0}, {"max_setbacks": -1}):
        with pytest.raises(TrainingError, match="is not usable"):
            NumberOptions(**options)
    with pytest.raises(TrainingError, match="does not say what losses were seen"):
        NumberGuard(seen={"losses": None})
    assert dataclasses.asdict(NumberOptions())["action"] == "stop"
