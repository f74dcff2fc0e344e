"""Where the processor time of `row_exchange` goes: the least time of each operation of a compiled program, as XLA's CPU
backend reports it to the profiler, added up by the functions that the operations came from.

The least and not the mean, for an operation that is interrupted by another worker's thread counts on meanwhile. What
collectives take is mostly waiting, so they are left out here: the messages are timed as a program of their own.
"""

from __future__ import annotations

import math
import pathlib
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

OTHER = "other operations"
MESSAGES = "messages alone"
REST = "operations started, workers waited for"
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
_MARK = "part="
_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")


def mark_parts() -> None:
    """Lets the functions of the exchange name the operations that they make, in this process, from now on."""
    import jax

    from splitjax.sync import codes, routes, row_exchange, wire

    for module, function, part in (
        (codes, "encode", "own set written"),
        (codes, "spread", "sets read"),
        (routes, "_united", "sets united"),
        (routes, "unite", "sets united"),
        (routes, "_holders", "who holds a row"),
        (routes, "_holders_by_row", "who holds a row"),
        (routes, "contributors", "owners chosen"),
        (routes, "_by_worker", "sets of the holders"),
        (routes, "_rows_of_pairs", "rows of pairs counted"),
        (row_exchange, "send_order", "order to send in"),
        (row_exchange, "_targets", "places of what comes in"),
        (row_exchange, "sum_rows", "rows added up"),
        (row_exchange, "take_rows", "rows of the union taken"),
        (wire, "gather", "messages packed"),
        (wire, "push_rows", "messages packed"),
    ):
        setattr(module, function, jax.named_scope(_MARK + part)(getattr(module, function)))


def parts_of(program: str) -> dict[str, str | None]:
    """Operation of a compiled `program`, as text -> its part; None for those that are not counted: collectives, and
    loops and branches, whose operations count themselves."""
    marked: dict[str, Counter[str]] = defaultdict(Counter)  # of fused computations, without names of their own
    lines, inside = [], ""
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            inside = found[1]
        elif found := _INSTRUCTION.match(line):
            marks = re.findall(rf"{_MARK}([\w ]+)", line)
            lines.append((found[1], found[2], re.search(r"calls=%?([\w.-]+)", line), marks))
            marked[inside].update(marks[-1:])
    out: dict[str, str | None] = {}
    for name, opcode, called, marks in lines:
        inner = marked[called[1]].most_common(1) if called else []
        is_counted = opcode not in (*_COLLECTIVES, "while", "conditional", "call")
        out[name] = (marks[-1] if marks else inner[0][0] if inner else OTHER) if is_counted else None
    return out


def least_seconds(run: Callable[[], Any], steps: int) -> dict[str, float]:
    """Operation -> the least seconds that it took of all workers in `steps` steps."""
    import jax

    least: dict[str, float] = defaultdict(lambda: math.inf)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(run())
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for event in (event for line in plane.lines for event in line.events):
                    if any(key == "hlo_op" for key, _ in event.stats):
                        least[event.name] = min(least[event.name], 1e-9 * event.duration_ns)
    return dict(least)


def split_up(program: Any, run: Callable[[], Any], seconds: float, messages: float, steps: int) -> dict[str, float]:
    """Part -> seconds a worker, of a compiled `program` that takes `seconds` of processor time, of which its messages
    alone take `messages`; the largest part first, then `MESSAGES` and `REST`."""
    parts, out = parts_of(program.as_text()), Counter[str]()
    for name, took in least_seconds(run, steps).items():
        if part := parts.get(name):
            out[part] += took
    return {**dict(out.most_common()), MESSAGES: messages, REST: seconds - out.total() - messages}


def lines(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """The lines of the page, from table -> half of the exchange -> part -> seconds."""
    from benchmarks._common import table

    rows = {(half, part): None for halves in found.values() for half, parts in halves.items() for part in parts}
    order = sorted(rows, key=lambda row: (row[0], row[1] in (MESSAGES, REST), row[1] == REST))
    cell = lambda halves, half, part: f"{1e3 * halves[half][part]:.2f}" if part in halves[half] else "-"
    body = [[f"{half}: {part}", *(cell(halves, half, part) for halves in found.values())] for half, part in order]
    return [
        (
            "Where the time goes, ms of a worker: the least time of each operation, as XLA reports it to the profiler,"
            f" added up by what it is for. *{MESSAGES.capitalize()}*: processor time of a program of the same messages"
            f" and nothing else, copies and waiting. *{REST.capitalize()}*: what is left of the processor time, with"
            " what operations take longer than at best while all workers share the cores."
        ),
        "",
        *table(["", *found], body),
        "",
        " ".join(_most_of_it(name, halves) for name, halves in found.items()),
        "",
    ]


def _most_of_it(name: str, halves: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence: what operations, messages and the rest of both halves take, and which operations take most."""
    of = lambda part: 1e3 * sum(parts[part] for parts in halves.values())
    operations = {
        f"{part} ({half})": 1e3 * seconds
        for half, parts in halves.items()
        for part, seconds in parts.items()
        if part not in (MESSAGES, REST)
    }
    first, *_ = sorted(operations, key=operations.get, reverse=True)
    return (
        f"{name}: operations {sum(operations.values()):.2f} ms, messages {of(MESSAGES):.2f} ms, the rest {of(REST):.2f}"
        f" ms; of the operations most is {first}, {operations[first]:.2f} ms."
    )
