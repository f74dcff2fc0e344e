"""The faults of `make mutants` still apply, and its runner tells what a test noticed from what none did."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import pytest

from benchmarks.mutants import faults as data
from benchmarks.mutants import main as command
from benchmarks.mutants import page, run
from benchmarks.mutants.faults import Fault, FaultError, has_test, problems, read_faults, rooms

MODULE = """import time

FACTOR = 2


def area(width, height):
    return width * height


def wait(seconds):
    time.sleep(seconds)
"""
TESTS = """import pytest

from splitjax.shapes import area, wait


@pytest.mark.parametrize("size", [2])
def test_squares(size):
    assert area(size, size) == 4


class TestRectangles:
    def test_unequal_sides(self):
        assert area(2, 3) == 6


def test_waits():
    wait(0)


@pytest.fixture
def prepared():
    assert area(2, 3) == 6


def test_prepared(prepared):
    assert True


def test_that_never_passes():
    assert area(1, 1) == 2
"""
FILE = "splitjax/shapes.py"
WRONG = ("width * height", "width + height")


def fault(name, test, old=WRONG[0], new=WRONG[1]):
    return Fault(name, FILE, old, new, "Areas are wrong.", (f"tests/test_shapes.py::{test}",))


def test_every_fault_applies_and_every_room_has_one():
    faults = read_faults()
    assert problems(faults) == []
    assert len(faults) >= 45 and {fault.room for fault in faults} == set(rooms())
    assert all(fault.breaks.endswith(".") and fault.breaks[0].isupper() for fault in faults)


def test_what_no_longer_applies_is_said(tmp_path):
    (tmp_path / "splitjax" / "inner").mkdir(parents=True)
    (tmp_path / FILE).write_text(MODULE)
    (tmp_path / "splitjax" / "inner" / "leaf.py").write_text("LEAF = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_shapes.py").write_text(TESTS)
    assert rooms(tmp_path) == ("inner", "top")
    assert has_test(tmp_path, "tests/test_shapes.py::TestRectangles::test_unequal_sides")
    assert has_test(tmp_path, "tests/test_shapes.py::test_squares[2]")
    assert not has_test(tmp_path, "tests/test_shapes.py::prepared")
    said = problems(
        [
            fault("right", "test_squares"),
            fault("moved", "test_squares", "no such text"),
            fault("twice", "test_squares", "width"),
            fault("broken", "test_squares", new="width *"),
            fault("renamed", "test_of_another_name"),
        ],
        tmp_path,
    )
    assert [line.partition(":")[0] for line in said] == [
        "moved", "twice", "broken", "renamed", "room inner has no fault",
    ]  # fmt: skip


def test_malformed_faults_are_refused(tmp_path):
    file = tmp_path / "faults.toml"
    entry = 'name = "a"\nfile = "f"\nold = "x"\nnew = "y"\nbreaks = "It breaks."\ntests = ["t"]\n'
    for text, message in [
        ("[[fault]]\n" + entry.replace('old = "x"\n', ""), "the entries must be"),
        ("[[fault]]\n" + entry.replace('"y"', '"x"'), "changes a piece of one line"),
        ("[[fault]]\n" + entry + "[[fault]]\n" + entry, "the same name: a"),
    ]:
        file.write_text(text)
        with pytest.raises(FaultError, match=message):
            read_faults(file)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A package of a module, with tests."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path_factory.mktemp("checkout")
    for name, text in {
        "splitjax/__init__.py": "",
        FILE: MODULE,
        "tests/test_shapes.py": TESTS,
        "ignored.py": "",
        ".gitignore": "ignored.py\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


def test_only_a_named_test_that_fails_kills_a_fault(checkout):
    faults = [
        fault("noticed", "TestRectangles::test_unequal_sides"),
        fault("unnoticed", "test_squares"),
        fault("moved", "test_squares", "no such text"),
        fault("no import", "test_squares", "FACTOR = 2", "FACTOR = height"),
        fault("no fixture", "test_prepared"),
        fault("failing before", "test_that_never_passes"),
    ]
    with run.workspace(checkout) as copy:
        assert not (copy / "ignored.py").exists()
        tests = sorted({test for each in faults for test in each.tests})
        broken = run.broken_tests(tests, run.run_unchanged(copy, tests, 60))
        assert list(broken) == ["tests/test_shapes.py::test_that_never_passes"]
        outcomes = {each.name: run.run_fault(copy, each, broken, 60) for each in faults}
        assert (copy / FILE).read_text() == MODULE
    assert not copy.exists()
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "noticed": run.KILLED,
        "unnoticed": run.SURVIVED,
        "moved": run.NOT_APPLIED,
        "no import": run.NOT_COLLECTED,
        "no fixture": run.NOT_COLLECTED,
        "failing before": run.BROKEN_BEFORE,
    }
    noticed = outcomes["noticed"]
    assert noticed.noticed_by == "tests/test_shapes.py::TestRectangles::test_unequal_sides" and "5" in noticed.message


def test_a_test_that_hangs_is_no_kill(checkout):
    with run.workspace(checkout) as copy:
        hangs = fault("hangs", "test_waits", "time.sleep(seconds)", "time.sleep(600)")
        outcome = run.run_fault(copy, hangs, {}, 4)
    assert outcome.verdict == run.TIMED_OUT and outcome.seconds < 60


def test_the_command_goes_on_where_it_was_and_fails_for_a_survivor(checkout, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_header", lambda options: "- header")
    file = tmp_path / "faults.toml"
    entries = [fault("noticed", "TestRectangles::test_unequal_sides"), fault("unnoticed", "test_squares")]

    def write(chosen):
        lines = [
            f"[[fault]]\nname = {json.dumps(each.name)}\nfile = {json.dumps(each.file)}\nold = {json.dumps(each.old)}\n"
            f"new = {json.dumps(each.new)}\nbreaks = {json.dumps(each.breaks)}\ntests = {json.dumps(each.tests)}\n"
            for each in chosen
        ]
        file.write_text("\n".join(lines))

    def call(*more):
        options = f"--faults {file} --checkout {checkout} --work {tmp_path / 'work'} --output {tmp_path} --jobs 1"
        status = command.main([*options.split(), *more])
        return status, capsys.readouterr()

    write(entries)
    status, printed = call()
    assert status == 1 and "1 killed, 1 survived" in printed.out
    text = (tmp_path / "mutants.md").read_text()
    assert "**1 of 2 faults killed, in 1 rooms.**" in text and "| `unnoticed` | survived |" in text
    assert json.loads((tmp_path / "mutants.json").read_text())["results"][0]["outcome"]["verdict"] == "killed"
    monkeypatch.setattr(run, "run_tests", lambda *arguments, **options: pytest.fail("what was killed is not run again"))
    status, printed = call("--only", "noticed")
    assert status == 0 and "1 of 1 faults are in" in printed.out
    write(entries[:1])
    assert call()[0] == 0 and "## Not killed" not in (tmp_path / "mutants.md").read_text()
    status, printed = call("--only", "nobody")
    assert status == 2 and "there is no fault nobody" in printed.err


def test_the_page_lists_what_was_kept():
    folder = pathlib.Path(data.__file__).parents[1] / "results"
    kept = json.loads((folder / "mutants.json").read_text())
    results = page.Results(
        kept["header"],
        kept["num_jobs"],
        kept["seconds"],
        tuple(
            page.Result(
                Fault(**{**entry["fault"], "tests": tuple(entry["fault"]["tests"])}), run.Outcome(**entry["outcome"])
            )
            for entry in kept["results"]
        ),
    )
    assert (folder / "mutants.md").read_text() == "\n".join(page.lines(results)) + "\n"
    assert all(entry.outcome.verdict == run.KILLED for entry in results.results) and len(results.results) >= 45
