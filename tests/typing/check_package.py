"""Checks the types of the package with pyright: `python tests/typing/check_package.py`, which `make lint` runs.

`bounds.json` has the most errors that there may be (`num_errors`; at 0 every error is shown and fails), the most lines
on which one is ignored (`num_ignores`), and the least share of public names whose type is known
(`completeness_percent`, of `pyright --verifytypes`). The bounds only ever get stricter: where a figure is better than
its bound, this says so, and the bound is to be moved there. Exits with 1 where a figure breaks its bound.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IGNORE = re.compile(r"#\s*(?:pyright|type):\s*ignore")
# An ignored error is named by its code, and has a reason behind it.
IGNORE_WITH_REASON = re.compile(r"# pyright: ignore\[\w+(?:, \w+)*\]  # \S+")


def ignores(package: pathlib.Path) -> list[tuple[str, str]]:
    """Returns (place, line) of every line on which a type error is ignored."""
    return [
        (f"{file.relative_to(package.parent)}:{number}", line)
        for file in sorted(package.rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if IGNORE.search(line)
    ]


def pyright(*options: str) -> dict[str, Any]:
    """Returns what pyright prints as JSON. Raises `RuntimeError` where it cannot run."""
    line = [sys.executable, "-W", "ignore", "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # --verifytypes looks for an installed package
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pyright ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def broken(figures: dict[str, float], bounds: dict[str, float]) -> list[str]:
    """Returns a sentence for every figure that breaks its bound: counts are at most it, shares in percent at least."""
    return [
        f"{name} is {figures[name]:g}, and the bound is {bound:g}"
        for name, bound in bounds.items()
        if (figures[name] < bound if name.endswith("_percent") else figures[name] > bound)
    ]


def main() -> int:
    """Compares the figures with their bounds. Returns the exit status."""
    bounds = json.loads((HERE / "bounds.json").read_text(encoding="utf-8"))
    checked = pyright()["generalDiagnostics"]
    errors = [diagnostic for diagnostic in checked if diagnostic["severity"] == "error"]
    completeness = pyright("--verifytypes", "splitjax", "--ignoreexternal")["typeCompleteness"]
    figures = {
        "num_errors": len(errors),
        "num_ignores": len(ignores(ROOT / "splitjax")),
        "completeness_percent": round(100 * completeness["completenessScore"], 2),
    }
    failures = broken(figures, bounds)
    if failures:
        for error in errors:
            file = pathlib.Path(error["file"]).relative_to(ROOT)
            print(f"{file}:{error['range']['start']['line'] + 1}: {error['message']} ({error.get('rule', 'no rule')})")
    for name, figure in figures.items():
        print(f"{name}: {figure:g} (bound: {bounds[name]:g})")
        if name != "num_ignores" and figure != bounds[name] and not failures:
            print(f"  better than its bound: write {figure:g} into tests/typing/bounds.json")
    for failure in failures:
        print(f"types: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
