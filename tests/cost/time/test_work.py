"""What a device does in a step: flops, bytes sent, loops, and the whole prediction of a decorated step."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.compile.memory import placed_program
from splitjax.cost.time.work import tasks_of, totals, walk
from splitjax.errors import CalibrationError, TargetError
from splitjax.machines.calibration import Calibration, OperationKind

DATA = pathlib.Path(__file__).parents[2] / "codec" / "data" / "calibration.json"
BATCH, WIDTH = 64, 128


def step_of(loss, rules, mesh):
    def step(state, batch):
        value, grads = splitjax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return splitjax.parallelize(step, mesh=mesh, rules=rules)


def two_layers(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"])
    return jnp.mean((hidden @ params["down"]["kernel"]) ** 2)


def scanned(params, batch):
    def block(x, w):
        return jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(block, batch["x"], params["blocks"])[0] ** 2)


f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
TWO = {"up": {"kernel": f32(WIDTH, WIDTH)}, "down": {"kernel": f32(WIDTH, WIDTH)}}
EXAMPLES = {"x": f32(BATCH, WIDTH)}


def tasks(step, *args):
    recipe, entry = step._recipe, step._programs.entry(args)
    return tasks_of(placed_program(recipe, entry, "time"))


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("data_parallel", {"data": 8}),
        ("fsdp", {"data": 8}),
        ("megatron", {"data": 2, "model": 4}),
    ],
)
def test_flops_and_bytes_are_those_of_the_plan(rules, mesh):
    step = step_of(two_layers, rules, mesh)
    plan, found = step.plan(TWO, EXAMPLES), totals(tasks(step, TWO, EXAMPLES))
    assert found["flops"] == plan.compute.flops > 0
    planned = sum(collective.bytes for collective in plan.collectives)
    # The loss of a step is summed too, which plans do not list.
    assert planned > 0 and found["sent_bytes"] == pytest.approx(planned, abs=64)


@pytest.mark.parametrize(("platform", "messages"), [("cpu", 5), ("gpu", 1)])
def test_a_processors_joined_sums_are_sent_array_by_array(platform, messages):
    # Four gradients and the loss, in one all-reduce of the program.
    def with_biases(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
        return jnp.mean((hidden @ params["down"]["kernel"] + params["down"]["bias"]) ** 2)

    state = {name: {**layer, "bias": f32(WIDTH)} for name, layer in TWO.items()}
    step = step_of(with_biases, "data_parallel", {"data": 8})
    placed = placed_program(step._recipe, step._programs.entry((state, EXAMPLES)), "time")
    found = tasks_of(dataclasses.replace(placed, platform=platform))
    assert [task.num_messages for task in found if task.op] == [messages]


@pytest.mark.parametrize(("side", "kinds"), [(4, "CONVOLUTION"), (2, "SMALL_CONVOLUTION")])
def test_which_convolutions_no_library_computes(side, kinds):
    """Of 2 x 2 places under a filter of 3 x 3: XLA's CPU compiler swaps the two, as its modules show."""

    def convolved(params, batch):
        image = batch["x"]
        for name in ("a", "b"):
            image = jax.lax.conv_general_dilated(
                image, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        return jnp.mean(image**2)

    state, batch = {name: f32(3, 3, 8, 8) for name in "ab"}, {"x": f32(64, side, side, 8)}
    step = step_of(convolved, "data_parallel", {"data": 8})
    found = [task.loads[0] for task in tasks(step, state, batch) if task.name == "conv_general_dilated"]
    # Two forward, one of an image, and two of filters, which sum the examples.
    assert sorted(load.kind.name for load in found) == sorted([kinds] * 3 + ["FILTER_GRADIENT"] * 2)
    assert {load.size for load in found if load.kind.name == kinds} == {2.0 * 8 * side * side * 9 * 8 * 8}
    text = step.lower(state, batch).compile().as_text()
    assert ("rhs_reversal" in text) == (side == 2)


def test_a_scan_runs_as_often_as_it_has_blocks():
    step = step_of(scanned, "data_parallel", {"data": 8})
    found = tasks(step, {"blocks": f32(6, WIDTH, WIDTH)}, EXAMPLES)
    products = [(task.loads[0].kind, turns) for task, turns in walk(found) if task.name == "dot_general"]
    assert sum(turns for _, turns in products) == 3 * 6  # forward, and two backward
    assert [turns for kind, turns in products if kind is OperationKind.WEIGHT_GRADIENT] == [6]
    costly = [(task, turns) for task, turns in walk(found) if any(x.kind is OperationKind.COSTLY for x in task.loads)]
    assert [turns for task, turns in costly if task.name == "tanh"] == [6]
    assert costly[0][0].loads[0].size == BATCH // 8 * WIDTH


def tasks_of_narrow_scan(platform):
    """The tasks, and how often each runs, of a scan over weights that are converted to a narrower type in each turn."""

    def narrow(params, batch):
        block = lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None)
        return jnp.mean(jax.lax.scan(block, batch["x"].astype(jnp.bfloat16), params["blocks"])[0] ** 2)

    step = step_of(narrow, "data_parallel", {"data": 8})
    args = {"blocks": f32(6, WIDTH, WIDTH)}, EXAMPLES
    placed = placed_program(step._recipe, step._programs.entry(args), "time")
    return [*walk(tasks_of(dataclasses.replace(placed, platform=platform)))]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_turn_of_a_scan_reads_its_own_part_of_the_weights(platform):
    found = tasks_of_narrow_scan(platform)
    read = [task for task, _ in found if task.name == "convert_element_type" and task.shape == (WIDTH, WIDTH)]
    assert read and all(task.num_bytes <= WIDTH * WIDTH * (4 + 2 + 2) for task in read)


