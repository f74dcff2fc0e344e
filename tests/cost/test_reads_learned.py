"""Which products have a cotangent asked for: those whose input parameters reach, wherever they stand in the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.plan import Phase, PurposeKind

EXAMPLES, WIDTH, HIDDEN = 16, 32, 64
MESH = {"data": 2, "model": 2}


def positioned(params, batch):
    """Learned positions are added to what the first product reads."""
    x = batch["first"] + params["positions"]
    return jnp.mean((jax.nn.relu(x @ params["first"]) @ params["last"] - batch["y"]) ** 2)


def towers(params, batch):
    """The second tower reads a batch, as the first one does."""
    first, second = (jax.nn.relu(batch[name] @ params[name]) for name in ("first", "second"))
    return jnp.mean(((first + second) @ params["last"] - batch["y"]) ** 2)


def arguments(loss):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"first": shape(WIDTH, HIDDEN), "last": shape(HIDDEN, WIDTH)}
    params |= {"positions": shape(1, WIDTH)} if loss is positioned else {"second": shape(WIDTH, HIDDEN)}
    batch = {name: shape(EXAMPLES, WIDTH) for name in ("first", "second", "y")}
    return params, batch if loss is towers else {"first": batch["first"], "y": batch["y"]}


def parallel(loss, rules):
    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return splitjax.parallelize(step, mesh=MESH, rules=rules)


@pytest.mark.parametrize(
    ("loss", "read_back"),
    [(positioned, {"first", "last", "positions"}), (towers, {"last"})],
    ids=["positions", "towers"],
)
def test_a_stored_weight_is_gathered_for_the_backward_pass_where_a_cotangent_is_asked_for(loss, read_back):
    step = parallel(loss, "fsdp")
    plan, report = step.plan(*arguments(loss)), step.report(*arguments(loss))
    gathers = [one for one in plan.collectives if one.purpose.kind == PurposeKind.STORED_WEIGHT]
    assert {one.layer for one in gathers if one.purpose.phase == Phase.BACKWARD} <= read_back
    assert {"first", "last"} & read_back <= {one.layer for one in gathers if one.purpose.phase == Phase.BACKWARD}
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []


@pytest.mark.parametrize("loss", [positioned, towers])
@pytest.mark.parametrize("rules", ["megatron", "splitbrain"])
def test_what_is_planned_is_compiled(loss, rules):
    report = parallel(loss, rules).report(*arguments(loss))
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []


def test_products_are_counted_that_are_computed():
    """Forward, for the weight, and for the input where parameters reach it."""
    product = 2 * EXAMPLES * WIDTH * HIDDEN
    plans = {loss: parallel(loss, "fsdp").plan(*arguments(loss)) for loss in (positioned, towers)}
    assert plans[positioned].compute.ideal_flops * 4 == (3 + 3) * product
    assert plans[towers].compute.ideal_flops * 4 == (2 + 2 + 3) * product
