"""How old pages of results are: how many commits changed the code that they measure since they were taken."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks.claims.pages import ResultPage, read_page

_TAKEN = re.compile(r"^- (?P<date>\d{4}-\d\d-\d\d)(?:, commit (?P<commit>\w+))?")


@dataclasses.dataclass(frozen=True)
class Age:
    """When one part of a page was taken, and what happened since.

    `part`: its heading, empty for a page of one part. `commit`: empty where the page records none. `num_changes`: the
    commits since then that touched the code which the page measures, to the date's end where no commit is recorded;
    None where the checkout's history does not reach back.
    """

    page: str
    part: str
    date: str
    commit: str
    num_changes: int | None


def ages(code: Mapping[str, Sequence[str]], root: pathlib.Path, results: pathlib.Path) -> list[Age]:
    """Gives the ages of all parts of the pages in `code`, which maps a page to the paths, relative to the checkout
    `root`, of what it measures. Raises `ClaimError` where a page is missing."""
    return [age for name, paths in code.items() for age in _ages_of(read_page(name, results), paths, root)]


def _ages_of(page: ResultPage, paths: Sequence[str], root: pathlib.Path) -> list[Age]:
    found = []
    for headings, line in page.lines:
        if (taken := _TAKEN.match(line)) is None:
            continue
        part = headings[1] if len(headings) > 1 else ""
        commit = taken["commit"] or ""
        found.append(
            Age(page.name, part, taken["date"], commit, _num_changes(commit, taken["date"], tuple(paths), root))
        )
    return found


@functools.cache  # parts of a page are often of one commit or day
def _num_changes(commit: str, date: str, paths: tuple[str, ...], root: pathlib.Path) -> int | None:
    since = [f"{commit}..HEAD"] if commit else [f"--since={date}T23:59:59Z", "HEAD"]
    command = ["git", "rev-list", "--count", *since, "--", *paths]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return int(done.stdout) if done.returncode == 0 else None
