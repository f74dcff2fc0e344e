"""The walk through all benchmarks: that none is left out, that its commands are ones the benchmarks know, and that what
fails is named."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from benchmarks.__main__ import registry
from benchmarks._common import RESULTS
from benchmarks.all import main, walks

ROOT = pathlib.Path(main.__file__).resolve().parents[2]


def source_of(name: str) -> str:
    """All that the code of a benchmark says, with the options that many of them share."""
    folder = ROOT / "benchmarks"
    files = [folder / f"{name}.py"] if (folder / f"{name}.py").is_file() else sorted((folder / name).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    shared = (folder / "_kept.py").read_text(encoding="utf-8") if "add_options(" in text else ""
    return text + shared


@pytest.mark.parametrize("name", [name for name in registry() if name != "all"])
def test_every_benchmark_is_walked_by_options_that_it_has_and_writes_no_page_of_ours(name):
    for walk in main.walks_of([name]):
        for command in walk.commands:
            unknown = [option for option in command if option.startswith("--") and f'"{option}"' not in source_of(name)]
            assert not unknown, f"{name} has no option {unknown}: give it {unknown}, or commands of its own in walks.py"
            places = [place for option in command for place in walks.PLACES if place in option]
            writes = '"--output"' in source_of(name) and not {"--list", "--program", "compare"} & set(command)
            assert "{output}" in places or "{work}" in places or not writes


def test_parts_of_walks_are_all_parts():
    """A new part of a benchmark that is walked in parts has to be walked, too."""
    from benchmarks.jigsaw.main import parts
    from benchmarks.sparse.main import PARTS as SPARSE
    from benchmarks.splitbrain.main import PARTS as SPLITBRAIN
    from benchmarks.training.main import PARTS as TRAINING

    every = {"jigsaw": parts(), "sparse": SPARSE, "splitbrain": SPLITBRAIN, "training": TRAINING}
    for name, known in every.items():
        assert sorted(walk.part for walk in walks.WALKS[name]) == sorted(known)


def test_walks_are_of_benchmarks_that_there_are_and_an_unknown_one_gets_the_common_options():
    assert set(walks.WALKS) <= set(registry())
    (walk,) = main.walks_of(["a_new_benchmark"])
    assert walk.commands == (("--quick", "--output", "{output}"),)


def test_walks_are_listed_as_they_are_written_down_and_new_benchmarks_last(capsys):
    assert main.main(["--list"]) == 0
    walked = list(dict.fromkeys(line.split()[3] for line in capsys.readouterr().out.splitlines()))
    written = [name for name in walks.WALKS if name in walked]
    assert walked[: len(written)] == written and set(walked) == {name for name in registry() if name != "all"}


def test_walks_compile_without_optimisations_whatever_flags_there_are(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    environment = main.quick_compiling()
    assert environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    assert environment["XLA_FLAGS"].split()[0] == "--xla_force_host_platform_device_count=3"


def test_a_walk_that_fails_is_named_and_fails_the_command(capsys, monkeypatch):
    broken = walks.Walk("claims", (("--root", "{work}"), ("--no-such-option",)))
    monkeypatch.setattr(main, "walks_of", lambda names: [walks.Walk("claims", ((),)), broken])
    assert main.main(["--quick", "--data-dir", str(ROOT)]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 walks came to their end" in printed and "failed: claims" in printed
    assert "exit status" in printed


def test_a_walk_that_writes_over_a_page_fails_the_command(capsys, monkeypatch, tmp_path):
    shutil.copy(RESULTS / "walk.md", tmp_path)
    monkeypatch.setattr(main, "RESULTS", tmp_path)

    def run(*_: object) -> list[main.Outcome]:
        (tmp_path / "walk.md").write_text("other figures")
        return []

    monkeypatch.setattr(main, "_run_all", run)
    assert main.main(["--quick", "--data-dir", str(ROOT)]) == 1
    assert "wrote over the pages" in capsys.readouterr().out


def test_without_quick_it_says_what_to_do(capsys):
    assert main.main([]) == 2
    assert "--quick" in capsys.readouterr().err


@pytest.mark.slow
def test_all_benchmarks_can_be_walked():
    """Ten minutes on two idle cores; needs root for links, and Ray."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "all", "--quick"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
