"""The pages of predicted memory say what is stored, and cells of every target are told apart by their names."""

from __future__ import annotations

import json

import pytest

from benchmarks._common import RESULTS
from benchmarks.planner import verdicts
from benchmarks.planner.cells import GPU, TPU, Cell, every_cell
from benchmarks.planner.main import lines_of, summary


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_page_of_a_platform_says_what_is_stored(platform):
    stored = json.loads((RESULTS / f"planner-{platform}.json").read_text())
    page = (RESULTS / f"planner-{platform}.md").read_text()
    assert "\n".join(line.rstrip() for line in lines_of(stored)).rstrip() + "\n" == page
    held_out = [cell for cell in stored["cells"] if cell["held_out"]]
    assert f"{summary(held_out)['median']:.1%} of 5%" in page
    for cell in stored["cells"]:
        assert cell["total_bytes"] == cell["compiled"]["peak"]
        assert Cell.parse(cell["cell"]).target.startswith(platform)
        assert cell["held_out"] == Cell.parse(cell["cell"]).is_held_out


@pytest.mark.parametrize("target", ["cpu:8", TPU, GPU])
def test_a_third_of_a_targets_cells_is_held_out(target):
    cells = [cell for cell in every_cell() if cell.target == target]
    assert len({cell.name for cell in cells}) == len(cells) >= 36
    assert 0.2 < sum(cell.is_held_out for cell in cells) / len(cells) < 0.5


def test_main_memory_is_told_apart_where_vector_memory_is_known():
    def cell(name, peak, vector, held_out=True):
        return {
            "cell": name, "held_out": held_out, "total_bytes": peak, "estimate_bytes": 1000 * 2**20,
            "argument_bytes": 10, "bound_bytes": 1200 * 2**20, "sum_bytes": peak, "taken_bytes": peak, "seconds": 0.1,
            "compiled": {"argument": 10, **({} if vector is None else {"vector": vector})},
        }  # fmt: skip

    page = lambda *cells: "\n".join(lines_of({"header": "", "notes": [], "cells": cells}))
    known = page(cell("a", 1000 * 2**20, 0), cell("b", 1050 * 2**20, 50 * 2**20), cell("c", 1100 * 2**20, 300 * 2**20))
    # Of HBM alone 1000, 1000 and 800 MiB, where 1000 are expected and 1200 are the bound.
    assert "| held out | 0.0% | 25.0% | 25.0% | 20.0% |" in known
    assert "| c | held out | 1100.0 | 300.0 | 1000.0 | -9.1% | 1100.0 | 1200.0 |" in known
    assert "VMEM" not in page(cell("a", 1000 * 2**20, 0), cell("b", 1050 * 2**20, None))


def test_verdicts_on_budgets_are_held_against_the_compiler():
    """Budgets are 2 ** (step / 20) times what is needed, for steps from -20 to 20."""
    cell = lambda estimate, bound: {
        "argument_bytes": 100, "total_bytes": 10**6, "estimate_bytes": estimate, "bound_bytes": bound
    }  # fmt: skip
    # The bound is reached from step 4 on; the estimate, which is too large, is beyond the budgets below step 2.
    high = verdicts.counted([cell(round(10**6 * 2**0.09), round(10**6 * 2**0.19))])
    assert high == verdicts.Verdicts(fits=17, false_fits=0, does_not=22, false_does_not=2, may=2)
    assert high.is_met == {"fits": True, "does not fit": True}
    # A bound that does not hold says three times of less than what is needed that it is enough.
    low = verdicts.counted([cell(round(10**6 * 2**-0.26), round(10**6 * 2**-0.16))])
    assert low == verdicts.Verdicts(fits=24, false_fits=3, does_not=15, false_does_not=0, may=2)
    assert not low.is_met["fits"]
    page = "\n".join(verdicts.lines({"held out": [cell(10**6, 10**6)]}))
    assert "| held out | 21 | 0.0% of 0% | 20 | 0.0% of 10% | 0 |" in page
