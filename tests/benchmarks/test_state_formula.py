"""A worker's state under SplitBrain is P_conv + P_dense / K: as planned, and as compiled."""

from __future__ import annotations

import pytest

from benchmarks import state
from splitjax.models import build


@pytest.mark.parametrize("group", state.GROUPS)
@pytest.mark.parametrize("head", state.HEADS)
def test_the_plan_of_vgg16_follows_the_formula(head, group):
    found = state.measure(head, build("vgg16", **state.HEADS[head]), group)
    assert found.plan_bytes == pytest.approx(found.formula_bytes, rel=state.TOLERANCE)
    assert found.plan_bytes == found.formula_bytes + sum(beyond for _, beyond in found.exceptions)
    # What is not split is named, and is nothing but the step counter and a bias that does not divide.
    names = {path.rsplit("/", 2)[-2] if "/" in path else path for path, _ in found.exceptions}
    assert names <= {"step", "logits"}


def test_formula_for_vgg16_with_the_head_of_cifar10():
    """The published counts: 14,714,688 parameters in convolutions, 18,923,530 in the head."""
    found = state.measure("cifar", build("vgg16"), 8)
    assert (found.num_conv, found.num_dense) == (14_714_688, 18_923_530)
    assert found.formula_bytes == 8 * (14_714_688 + 18_923_530 / 8)


def test_compiled_for_cpu():
    spec = build("vgg11", width=1 / 16, head_features=(1024, 1024))
    found = state.measure("cifar", spec, 4, ("cpu",))
    compiled = found.compiled["cpu"]
    assert compiled.explained and compiled.padding_bytes == 0
    assert compiled.state_bytes == found.plan_bytes
    assert found.ok


@pytest.mark.tpu_aot
def test_compiled_ahead_of_time_for_a_tpu():
    spec = build("vgg11", width=1 / 16, head_features=(1024, 1024))
    found = state.measure("cifar", spec, 8, ("tpu",))
    compiled = found.compiled["tpu"]
    assert compiled.explained, "arrays and tiles do not add up to the executable's argument bytes"
    assert compiled.state_bytes - compiled.padding_bytes == found.plan_bytes
    assert found.ok
