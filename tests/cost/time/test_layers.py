"""What each layer costs, against the sums of the step."""

from __future__ import annotations

import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax import display
from splitjax.cost.time.prediction import LayerCost, StepTime
from tests.report.programs import f32, narrow

# A processor, whose kernels are those of which the memory of a plan is predicted.
MACHINE = pathlib.Path(__file__).parents[2] / "codec" / "data" / "calibration.json"


@pytest.mark.parametrize(("model", "rules"), [("transformer", "megatron"), ("vgg11", "splitbrain")])
def test_layers_add_up_to_the_step(model, rules):
    step, arguments = narrow(model, rules=rules)
    time, plan = step.time(*arguments, on=MACHINE), step.plan(*arguments)
    assert math.isclose(sum(each.seconds for each in time.layers), time.computing_seconds + time.sending_seconds)
    assert math.isclose(sum(each.sent_bytes for each in time.layers), sum(part.sent_bytes for part in time.collectives))
    assert sum(each.state_bytes for each in time.layers) == plan.memory.state_bytes
    timeline = step.memory_timeline(*arguments, compiled=False).predicted
    assert sum(each.stored_bytes for each in time.layers) == timeline.temporary_bytes
    # Every layer is there, once, and next to nothing is nobody's.
    names = [each.layer for each in time.layers]
    assert len(set(names)) == len(names) and {layer.name for layer in plan.layers} <= set(names)
    assert sum(each.seconds for each in time.layers if not each.layer) < 0.15 * time.seconds
    assert [each.seconds for each in time.layers] == sorted((each.seconds for each in time.layers), reverse=True)


def test_the_layer_that_computes_most_takes_longest():
    def step(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["small"])
            return jnp.mean((jnp.tanh(hidden @ params["large"]) @ params["last"]) ** 2)

        gradients = splitjax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params = {"small": f32(64, 512), "large": f32(512, 4096), "last": f32(4096, 64)}
    planned = splitjax.parallelize(step, mesh={"data": 4}, rules="data_parallel")
    time = planned.time(params, {"x": f32(512, 64)}, on="tpu:v5e:2x2")
    costs = {each.layer: each for each in time.layers}
    assert time.layers[0].layer == "large" and costs["large"].seconds > 3 * costs["small"].seconds
    assert costs["large"].state_bytes == 512 * 4096 * 4
    # Joined all-reduces are their layers' by what each of these sends: a ring over 4 devices.
    assert math.isclose(costs["large"].sent_bytes, 2 * 3 / 4 * 512 * 4096 * 4, rel_tol=0.01)
    assert math.isclose(costs["small"].sent_bytes, 2 * 3 / 4 * 64 * 512 * 4, rel_tol=0.01)


def time_of(layers):
    return StepTime(1e-3, 1e-3, 0.0, 0.0, 0.0, (), True, tuple(layers))


def test_many_blocks_share_a_row():
    blocks = [LayerCost(f"params/block{k}/up", 1e-5, 1024.0, 2048, 1024) for k in range(30)]
    text = display.show(time_of([*blocks, LayerCost("params/head", 5e-6, 0.0)]), 80)
    assert "30 x params/block*/up" in text and "300 us" in text and "90.0 KiB" in text and "block7" not in text
    few = display.show(time_of(blocks[:3]), 80)
    assert "params/block0/up" in few and " x " not in few and "██" in few
    assert max(map(len, text.splitlines())) <= 80
