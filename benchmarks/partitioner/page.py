"""What is kept of a run in `results/partitioner.json`, and the page that is written from all runs there."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import RESULTS, table, write_page
from benchmarks.partitioner.draw import Draw
from benchmarks.partitioner.families import families
from benchmarks.partitioner.known import GSPMD, KINDS, kind_of, rows
from benchmarks.partitioner.primitives import NOT_DRAWN
from benchmarks.partitioner.run import Outcome
from splitjax.primitives.table import OPERATIONS
from splitjax.trace import tracer  # noqa: F401  (it fills the registry)

STORE = "partitioner.json"
BAD = ("wrong", "failed", "crash")
_WAYS = {"hand": "by hand", "splitjax": "under splitjax"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of many programs came to. `findings`: per kind of defect how many programs, the largest relative
    error, up to a few of their numbers, and least forms with their outcome. `only`: the family that it was confined to;
    empty for the main search."""

    jax: str
    partitioner: str
    way: str
    seed: str
    header: str
    statuses: dict[str, int]
    families: dict[str, dict[str, int]]
    primitives: dict[str, int]
    layouts: dict[str, dict[str, int]]
    findings: dict[str, dict[str, Any]]
    only: str = ""

    @property
    def key(self) -> str:
        return key_of(self.jax, self.partitioner, self.way, self.only)

    @property
    def num_programs(self) -> int:
        return sum(count for status, count in self.statuses.items() if status != "invalid")


def key_of(jax: str, partitioner: str, way: str, only: str = "") -> str:
    """The name under which a run is kept."""
    return " ".join(part for part in (jax, partitioner, way, only) if part)


def summary(
    jax: str,
    partitioner: str,
    way: str,
    seed: str,
    header: str,
    pairs: Sequence[tuple[Draw, Outcome]],
    least: Mapping[str, Any],
    only: str = "",
) -> Run:
    """The summary of a run. `least`: by kind, least forms as `{"draw": ..., "outcome": ...}` texts. `only`: the family
    that it was confined to."""
    statuses: collections.Counter[str] = collections.Counter()
    by_family: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    primitives: collections.Counter[str] = collections.Counter()
    layouts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    found: dict[str, dict[str, Any]] = {}
    for draw, outcome in pairs:
        statuses[outcome.status] += 1
        if outcome.status == "invalid":
            continue
        by_family[draw.family][outcome.status] += 1
        primitives.update(outcome.primitives)
        layout = layouts[layout_of(draw, way)]
        layout["programs"] += 1
        layout["partly replicated"] += draw.is_partly_replicated
        layout[outcome.status] += 1
        if outcome.status in BAD:
            entry = found.setdefault(
                kind_of(draw, outcome, partitioner),
                {"programs": 0, "statuses": {}, "error": 0.0, "examples": [], "messages": []},
            )
            entry["programs"] += 1
            entry["statuses"][outcome.status] = entry["statuses"].get(outcome.status, 0) + 1
            finite = [error for _, error in outcome.wrong if error < 1e300]
            entry["error"] = max(entry["error"], *finite, 0.0) if finite else entry["error"]
            entry["examples"] = (entry["examples"] + [f"{seed}:{outcome.number}"])[:4]
            if outcome.message and outcome.message not in entry["messages"] and len(entry["messages"]) < 2:
                entry["messages"].append(outcome.message)
    for kind, entry in found.items():
        entry["least"] = least.get(kind, [])
    plain = lambda counters: {name: dict(counter) for name, counter in sorted(counters.items())}
    return Run(
        jax,
        partitioner,
        way,
        seed,
        header,
        dict(statuses),
        plain(by_family),
        dict(sorted(primitives.items())),
        plain(layouts),
        found,
        only,
    )


def layout_of(draw: Draw, way: str) -> str:
    """The mesh, and what splits the examples and the weights, in words."""
    shape = " x ".join(f"{axis} {size}" for axis, size in draw.mesh)
    if way == "splitjax":
        return f"{shape}; {draw.rules}"
    large = [axis for axis, size in draw.mesh if size > 1]
    examples = {layout[0] for layout in draw.layouts[:1] if layout}
    split = next(iter(examples), ())
    batch = "all axes" if set(split) == set(large) else "some axes" if split else "none"
    return f"{shape}; examples over {batch}"


