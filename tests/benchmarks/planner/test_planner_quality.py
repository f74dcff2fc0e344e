"""The figures of the page on how good the plans of `auto` are, by hand, and the memory of a small model."""

from __future__ import annotations

import json

import pytest

from benchmarks._common import RESULTS
from benchmarks.planner import quality
from benchmarks.planner.quality import MODELS, PAGE, cell_of, fitted, is_met, lines_of, paired, ratio_of
from benchmarks.planner.quality_ways import (
    AGAIN,
    AUTO,
    BASELINES,
    MOST_STEPS,
    XLA_ALONE,
    best_of,
    contenders,
    steps_of_turn,
)
from benchmarks.sparse.launch import Answers

TURNS = {
    AUTO: [0.9, 1.0, 1.8, 0.9], "data parallel": [1.0, 1.0, 2.0, 1.0], "Megatron": [3.0] * 4, XLA_ALONE: [0.1] * 4,
}  # fmt: skip

CHOSEN = {"rules": "auto", "mesh": "data=2", "predicted": 0.1}


def cell(model, ratio, high, **more):
    return {
        "where": "loopback", "model": model, "ratio": ratio, "low": ratio - 0.02, "high": high, "rival": "Megatron",
        "medians": {AUTO: 0.1 * ratio, "Megatron": 0.1}, "seconds": {AUTO: [0.1 * ratio] * 45},
        "chosen": CHOSEN,
        **more,
    }  # fmt: skip


def within(needed, budget=90):
    return {"model": "mlp", "needs": {"Megatron": 100}, "budget": budget, "needed": needed, "chosen": "fsdp, data=8"}


def test_rounds_are_compared_in_pairs_with_the_fastest_baseline():
    found = paired(TURNS, [2, 2])
    assert found["rival"] == "data parallel", "what XLA does alone is no baseline"
    assert found["ratio"] == pytest.approx(0.9) and found["medians"][AUTO] == pytest.approx(0.95)
    assert 0.9 <= found["low"] + 1e-9 and found["high"] <= 1.0
    assert paired({**TURNS, AUTO: [1.2] * 4}, [4])["low"] > 0.5


def test_who_cannot_win_leaves_after_the_first_rounds():
    first = {AUTO: [9.0, 9.0], "data parallel": [1.0, 1.2], "Megatron": [1.4, 1.6], "fully sharded": [2.0, 1.9],
             XLA_ALONE: [0.5, 0.5]}  # fmt: skip
    assert best_of(first) == "data parallel", "what XLA does alone is no baseline"
    assert contenders(first) == [AUTO, "data parallel", "Megatron", XLA_ALONE]
    # Two rounds of a layout that left are no median of four, however short they were.
    assert paired({**TURNS, "fully sharded": [0.5, 0.5]}, [4])["rival"] == "data parallel"


def test_rounds_of_one_start_are_one_figure():
    """Of four starts one is slow. Any draw of four has it at least twice in a quarter of the cases; of twenty
    independent rounds, half were hardly ever drawn of the slow quarter."""
    own, other = [1.0] * 15 + [1.2] * 5, [1.0] * 20
    by_starts, by_rounds = ratio_of(own, other, [5] * 4), ratio_of(own, other, [1] * 20)
    assert by_starts["ratio"] == by_rounds["ratio"] == by_starts["low"] == 1.0
    assert by_starts["high"] == pytest.approx(1.2) and by_rounds["high"] < 1.15


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, 2), (0.15, 3), (0.021, 20), (0.001, MOST_STEPS)])
def test_turns_of_quick_steps_have_more_of_them(seconds, steps):
    assert steps_of_turn(seconds) == steps


