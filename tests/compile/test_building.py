"""A signature of a step is traced once, whatever its tables and its run make of its program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.planning import observing
from splitjax.step import traced


class Traces:
    """Counts how often a step was called by whoever traces it."""

    def __init__(self) -> None:
        self.num_calls = 0

    def step(self, state, batch):
        self.num_calls += 1
        loss, grads = splitjax.value_and_grad(lambda params: jnp.mean(params["table"][batch["ids"]] * batch["by"]))(
            state
        )
        return {"table": state["table"] - grads["table"]}, loss


def batch_of(number, examples=8, rows=8):
    rng = np.random.default_rng(number)
    return {
        "ids": rng.integers(0, rows, (examples, 3)).astype(np.int32),
        "by": rng.uniform(1.0, 1.1, (examples, 3, 4)).astype(np.float32),
    }


def start():
    return {"table": np.zeros((64, 4), np.float32)}


@pytest.fixture
def analyses(monkeypatch):
    """What was analysed, in order."""
    seen, build_graph = [], traced.build_graph
    monkeypatch.setattr(traced, "build_graph", lambda *given: seen.append(given) or build_graph(*given))
    return seen


def test_observed_steps_a_fallback_and_a_resumed_run_trace_nothing_anew(monkeypatch, analyses):
    monkeypatch.setattr(observing, "CHECKED_STEPS", 3)
    monkeypatch.setattr(observing, "MOST_FALLBACKS", 1)
    traces = Traces()
    step = splitjax.parallelize(traces.step, mesh={"data": 4}, sync="zen")
    state = start()
    for number in range(12):  # three of few rows are observed; then there are too many
        state, _ = step(state, batch_of(number, rows=2 if number < 4 else 64))
    # Back to the first program, which is kept, and to another final one.
    assert [record.reason for record in step.compiles][1:] == ["its tables were observed"] * 2
    step.resume(step.carried())
    state, _ = step(state, batch_of(12))
    assert (traces.num_calls, len(analyses)) == (1, 1)
    step(state, batch_of(9, examples=16))
    assert (traces.num_calls, len(analyses)) == (2, 2)

    again = Traces()
    resumed = splitjax.parallelize(again.step, mesh={"data": 4}, sync="auto")
    resumed.resume(step.carried())
    state = start()
    for number in range(5):
        state, _ = resumed(state, batch_of(number))
    assert again.num_calls == 1 and len(analyses) == 3


def test_a_step_that_cannot_be_planned_is_analysed_anew(analyses):
    traces = Traces()
    step = splitjax.parallelize(traces.step, mesh={"data": 4}, sync="row_exchange", rules="embedding_owner")
    with pytest.raises(splitjax.SplitjaxError):
        step(start(), batch_of(0, examples=6))
    with pytest.raises(splitjax.SplitjaxError):
        step(start(), batch_of(0, examples=6))
    assert traces.num_calls == len(analyses) == 2
