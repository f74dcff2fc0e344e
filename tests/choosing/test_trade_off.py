"""Machines compared for a step: which points are kept, which are beaten, what is said, and that it shows itself."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax.choosing import Candidate, Choice, Point, TradeOff, trade_off
from splitjax.display import html, show
from splitjax.errors import BudgetError, TargetError
from splitjax.machines import parse_target
from splitjax.mesh import MeshShape
from splitjax.rules import RuleSet
from splitjax.step.options import OptionError

SMALL, LARGE = parse_target("tpu:v5e:2x2"), parse_target("tpu:v5e:2x4")
MIB = 2**20


def chooser(curves):
    """A choice by `curves`: for each machine, (seconds, bytes) of its layouts, the fastest first."""
    asked = []

    def choose(target, allowed):
        asked.append((str(target), allowed))
        for seconds, num_bytes in curves[target]:
            if allowed is None or num_bytes <= allowed:
                mesh = MeshShape((("data", target.num_devices),))
                best = Candidate(RuleSet(f"by {seconds}", ()), mesh, math.inf, 0, 0, num_bytes, seconds)
                return Choice(best, (best,), (), (), (mesh,))
        raise BudgetError("nothing fits", value=allowed, place="here", remedy="none")

    return choose, asked


def test_each_machine_is_asked_for_less_and_less():
    choose, asked = chooser({SMALL: [(4.0, 100 * MIB), (5.0, 90 * MIB), (9.0, 70 * MIB)]})
    compared = trade_off(choose, [SMALL, SMALL], most_points=4)
    assert [(each.seconds, each.memory_bytes // MIB) for each in compared.points] == [(4.0, 100), (9.0, 70)]
    assert [allowed for _, allowed in asked] == [None, 80 * MIB, 56 * MIB]


def test_a_budget_is_asked_for_itself():
    choose, asked = chooser({SMALL: [(4.0, 900 * MIB), (5.0, 200 * MIB), (9.0, 70 * MIB)]})
    compared = trade_off(choose, [SMALL], budget_bytes=300 * MIB, most_points=3)
    assert [allowed for _, allowed in asked] == [None, 300 * MIB, 160 * MIB]
    assert [compared.fits(each) for each in compared.points] == [False, True, True]
    assert compared.fewest == compared.fastest == compared.points[1]


def test_what_another_machine_beats_and_what_it_would_take():
    choose, _ = chooser({SMALL: [(4.0, 100 * MIB)], LARGE: [(2.0, 60 * MIB), (3.0, 40 * MIB)]})
    compared = trade_off(choose, [SMALL, LARGE], budget_bytes=150 * MIB)
    assert compared.front == compared.points, "fewer devices are worth time and memory"
    assert compared.fewest.num_devices == 4 and compared.fastest.seconds == 2.0
    assert compared.verdict.startswith("within 150.0 MiB a device it takes tpu:v5e:2x2 (4 devices): 4.00 s a step")
    text = show(compared)
    assert "the fewest devices that fit" in text and "the fastest that fits" in text
    slow = dataclasses.replace(compared.points[0], target=LARGE)
    beaten = TradeOff((*compared.points, slow), 50 * MIB)
    assert slow not in beaten.front and beaten.beaten_by(slow).seconds == 2.0
    assert beaten.verdict.startswith("within 50.0 MiB a device it takes tpu:v5e:2x4")
    assert "does not fit: 50.0 MiB a device" in show(beaten) and html(beaten).count("<circle") == 4


def test_nothing_fits():
    choose, _ = chooser({SMALL: [(4.0, 100 * MIB)]})
    compared = trade_off(choose, [SMALL], budget_bytes=MIB)
    assert compared.fewest is None and compared.fastest is None
    assert (
        compared.verdict
        == "nothing fits within 1.0 MiB a device: the least that a device needs is 100.0 MiB, on tpu:v5e:2x2"
    )
    # Without a budget the memory of a device is the limit.
    whole = TradeOff((Point(SMALL, MeshShape((("data", 4),)), "any", 1.0, 17 * 2**30),))
    assert not whole.fits(whole.points[0]) and whole.verdict.startswith(
        "nothing fits within the memory that devices have"
    )


def test_a_step_is_compared_on_machines_that_are_not_here():
    tx = optax.adam(1e-3)

    def step(state, batch):
        def loss_fn(params):
            hidden = jax.nn.relu(batch["x"] @ params["up"])
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = {"up": shape(512, 1024), "down": shape(1024, 64)}
    state = {"params": params, "opt": jax.eval_shape(tx.init, params)}
    batch = {"x": shape(64, 512), "y": shape(64, 64)}
    targets = ["tpu:v5e:2x2", "gpu:h200:1x2"]
    compared = splitjax.pareto(step, state, batch, targets=targets, memory_budget="1GiB", most_points=2)
    assert {str(each.target) for each in compared.points} == {"tpu:v5e:2x2", str(parse_target("gpu:h200:1x2"))}
    assert all(each.seconds > 0 and each.memory_bytes > 0 and compared.fits(each) for each in compared.points)
    assert compared.fewest.num_devices == 2
    assert compared == splitjax.pareto(step, state, batch, targets=targets, memory_budget="1GiB", most_points=2)
    with pytest.raises(OptionError, match="no machine to compare"):
        splitjax.pareto(step, state, batch, targets=[])
    with pytest.raises(TargetError, match="targets"):
        splitjax.pareto(step, state, batch, targets=["tpu:v99:2x2"])
    with pytest.raises(BudgetError, match="number of bytes"):
        splitjax.pareto(step, state, batch, targets=targets, memory_budget="lots")
    with pytest.raises(OptionError, match="named together"):
        splitjax.pareto(step, state, batch, targets=targets, target="tpu:v5e:2x4")
