"""Measures with other programs, each optional: type errors and completeness by pyright, and what `import` takes.

A checkout goes in, numbers come out. The checkout is imported by child processes alone.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import NotRequired, TypedDict, cast

from benchmarks.house.source import PACKAGE

_TIMED_IMPORT = "import time; started = time.perf_counter(); import {}; print(time.perf_counter() - started)"


class CommandError(RuntimeError):
    """Says that a program which measures could not be run, or printed what cannot be read."""


@dataclasses.dataclass(frozen=True)
class Typing:
    """Holds what pyright says of the package.

    `completeness_percent` is the share of exported symbols whose type is known; None where pyright does not find the
    package as an installed, typed package.
    """

    version: str
    num_errors: int
    by_rule: tuple[str, ...]
    by_file: tuple[str, ...]
    completeness_percent: float | None


@dataclasses.dataclass(frozen=True)
class ImportTime:
    """Holds median seconds in which fresh processes import the package and JAX."""

    package_seconds: float
    jax_seconds: float

    @property
    def ratio(self) -> float:
        """Divides the package's time by JAX's, which it contains."""
        return self.package_seconds / self.jax_seconds


class _Diagnostic(TypedDict):
    file: str
    severity: str
    rule: NotRequired[str]  # a syntax error breaks none


def measure_typing(checkout: pathlib.Path, command: str, timeout_seconds: float = 900) -> Typing:
    """Runs pyright over the package of `checkout`.

    `command` starts pyright, with options such as `--pythonpath`; the checkout's own configuration applies, and without
    one pyright's standard mode. Raises `CommandError` where it fails or takes more than `timeout_seconds`.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}  # --verifytypes wants an installed package

    def pyright(*options: str) -> Mapping[str, object]:
        line = [*shlex.split(command), "--outputjson", *options]
        try:
            done = subprocess.run(
                line, cwd=checkout, env=environment, capture_output=True, text=True, timeout=timeout_seconds
            )
            return cast("Mapping[str, object]", json.loads(done.stdout))
        except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            raise CommandError(f"`{shlex.join(line)}` failed: {error}; remedy: run it by hand in {checkout}") from error

    checked = pyright(PACKAGE)
    verified = pyright("--verifytypes", PACKAGE, "--ignoreexternal")
    diagnostics = cast("list[_Diagnostic]", checked["generalDiagnostics"])
    errors = [diagnostic for diagnostic in diagnostics if diagnostic["severity"] == "error"]
    top = checkout.resolve()
    completeness = cast("Mapping[str, object]", verified.get("typeCompleteness", {}))
    is_ours = pathlib.Path(str(completeness.get("packageRootDirectory", ""))).is_relative_to(top)
    score = completeness.get("completenessScore")
    return Typing(
        version=str(checked["version"]),
        num_errors=len(errors),
        by_rule=_most_common(diagnostic.get("rule", "no rule") for diagnostic in errors),
        by_file=_most_common(_relative(diagnostic["file"], top) for diagnostic in errors),
        completeness_percent=100 * score if is_ours and isinstance(score, float | int) else None,
    )


def measure_imports(checkout: pathlib.Path, num_runs: int, python: str = sys.executable) -> ImportTime:
    """Imports the package of `checkout` and JAX alternately, `num_runs` times each in processes of their own.

    `python` is the interpreter. A first run of each is not counted: it writes byte code and fills the file cache.
    Raises `CommandError` where an import fails.
    """
    seconds: dict[str, list[float]] = {PACKAGE: [], "jax": []}
    for run in range(num_runs + 1):
        for name, kept in seconds.items():
            line = [python, "-W", "ignore", "-c", _TIMED_IMPORT.format(name)]
            done = subprocess.run(line, cwd=checkout, env=_quiet(checkout), capture_output=True, text=True, check=False)
            if done.returncode:
                raise CommandError(f"import {name} in {checkout} failed:\n{done.stderr}")
            if run:
                kept.append(float(done.stdout.split()[-1]))
    return ImportTime(statistics.median(seconds[PACKAGE]), statistics.median(seconds["jax"]))


def checkout_commit(checkout: pathlib.Path) -> str:
    """Gives the short commit of `checkout`, with "with changes" where its files differ, result pages apart.

    Empty outside a git checkout.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=7", "HEAD")
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{commit} with changes" if commit and changed else commit


def _most_common(names: Iterable[str]) -> tuple[str, ...]:
    counts = collections.Counter(names)
    return tuple(f"{name}: {count}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _relative(file: str, top: pathlib.Path) -> str:
    path = pathlib.Path(file)
    return path.relative_to(top).as_posix() if path.is_relative_to(top) else path.name


def _quiet(checkout: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "PYTHONPATH": str(checkout.resolve())}
