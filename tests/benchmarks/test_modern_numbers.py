"""Steps of today beside one device: what is run of them, what counts, and that a few of them are the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks.modern.steps as folder
from benchmarks.modern import numbers
from benchmarks.modern.cells import AXIS_TYPES, MESHES, Cell, combinations, covering, fits, knows, rule_sets
from benchmarks.modern.comparing import (
    RAISED,
    REFUSED,
    SAME,
    WRONG,
    NoReferenceError,
    Run,
    compare,
    distance,
    reference_of,
)
from benchmarks.modern.cover import pairs_of, pairwise
from benchmarks.modern.numbers_page import page_lines, passes
from benchmarks.modern.refusals import MAY_REFUSE, expected
from benchmarks.modern.steps import catalogue
from benchmarks.modern.steps.case import ModernStep, Problem


def test_a_cover_has_every_pair_of_values_in_few_rows_and_is_the_same_again():
    rows = [row for row in itertools.product("abc", range(4), (True, False), range(3)) if row[:2] != ("a", 0)]
    chosen = pairwise(rows)
    assert pairs_of(chosen) == pairs_of(rows)
    assert len(chosen) <= 16 < len(rows)  # 4 x 3 are the fewest
    assert pairwise(rows) == chosen and list(chosen) == [row for row in rows if row in chosen]
    assert pairwise([]) == ()


def test_every_step_meets_every_rule_set_mesh_and_type_of_axes_that_fits_it():
    steps = catalogue.every_step()
    cells = covering(steps)
    astuples = [dataclasses.astuple(cell) for cell in cells]
    assert pairs_of(astuples) == pairs_of([dataclasses.astuple(cell) for cell in combinations(steps)])
    for step in steps:
        own = [cell for cell in cells if cell.step == step.name]
        assert {cell.rules for cell in own} == set(rule_sets())
        assert {cell.mesh for cell in own} == {mesh for mesh in MESHES if fits(step, mesh)}
        assert {cell.axes for cell in own} == set(AXIS_TYPES)
    assert sorted({len(sizes) for sizes in MESHES.values()}) == [2, 3]
    assert {int(np.prod(list(sizes.values()))) for sizes in MESHES.values()} == {8}


def test_a_rule_set_knows_meshes_that_it_has_a_use_for():
    assert knows("transformer", "fsdp=2 x expert=2 x tensor=2") and knows("data_parallel", "data=2 x expert=4")
    assert not knows("fsdp", "data=2 x expert=4") and not knows("splitbrain", "fsdp=4 x tensor=2")


def test_names_are_unique_and_every_module_of_the_folder_is_in_the_catalogue(monkeypatch):
    steps = catalogue.every_step()
    assert len({step.name for step in steps}) == len(steps) >= 60
    files = pathlib.Path(folder.__file__).parent.glob("*.py")
    modules = {file.stem for file in files if not file.stem.startswith("_")} - {"case", "catalogue"}
    assert modules == set(catalogue.MODULES)
    monkeypatch.setattr(catalogue, "MODULES", ("experts", "experts"))
    with pytest.raises(ValueError, match="two steps are called"):
        catalogue.every_step()


def test_float64_steps_have_the_strict_tolerance():
    loose = [step.name for step in catalogue.every_step() if step.dtype == "float64" and step.tolerance > 1e-10]
    assert not loose


def linear(dtype: str) -> Problem:
    """A line fitted by gradient descent."""

    def step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"loss": loss}

    draws = np.random.default_rng(0)
    batches = tuple({"x": draws.normal(size=(16, 64)).astype(dtype)} for _ in range(2))
    return Problem(step, {"w": draws.normal(size=(64, 32)).astype(dtype)}, batches)


STEP = ModernStep("a line", "none", linear, (), dtype="float32", tolerance=1e-4)
CELL = Cell("a line", "megatron", "data=2 x tensor=4", "Explicit")


def test_a_step_is_the_same_wrong_refused_or_raises():
    problem = linear("float32")
    want = reference_of(STEP, problem)
    same = compare(STEP, problem, want, CELL)
    assert same.status == SAME and same.difference is not None and same.difference <= 1e-4
    other = Run({**want.values, "w": want.values["w"] + 0.01})
    wrong = compare(STEP, problem, other, CELL)
    assert wrong.status == WRONG and wrong.where == "w" and wrong.difference == pytest.approx(0.01, rel=0.1)
    refused = compare(STEP, problem, want, dataclasses.replace(CELL, rules="embedding_owner"))
    assert refused.status == REFUSED and refused.text.startswith("RuleError: ")
    assert expected(STEP, "embedding_owner", refused.text) and not expected(STEP, "fsdp", refused.text)
    raised = compare(STEP, dataclasses.replace(problem, step=lambda state, batch: 1 / 0), want, CELL)
    assert raised.status == RAISED and "ZeroDivisionError" in raised.text


def test_a_step_that_hardly_moves_or_is_not_finite_is_no_reference():
    problem = linear("float32")
    with pytest.raises(NoReferenceError, match="no leaf moves"):
        reference_of(dataclasses.replace(STEP, tolerance=10.0), problem)
    with pytest.raises(NoReferenceError, match="not finite"):
        reference_of(STEP, dataclasses.replace(problem, state={"w": problem.state["w"] * np.inf}))


def test_distances_are_relative_above_one_and_infinite_for_other_shapes_and_no_numbers():
    assert distance(np.array([0.5, 101.0]), np.array([0.4, 100.0])) == pytest.approx(0.1)
    assert distance(np.array(1), np.array(1)) == 0 and distance(np.zeros((0,)), np.zeros((0,))) == 0
    assert distance(np.zeros(2), np.zeros(3)) == distance(np.array([np.nan]), np.array([0.0])) == np.inf
    assert distance(np.array([1j]), np.array([0.0])) == 1


def test_where_a_process_ends_another_goes_on_behind_its_cell(monkeypatch, tmp_path):
    cells = [dataclasses.replace(CELL, axes=axes, rules=rules) for axes in AXIS_TYPES for rules in ("fsdp", "megatron")]
    asked = []

    def ask(step, left):
        asked.append(len(left))
        if len(left) == 4:
            yield {**dataclasses.asdict(left[0]), "status": SAME}
            yield {"ended": "exit status -11"}
        else:
            yield from ({**dataclasses.asdict(cell), "status": SAME} for cell in left)

    monkeypatch.setattr(numbers, "_ask", ask)
    found = numbers._compared(STEP, cells, tmp_path)
    assert [outcome.status for outcome in found] == [SAME, RAISED, SAME, SAME] and asked == [4, 2]
    assert [outcome.cell for outcome in found] == cells and found[1].text == "exit status -11"
    assert numbers._compared(STEP, cells, tmp_path) == found and asked == [4, 2]  # what is kept is not compared again
    (file,) = tmp_path.iterdir()
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    assert numbers._compared(STEP, cells, tmp_path) == found and asked == [4, 2, 1]
    with pytest.raises(ValueError, match="other cells"):
        numbers._compared(STEP, cells[1:], tmp_path)
    monkeypatch.setattr(numbers, "_ask", lambda step, left: iter([{"broken": "on one device: no"}]))
    assert {outcome.status for outcome in numbers._compared(STEP, cells)} == {RAISED}


def test_a_step_passes_only_with_ones_devices_numbers_or_expected_refusals():
    cell = lambda status, why="": {"status": status, "why": why}
    assert passes({"cells": [cell(SAME), cell(REFUSED, "said before")]})
    for bad in (cell(REFUSED), cell(WRONG), cell(RAISED)):
        assert not passes({"cells": [cell(SAME), bad]})
    assert not passes({"cells": [cell(REFUSED, "said before")]})


def test_the_few_quick_steps_have_one_devices_numbers(tmp_path, capsys):
    assert numbers.run(None, True, tmp_path) == 0, capsys.readouterr().out
    stored = json.loads((tmp_path / "modern_numbers.json").read_text(encoding="utf-8"))
    assert [step["name"] for step in stored["steps"]] == list(numbers.QUICK)
    assert all(len(step["cells"]) == numbers.QUICK_CELLS for step in stored["steps"])
    page = (tmp_path / "modern_numbers.md").read_text(encoding="utf-8")
    assert f"{len(numbers.QUICK)} of {len(numbers.QUICK)} steps pass everywhere" in page
    assert page.splitlines() == [line.rstrip() for line in "\n".join(page_lines(stored)).rstrip().splitlines()]


def test_an_unknown_step_is_named(capsys):
    assert numbers.run(["GPT-9"], False, None) == 2
    assert "no step 'GPT-9'" in capsys.readouterr().err


def test_every_reason_for_a_refusal_is_of_a_rule_set_that_there_is():
    assert {may.rules for may in MAY_REFUSE} <= set(rule_sets())
