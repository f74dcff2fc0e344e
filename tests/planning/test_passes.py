"""Planning needs no devices: cells of the corpus are planned on abstract meshes, as they are on real ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.corpus import steps
from benchmarks.corpus.canonical import canonical_plan, digest
from benchmarks.corpus.cells import Cell
from splitjax.errors import SplitjaxError

EVERY_MODEL = "mlp,transformer,lstm,deepfm,dlrm,vgg11,resnet18,mobilenet_v2,convnext_tiny"


@pytest.mark.parametrize(
    ("models", "stride"), [("mlp,deepfm", 47), pytest.param(EVERY_MODEL, 7, marks=pytest.mark.slow)]
)
def test_planning_on_abstract_meshes_initialises_no_backend(models, stride):
    command = [sys.executable, "-m", "tests.planning.abstract_worker", models, str(stride)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    abstract = dict(json.loads(line) for line in run.stdout.splitlines())
    assert sum(len(said) == 16 for said in abstract.values()) > 5
    assert abstract == {name: plan(Cell.parse(name)) for name in abstract}


def plan(cell: Cell) -> str:
    """The digest of a cell's plan on a mesh with devices, or what it is refused with."""
    made = steps.ready(cell.unit)
    try:
        return digest(canonical_plan(steps.parallel(cell, made).plan(*made.arguments).with_summed_memory().to_json()))
    except SplitjaxError as error:
        return type(error).__name__
