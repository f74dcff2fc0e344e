"""CONTRIBUTING.md: each example of another package, installed as one, tested and run from the command line."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.processes import compile_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
_HEAD = re.compile(r"^### An? (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, str]:
    """Name of a kind of extension -> the text of its section."""
    _, *parts = _HEAD.split(PAGE.read_text(encoding="utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def install(text: str, folder: pathlib.Path) -> list[str]:
    """Writes a section's files into a folder, as `pip install` would, and returns its commands."""
    points, commands, files = "", [], []
    for language, block in _BLOCK.findall(text):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, f"a file begins with its name: {block[:60]!r}"
            (folder / name[1]).write_text(block)
            files.append(name[1])
        elif language == "ini":
            points += block
        elif language == "sh":
            commands += block.splitlines()
    assert len(files) == 2 and files[1].startswith("test_"), "one file and one test"
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    return commands


def run(arguments: list[str], folder: pathlib.Path, **variables: str) -> str:
    """What a process printed that finds splitjax and the package of the folder; fails if it does not exit with 0."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": compile_flags(), "SPLITJAX_CACHE": str(folder / "cache")}
    environment |= {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), "COLUMNS": "120", **variables}
    done = subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_seam_has_its_section():
    assert set(sections()) == {"scheme", "policy", "model", "rule set", "primitive"}
    for name, text in sections().items():
        assert f"[splitjax.{'rules' if name == 'rule set' else {'policy': 'policies'}.get(name, name + 's')}]" in text


@pytest.mark.parametrize(
    "name",
    [
        "scheme",
        "primitive",
        *(pytest.param(name, marks=pytest.mark.one_version) for name in ("policy", "model", "rule set")),
    ],
)
def test_one_file_and_one_test(name, tmp_path):
    install(sections()[name], tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")  # and not splitjax's own options
    out = run([sys.executable, "-m", "pytest", "-q"], tmp_path, JAX_NUM_CPU_DEVICES="8")
    assert re.search(r"^\d+ passed", out, re.MULTILINE), out


SHOWN = {
    "splitjax simulate --list": "gang-narrow",
    "splitjax plan --model my_model:small --model-option features=128": "(linen, 9,610 parameters), adam",
    "splitjax train --model sine --mesh data=4,model=2 --batch-size 48 --steps 5 --platform cpu": "step 5: loss",
    "splitjax lint my_rules:WIDE": "rule set wide: 2 rules",
}


@pytest.mark.slow  # a process each
def test_the_commands_do_what_they_say(tmp_path):
    ran = set()
    for name, text in sections().items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        for command in install(text, folder):
            program, *arguments = shlex.split(command)
            assert program == "splitjax"
            assert SHOWN[command] in run([sys.executable, "-m", "splitjax.cli", *arguments], folder)
            ran.add(command)
    assert ran == set(SHOWN)
