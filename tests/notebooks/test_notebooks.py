"""Every notebook runs from top to bottom, and is the twin of its script."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from splitjax.schedule.policies.group_plan import MAX_MEMBERS
from tests.processes import compile_flags

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_and_script_are_twins(path):
    def cells(file):
        return [(cell.cell_type, cell.source) for cell in jupytext.read(file).cells]

    assert cells(path) == cells(path.with_suffix(".py")), "run `make notebooks`"
    # Outputs would go stale, and hold paths of the machine that they were made on.
    assert all(not cell.get("outputs") for cell in jupytext.read(path).cells)


def test_the_scheduler_s_notebook_knows_how_many_jobs_share_devices():
    (number,) = re.findall(r"as it groups no more than (\w+)", (FOLDER / "05_scheduler.py").read_text())
    assert ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight").index(number) == MAX_MEMBERS


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    # A reader's kernel has none of the test run's settings, but for those that only make compiling quick.
    monkeypatch.setenv("XLA_FLAGS", compile_flags())
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH")))))
    notebook = jupytext.read(path)
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    if path.stem == "01_quickstart":
        assert any("text/html" in output.get("data", {}) for output in outputs), "the plan renders"
        text = "".join(output.get("text", "") for output in outputs)
        assert "was consumed by call" in text and "test accuracy" in text
