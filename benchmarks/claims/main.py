"""Whether the figures in README and docs are those of the pages of results, and how old these pages are.

    python -m benchmarks claims           checks all figures, and names pages older than the code they measure
    python -m benchmarks claims --strict  is not content with a page that is older than its code either

A claim (`benchmarks/claims/claims.toml`) is a text of README.md or docs/*.md with the places of its figures: a cell of
a table, a goal, or arithmetic over them. A figure has to be its page's value as it rounds to the digits written, and
every number with a unit, a ratio or a share has to stand in a claim, or among the settings, which say why nothing
measured it. Reads files only, in a second. The exit status is 1 where a figure is wrong or covered by no claim.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from benchmarks._common import RESULTS, table
from benchmarks.claims.ages import Age, ages
from benchmarks.claims.checking import documents, problems
from benchmarks.claims.claim import read_claims
from benchmarks.claims.pages import ClaimError

CLAIMS = pathlib.Path(__file__).with_name("claims.toml")
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def main(argv: list[str] | None = None) -> int:
    """Checks and prints; 1 where something is wrong, 2 where the claims cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="checkout with README.md and docs/")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the pages of results")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for a page older than its code, too")
    options = parser.parse_args(argv)
    try:
        claims = read_claims(CLAIMS)
        wrong = problems(claims, options.root, options.results)
        old = [age for age in ages(claims.code, options.root, options.results) if age.num_changes != 0]
    except ClaimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in wrong:
        print(line)
    if old:
        print("\nPages older than the code they measure:\n")
        print("\n".join(table(("page", "part", "taken", "commit", "changes since"), map(_row, old))))
    num_figures = sum(len(claim.figures) for claim in claims.claims)
    print(
        f"\n{num_figures} figures of {len(claims.claims)} claims in {len(documents(options.root))} documents:"
        f" {len(wrong)} problems; {len(old)} parts of pages are older than the code they measure"
    )
    return 1 if wrong or (options.strict and old) else 0


def _row(age: Age) -> tuple[str, ...]:
    changes = "the history does not reach back" if age.num_changes is None else f"{age.num_changes} commits"
    return age.page, age.part, age.date, age.commit or "not recorded", changes
