"""Names of layers in the compiled program, for profiles."""

from __future__ import annotations

import re

import jax
import optax
import pytest

import splitjax
from splitjax import models


@pytest.mark.parametrize("rules", ["splitbrain", "data_parallel"])
def test_products_carry_their_layer_s_name_forward_and_backward(rules):
    # NNX gives no names of its own.
    spec = models.build("vgg11", library="nnx", width=0.0625, head_features=16)
    make, train_step, _ = models.make_nnx_step(spec, optax.adam(1e-3), value_and_grad=splitjax.nnx.value_and_grad)
    step = splitjax.nnx.parallelize(train_step, mesh={"data": 2, "model": 4}, rules=rules)
    text = step.lower(*make(jax.random.key(0)), spec.example(16)).as_text(debug_info=True)
    named = re.findall(r'"[^"]*jit\(train_step\)/([^"]*)splitjax:layer:model\.(\w+)', text)
    assert {layer for _, layer in named} == {
        f"conv{n}" for n in ("1_1", "2_1", "3_1", "3_2", "4_1", "4_2", "5_1", "5_2")
    } | {"dense1", "dense2", "logits"}
    assert {"conv3_1", "dense1"} <= {layer for before, layer in named if "transpose" in before}
