"""The benchmark of one accelerator: its page says what was stored, and its steps are what their names say."""

from __future__ import annotations

import json

import jax
import pytest

from benchmarks._common import RESULTS
from benchmarks.accelerator import main
from benchmarks.accelerator.cells import Cell, every_cell, made
from benchmarks.accelerator.running import time_of

MIB = 2**20


def memory(cell, estimate, compiled, bound, held_out=False):
    return {
        "cell": cell, "held_out": held_out, "estimate": estimate * MIB, "compiled": compiled * MIB,
        "bound": bound * MIB, "peak": (compiled + 1) * MIB,
    }  # fmt: skip


def test_the_page_says_what_was_stored():
    tried = [{"batch": 8, "bound": 90 * MIB, "estimate": 80 * MIB, "ran": True},
             {"batch": 16, "bound": 120 * MIB, "estimate": 110 * MIB, "ran": False}]  # fmt: skip
    times = [{"cell": "mlp/8", "held_out": True, "predicted": 0.003, "measured": 0.002, "published": 0.001,
              "plain": 0.0019, "loss": 1.5, "plain_loss": 1.5, "largest": []}]  # fmt: skip
    stored = {
        "header": "- a machine", "notes": [], "times": times,
        "memory": [memory("a/8", 90, 100, 99), memory("b/8", 100, 100, 110), {"cell": "c/8", "error": ["out"]}],
        "budgets": [{"model": "a", "limit": 100 * MIB, "tried": tried}],
    }  # fmt: skip
    page = "\n".join(main.lines_of(stored))
    assert "| held out | 1 | 50.0% of 20% (missed) | 50.0% | 1.053 | 1.053 |" in page
    assert "| looked at | 2 | 5.0% of 5% | 10.0% of 12% | 10.0% of 20% | 50% |" in page
    assert "| a | 100 | 8 | 80 | 90 | fits | yes |" in page
    assert "| a | 100 | 16 | 110 | 120 | does not fit | no |" in page


def test_nothing_is_written_without_an_accelerator(tmp_path, capsys):
    assert main.main(["--output", str(tmp_path)]) == 2
    assert "no accelerator" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_steps_are_predicted():
    names = {cell.model: cell for cell in every_cell()}
    for cell in map(names.__getitem__, ("deepfm", "scanned_dots_bf16")):
        each = made(cell, quick=True)
        state = jax.eval_shape(each.init, jax.random.key(0))
        assert each.parallel.memory(state, each.batch).bound_bytes > 0
        assert Cell.parse(cell.name) == cell


def test_both_steps_do_the_same():
    found = time_of(Cell("scanned_remat", 2), "gpu:h100:1x1", "gpu:h100:1x1", quick=True)
    assert found["loss"] == pytest.approx(found["plain_loss"], rel=1e-5)
    assert found["measured"] > 0 and found["published"] == found["predicted"] > 0


def test_stored_times_are_predicted_anew():
    stored = json.loads((RESULTS / "accelerator.json").read_text())
    (cell,) = [each for each in stored["times"] if each["cell"] == "mlp/1024"]
    old = cell | {"predicted": 0.0, "published": 0.0}
    found = main.repredicted({**stored, "times": [old]}, "gpu:h100:1x1", "a commit")
    (again,) = found["times"]
    # Versions of JAX trace a step a little differently.
    assert again["predicted"] == pytest.approx(cell["predicted"], rel=0.05)
    assert again["published"] == pytest.approx(cell["published"], rel=0.05)
    assert again["measured"] == cell["measured"] > again["published"]
    assert "commit a commit" in "\n".join(main.lines_of(found))
