"""Who the workers of a step are: axes, counts, and which parameters keep an axis from being theirs."""

from __future__ import annotations

import ast
import pathlib

import pytest

from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Plan
from splitjax.planning.workers import Workers, workers_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
MESH = MeshShape((("data", 2), ("model", 3), ("idle", 1)))


def plan_of(replicated_batch="all", batch_axes=("data", "model"), **specs):
    leaves = tuple(LeafPlan(path, (6, 6), "float32", "param", True, spec, "rule") for path, spec in specs.items())
    table = LeafPlan("slot", (6, 6), "float32", "optimizer", True, ("data",), "follows")
    return Plan(MESH, "rules", replicated_batch, batch_axes, (*leaves, table), ())


def test_workers_lie_along_the_batch_axes_that_split_nothing():
    workers = Workers.beside(MESH, ("data", "model", "idle"), {"model"})
    assert workers.axes == ("data",) and workers.shared_axes == ("model",)
    assert (workers.num_workers, workers.devices_each, workers.num_batch_parts) == (2, 3, 6)
    assert workers.sizes == (("data", 2), ("model", 3))


def test_divided_workers_share_nothing():
    workers = Workers.beside(MESH, ("data", "model"), {"data"})
    divided = workers.divided(workers.shared_axes)
    assert set(divided.axes) == {"data", "model"} and divided.axes[0] == "model"
    assert (divided.num_workers, divided.devices_each) == (6, 1)


def test_a_single_device_is_one_worker():
    assert (Workers().num_workers, Workers().num_batch_parts, Workers().devices_each) == (1, 1, 1)


@pytest.mark.parametrize(
    ("specs", "stored", "gathered"),
    [
        ({"a": ()}, ("data", "model"), ("data", "model")),
        ({"a": (None, "model"), "b": ()}, ("data",), ("data",)),
        # Stored in pieces over the batch's axes, and whole while it is used.
        ({"a": ("data",)}, ("model",), ("data", "model")),
        ({"a": (("data", "model"),)}, (), ("data", "model")),
    ],
)
def test_a_parameter_that_is_split_keeps_its_axes_from_the_workers(specs, stored, gathered):
    plan = plan_of(**specs)
    assert workers_of(plan).axes == stored
    assert workers_of(plan, gathers=True).axes == gathered


def test_a_parameter_that_workers_do_not_read_whole_is_left_out():
    plan = plan_of(table=("model",), dense=())
    assert workers_of(plan).axes == ("data",)
    assert workers_of(plan, apart={"table"}).axes == ("data", "model")


def test_nobody_else_says_who_the_workers_are():
    """Only `planning/workers.py` picks workers out of the axes that split the batch."""
    for room in ("planning", "lower", "compile", "measure", "partial"):
        for file in sorted((ROOT / "splitjax" / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "present":
                    of_batch = any(ast.unparse(argument).endswith("batch_axes") for argument in node.args)
                    assert not of_batch or file.match("planning/workers.py"), f"{file}:{node.lineno}"
