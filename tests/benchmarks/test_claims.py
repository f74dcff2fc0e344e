"""Figures of README and docs against the pages of results: that they hold today, and that a wrong one is noticed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess

import pytest

from benchmarks._common import RESULTS
from benchmarks.claims import ages, checking, claim, main, pages
from benchmarks.curves import page as curves_page
from benchmarks.house import page as house_page
from benchmarks.jigsaw.main import PAGE as JIGSAW
from benchmarks.partial.main import PAGE as PARTIAL
from benchmarks.partitioner import page as partitioner_page
from benchmarks.sparse.main import PAGE as SPARSE
from benchmarks.training.main import PAGE as TRAINING

PAGE = """# Widgets

- 2026-11-20, commit 1234567, Linux
- command: `python -m benchmarks widgets`

| part | of | ms |
| --- | --- | --- |
| dense | `a` | **1,234.5** (1,200 to 1,300) |
| sparse | `a` | 12.34 |

## Later

| part | of | ms |
| --- | --- | --- |
| dense | `a` | 7 |

- pass speedup of sparse: 100.04 (goal: at least 90.00)
- **MISS share of sparse: 1.0% (goal: at most 0.5%)**
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a page of results and a README that states its figures; gives its folder."""
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "widgets.md").write_text(PAGE)
    (tmp_path / "README.md").write_text("Widgets take 1,235 ms,\n  and 12.3 ms when sparse. `99 ms` is code.\n")
    return tmp_path


def widgets(checkout, *sources, says="Widgets take {1,235} ms, and {12.3} ms when sparse", settings=()):
    claims = claim.Claims((claim.Claim("README.md", says, sources),), settings, {})
    return checking.problems(claims, checkout, checkout / "results")


def cell(row, column="ms", section="Widgets /", **more):
    return claim.Source(page="widgets", section=section, row=row, column=column, **more)


def test_all_figures_of_the_documents_are_those_of_the_pages_and_an_old_page_fails_the_strict_check_alone(capsys):
    assert main.main([]) == 0, capsys.readouterr().out
    has_old = "Pages older than the code they measure" in capsys.readouterr().out
    assert main.main(["--strict"]) == has_old


@pytest.mark.parametrize("kept", [JIGSAW, PARTIAL, SPARSE, TRAINING], ids=lambda kept: kept.name)
def test_pages_of_several_parts_are_what_their_stored_data_say(kept):
    assert "\n".join(line.rstrip() for line in kept.lines(kept.read(RESULTS))).rstrip() + "\n" == (
        RESULTS / f"{kept.name}.md"
    ).read_text(encoding="utf-8")


def test_pages_of_their_own_are_what_their_stored_data_say(tmp_path):
    for name in ("house", "partitioner"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    house_page.write(house_page.read(tmp_path), tmp_path)
    partitioner_page.write(tmp_path)
    for name in ("house", "partitioner"):
        assert (tmp_path / f"{name}.md").read_bytes() == (RESULTS / f"{name}.md").read_bytes(), name


def test_a_claim_that_holds_is_no_problem(checkout):
    assert widgets(checkout, cell("dense"), cell("sparse | a")) == []


def test_a_figure_that_is_not_its_pages_is_a_problem(checkout):
    (problem,) = widgets(checkout, cell("dense"), cell("dense", section="Later"))
    assert "says 12.3; the page widgets has 7" in problem


def test_figures_that_no_claim_covers_are_problems_with_their_line(checkout):
    (problem,) = widgets(checkout, cell("dense"), says="Widgets take {1,235} ms")
    assert problem.startswith("README.md:2: no claim covers") and "12.3 ms" in problem
    settings = (("README.md", "12.3 ms when sparse", "an example"),)
    assert widgets(checkout, cell("dense"), says="Widgets take {1,235} ms", settings=settings) == []


def test_a_setting_that_went_away_is_a_problem(checkout):
    settings = (("README.md", "6 minutes", "a default"),)
    (problem,) = widgets(checkout, cell("dense"), cell("sparse"), settings=settings)
    assert "'6 minutes' is not in the document any more" in problem


def test_a_claim_whose_text_went_away_is_a_problem(checkout):
    found = widgets(checkout, cell("dense"), says="Widgets need {1,235} ms")
    assert any("is there 0 times" in problem for problem in found)


@pytest.mark.parametrize(
    "source",
    [
        cell("wet"),
        cell("dense", column="s"),
        cell("dense", section=""),  # there twice
        claim.Source(page="nothing", row="dense", column="ms"),
        claim.Source(page="widgets", goal="speed"),
        cell("dense", position=9),
    ],
)
def test_a_value_that_cannot_be_looked_up_is_a_problem(checkout, source):
    (problem,) = widgets(checkout, source, cell("sparse"))
    assert problem.startswith("README.md: 'Widgets take 1,235 ms, and 12.3 ms when sparse'")


def test_goals_formulas_and_bounds_give_values(checkout):
    goal = claim.Source(page="widgets", goal="speedup of sparse")
    missed = claim.Source(page="widgets", goal="share of sparse")
    ratio = claim.Source(formula="dense / sparse", values=(("dense", cell("dense")), ("sparse", cell("sparse"))))
    (checkout / "README.md").write_text("100x, 1.0 %, 100x, 1300 ms\n")
    bound = cell("dense", bound="at most")
    assert widgets(checkout, goal, missed, ratio, bound, says="{100}x, {1.0} %, {100}x, {1300} ms") == []
    assert len(widgets(checkout, ratio, goal, missed, bound, says="{100}x, {1.0} %, {100}x, {1300} ms")) == 2


def test_a_formula_may_only_calculate(checkout):
    evil = claim.Source(formula="open('README.md')", values=())
    (problem,) = widgets(checkout, evil, cell("sparse"))
    assert "a formula may have names" in problem


@pytest.mark.parametrize(
    ("figure", "value", "agree"),
    [
        ("42", 42.49, True),
        ("42", 42.51, False),
        ("1,234", 1234.4, True),
        ("1e-10", 1.2e-10, True),
        ("0.75", -0.746, True),
    ],
)
def test_a_figure_is_the_value_as_it_rounds_to_its_digits(figure, value, agree):
    assert claim.agrees(figure, claim.Source(), value) is agree


def test_sections_are_named_by_parts_of_headings():
    headings = ("Widgets: all", "Memory", "8 examples, cpu")
    assert pages.is_under(headings, "Memory / 8 examples")
    assert not pages.is_under(headings, "8 examples / Memory")
    assert pages.is_under(headings, "Widgets") and not pages.is_under(headings, "Widgets /")


def test_a_claim_has_a_source_for_each_figure_and_no_unknown_keys(tmp_path):
    file = tmp_path / "claims.toml"
    file.write_text('[[claim]]\ndoc = "README.md"\nsays = "{1} and {2}"\nfrom = [{ page = "widgets" }]\n')
    with pytest.raises(pages.ClaimError, match="2 figures and 1 sources"):
        claim.read_claims(file)
    file.write_text('[[claim]]\ndoc = "README.md"\nsays = "{1}"\nfrom = [{ pages = "widgets" }]\n')
    with pytest.raises(pages.ClaimError, match="cannot be read"):
        claim.read_claims(file)


def test_a_page_is_as_old_as_the_commits_to_its_code_since(checkout):
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()

    def commit(name: str) -> str:
        (checkout / name).write_text(name)
        git("add", name)
        git("commit", "-qm", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    page = checkout / "results" / "widgets.md"
    page.write_text(PAGE.replace("1234567", commit("widget.py")))
    assert [age.num_changes for age in ages.ages({"widgets": ["widget.py"]}, checkout, page.parent)] == [0]
    commit("gadget.py")
    assert [age.num_changes for age in ages.ages({"widgets": ["widget.py"]}, checkout, page.parent)] == [0]
    assert [age.num_changes for age in ages.ages({"widgets": ["gadget.py"]}, checkout, page.parent)] == [1]
    page.write_text(PAGE)
    (unknown,) = ages.ages({"widgets": ["widget.py"]}, checkout, page.parent)
    assert dataclasses.astuple(unknown) == ("widgets", "", "2026-11-20", "1234567", None)


def test_every_page_names_the_code_that_it_measures():
    named = claim.read_claims(main.CLAIMS).code
    assert set(named) == {file.stem for file in RESULTS.glob("*.md")}
    for name, paths in named.items():
        assert all((main.ROOT / path).exists() for path in paths), name


def test_curves_are_what_their_stored_data_say():
    kept = json.loads((RESULTS / "curves.json").read_text(encoding="utf-8"))
    lines = curves_page.page(kept["header"], kept["results"], kept["other_seeds"])
    written = (RESULTS / "curves.md").read_text(encoding="utf-8")
    assert "\n".join(line.rstrip() for line in lines).rstrip() + "\n" == written
