"""The loop around a step: what is told, saved and evaluated when, and how it ends."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splitjax.errors import TrainingError
from splitjax.runtime.training.ledger import Ledger
from splitjax.runtime.training.loop import LoopOptions, train
from splitjax.runtime.training.profiling import Profile


@dataclasses.dataclass(frozen=True)
class At:
    number: int

    def to_json(self):
        return self.number


@jax.jit
def step(state, batch):
    return state + batch, {"loss": (state + batch).astype(jnp.float32)}


class Recorder:
    def __init__(self):
        self.rows, self.saved = [], []

    def step(self, row):
        self.rows.append(row)

    def close(self):
        pass

    def save(self, number, state, extra, metrics, *, wait=False):
        self.saved.append((number, int(state), dict(extra), dict(metrics), wait))
        return True


class StopAfter:
    def __init__(self, number):
        self.number = number

    def after(self, step):
        return step >= self.number


def batches(count, value=1.0, start=0):
    return iter([(At(number + 1), jnp.float32(value)) for number in range(start, count)])


def options(**changes):
    return LoopOptions(**{"num_steps": 10, "batch_size": 4, **changes})


def test_every_step_is_told_once_in_order():
    seen = Recorder()
    outcome = train(
        step, jnp.float32(0), batches(10), options(steps_per_epoch=4), observers=[seen], learning_rates=range(10)
    )
    assert [row["step"] for row in seen.rows] == list(range(1, 11))
    assert [row["loss"] for row in seen.rows] == list(range(1, 11))
    assert [row["epoch"] for row in seen.rows] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2] and seen.rows[3]["learning_rate"] == 3
    assert (float(outcome.state), outcome.last_step, outcome.stopped) == (10, 10, False)


def test_saves_hold_the_state_the_position_and_the_mean_loss_since_the_last():
    seen = Recorder()
    train(step, jnp.float32(0), batches(10), options(checkpoint_every=4), checkpoints=seen, extra={"run": 1})
    assert [(number, state, wait) for number, state, _, _, wait in seen.saved] == [
        (4, 4, False),
        (8, 8, False),
        (10, 10, True),
    ]
    assert [extra for _, _, extra, _, _ in seen.saved] == [{"run": 1, "position": n} for n in (4, 8, 10)]
    assert [metrics["loss"] for *_, metrics, _ in seen.saved] == [2.5, 6.5, 9.5]


def test_a_resumed_loop_goes_on_with_its_number():
    seen = Recorder()
    train(
        step,
        jnp.float32(6),
        batches(10, start=6),
        options(checkpoint_every=4),
        first_step=7,
        checkpoints=seen,
        observers=[seen],
    )
    assert [row["step"] for row in seen.rows] == [7, 8, 9, 10] and seen.rows[-1]["loss"] == 10
    assert [number for number, *_ in seen.saved] == [8, 10]


def test_evaluation_is_told_and_saved_with_its_step():
    seen = Recorder()
    train(
        step,
        jnp.float32(0),
        batches(10),
        options(evaluate_every=4, checkpoint_every=4),
        checkpoints=seen,
        observers=[seen],
        evaluate=lambda state: {"loss": float(state) * 100},
    )
    assert {row["step"]: row["eval_loss"] for row in seen.rows if "eval_loss" in row} == {
        4: 400.0,
        8: 800.0,
        10: 1000.0,
    }
    assert [metrics["eval_loss"] for *_, metrics, _ in seen.saved] == [400.0, 800.0, 1000.0]


def test_a_request_to_stop_saves_and_waits():
    seen = Recorder()
    outcome = train(
        step,
        jnp.float32(0),
        batches(10),
        options(checkpoint_every=4),
        checkpoints=seen,
        observers=[seen],
        stop=StopAfter(6),
    )
    assert outcome.stopped and outcome.last_step == 6 and seen.rows[-1]["step"] == 6
    assert seen.saved[-1][0] == 6 and seen.saved[-1][-1] is True


def test_a_loss_that_is_no_number_is_never_saved():
    def broken(state, batch):
        return state + batch, {"loss": jnp.where(state < 3, 1.0, jnp.nan)}

    seen = Recorder()
    with pytest.raises(TrainingError, match="loss of step 4 is nan"):
        train(broken, jnp.float32(0), batches(10), options(checkpoint_every=2), checkpoints=seen)
    assert [number for number, *_ in seen.saved] == [2]
    allowed = train(broken, jnp.float32(0), batches(10), options(allow_nonfinite=True), checkpoints=seen)
    assert allowed.last_step == 10


def test_batches_that_end_early_and_metrics_without_loss_are_errors():
    with pytest.raises(TrainingError, match="ended after step 3"):
        train(step, jnp.float32(0), batches(3), options())
    with pytest.raises(TrainingError, match="no loss"):
        train(lambda state, batch: (state, {"accuracy": batch}), jnp.float32(0), batches(3), options())


POSITIONS = [0, 7, 1.5, "shard-3", None, True, [1, "a", None], {"epoch": 1, "batch": [2]}, [], {}, At(5)]


@pytest.mark.parametrize("position", POSITIONS, ids=str)
def test_a_position_is_any_json(position):
    seen = Recorder()
    train(step, jnp.float32(0), iter([(position, jnp.float32(1))] * 2), options(num_steps=2), checkpoints=seen)
    (saved,) = seen.saved
    assert saved[2] == {"position": 5 if isinstance(position, At) else position} and saved[1] == 2


@pytest.mark.parametrize(
    "batch",
    [np.float32(1), {"x": np.ones(2)}, (np.ones(2), np.ones(2)), [1, np.ones(2)], (3, np.ones(2), "a")],
    ids=["array", "dict", "pair of arrays", "list", "triple"],
)
def test_what_holds_arrays_is_a_batch_and_counted(batch):
    seen, given = Recorder(), []

    def takes(state, batch):
        given.append(batch)
        return state + 1, {"loss": 1.0}

    train(takes, jnp.float32(0), [batch] * 3, options(num_steps=3, checkpoint_every=2), checkpoints=seen)
    assert [extra["position"] for _, _, extra, _, _ in seen.saved] == [2, 3]
    assert len(given) == 3 and all(one is batch for one in given)


def test_a_resumed_loop_drops_the_plain_batches_that_it_has_seen():
    seen = Recorder()
    train(
        step,
        jnp.float32(6),
        (jnp.float32(number) for number in range(1, 11)),
        options(),
        first_step=4,
        checkpoints=seen,
    )
    assert seen.saved[-1][1] == 6 + sum(range(4, 11)) and seen.saved[-1][2] == {"position": 10}
    with pytest.raises(TrainingError, match="ended after step 3"):
        train(step, jnp.float32(6), [jnp.float32(1)] * 2, options(), first_step=4)


@pytest.mark.parametrize(
    ("batches", "pattern", "remedy"),
    [
        ({"x": np.ones(3)}, "none that follow each other", "itertools.repeat"),
        (np.ones((3, 2)), "none that follow each other", "itertools.repeat"),
        (5, "none that follow each other", "generator"),
        ("abc", "none that follow each other", "generator"),
        (iter([None]), "holds no array", "pytrees of arrays"),
        (range(9), "holds no array", "position, batch"),
        (iter([(np.int64(3), np.ones(2))]), "this position is not JSON", r"int\(position\)"),
        (iter([((1, 2), np.ones(2))]), "this position is not JSON", "a list"),
        (iter([(object(), np.ones(2))]), "this position is not JSON", "to_json"),
        (iter([({1: 2}, np.ones(2))]), "this position is not JSON", "by strings"),
        (iter([(1, np.float32(1)), np.float32(1)]), "some batches come with a position", "every time"),
        (iter([np.float32(1), (1, np.float32(1))]), "some batches come with a position", "every time"),
    ],
    ids=[
        "one dict",
        "one array",
        "a number",
        "text",
        "None",
        "numbers",
        "a number of NumPy",
        "a tuple",
        "an object",
        "keys that are numbers",
        "pairs, then none",
        "none, then pairs",
    ],
)
def test_what_is_neither_is_refused(batches, pattern, remedy):
    with pytest.raises(TrainingError, match=pattern) as caught:
        train(step, jnp.float32(0), batches, options())
    assert caught.value.place and re.search(remedy, caught.value.remedy)


def test_the_ledger_knows_the_steps(tmp_path):
    ledger = Ledger(tmp_path / "goodput.json")
    train(step, jnp.float32(0), batches(10), options(), ledger=ledger)
    found = ledger.summary()
    assert found.parts["step"] > 0 and found.parts["compile"] > 0 and found.repeated_steps == 0
    assert (tmp_path / "goodput.json").exists()


# of JAX's reader; as an error it ends the process
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_a_profile_holds_the_steps_by_name(tmp_path):
    train(step, jnp.float32(0), batches(10), options(), profile=Profile(tmp_path, num_steps=2))
    traces = list(tmp_path.rglob("*.xplane.pb"))
    assert len(traces) == 1
    trace = jax.profiler.ProfileData.from_file(str(traces[0]))
    numbers = {
        dict(event.stats).get("step_num")
        for plane in trace.planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("train")
    }
    assert {4, 5} <= numbers and 6 not in numbers
