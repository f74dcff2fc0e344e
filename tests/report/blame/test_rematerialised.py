"""Involuntary full rematerialisations in compiled modules, against the warning that XLA logs for each."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax.report.value import Report
from tests.report.blame.moves import AB, AXES, MOVES, WARNING, found_of, uncached

ROOT = pathlib.Path(__file__).resolve().parents[3]


def make_mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(("before", "after", "sizes", "expected"), MOVES)
def test_what_is_logged_is_found(before, after, sizes, expected, capfd):
    logged = lambda: capfd.readouterr().err
    assert found_of(make_mesh(), before, after, sizes, logged) == (expected, expected)


@pytest.mark.parametrize(
    ("platform", "settings"),
    [
        pytest.param("tpu", {"TPU_STDERR_LOG_LEVEL": "0", "TPU_MIN_LOG_LEVEL": "0"}, marks=pytest.mark.tpu_aot),
        pytest.param(
            "gpu", {"JAX_PLATFORMS": "cpu,cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}, marks=pytest.mark.gpu_aot
        ),
    ],
)
def test_what_other_compilers_log_is_found(platform, settings):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.report.blame.moves", platform],
        cwd=ROOT,
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == [[move[3], move[3]] for move in MOVES]


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
