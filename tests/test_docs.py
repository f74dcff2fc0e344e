"""Documentation that runs: its scripts, its rule file, its links, and an entry for every typed error."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import splitjax
from benchmarks.product.pages import readme_words
from splitjax import errors
from splitjax.plan import Memory, PlanWarning
from splitjax.report.attribute import ReportedCollective
from splitjax.report.value import CompiledMemory
from tests.processes import compile_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_script(script: str, folder: pathlib.Path, xla_flags: str | None = None) -> str:
    """What it printed. Without `xla_flags` it has those that make compiling quick, and makes its own devices."""
    environment = {**os.environ, "XLA_FLAGS": compile_flags() if xla_flags is None else xla_flags}
    path = os.pathsep.join(part for part in (str(ROOT), environment.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**environment, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_readme_trains(tmp_path):
    example = next(block for block in blocks("README.md", "python") if "@splitjax.parallelize" in block)
    out = run_script(example, tmp_path)
    assert "P(None, 'model')" in out
    assert float(out.split("loss")[-1]) < 0.1


def test_the_quickstart_is_one_script(tmp_path):
    out = run_script("".join(blocks("docs/quickstart.md", "python")), tmp_path)
    assert "compiled 1 time(s): first call" in out
    assert re.search(r"right (6[0-4]|5\d) of 64", out)
    assert (tmp_path / "plan.json").is_file()


def test_the_training_script_trains_and_resumes(tmp_path):
    script = "".join(blocks("docs/training.md", "python"))
    assert re.search(r"step 100 loss 0\.\d+", run_script(script, tmp_path))
    longer = script.replace("num_steps=100", "num_steps=120")
    assert re.search(r"step 120 loss 0\.\d+", run_script(longer, tmp_path))
    assert (tmp_path / "run" / "120").is_dir()


def test_the_script_of_many_jobs_runs(tmp_path):
    # which has a step of the reader's
    simulated = [block for block in blocks("docs/scheduler.md", "python") if "RayEngine" not in block]
    out = run_script("".join(simulated), tmp_path)
    assert re.search(r"gang-srtf: \d+ s on average", out) and out.strip().endswith("gang-srtf")


def test_the_index_lists_every_command():
    from splitjax import cli

    listed = set(re.findall(r"^\| `splitjax (\w+)", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    assert len(listed) > 8 and listed == set(cli.COMMANDS)


@pytest.mark.parametrize(
    ("name", "kind"), [("plan", splitjax.Plan), ("report", splitjax.Report), ("advice", splitjax.Advice)]
)
def test_attributes_that_the_docs_name_are_there(name, kind):
    named = {
        (page.name, attribute)
        for page in PAGES
        for attribute in re.findall(rf"`{name}\.(?!py\b)([a-z_]+)", page.read_text())
    }
    assert named and not [
        one
        for one in named
        if one[1] not in {field.name for field in dataclasses.fields(kind)} and not hasattr(kind, one[1])
    ]
    # What a plan prints under a title of its own is no attribute: pages say where it is printed, and what it is in
    # Python.
    assert not [page.name for page in PAGES if re.search(r"plan's exceptions|`exceptions`", page.read_text())]


LISTED = {  # what a page says that values have -> their type
    r"`report\.unplanned`, each with (.*?)\.\s": ReportedCollective,
    r"`plan\.warnings` holds them, each with (.*?)\.\s": PlanWarning,
    r"`report\.memory\.predicted`, with (.*?),": Memory,
    r"`report\.memory\.compiled`, with (.*?)\.\s": CompiledMemory,
}


@pytest.mark.parametrize("words", LISTED)
def test_what_the_page_on_reports_lists_of_a_value_is_there(words):
    (listed,) = re.findall(words, (ROOT / "docs" / "reports.md").read_text(), re.DOTALL)
    names = set(re.findall(r"`(\w+)`", listed))
    assert names and names <= {*dir(LISTED[words]), *(field.name for field in dataclasses.fields(LISTED[words]))}


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page: of each its rows, the first that of the titles, as lists of cells."""
    found: list[list[list[str]]] = [[]]
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if rows]


