"""The page of the corpus: how many cells there are, what is refused, what was compiled, and what reports miss."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import machine
from benchmarks._common import RESULTS, table, write_page
from benchmarks.corpus.cells import FIELDS, Cell, compiles
from benchmarks.corpus.cover import pairs_of
from benchmarks.corpus.exceptions import KNOWN, LIMIT
from benchmarks.corpus.store import FOLDER, Summary, load
from benchmarks.corpus.worker import environment

COMMAND = "python -m benchmarks corpus record --output DIR; python -m benchmarks corpus store DIR"


def header() -> str:
    """The machine and the releases of this process, as a page's header says them. Starts JAX's backend."""
    os.environ.update(environment())
    return machine.header(machine.this_machine(), COMMAND)


def write_corpus_page(results: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes the page from all that is stored."""
    folders = sorted((results / FOLDER).glob("jax-*"))
    lines = [
        "# The corpus: every combination, planned and compiled", "",
        "What a refactoring has to leave as it is. `python -m benchmarks corpus record --output DIR` records a "
        "checkout, and `python -m benchmarks corpus compare DIR` compares it with the digests that are kept in "
        "`benchmarks/results/corpus`; two recordings are compared in full, with the lines that differ. A plan's digest "
        "is that of its canonical JSON, without sentences; a program's is that of XLA's optimised modules without "
        "names, ids, channels and metadata, in post-order.", "",
        f"Exceptions, of at most {LIMIT} cells: {len(KNOWN) or 'none'}" + ("." if not KNOWN else ":"),
        *(f"- `{one.pattern}`, {one.part}: {one.why}" for one in KNOWN), "",
    ]  # fmt: skip
    for folder in folders:
        lines += _section(load(folder))
    return write_page("corpus", lines, results)


def _section(one: Summary) -> Iterator[str]:
    about, plans, programs = one.about, one.plans, one.programs
    compiled = {name: found for name, found in programs.items() if not isinstance(found, str)}
    yield from (f"## jax {about['jax']}", "", *about.get("machine", "").splitlines())
    again = [f"- recorded again: {part}" for part in about.get("again", ())]
    yield from (f"- recorded: splitjax as of commit {about['commit']}", *again, *_times(about), "")
    kinds = collections.Counter(_kind(value) for value in plans.values())
    asked, otherwise = (kinds.pop(kind, 0) for kind in ("planned", "otherwise"))
    yield f"{len(plans)} cells; {asked} are planned as they ask, {otherwise} otherwise; {len(compiled)} are compiled."
    able = [
        cell
        for cell in (Cell.parse(name) for name, value in plans.items() if _kind(value) == "planned")
        if compiles(cell)
    ]
    wanted, had = pairs_of(able), pairs_of(map(Cell.parse, compiled))
    yield f"Pairs of values that can be compiled: {len(wanted)}; in compiled cells: {len(wanted & had)}."
    yield "Otherwise: nothing crosses that could cross in turns, or a table's gradient has to stay whole."
    yield ""
    if kinds:
        yield from table(("no plan", "cells"), [(kind, str(count)) for kind, count in sorted(kinds.items())])
        yield ""
    yield from (
        *table(("dimension", "value", "cells", "planned as asked", "compiled"), _dimensions(plans, compiled)),
        "",
    )
    yield (
        "Models with batch norm are planned with microbatches, and refused when they are compiled: no cover has them."
        " So are those of them that drop paths at random with partial backpropagation, as their workers would draw the"
        " same numbers."
    )
    yield ""
    failed = {name: found for name, found in programs.items() if isinstance(found, str)}
    if failed:
        yield from ("### Planned, and not compiled", "", *table(("cell", "error"), sorted(failed.items())), "")
    yield from _missing(compiled)


def _times(about: Mapping[str, Any]) -> Iterator[str]:
    for what in ("plan", "program"):
        if f"{what}_seconds" in about:
            wall, cpu = (about.get(f"{what}_{kind}", 0.0) / 60 for kind in ("seconds", "cpu_seconds"))
            load = f"the machine's load average was {about.get(f'{what}_load', 'unknown')} before they began"
            jobs = about.get("jobs", 2)
            yield f"- {what}s: {cpu:.1f} minutes of processor time, {wall:.1f} of wall time with --jobs {jobs}; {load}"


def _kind(value: str) -> str:
    if " " in value:
        status, _, error = value.partition(" ")
        return f"{status}: {error}"
    return "otherwise" if value.startswith("-") else "planned"


def _dimensions(plans: Mapping[str, str], compiled: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for field in FIELDS:
        every = collections.Counter(getattr(Cell.parse(name), field) for name in plans)
        planned = collections.Counter(
            getattr(Cell.parse(name), field) for name, value in plans.items() if _kind(value) == "planned"
        )
        programs = collections.Counter(getattr(Cell.parse(name), field) for name in compiled)
        for value, count in every.items():
            yield field, value, str(count), str(planned[value]), str(programs[value])


def _missing(compiled: Mapping[str, Any]) -> Iterator[str]:
    """What the reports of compiled cells miss: planned collectives that XLA did without."""
    rows = []
    for name, found in compiled.items():
        for program, one in found.items():
            if one["missing"]:
                first, num = one["missing"][0], len(one["missing"])
                rows.append((name, program, str(num), first))
    yield from (f"### Something is missing: {len({row[0] for row in rows})} of {len(compiled)} compiled cells", "")
    yield "`report().missing`: planned collectives that XLA did without (op, axis, bytes, layer)."
    yield ""
    if rows:
        yield from table(("cell", "program", "missing", "first of them"), rows)
        yield ""
