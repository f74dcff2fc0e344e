"""The pages of predicted memory say what is stored, and cells of every target are told apart by their names."""

from __future__ import annotations

import json

import pytest

from benchmarks._common import RESULTS
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
