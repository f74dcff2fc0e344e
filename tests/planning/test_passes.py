"""Planning needs no devices: cells of the corpus are planned on abstract meshes, to the plans that are stored."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import jax
import pytest

STORED = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "corpus"
EVERY_MODEL = "mlp,transformer,lstm,deepfm,dlrm,vgg11,resnet18,mobilenet_v2,convnext_tiny"


@pytest.mark.parametrize(
    ("models", "stride"), [("mlp,deepfm", 29), pytest.param(EVERY_MODEL, 7, marks=pytest.mark.slow)]
)
def test_planning_on_abstract_meshes_initialises_no_backend(models, stride):
    command = [sys.executable, "-m", "tests.planning.abstract_worker", models, str(stride)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    *planned, about = [json.loads(line) for line in run.stdout.splitlines()]
    assert about == ["jax", jax.__version__] and len(planned) > 5
    stored = {}
    for model in models.split(","):
        file = STORED / f"jax-{jax.__version__}" / f"plans-{model}.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        stored |= dict(line.split(" ", 1) for line in lines)
    compared = [
        (cell, said, stored[cell].partition("+")[0]) for cell, said in planned if " " not in stored.get(cell, " ")
    ]
    assert [cell for cell, said, expected in compared if said != expected] == []
    assert compared or not stored