def test_a_cell_of_the_measured_figures_has_one_figure():
    measured = [table for table in tables("docs/measured.md") if len(table) > 1]
    assert len(measured) > 15
    for titles, *rows in measured:
        first = titles.index("result") if "result" in titles else 1
        last = first + 1 if "result" in titles else len(titles)
        for row in rows:
            assert len(row) == len(titles)
            for cell in row[first:last]:
                figures = re.findall(r"[\d,.]+", re.sub(r"[\d,]+ of [\d,]+", "1", cell))
                assert len(figures) <= 1 or cell in ("100 Mb/s",), cell
    sparse = next(table for table in measured if "over PyTorch's DDP, sparse gradients" in table[0])
    assert sparse[0][2] == "over PyTorch's DDP, sparse gradients", "the strongest rival comes first"
    assert len(sparse) == 7


def test_the_readme_is_short_and_names_the_rival_of_each_figure():
    assert 300 < readme_words() <= 600
    figures = next(table for table in tables("README.md") if "against" in table[0])
    assert len(figures) == 5 and all(row[1] for row in figures)


def test_the_picture_of_the_readme_is_what_the_command_draws(tmp_path, run):
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "--svg plan.svg" in line)
    command = re.search(r"`splitjax (plan .*?)`", line)
    assert command is not None
    drawn = tmp_path / "plan.svg"
    status, _, err = run(command[1].replace("plan.svg", str(drawn)))
    assert status == 0, err
    assert drawn.read_text() == (ROOT / "docs" / "images" / "plan-vgg16.svg").read_text()


# What a reader may do without; the other pages of features say so in their words.
FEATURES = (
    *("choosing", "rules", "meshes", "planning", "sparse", "partial_backpropagation", "sharded_state", "splitbrain"),
    *("kernels", "time", "verify", "scheduler", "reports", "checkpoints", "launching", "training", "data"),
    "mixed_precision",
)


@pytest.mark.parametrize("page", FEATURES)
def test_the_page_of_a_feature_begins_with_when_to_use_it(page):
    title, first = (ROOT / "docs" / f"{page}.md").read_text().split("\n\n")[:2]
    assert title.startswith("# ") and re.match(r"Use .*? if ", first), first


# Nobody understood them; each has a plain sentence in its place.
RIDDLES = (
    "split theirs over",
    "realised otherwise",
    "not over arguments",
    "are those of long ones",
    "has no turns",
    "fall towards the loss",
    "half as much later",
    "since it asks twice",
)


def test_riddles_are_gone():
    files = [
        *PAGES,
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("splitjax/**/*.py"),
        *ROOT.glob("notebooks/*.py"),
    ]
    files.remove(ROOT / "docs" / "architecture.md")
    assert not [
        (str(file.relative_to(ROOT)), riddle) for file in files for riddle in RIDDLES if riddle in file.read_text()
    ]


def test_the_options_file_of_the_docs_is_read(tmp_path):
    from splitjax.cli._train_options import expand_config

    (toml,) = blocks("docs/training.md", "toml")
    (tmp_path / "run.toml").write_text(toml)
    assert "--warmup-steps" in expand_config(["--config", str(tmp_path / "run.toml")])


def test_the_rule_file_of_the_docs_is_the_rule_set_beside_it(tmp_path):
    (toml,) = blocks("docs/rules.md", "toml")
    (tmp_path / "mine.toml").write_text(toml)
    from splitjax.rules import load_rules

    scope: dict = {}
    exec(next(block for block in blocks("docs/rules.md", "python") if "RuleSet" in block), scope)
    assert load_rules(tmp_path / "mine.toml").rules == scope["rules"].rules


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="the page shows what one version of XLA compiles")
def test_the_example_of_the_page_on_reports_is_what_the_command_prints(tmp_path):
    (example,) = blocks("docs/reports.md", "text")
    command = re.search(r"`splitjax (report [^`]*--batch-size \d+)`", (ROOT / "docs/reports.md").read_text()).group(1)
    script = (
        f"import os; os.environ['SPLITJAX_CACHE'] = 'cache'; from splitjax.cli import main; main({command.split()!r})"
    )
    assert [text.rstrip() for text in run_script(script, tmp_path, xla_flags="").splitlines()] == example.splitlines()


def test_every_typed_error_has_its_place_in_troubleshooting():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, splitjax.SplitjaxError) and kind is not splitjax.SplitjaxError:
            assert f"\n## {name}\n" in text and f"[`{name}`](#{name.lower()})" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file) if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            ]
