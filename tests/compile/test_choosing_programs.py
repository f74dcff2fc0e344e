"""The choice of rules and meshes by lowered programs: for a target, and for a machine that was measured."""

from __future__ import annotations

import itertools
import pathlib

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.choosing import Prices
from splitjax.errors import CalibrationError
from splitjax.machines.calibration import Calibration
from splitjax.mesh import MeshShape

FILE = pathlib.Path(__file__).parents[1] / "codec" / "data" / "calibration.json"
TARGET = "tpu:v5e:2x4"
WIDTHS = (512, 2048, 2048, 512)


def loss_of(state, batch):
    for kernel in state.values():
        batch = jax.nn.relu(batch @ kernel)
    return jnp.mean(batch**2)


def step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
STATE = {f"dense{number}": f32(*sizes) for number, sizes in enumerate(itertools.pairwise(WIDTHS))}


def chosen(num_examples=4096, **options):
    args = STATE, f32(num_examples, WIDTHS[0])
    decorated = splitjax.parallelize(step, **{"mesh": "auto", "rules": "auto"} | options)
    decorated.plan(*args)
    return decorated, args


MACHINES = {"target": TARGET, "file": str(FILE), "path": FILE, "calibration": Calibration.load(FILE)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_the_fastest_program_of_those_that_were_lowered_is_taken(machine, budget):
    decorated, args = chosen(target=MACHINES[machine], memory_budget=budget)
    choice = decorated.choice
    timed = [each for each in choice.candidates if each.program_seconds is not None]
    assert choice.best.program_seconds == min(each.program_seconds for each in timed)
    # It is what `step.time` says of the step as it was decided.
    assert choice.best.program_seconds == decorated.time(*args, on=MACHINES[machine]).seconds
    if budget is not None:
        assert all(each.bound_bytes <= 64 * 2**20 for each in timed)
        assert decorated.plan(*args).memory.bound_bytes == choice.best.bound_bytes
    else:  # The best as a sum is among them, and the best of every rule set; three are data_parallel on its best mesh.
        assert choice.candidates[0] in timed
        names = {each.rules.name for each in choice.candidates}
        assert {each.rules.name for each in timed} >= names - {"megatron", "splitbrain", "splitbrain_fsdp"}
    assert f"{1e3 * choice.best.program_seconds:.4g} ms as a program" in decorated.plan(*args).notes[0]
    assert "not lowered" in str(choice)


def test_what_overlaps_decides_and_the_sum_does_not():
    decorated, _ = chosen(num_examples=256, target=TARGET)
    best, by_sum = decorated.choice.best, decorated.choice.candidates[0]
    assert best.seconds > by_sum.seconds and best.program_seconds < by_sum.program_seconds
    assert decorated.choice.verdict(by_sum) == "slower"


def test_without_a_machine_the_sum_decides():
    choice = chosen()[0].choice
    assert all(each.program_seconds is None for each in choice.candidates)
    assert choice.best.seconds == choice.candidates[0].seconds


@pytest.mark.parametrize("target", [TARGET, FILE], ids=["target", "calibration"])
def test_never_slower_than_a_shipped_set_by_its_program(target):
    decorated, args = chosen(target=target)
    mesh = dict(decorated.choice.mesh.axes)
    for rules in ("data_parallel", "fsdp", "megatron", "splitbrain", "transformer"):
        for sizes in (mesh, {"data": 8, "model": 1}, {"data": 2, "model": 4}):
            by_hand = splitjax.parallelize(step, mesh=sizes, rules=rules, target=target)
            assert decorated.choice.best.program_seconds <= by_hand.time(*args, on=target).seconds * (1 + 1e-9)


def test_prices_of_what_was_measured():
    calibration, mesh = Calibration.load(FILE), MeshShape.of({"data": 4, "model": 2})
    prices = Prices.of_calibration(calibration, mesh)
    largest = lambda kind: next(c for c in calibration.curves if c.kind.value == kind and c.dtype == "float32").points
    assert prices.memory_bytes_per_second == pytest.approx(
        largest("elementwise")[-1].size / largest("elementwise")[-1].seconds
    )
    assert prices.flops_per_second == pytest.approx(max(p.size / p.seconds for p in largest("product")[-3:]), rel=0.5)
    # A ring of four goes over processes that have two devices each; both take what an all-reduce was measured to take.
    for axis, count in mesh.axes:
        link, sent = prices.links[axis], 1e6
        between = count * (1 if axis == "model" else 2) > calibration.devices_per_process
        whole = calibration.collective_seconds("all_reduce", count, between, sent)
        assert 2 * (count - 1) * link.latency_seconds + sent / link.bytes_per_second == pytest.approx(whole)


def test_a_calibration_that_is_none(tmp_path):
    (tmp_path / "c.json").write_text("{}")
    for path in (tmp_path / "c.json", tmp_path / "missing.json", str(tmp_path / "missing.json")):
        with pytest.raises(CalibrationError) as caught:
            splitjax.parallelize(step, mesh="auto", rules="auto", target=path)
        assert caught.value.remedy
