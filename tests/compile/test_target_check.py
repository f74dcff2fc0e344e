"""Steps that are compiled for machines that are not here: what is said of them, and whether they fit."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import splitjax
from splitjax.compile import topologies
from splitjax.errors import BudgetError, CompilerError, PlanError, TargetError
from splitjax.machines import parse_target
from splitjax.mesh import MeshShape
from splitjax.report.target.value import TargetCheck, predicted_fit

WIDTH = 256


def train(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["first"])
        return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)

    value, grads = splitjax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}


def init(key):
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (WIDTH, WIDTH)),
        "second": jax.random.normal(second, (WIDTH, WIDTH)),
    }


def batch_of(examples):
    shape = jax.ShapeDtypeStruct((examples, WIDTH), np.float32)
    return {"x": shape, "y": shape}


SHAPES = jax.eval_shape(init, jax.random.key(0))
BATCH = batch_of(64)


def step_of(**options):
    return splitjax.parallelize(train, **{"mesh": {"data": 4}, "rules": "data_parallel", **options})


def test_processors_are_checked_with_virtual_devices():
    check = step_of(target="cpu:4").check_target(SHAPES, BATCH, memory_budget="1GiB")
    assert check.fits is True and check.predicted_fits is True and check.run.limit_bytes is None
    assert check.target == "cpu:4" and check.run.compiler.startswith("jaxlib ") and check.report is not None
    # Arguments are exact: both weights whole, a quarter of the examples.
    assert check.compiled.argument_bytes == 4 * (2 * WIDTH**2 + 2 * 16 * WIDTH) == check.memory.argument_bytes
    assert check.needed_bytes == check.compiled.total_bytes <= check.memory.bound_bytes
    # Two gradients are summed over four devices, each sends 3/4 of them twice; the loss is a further sum.
    gradients = round(2 * 3 / 4 * 4 * 2 * WIDTH**2)
    sent = check.sent["all_reduce", "data"]
    assert 0 <= sent.compiled_bytes - gradients < 64 and 0 <= sent.predicted_bytes - gradients < 64
    text = str(check)
    assert "fits: as compiled a device needs" in text and "of 1.0 GiB (the budget)" in text
    assert "none: every array that is gathered whole is read whole" in text
    assert "VMEM" not in text and "HBM" not in text
    assert "does not fit" not in check._repr_html_() and "cpu:4" in check._repr_html_()


def test_a_budget_that_is_too_small_for_what_was_compiled():
    check = step_of().check_target(SHAPES, BATCH, on="cpu:4", memory_budget=2**20 // 2)
    assert check.fits is False and check.predicted_fits is False and check.report is not None
    assert "does not fit: as compiled" in str(check) and "512.0 KiB (the budget)" in " ".join(str(check).split())
    assert repr(check) == "<TargetCheck of train on cpu:4: does not fit>"


def test_processors_without_a_budget_are_held_against_nothing():
    check = step_of().check_target(SHAPES, BATCH, on="cpu:4")
    assert check.allowed_bytes is None and check.fits is None and check.predicted_fits is None
    assert "no budget was given" in str(check)


def test_a_check_is_read_back():
    check = step_of().check_target(SHAPES, BATCH, on="cpu:4", memory_budget="1GiB")
    assert TargetCheck.from_json(check.to_json()) == check
    refused = dataclasses.replace(
        check, report=None, run=dataclasses.replace(check.run, needed_bytes=2**31, available_bytes=2**30)
    )
    assert TargetCheck.from_json(refused.to_json()) == refused and refused.fits is False
    assert refused.sent["all_reduce", "data"].compiled_bytes == 0
    assert "the compiler refuses it" in str(refused)
    with pytest.raises(PlanError, match="not the JSON of a check"):
        TargetCheck.from_json("[]")


def test_the_bound_decides_before_compiling():
    memory = step_of().plan(SHAPES, BATCH).memory
    assert memory.peak_bytes < memory.bound_bytes
    assert predicted_fit(memory, memory.bound_bytes) is True
    assert predicted_fit(memory, memory.bound_bytes - 1) is None
    assert predicted_fit(memory, memory.peak_bytes - 1) is False
    assert predicted_fit(dataclasses.replace(memory, bound_bytes=None), 1) is None


@pytest.mark.parametrize(
    ("on", "budget", "error", "match"),
    [
        (None, None, TargetError, "the machine to compile for is not said"),
        ("tpu:v99:2x2", None, TargetError, "no kind of device of this name"),
        ("cpu:8", None, TargetError, "the mesh has 4 devices and the target 8"),
        ("cpu:4", "much", BudgetError, "a budget is a number of bytes"),
    ],
)
def test_what_cannot_be_checked_is_said(on, budget, error, match):
    with pytest.raises(error, match=match) as caught:
        step_of().check_target(SHAPES, BATCH, on=on, memory_budget=budget)
    assert caught.value.remedy


def test_more_virtual_devices_than_there_are():
    target = parse_target(f"cpu:{2 * len(jax.devices('cpu'))}")
    with pytest.raises(CompilerError, match="virtual devices") as caught:
        topologies.target_mesh(target, MeshShape.of({"data": target.num_devices}), (AxisType.Auto,))
    assert "--xla_force_host_platform_device_count" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "package"), [("tpu:v5e:2x2", "pip install libtpu"), ("gpu:h200:4", 'pip install "jax[cuda13]"')]
)
def test_a_compiler_that_is_not_installed(text, package, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CompilerError, match="is not installed") as caught:
        step_of().check_target(SHAPES, BATCH, on=text)
    assert package in caught.value.remedy and caught.value.value == text


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (NotImplementedError("topology not implemented for cuda"), "is not installed"),
        (RuntimeError("Unknown backend: 'cuda' requested"), "is not installed"),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such layout"), "refuses this topology: INVALID_ARGUMENT"),
    ],
)
def test_a_plugin_that_does_not_describe_the_topology(error, match, monkeypatch):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    target = parse_target("gpu:h200:4")
    with pytest.raises(CompilerError, match=match):
        topologies.target_mesh(target, MeshShape.of({"data": 4}), (AxisType.Auto,))


def test_a_gpu_of_which_xla_knows_too_little(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    target = parse_target("gpu:h200:4")
    bare = dataclasses.replace(target, kind=dataclasses.replace(target.kind, xla_config=""))
    with pytest.raises(CompilerError, match="what XLA has to know of gpu:h200") as caught:
        topologies.target_mesh(bare, MeshShape.of({"data": 4}), (AxisType.Auto,))
    assert "xla_config" in caught.value.remedy


@pytest.mark.tpu_aot
def test_a_tpu_without_a_tpu():
    check = step_of(target="tpu:v5e:2x2").check_target(SHAPES, BATCH)
    assert check.fits is True and check.run.limit_bytes is None and check.allowed_bytes == 16 * 2**30
    assert check.report.platform == "tpu" and check.run.compiler.startswith("libtpu ")
    assert 4 * 2 * WIDTH**2 < check.needed_bytes < check.memory.bound_bytes
    assert check.sent["all_reduce", "data"].compiled_bytes > 0
    assert "(HBM)" in str(check) and "(what it has)" in str(check)
    # The peak counts vector memory, of which such a core has 128 MiB.
    assert 0 < check.compiled.vector_bytes < min(check.compiled.peak_bytes, 128 * 2**20)
    assert "in VMEM, at most at a time" in str(check) and "in VMEM, at most at a time" in str(check.report)


@pytest.mark.tpu_aot
def test_a_tpu_is_held_to_the_budget():
    step = step_of(target="tpu:v5e:2x2")
    check = step.check_target(SHAPES, BATCH, memory_budget="64MiB")
    assert check.fits is True and check.run.limit_bytes == 64 * 2**20
    assert check.run.options == {"xla_tpu_max_hbm_size_mib": 64} and "xla_tpu_max_hbm_size_mib" in str(check)
    small = step.check_target(SHAPES, batch_of(2**17), memory_budget="64MiB")
    assert small.fits is False and small.report is None and small.compiled is None
    # A quarter of the examples, and what is computed of them.
    assert small.needed_bytes > 2 * 2**15 * 4 * WIDTH and small.run.available_bytes == 64 * 2**20
    assert "does not fit: the compiler refuses it" in str(small)
    assert "64.0 MiB (the budget)" in " ".join(str(small).split())


@pytest.mark.tpu_aot
def test_a_program_above_the_memory_of_the_chip_does_not_fit():
    check = step_of(target="tpu:v5e:2x2").check_target(SHAPES, batch_of(2**26))
    assert check.fits is False and check.report is None and check.run.available_bytes < 16 * 2**30 < check.needed_bytes
    assert "that are left of 16.0 GiB (what it has)" in " ".join(str(check).split())
    assert TargetCheck.from_json(check.to_json()) == check


@pytest.mark.tpu_aot
def test_a_topology_that_the_compiler_does_not_know():
    target = parse_target("tpu:v5e:2x2")
    unknown = dataclasses.replace(target, kind=dataclasses.replace(target.kind, name="tpu:v99"))
    with pytest.raises(CompilerError, match="refuses this topology") as caught:
        topologies.target_mesh(unknown, MeshShape.of({"data": 4}), (AxisType.Auto,))
    assert caught.value.remedy


@pytest.mark.tpu_aot
def test_slices_and_single_chips_have_topologies():
    for text, count in (("tpu:v5e:2*2x2", 8), ("tpu:v5e:1x1", 1)):
        mesh = topologies.target_mesh(parse_target(text), MeshShape.of({"data": count}), (AxisType.Auto,))
        assert mesh.devices.shape == (count,) and mesh.devices[0].platform == "tpu"


def test_a_state_that_lies_here_is_checked_for_elsewhere():
    step = step_of()
    state = step.init(init, jax.random.key(0), example=(BATCH,))
    check = step.check_target(state, BATCH, on="cpu:4", memory_budget="1GiB")
    assert check.fits is True and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    evaluation = step.like(lambda state, batch: train(state, batch)[1])
    assert evaluation.check_target(state, BATCH, on="cpu:4", memory_budget="1GiB").fits is True


@pytest.mark.gpu_aot
def test_a_gpu_without_a_gpu():
    check = step_of().check_target(SHAPES, BATCH, on="gpu:h200:1x4", memory_budget="1GiB")
    assert check.fits is True and check.report.platform == "gpu" and check.run.limit_bytes is None
    assert check.needed_bytes <= check.memory.bound_bytes
