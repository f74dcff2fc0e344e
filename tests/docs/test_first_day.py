"""The page of a first day, as a person walks it: its files saved, its commands typed, one after the other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from benchmarks.product.pages import ROOT, first_day
from tests.processes import compile_flags

pytestmark = pytest.mark.one_version
PAGE = (ROOT / "docs" / "first_day.md").read_text()


def check(said: str) -> None:
    """What the page promises: the plan's first lines as they stand there, and a run that is evaluated and goes on."""
    (promised,) = re.findall(r"^```\n(saves.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    assert promised in said
    (first, second) = re.findall(r"^step (\d+) right (\d+) of 359$", said, re.MULTILINE)
    assert (first[0], second[0]) == ("100", "150") and min(int(first[1]), int(second[1])) > 0.9 * 359
    assert said.index("step 100 right") < said.index("resumed behind step 100") < said.index("step 150 right")


# Runs commands of Python as `python FILE ARGUMENTS` does, but for one start of Python and its imports.
RUNNER = """
import json, runpy, sys
sys.path.insert(0, "")
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    sys.modules.pop("model", None)
    runpy.run_path(name, run_name="__main__")
"""


def test_the_files_of_a_first_day_plan_train_evaluate_save_and_resume(tmp_path):
    """What comes behind the installation, in the order of the page."""
    import json

    commands = []
    for step in first_day():
        if step.name:
            (tmp_path / step.name).write_text(step.text)
        else:
            commands += [line for line in step.text.splitlines() if line.startswith("python ")]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps([shlex.split(command)[1:] for command in commands])],
        cwd=tmp_path,
        env={**os.environ, "XLA_FLAGS": compile_flags(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout)
    assert (tmp_path / "run" / "100").is_dir() and (tmp_path / "run" / "150").is_dir()


@pytest.mark.slow
@pytest.mark.network
def test_a_first_day_from_the_clone_on(tmp_path):
    """All of it, as it stands: with an environment of its own, into which it is installed."""
    from benchmarks.product.walking import walk

    done = walk(tmp_path, timeout_seconds=900)
    assert done.status == 0, done.said
    check(done.said)
    assert done.seconds < 900
