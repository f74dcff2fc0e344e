"""What a type checker tells a user: nothing about scripts that are right, and each mistake where it stands.

The scripts in `scripts/` are read by pyright and mypy, never run.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"

# File name -> line -> what the checker says there.
Complaints = dict[str, dict[int, str]]


def run(tool: str, *arguments: str) -> str:
    """Returns the output of a type checker, which exits with 1 where it complains."""
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"needs {tool}: pip install 'splitjax[test]'")
    line = [sys.executable, "-W", "ignore", "-m", tool, *arguments]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(line, cwd=HERE, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def by_pyright() -> Complaints:
    told: Complaints = collections.defaultdict(dict)
    answer = json.loads(run("pyright", "--project", str(HERE), "--pythonpath", sys.executable, "--outputjson"))
    assert answer["summary"]["filesAnalyzed"] == len(list(SCRIPTS.glob("*.py")))
    for diagnostic in answer["generalDiagnostics"]:
        line = diagnostic["range"]["start"]["line"] + 1
        texts = told[pathlib.Path(diagnostic["file"]).name]
        texts[line] = texts.get(line, "") + diagnostic["message"]
    return told


@pytest.fixture(scope="module")
def by_mypy(tmp_path_factory: pytest.TempPathFactory) -> Complaints:
    told: Complaints = collections.defaultdict(dict)
    cache = tmp_path_factory.mktemp("mypy")
    text = run("mypy", "--config-file", str(HERE / "mypy.ini"), "--cache-dir", str(cache), str(SCRIPTS))
    for name, line, message in re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: (.*)$", text, re.MULTILINE):
        told[name][int(line)] = told[name].get(int(line), "") + message
    assert told or "Success" in text, text
    return told


def mistakes() -> dict[int, str]:
    """Line -> what is wrong there, as the script says."""
    lines = (SCRIPTS / "mistakes.py").read_text(encoding="utf-8").splitlines()
    return {number: line.split("# mistake: ")[1] for number, line in enumerate(lines, 1) if "# mistake: " in line}


@pytest.mark.parametrize("checker", ["by_pyright", "by_mypy"])
@pytest.mark.parametrize("script", ["linen_user.py", "nnx_user.py"])
def test_a_script_that_is_right(checker, script, request):
    assert request.getfixturevalue(checker).get(script, {}) == {}


@pytest.mark.parametrize("checker", ["by_pyright", "by_mypy"])
def test_each_mistake_is_told_and_nothing_else(checker, request):
    told = request.getfixturevalue(checker)["mistakes.py"]
    assert len(mistakes()) == 10
    assert {line: mistakes().get(line, "right") for line in told} == mistakes()