def test_rounds_of_all_starts_follow_one_another():
    def worker(rounds, factor):
        turns = {way: [{"seconds": factor * each} for each in seconds] for way, seconds in rounds.items()}
        more = {
            "chosen": CHOSEN,
            "refused": {},
            "predicted": {},
            "steps": 2,
            "again": "Megatron",
            "losses": {AUTO: [2.0]},
        }
        return {"models": {"mlp": {"turns": turns, **more}}}

    first = {AUTO: [1.0, 2.0], "Megatron": [1.0, 1.0], "data parallel": [5.0], AGAIN: [1.5]}
    later = {AUTO: [3.0, 4.0], "Megatron": [2.0, 2.0], AGAIN: [3.0, 3.0]}
    # The slower process of a pair counts.
    starts = [Answers((worker(each, 1.0), worker(each, 0.5)), others) for each, others in ((first, 0.0), (later, 0.1))]
    found = cell_of("loopback", "mlp", starts)
    assert found["seconds"][AUTO] == [1.0, 2.0, 3.0, 4.0] and found["starts"] == [2, 2] and found["others"] == 0.1
    assert found["rival"] == "Megatron" and found["ratio"] == pytest.approx(1.75)  # of 1, 2, 1.5, 2
    unknown = [starts[0], Answers(starts[1].workers, None)]
    assert cell_of("loopback", "mlp", unknown)["others"] is None
    # The first round was over when the second build came in.
    assert found["again"]["way"] == "Megatron" and found["again"]["ratio"] == pytest.approx(1.5)
    page = "\n".join(lines_of({"timed": [found], "fitted": [], "headers": {}, "notes": []}))
    assert "2 starts, 4 rounds in all." in page and "| mlp | Megatron | 1.500 | 1.500 to 1.500 |" in page
    starts[1].workers[0]["models"]["mlp"]["chosen"] = CHOSEN | {"mesh": "model=2"}
    with pytest.raises(RuntimeError, match="mlp in its starts"):
        cell_of("loopback", "mlp", starts)


def test_goals():
    faster = [cell(model, 0.9, 0.95) for model in ("mlp", "vgg16", "lstm")]
    stored = {
        "timed": [*faster, cell("llama", 1.02, 1.05)], "fitted": [within(90)], "headers": {"loopback": "- a machine"},
        "notes": [],
    }  # fmt: skip
    assert all(is_met(stored).values())
    assert "llama" not in "\n".join(lines_of(stored)).split("## Time")[0]
    assert "### loopback\n\n- a machine\n\n45 rounds of an earlier form" in "\n".join(lines_of(stored))
    slow = {**stored, "timed": [*faster, cell("llama", 1.04, 1.05)]}
    assert not is_met(slow)["not slower"] and "(not so: llama, loopback)" in "\n".join(lines_of(slow))
    assert not is_met({**stored, "timed": faster[:2]})["faster"]
    assert not is_met({**stored, "fitted": [within(91)]})["fits"]
    assert not is_met({**stored, "fitted": [within(None)]})["fits"]
    none = {**stored, "timed": [], "fitted": []}
    assert not any(is_met(none).values()) and "\n".join(lines_of(none)).count("**not measured**") == 3


def test_some_models_of_a_part_are_taken_again(tmp_path, monkeypatch):
    file = tmp_path / f"{PAGE}.json"
    old = {
        "timed": [cell("mlp", 0.9, 0.95), cell("lstm", 1.2, 1.3)], "fitted": [within(90)],
        "headers": {"loopback": "- then", "memory": "- then"},
        "notes": ["loopback: others kept 0.01 cores busy meanwhile."],
    }  # fmt: skip
    file.write_text(json.dumps(old))
    taken = []
    monkeypatch.setattr(quality, "timed", lambda part, models, quick: taken.append((part, models)) or [
        cell(name, 1.0, 1.02, others=0.02) for name in models
    ])  # fmt: skip
    quality.main(False, tmp_path, ["loopback"], ["lstm"])
    stored = json.loads(file.read_text())
    assert taken == [("loopback", ["lstm"])]
    assert [(each["model"], each["ratio"]) for each in stored["timed"]] == [("mlp", 0.9), ("lstm", 1.0)]
    assert stored["headers"] == old["headers"] and stored["fitted"] == old["fitted"]
    assert stored["notes"] == [*old["notes"], "loopback (lstm): others kept 0.02 cores busy meanwhile."]
    page = (tmp_path / f"{PAGE}.md").read_text()
    assert "mlp:\n\n- then\n" in page and "lstm:\n\n- 20" in page and "--parts 'loopback' --models lstm" in page
    # A whole part is of one header again.
    quality.main(False, tmp_path, ["loopback"])
    stored = json.loads(file.read_text())
    assert stored["headers"]["loopback"] != "- then" and not any("header" in each for each in stored["timed"])
    assert [note.split(":")[0] for note in stored["notes"]] == ["loopback"]


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
