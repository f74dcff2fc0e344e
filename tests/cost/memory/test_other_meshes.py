"""A step with a mesh of the user's own over the same devices: its axes by those of the step's mesh, in memory and
time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax.cost.memory.lifetimes import PlacedProgram, predict_program_memory
from splitjax.cost.memory.other_meshes import OtherAxis, same_axes
from splitjax.cost.memory.reading import read
from splitjax.cost.memory.spreading import spread
from splitjax.cost.time.work import tasks_of

OWN = {"data": 2, "model": 4}
N = 64


@pytest.mark.parametrize(
    ("mesh", "axes", "wanted"),
    [
        ({"a": 2, "b": 4}, ("b",), ("model",)),
        ({"a": 2, "b": 4}, ("b", "a"), ("model", "data")),
        ({"z": 8}, ("z",), ("data", "model")),
        ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), ("data", "model")),
        ({"a": 2, "b": 1, "c": 4}, ("b", "c"), ("model",)),
    ],
)
def test_an_axis_that_numbers_devices_alike_is_the_meshs_own(mesh, axes, wanted):
    assert same_axes(axes, mesh, OWN) == (wanted, {})


def test_an_axis_that_does_not_keeps_its_size_and_says_what_it_crosses():
    found, others = same_axes(("a",), {"a": 4, "b": 2}, OWN)
    assert others == {"a of a=4 x b=2": OtherAxis(4, ("data", "model"))} and found == tuple(others)
    found, others = same_axes(("a", "c"), {"a": 2, "b": 2, "c": 2}, OWN)
    assert found == ("data", "c of a=2 x b=2 x c=2") and others[found[1]] == OtherAxis(2, ("model",))


def placed(mesh, spec, how, own=OWN):
    """A product, laid out by a `shard_map` or a constraint over axes of `mesh`, whose last one it adds up over."""
    mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    body = lambda x: jnp.sin(x) + jax.lax.psum(x, mesh.axis_names[-1])
    act = {
        "shard_map": jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec),
        "constraint": lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, spec)),
    }[how]
    shapes = jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((N, N), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, w: act(x @ w) @ w.T)(*shapes)
    return PlacedProgram(jaxpr, [(("data",), ()), ((), ("model",))], [None], {}, own, "cpu")


P = PartitionSpec


@pytest.mark.parametrize("how", ["shard_map", "constraint"])
@pytest.mark.parametrize(
    ("mesh", "spec"), [({"a": 2, "b": 4}, P("a", "b")), ({"a": 2, "b": 2, "c": 2}, P("a", ("b", "c")))]
)
def test_memory_and_time_are_those_of_the_same_layout_in_the_meshs_own_axes(how, mesh, spec):
    renamed, own = placed(mesh, spec, how), placed(OWN, P("data", "model"), how)
    assert predict_program_memory(renamed).estimate_bytes == predict_program_memory(own).estimate_bytes
    if len(mesh) == 2:
        sent = [[(task.op, task.axes, task.sent_bytes) for task in tasks_of(each)] for each in (renamed, own)]
        assert sent[0] == sent[1] and any(num_bytes for _, _, num_bytes in sent[0])


@pytest.mark.parametrize("how", ["shard_map", "constraint"])
def test_a_value_is_split_by_the_sizes_of_its_own_mesh(how):
    step = placed({"a": 4, "b": 2}, P("a", P.UNCONSTRAINED if how == "constraint" else None), how)
    program = read(step.jaxpr, step.arguments, step.results, step.axes)
    spread(program)
    name = "sharding_constraint" if how == "constraint" else "enter"
    (laid_out,) = [node.outputs[0] for node in program.body.nodes if node.name == name]
    assert program.bytes_of(laid_out) == N * N * 4 // 4
    assert predict_program_memory(step).estimate_bytes
    assert {axis for task in tasks_of(step) for axis in task.axes} <= set(OWN)


def test_plans_memory_and_reports_of_a_step_with_a_mesh_of_its_own():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    gelu = jax.shard_map(jax.nn.gelu, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))

    def step(params, batch):
        loss = lambda p: jnp.mean((gelu(batch["x"] @ p["up"]) @ p["down"]) ** 2)
        value, grads = splitjax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    args = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}, {"x": jnp.ones((16, 16))}
    step = splitjax.parallelize(step, mesh=OWN, rules="megatron", donate=False)
    plan = step.plan(*args)
    assert "peak" in str(plan) and plan.to_json() and str(step.report(*args))
    assert step.memory(*args).estimate_bytes == plan.memory.peak_bytes