def test_a_tpu_converts_all_parts_once_in_front_of_the_scan():
    (converted,) = [task for task, turns in tasks_of_narrow_scan("tpu") if task.name == "convert" and turns == 1]
    assert converted.shape == (6, WIDTH, WIDTH) and converted.num_bytes == 6 * WIDTH * WIDTH * (4 + 2)


def test_the_time_of_a_step():
    step = step_of(two_layers, "megatron", {"data": 2, "model": 4})
    found = step.time(TWO, EXAMPLES, on=DATA)
    assert found == step.time(TWO, EXAMPLES, on=Calibration.load(DATA)) == step.time(TWO, EXAMPLES, on=str(DATA))
    assert found.seconds == pytest.approx(found.computing_seconds + found.sending_seconds + found.call_seconds)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.seconds - found.call_seconds)
    assert found.collectives and all(part.axes for part in found.collectives)
    assert "about" in str(found) and "dot_general" in str(found)
    more = step.time(TWO, {"x": f32(16 * BATCH, WIDTH)}, on=DATA)
    assert more.computing_seconds > 4 * found.computing_seconds


def test_the_time_on_a_machine_that_is_not_here():
    step = step_of(two_layers, "data_parallel", {"data": 16})
    found = step.time(TWO, EXAMPLES, on="tpu:v5e:4x4")
    assert found.is_lower_bound and "at least" in str(found) and found.sending_seconds > 0
    # Both gradients are small and summed together, so that little or nothing is left to compute meanwhile.
    assert 0 <= found.hidden_seconds < found.sending_seconds
    assert found.seconds == pytest.approx(found.computing_seconds + found.sending_seconds - found.hidden_seconds)
    assert step.time(TWO, EXAMPLES, on="gpu:h200:2x8").seconds != found.seconds


def test_what_is_no_machine_for_the_step():
    step = step_of(two_layers, "data_parallel", {"data": 8})
    with pytest.raises(TargetError, match="8 devices and the target 16"):
        step.time(TWO, EXAMPLES, on="tpu:v5e:4x4")
    with pytest.raises(CalibrationError, match="cannot be read"):
        step.time(TWO, EXAMPLES, on="nowhere.json")
    with pytest.raises(CalibrationError, match="a machine is a calibration"):
        step.time(TWO, EXAMPLES, on=3)


def test_kernels_of_other_platforms_take_no_time():
    """Of what JAX traced for several platforms one is compiled."""
    from splitjax.cost.memory.lifetimes import PlacedProgram
    from splitjax.cost.time.work import tasks_of, totals

    def step(x, y):
        kernel = lambda x, y: jnp.tanh(x @ x @ x) + y
        return jax.lax.platform_dependent(x, y, default=jnp.add, tpu=kernel, cuda=kernel)

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    jaxpr = jax.make_jaxpr(step)(x, x)
    flops = {
        platform: totals(tasks_of(PlacedProgram(jaxpr, [None] * 2, [None], {}, {}, platform)))["flops"]
        for platform in ("cpu", "gpu", "tpu")
    }
    assert flops["cpu"] == 0 and flops["gpu"] == flops["tpu"] == 4 * 256**3
