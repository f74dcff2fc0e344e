"""Every notebook runs from top to bottom, and is the twin of its script."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from splitjax.schedule.policies.group_plan import MAX_MEMBERS
from tests.processes import compile_flags

jupytext = pytest.importorskip("jupytext")
pytest.importorskip("nbclient")

from tests.notebooks.execute import complaints, executed  # noqa: E402  # needs both

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_and_script_are_twins(path):
    def cells(file):
        return [(cell.cell_type, cell.source) for cell in jupytext.read(file).cells]

    assert cells(path) == cells(path.with_suffix(".py")), "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_reader_sees_what_a_notebook_shows(path):
    """Whoever only looks at it sees its outputs: of all cells, none of them a complaint, nothing of the machine."""
    notebook = jupytext.read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells) and complaints(notebook) == []
    assert any(cell.outputs for cell in cells) and path.stat().st_size < 400_000
    shown = str([cell.outputs for cell in cells])
    assert not re.search(r"/(root|home|work|Users)/|/tmp/(?!ipykernel)", shown)


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
    notebook = executed(path, timeout_seconds=240)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs and complaints(notebook) == []
    if path.stem == "01_quickstart":
        assert any("text/html" in output.get("data", {}) for output in outputs), "the plan renders"
        text = "".join(output.get("text", "") for output in outputs)
        assert "was consumed by call" in text and "test accuracy" in text
