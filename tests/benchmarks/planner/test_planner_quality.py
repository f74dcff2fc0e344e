"""The figures of the page on how good the plans of `auto` are, by hand, and the memory of a small model."""

from __future__ import annotations

import json

import pytest

from benchmarks._common import RESULTS
from benchmarks.planner.quality import MODELS, PAGE, fitted, is_met, lines_of, paired
from benchmarks.planner.quality_ways import AUTO, BASELINES, XLA_ALONE, contenders

TURNS = {
    AUTO: [0.9, 1.0, 1.8, 0.9], "data parallel": [1.0, 1.0, 2.0, 1.0], "Megatron": [3.0] * 4, XLA_ALONE: [0.1] * 4,
}  # fmt: skip


def cell(model, ratio, high, **more):
    return {
        "where": "loopback", "model": model, "ratio": ratio, "low": ratio - 0.02, "high": high, "rival": "Megatron",
        "medians": {AUTO: 0.1 * ratio, "Megatron": 0.1}, "seconds": {AUTO: [0.1 * ratio] * 45},
        "chosen": {"rules": "auto", "mesh": "data=2", "predicted": 0.1},
        **more,
    }  # fmt: skip


def within(needed, budget=90):
    return {"model": "mlp", "needs": {"Megatron": 100}, "budget": budget, "needed": needed, "chosen": "fsdp, data=8"}


def test_rounds_are_compared_in_pairs_with_the_fastest_baseline():
    found = paired(TURNS)
    assert found["rival"] == "data parallel", "what XLA does alone is no baseline"
    assert found["ratio"] == pytest.approx(0.9) and found["medians"][AUTO] == pytest.approx(0.95)
    assert 0.9 <= found["low"] + 1e-9 and found["high"] <= 1.0
    assert paired({**TURNS, AUTO: [1.2] * 4})["low"] > 0.5


def test_who_cannot_win_leaves_after_the_first_rounds():
    first = {AUTO: [9.0, 9.0], "data parallel": [1.0, 1.2], "Megatron": [1.4, 1.6], "fully sharded": [2.0, 1.9],
             XLA_ALONE: [0.5, 0.5]}  # fmt: skip
    assert contenders(first) == [AUTO, "data parallel", "Megatron", XLA_ALONE]
    # Two rounds of a layout that left are no median of four, however short they were.
    assert paired({**TURNS, "fully sharded": [0.5, 0.5]})["rival"] == "data parallel"


def test_goals():
    faster = [cell(model, 0.9, 0.95) for model in ("mlp", "vgg16", "lstm")]
    stored = {
        "timed": [*faster, cell("llama", 1.02, 1.05)], "fitted": [within(90)], "headers": {"loopback": "- a machine"},
        "notes": [],
    }  # fmt: skip
    assert all(is_met(stored).values())
    assert "llama" not in "\n".join(lines_of(stored)).split("## Time")[0]
    assert "### loopback\n\n- a machine\n\n45 rounds.\n" in "\n".join(lines_of(stored))
    slow = {**stored, "timed": [*faster, cell("llama", 1.04, 1.05)]}
    assert not is_met(slow)["not slower"] and "(not so: llama, loopback)" in "\n".join(lines_of(slow))
    assert not is_met({**stored, "timed": faster[:2]})["faster"]
    assert not is_met({**stored, "fitted": [within(91)]})["fits"]
    assert not is_met({**stored, "fitted": [within(None)]})["fits"]
    none = {**stored, "timed": [], "fitted": []}
    assert not any(is_met(none).values()) and "\n".join(lines_of(none)).count("**not measured**") == 3


def test_what_was_predicted_of_all_layouts_stands_below_what_they_took():
    # Of a choice that is not the best, the page says which prediction was off: the chosen layout's, or the others'.
    told = cell("mlp", 0.9, 0.95, predicted={AUTO: 0.08, "Megatron": 0.0705})
    page = "\n".join(lines_of({"timed": [told], "fitted": [], "headers": {}, "notes": []}))
    row = next(line for line in page.splitlines() if line.startswith("| mlp, predicted |"))
    assert " 70.5 |" in row and "refused" not in row
    stored = "\n".join(lines_of({"timed": [cell("mlp", 0.9, 0.95)], "fitted": [], "headers": {}, "notes": []}))
    assert ", predicted |" not in stored, "pages that were stored before have no such row"


def test_a_small_model_fits_into_nine_tenths():
    found = fitted("mlp")
    assert "mlp" in MODELS and set(found["needs"]) == set(BASELINES)
    assert found["budget"] == int(0.9 * min(found["needs"].values()))
    assert found["needed"] is not None and found["needed"] <= found["budget"]


def test_the_page_says_what_is_stored():
    stored = json.loads((RESULTS / f"{PAGE}.json").read_text())
    page = (RESULTS / f"{PAGE}.md").read_text()
    assert "\n".join(line.rstrip() for line in lines_of(stored)).rstrip() + "\n" == page