def store(run: Run, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Puts a run among those that are kept, in the place of an earlier one of the same JAX, partitioner, way and
    family."""
    runs = {kept.key: kept for kept in load(folder)} | {run.key: run}
    path = folder / STORE
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(_fields(kept), sort_keys=True)}" for key, kept in sorted(runs.items())
    )
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    return path


def _fields(run: Run) -> dict[str, Any]:
    """What is kept of a run; of the main search's no family."""
    return {name: value for name, value in dataclasses.asdict(run).items() if name != "only" or value}


def load(folder: pathlib.Path = RESULTS) -> list[Run]:
    """The runs that are kept."""
    path = folder / STORE
    return [Run(**fields) for fields in json.loads(path.read_text(encoding="utf-8")).values()] if path.exists() else []


def shrunk_kinds(runs: Sequence[Run], key: str) -> frozenset[str]:
    """The kinds of mismatch of which a run other than that of `key` has least forms."""
    return frozenset(kind for run in runs if run.key != key for kind, entry in run.findings.items() if entry["least"])


def write(folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes the page from what is kept."""
    return write_page("partitioner", page(load(folder)), folder)


def page(runs: Sequence[Run]) -> list[str]:
    """The lines of the page."""
    runs = sorted(runs, key=lambda run: (run.way, run.jax, run.partitioner))
    of_one_family = [run for run in runs if run.only]
    runs = [run for run in runs if not run.only]
    return [
        "# What XLA's SPMD partitioner computes wrongly",
        "",
        (
            "A program is a small training step around one operation or a chain of layers, with drawn shapes, strides,"
            " dilations, paddings, groups and index modes, standing alone or in a scan, remat, a vmap, a branch or"
            " custom derivatives, with a drawn layout for every input. Its forward values and its gradients for weights"
            " and data on a mesh of virtual devices are compared with those of one device, in float64 to 1e-8 of the"
            " largest value (some in float32 and bfloat16, to their rounding; integers exactly). What differs among"
            " many programs in one compile is run again alone, which decides. A program that kills the compiler is"
            " found by halving."
        ),
        "",
        "Any program can be had again: `python -m benchmarks partitioner --program SEED:NUMBER`.",
        "",
        *_overview(runs),
        "",
        *_defects(runs),
        "",
        *_findings(runs),
        "",
        *_families(runs),
        "",
        *_searches_of_one_family(of_one_family),
        *_layouts(runs),
        "",
        *_primitives(runs),
        "",
        "## Runs",
        "",
        *[
            line
            for run in runs
            for line in (f"### jax {run.jax}, {run.partitioner}, {_WAYS[run.way]}", "", run.header.rstrip(), "")
        ],
    ]


def _overview(runs: Sequence[Run]) -> list[str]:
    titles = (
        "jax",
        "partitioner",
        "way",
        "programs",
        "partly replicated",
        "right",
        "wrong",
        "compile error",
        "crash",
        "refused by splitjax",
        "kinds",
        "left out",
    )
    cells = []
    for run in runs:
        partly = sum(counts.get("partly replicated", 0) for counts in run.layouts.values())
        counts = [str(run.statuses.get(status, 0)) for status in ("right", "wrong", "failed", "crash", "refused")]
        cells.append(
            (
                run.jax,
                run.partitioner,
                _WAYS[run.way],
                str(run.num_programs),
                str(partly),
                *counts,
                str(len(run.findings)),
                str(run.statuses.get("invalid", 0)),
            )
        )
    return [
        *table(titles, cells),
        "",
        "Left out, and not among the programs: those that one device cannot run either (XLA's algebraic simplifier ends"
        " the process in some gradients of strided 3-D convolutions), or gives other numbers for when it is asked again"
        " (XLA's CPU backend reads memory that nothing wrote in some convolutions with a negative padding) or when its"
        " inputs are off by a rounding (the cosine of a number of 80 digits).",
        "",
        "With GSPMD nothing is drawn under splitjax: it refuses to plan for GSPMD (row `gspmd`).",
    ]


def _defects(runs: Sequence[Run]) -> list[str]:
    """The package's table, each row with the kinds that it covers and how many programs of each run are of them."""
    known = rows()
    if not known:
        return []
    lines = [
        "## The package's table of defects",
        "",
        "What `splitjax.partitioner.DEFECTS` says, and how many programs by hand a row covers.",
        "",
    ]
    cells = []
    for name, defect in known.items():
        kinds = {kind.name for kind in (*KINDS, GSPMD) if kind.row == name}
        count = sum(
            entry["programs"]
            for run in runs
            if run.way == "hand"
            for kind, entry in run.findings.items()
            if kind in kinds
        )
        cells.append((name, defect.operation, defect.condition, defect.versions, defect.remedy, str(count)))
    return [*lines, *table(("row", "operation", "condition", "versions", "what is done instead", "programs"), cells)]


def _findings(runs: Sequence[Run]) -> list[str]:
    kinds = sorted({kind for run in runs for kind in run.findings})
    row_of = {kind.name: kind.row for kind in (*KINDS, GSPMD)}
    cells = []
    for kind in kinds:
        mine = [(run, run.findings[kind]) for run in runs if kind in run.findings]
        for run, entry in mine:
            what = ", ".join(f"{count} {status}" for status, count in sorted(entry["statuses"].items()))
            error = f"{entry['error']:.2g}" if entry["error"] else ""
            cells.append(
                (
                    kind,
                    row_of.get(kind, ""),
                    run.jax,
                    run.partitioner,
                    _WAYS[run.way],
                    what,
                    error,
                    " ".join(entry["examples"]),
                )
            )
    lines = [
        "## Mismatches, errors and crashes",
        "",
        *table(
            (
                "kind",
                "row of the table",
                "jax",
                "partitioner",
                "way",
                "programs",
                "largest relative error",
                "for example",
            ),
            cells,
        ),
    ]
    for kind in kinds:
        shown = [(run, each) for run in runs if kind in run.findings for each in run.findings[kind]["least"]][:3]
        messages = list(
            dict.fromkeys(message for run in runs if kind in run.findings for message in run.findings[kind]["messages"])
        )[:2]
        if shown or messages:
            lines += ["", f"### {kind}", ""]
        lines += [f"- `{message}`" for message in messages]
        for run, each in shown:
            lines += [
                f"- least form (jax {run.jax}, {run.partitioner}): {_words(Draw.from_json(each['draw']))}:"
                f" {each['outcome']}"
            ]
    return lines


def _words(draw: Draw) -> str:
    """A draw in a line: what differs from the simplest."""
    settings = ", ".join(f"{key}={value!r}" for key, value in draw.params)
    mesh = " x ".join(f"{axis} {size}" for axis, size in draw.mesh)
    around = "" if draw.wrapper == "plain" else f" in {draw.wrapper}"
    return (
        f"`{draw.family}({settings})`{around}, mesh {mesh}, layouts `{draw.layouts}`"
        + (", gradients pinned" if draw.pinned else "")
        + (f", {draw.reuse}" if draw.reuse != "once" else "")
    )


def _searches_of_one_family(runs: Sequence[Run]) -> list[str]:
    """A table of the runs with `--only`, with their commands; nothing where there are none."""
    if not runs:
        return []
    lines = [
        "## Searches of one family",
        "",
        "Beside the main search, and not counted in the other tables. `fourier`: a Fourier transform between two dense"
        " layers, along dims that their weights split (`benchmarks/partitioner/fourier.py`).",
        "",
    ]
    titles = ("family", "jax", "partitioner", "way", "programs", "right", "wrong", "compile error", "crash", "refused")
    cells = [
        (
            run.only,
            run.jax,
            run.partitioner,
            _WAYS[run.way],
            str(run.num_programs),
            *(str(run.statuses.get(status, 0)) for status in ("right", *BAD, "refused")),
        )
        for run in sorted(runs, key=lambda run: run.only)
    ]
    lines += [*table(titles, cells), ""]
    messages = {
        (run.only, message): None for run in runs for entry in run.findings.values() for message in entry["messages"]
    }
    lines += [f"- {only}: `{message}`" for only, message in messages] + ([""] if messages else [])
    for run in runs:
        title = f"### {run.only}: jax {run.jax}, {run.partitioner}, {_WAYS[run.way]}"
        lines += [title, "", run.header.rstrip(), ""]
    return lines


def _families(runs: Sequence[Run]) -> list[str]:
    cells = []
    for name in (family.name for family in families().values() if family.share):
        for run in runs:
            counts = run.families.get(name, {})
            cells.append(
                (
                    name,
                    run.jax,
                    run.partitioner,
                    _WAYS[run.way],
                    str(sum(counts.values())),
                    *(str(counts.get(status, 0)) for status in ("right", *BAD, "refused")),
                )
            )
    titles = ("family", "jax", "partitioner", "way", "programs", "right", "wrong", "compile error", "crash", "refused")
    return ["## By family of operations", "", *table(titles, cells)]


def _layouts(runs: Sequence[Run]) -> list[str]:
    cells = []
    for run in runs:
        for name, counts in run.layouts.items():
            shape, _, rest = name.partition("; ")
            bad = [str(counts.get(status, 0)) for status in BAD]
            cells.append(
                (
                    run.jax,
                    run.partitioner,
                    _WAYS[run.way],
                    shape,
                    rest,
                    str(counts["programs"]),
                    str(counts.get("partly replicated", 0)),
                    *bad,
                )
            )
    titles = (
        "jax",
        "partitioner",
        "way",
        "mesh",
        "layout",
        "programs",
        "partly replicated",
        "wrong",
        "compile error",
        "crash",
    )
    return ["## By layout", "", *table(titles, cells)]


def _primitives(runs: Sequence[Run]) -> list[str]:
    drawn: collections.Counter[str] = collections.Counter()
    for run in runs:
        drawn.update(run.primitives)
    names = [name for name in OPERATIONS.with_dims() if name in drawn]
    lines = [
        "## Primitives",
        "",
        (
            f"Counted in the programs' jaxprs, forward and backward, over all runs: {len(names)} of the"
            f" {len(OPERATIONS.with_dims())} that have a dim rule."
        ),
        "",
        *table(
            ("primitive", *(f"{run.jax} {run.partitioner} {_WAYS[run.way]}" for run in runs)),
            [(name, *(str(run.primitives.get(name, 0)) for run in runs)) for name in names],
        ),
        "",
        "Not drawn, and why:",
        "",
    ]
    missing = [
        (name, NOT_DRAWN.get(name, "not met in these runs")) for name in OPERATIONS.with_dims() if name not in drawn
    ]
    return [*lines, *table(("primitive", "reason"), missing)]
