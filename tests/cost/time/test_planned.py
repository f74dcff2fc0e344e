"""What a plan sends and no equation of the program shows is counted: by hand, and of a table that lies with owners."""

from __future__ import annotations

import pathlib

import jax
import optax
import pytest

import splitjax
from splitjax.cost.time import Machine, StepTime, with_planned
from splitjax.cost.time.prediction import TimedPart
from splitjax.machines import parse_target
from splitjax.plan import Collective, Phase, Purpose, PurposeKind

CALIBRATION = pathlib.Path(__file__).parents[2] / "codec" / "data" / "calibration.json"
MACHINE = Machine.published(parse_target("gpu:h200:8"), {"data": 2, "model": 4})


def time_of(*sent):
    parts = tuple(TimedPart("sum", (), 1.0, 1, 0.0, 0.0, "all_reduce", (axis,), num) for axis, num in sent)
    return StepTime(5.0, 3.0, 2.0, 0.0, 0.0, parts, True)


def plan(*sent):
    purpose = Purpose(PurposeKind.GRADIENT, Phase.BACKWARD)
    return [Collective(op, axis, num_bytes, "table", purpose) for op, axis, num_bytes in sent]


def test_what_the_program_shows_is_not_counted_again():
    time = time_of(("data", 100e6), ("model", 50e6))
    assert with_planned(time, plan(("all_reduce", "data", 100e6), ("all_gather", "model", 40e6)), MACHINE) is time
    # The plan names one axis where the program has another; together they send as much.
    assert with_planned(time, plan(("all_reduce", "model", 150e6)), MACHINE) is time
    assert with_planned(time, [], MACHINE) is time


def test_what_it_does_not_show_is_sent_besides():
    time = time_of(("data", 100e6))
    sent = plan(("all_reduce", "data", 100e6), ("all_to_all", "model", 45e6), ("all_gather", "model", 5e6))
    found = with_planned(time, sent, MACHINE)
    (added,) = (part for part in found.collectives if part.name == "planned_moves")
    assert (added.op, added.axes, added.sent_bytes) == ("all_to_all", ("model",), pytest.approx(50e6))
    assert added.seconds > 50e6 / 450e9
    assert found.seconds == pytest.approx(5 + added.seconds)
    assert found.sending_seconds == pytest.approx(2 + added.seconds)
    # Half of what the plan has over `model` beyond the program is what the program has over `data` beyond the plan.
    half = with_planned(time, plan(("all_reduce", "data", 75e6), ("all_to_all", "model", 50e6)), MACHINE)
    assert sum(part.sent_bytes for part in half.collectives) == pytest.approx(125e6)


def test_moves_that_are_guessed_and_not_planned_are_left_out():
    explicit = TimedPart("psum", (), 2.0, 1, 0.0, 0.0, "all_reduce", ("data",), 100e6)
    guessed = TimedPart("move", (8,), 1.0, 4, 0.0, 0.0, "all_to_all", ("data",), 40e6)
    time = StepTime(5.0, 2.0, 3.0, 0.0, 0.0, (explicit, guessed), True)
    found = with_planned(time, plan(("all_reduce", "data", 100e6)), MACHINE)
    assert found.parts == (explicit,)
    assert (found.seconds, found.sending_seconds) == (4.0, 2.0)
    half = with_planned(time, plan(("all_reduce", "data", 100e6), ("all_to_all", "data", 20e6)), MACHINE)
    assert (half.seconds, sum(part.sent_bytes for part in half.collectives)) == (4.5, 120e6)
    # What the program says itself stays, whatever the plan lists.
    assert with_planned(time, plan(("all_reduce", "data", 50e6)), MACHINE).parts == (explicit,)


def test_a_scan_over_stored_weights_sends_what_is_planned():
    """Reading such a program guesses that activations change their layout in each turn, which they do not."""
    from benchmarks.planner.steps import own_init, own_step

    step, (_, tokens) = own_step("scanned", 32)
    stored = splitjax.parallelize(step, mesh={"data": 2}, rules="fsdp")
    arguments = jax.eval_shape(own_init("scanned"), jax.random.key(0)), tokens
    time = stored.time(*arguments, on=CALIBRATION)
    planned = sum(each.bytes for each in stored.plan(*arguments).collectives)
    assert sum(part.sent_bytes for part in time.collectives) == pytest.approx(planned, rel=1e-3)
    assert sum(each.sent_bytes for each in time.layers) == pytest.approx(planned, rel=1e-3)


def test_rows_that_a_split_table_sends_are_timed():
    """XLA's partitioner moves the rows of a token embedding that is split by rows, without an equation."""
    spec = splitjax.models.build("transformer", vocab_size=64, max_len=16, d_model=16, num_heads=2, num_layers=1)
    init, step, _ = splitjax.models.make_step(spec, optax.sgd(0.1), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init, jax.random.key(0)), spec.example(64)
    owned = splitjax.parallelize(step, mesh={"data": 1, "model": 8}, rules="embedding_owner")
    time = owned.time(*arguments, on=CALIBRATION)
    added = [part for part in time.collectives if part.name == "planned_moves"]
    # The program that is timed is that behind the observed steps, whose rows are exchanged by their owners.
    planned = sum(each.bytes for each in owned._programs.observed(arguments).plan.collectives)
    assert sum(part.sent_bytes for part in time.collectives) == pytest.approx(planned)
    assert 0 < sum(part.sent_bytes for part in added) < planned
    layered = owned.time(*arguments, on=CALIBRATION).layers
    assert sum(each.sent_bytes for each in layered) == pytest.approx(planned)
