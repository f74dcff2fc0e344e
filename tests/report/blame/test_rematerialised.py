"""Involuntary full rematerialisations in compiled modules, against the warning that XLA logs for each."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.report.blame.rematerialised import rematerialised
from splitjax.report.dataflow import Dataflow
from splitjax.report.hlo import read_collectives
from splitjax.report.value import Report
from splitjax.report.wire import read_module

WARNING = "Involuntary full rematerialization"
AB, BA = ("data", "model"), ("model", "data")
# from, to, sizes (10 and 12 do not divide), and how many warnings XLA logs
MOVES = [
    ((AB, None), (None, "model"), (64, 64), 1),
    ((None, BA), ("data", None), (64, 64), 1),
    (("data", None), (None, "model"), (64, 64), 1),
    ((AB, None), (BA, None), (64, 64), 0),
    (("data", "model"), ("model", "data"), (64, 64), 0),
    ((AB, None), (None, None), (64, 64), 0),
    ((None, "data"), ("model", None), (10, 12), 1),
    ((AB, None), ("data", "model"), (10, 12), 1),
    (("data", None), ("model", None), (10, 12), 0),
]


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@contextlib.contextmanager
def uncached():
    """What comes from a cache logs nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.parametrize(("before", "after", "sizes", "expected"), MOVES)
def test_what_is_logged_is_found(before, after, sizes, expected, capfd):
    mesh = make_mesh()

    def move(x):
        x = jax.lax.with_sharding_constraint(2 * jnp.sin(x), NamedSharding(mesh, PartitionSpec(*before)))
        x = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(mesh, PartitionSpec(*after)))
        return jnp.sum(3 * x)

    with uncached():
        compiled = jax.jit(move).lower(jax.ShapeDtypeStruct(sizes, jnp.float32)).compile()
    logged = capfd.readouterr().err.count(WARNING)
    shape, found = MeshShape.of(mesh), []
    for module in map(read_module, _compat.serialized_modules(compiled)):
        flow = Dataflow(module)
        for each in read_collectives(module, shape):
            found.append(rematerialised(flow.collective(each.name, each.member), flow, shape, each.axis))
    assert sum(each is not None for each in found) == logged == expected


def step_with(mesh, *specs):
    """A training step that constrains its hidden activations to one spec after the other."""

    def step(params, batch):
        def loss(params):
            hidden = batch @ params["up"]
            for spec in specs:
                hidden = jax.lax.with_sharding_constraint(jnp.cos(hidden), NamedSharding(mesh, spec))
            return jnp.mean((hidden @ params["down"]) ** 2)

        value, gradients = splitjax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    shapes = {"up": jax.ShapeDtypeStruct((16, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 16), jnp.float32)}
    parallel = splitjax.parallelize(step, mesh=mesh, rules="data_parallel")
    with uncached():
        return parallel.report(shapes, jax.ShapeDtypeStruct((64, 16), jnp.float32))


def test_a_report_names_line_and_remedy_and_the_remedy_works(capfd):
    mesh, P = make_mesh(), PartitionSpec
    report = step_with(mesh, P(AB, None), P(None, "model"))
    assert WARNING in capfd.readouterr().err
    blamed = report.rematerialised
    assert blamed and all("test_rematerialised.py" in each.source for each in blamed)
    assert "involuntary full rematerialization" in str(report) and "P('data', 'model')" in report._repr_html_().replace(
        "&#x27;", "'"
    )
    assert Report.from_json(report.to_json()) == report

    better = step_with(mesh, P(AB, None), P("data", "model"), P(None, "model"))
    assert len(better.rematerialised) < len(blamed)
    assert capfd.readouterr().err.count(WARNING) == len(better.rematerialised)


def test_the_remedy_stops_where_both_moves_are_one_collective():
    report = step_with(make_mesh(), PartitionSpec(AB, None), PartitionSpec(None, "model"))
    remedies = {each.rematerialised.remedy for each in report.rematerialised} - {""}
    assert remedies and all("constrain it to P('data', 'model') on the way" in remedy for remedy in remedies)


def test_a_step_without_any(capfd):
    report = step_with(make_mesh())
    assert not report.rematerialised and WARNING not in capfd.readouterr().err
    assert "involuntary" not in str(report) and '"rematerialised"' not in report.to_json()
