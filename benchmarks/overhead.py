"""What splitjax costs over the same sharding written by hand: the compiled program, the step, the call, and the
planning.

    python -m benchmarks overhead                   everything (about ten minutes on two busy cores), and its page
    python -m benchmarks overhead --parts programs dispatch planning
    python -m benchmarks overhead --quick           a small part of each, printed only
    python -m benchmarks overhead --before CHECKOUT what a call adds, against an earlier checkout, and its page

Programs are compared as XLA's optimised text, without names of modules and source lines. Step times are medians of
ratios: both versions take turns, step by step, so that other work on the machine meets both.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks import _by_hand, _calls, planning_time
from benchmarks._calls import Tiny
from benchmarks._common import table, virtual_devices, write_stored

PARTS = ("programs", "dispatch", "planning")
MOST_RATIO = 1.02
MOST_DISPATCH_SECONDS = 50e-6


@dataclasses.dataclass(frozen=True)
class Compared:
    """One hand-written step against splitjax's. `ratio`: splitjax's step time over the other's; None where not timed.
    `spread`: the quartiles of the ratios."""

    name: str  # of the model
    rules: str
    style: str  # what is constrained by hand
    lowered_alike: bool
    compiled_alike: bool
    differing_lines: int
    collectives_alike: bool
    ratio: float | None = None
    spread: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.compiled_alike or (self.ratio is not None and self.ratio <= MOST_RATIO)


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Seconds of a call: of the whole, of the jitted function inside it, and of splitjax's own part alone."""

    num_devices: int
    num_leaves: int
    num_calls: int
    whole_seconds: float
    inner_seconds: float
    added_seconds: float  # median of the pairs' differences
    alone_seconds: float  # with the jitted function replaced by one that does nothing

    @property
    def ok(self) -> bool:
        return max(self.added_seconds, self.alone_seconds) <= MOST_DISPATCH_SECONDS


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where one misses its limit."""
    virtual_devices()
    parser = argparse.ArgumentParser(
        "overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three programs, few steps and calls; no limit is held")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[])
    parser.add_argument(
        "--steps", type=int, default=300, help="timed steps of each version; a quarter where the programs are identical"
    )
    parser.add_argument("--calls", type=int, default=2000, help="timed calls of each kind; with --before of a round")
    parser.add_argument("--before", type=pathlib.Path, help="an earlier checkout: calls alone are compared with its")
    parser.add_argument("--rounds", type=int, default=40, help="with --before: how often both checkouts are asked")
    parser.add_argument(
        "--output", type=pathlib.Path, help="folder of the page; a whole run writes to benchmarks/results"
    )
    options = parser.parse_args(argv)
    if options.before is not None:
        return _compare_calls(options)
    parts = options.parts or PARTS
    num_steps, num_calls = (8, 20) if options.quick else (options.steps, options.calls)
    cases = (_by_hand.CASES[0], _by_hand.CASES[1], _by_hand.CASES[-1]) if options.quick else _by_hand.CASES
    compared = [_compare(case, num_steps) for case in cases] if "programs" in parts else []
    dispatch = [_dispatch(mesh, num_calls) for mesh in ({"data": 1}, _by_hand.MESH)] if "dispatch" in parts else []
    planned = planning_time.measure_all(*((1, 5) if options.quick else ())) if "planning" in parts else []
    if options.output or (len(parts) == len(PARTS) and not options.quick):
        from benchmarks import machine

        found = {"compared": compared, "dispatch": dispatch, "planned": planned}
        stored = {
            "header": machine.header(machine.this_machine(), "python -m benchmarks overhead").rstrip(),
            "num_steps": num_steps,
            **{part: [dataclasses.asdict(one) for one in measured] for part, measured in found.items()},
        }
        print("wrote", write_stored("overhead", stored, page_lines, options.output))
    return 0 if options.quick or all(one.ok for one in (*compared, *dispatch, *planned)) else 1


def _compare(case: _by_hand.ByHand, num_steps: int) -> Compared:
    tx = optax.sgd(0.01, momentum=0.9)
    step = splitjax.parallelize(
        _by_hand.make_step(case.model, tx, splitjax.value_and_grad), mesh=_by_hand.MESH, rules=case.rules
    )
    init = _by_hand.make_init(case.model, tx, case.batch)
    jitted, state_shardings, batch_sharding = case.jitted(step.mesh, tx)
    abstract = step.abstract_state(init, jax.random.key(0), example=(case.batch,))
    for (path, leaf), wanted in zip(
        jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(state_shardings), strict=True
    ):
        if not leaf.sharding.is_equivalent_to(wanted, len(leaf.shape)):
            raise RuntimeError(
                f"{case.name} {case.rules}: {jax.tree_util.keystr(path)} is {leaf.sharding.spec}, by hand {wanted.spec}"
            )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch)
    lowered = step.lower(abstract, shapes), jitted.lower(abstract, shapes)
    texts = [_plain(one.compile().as_text()) for one in lowered]
    lines = [collections.Counter(text.splitlines()) for text in texts]
    found = Compared(
        case.name,
        case.rules,
        case.style,
        lowered[0].as_text() == lowered[1].as_text(),
        texts[0] == texts[1],
        (lines[0] - lines[1]).total(),
        _collectives(texts[0]) == _collectives(texts[1]),
    )
    if num_steps:
        state = step.init(init, jax.random.key(0), example=(case.batch,))
        planned = {
            name: jax.NamedSharding(step.mesh, step.plan(abstract, shapes).spec(f"batch/{name}")) for name in case.batch
        }
        batches = [jax.device_put(case.batch, where) for where in (planned, batch_sharding)]
        count = num_steps // 4 if found.compiled_alike else num_steps
        found = dataclasses.replace(found, **_ratio(step, jitted, state, batches, count))
    print(_compared_line(found), flush=True)
    return found


def _ratio(step: Callable, jitted: Callable, state: Any, batches: Sequence[Any], num_steps: int) -> dict[str, Any]:
    """Both steps in turn, each on a state and a batch of its own, who begins changing from pair to pair."""
    states = [state, jax.tree.map(jnp.copy, state)]
    seconds: list[list[float]] = [[], []]
    for number in range(num_steps + 5):
        for which in ((0, 1), (1, 0))[number % 2]:
            started = time.perf_counter()
            states[which], metrics = (step, jitted)[which](states[which], batches[which])
            jax.block_until_ready((states[which], metrics))
            if number >= 5:
                seconds[which].append(time.perf_counter() - started)
    ratios = sorted(a / b for a, b in zip(*seconds, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    # Of the medians, not the median of the ratios: a ratio of two noisy times is biased upwards.
    return {"ratio": statistics.median(seconds[0]) / statistics.median(seconds[1]), "spread": (low, high),
            "seconds": statistics.median(seconds[1])}  # fmt: skip


# A table of source files and frames stands before the first computation; metadata points into it. Where an operation
# came from and what its module is called is no part of what it does.
_METADATA = re.compile(r",? ?metadata=\{[^{}]*\}")
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", re.MULTILINE)


def _plain(hlo: str) -> str:
    """An optimised module's text without its name, source lines and tables of them."""
    return re.sub(r"^HloModule [^,]+", "HloModule", _METADATA.sub("", _TABLES.sub("", hlo)))


def _collectives(hlo: str) -> list[str]:
    """The collectives with their shapes and groups, without the names of their operands."""
    lines = re.findall(r"= (.*?(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(.*)", hlo)
    return sorted(re.sub(r"%[\w.-]+|channel_id=\d+", "", line) for line in lines)


def _dispatch(mesh: dict[str, int], num_calls: int) -> Dispatch:
    """Times the calls of a step that hardly computes."""
    tiny = Tiny.on(mesh)
    pairs = tiny.pairs(num_calls)
    whole, bare = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    added = statistics.median(of_step - of_jitted for of_step, of_jitted in pairs)
    found = Dispatch(len(tiny.step.mesh.devices.flat), tiny.num_leaves, num_calls, whole, bare, added,
                     tiny.alone(num_calls))  # fmt: skip
    print(_dispatch_line(found), flush=True)
    return found


def _compare_calls(options: argparse.Namespace) -> int:
    """Compares calls with those of an earlier checkout, and writes the page."""
    num_rounds, num_calls = (2, 20) if options.quick else (options.rounds, options.calls)
    measured = []
    for num_devices in (1, 8):
        for one in _calls.compare(options.before, num_devices, num_rounds, num_calls):
            print(_calls.line_of(one), flush=True)
            measured.append(one)
    if options.output or not options.quick:
        from benchmarks import machine

        command = f"python -m benchmarks overhead --before CHECKOUT --rounds {num_rounds} --calls {num_calls}"
        commit = subprocess.run(
            ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        stored = {
            "header": machine.header(machine.this_machine(), command).rstrip(),
            "before_commit": commit.stdout.strip(),
            "num_calls": num_calls,
            "calls": [dataclasses.asdict(one) for one in measured],
        }
        print("wrote", write_stored("calls", stored, _calls.page_lines, options.output))
    return 0 if options.quick or all(one.ok for one in measured) else 1


def _compared_line(one: Compared) -> str:
    program = "identical program" if one.compiled_alike else f"{one.differing_lines} lines of the program differ"
    timed = "" if one.ratio is None else f"; step time ratio {one.ratio:.3f} [{one.spread[0]:.3f}, {one.spread[1]:.3f}]"
    collectives = "" if one.collectives_alike else "; other collectives"
    lowered = " (identical before XLA, too)" if one.lowered_alike else ""
    return (
        f"{'pass' if one.ok else 'MISS'} {one.name} {one.rules} ({one.style}): {program}{lowered}{collectives}{timed}"
    )


def _dispatch_line(one: Dispatch) -> str:
    micro = [
        f"{1e6 * seconds:.1f}"
        for seconds in (one.whole_seconds, one.inner_seconds, one.added_seconds, one.alone_seconds)
    ]
    return (
        f"{'pass' if one.ok else 'MISS'} dispatch on {one.num_devices} devices, {one.num_leaves} leaves, microseconds:"
        f" call {micro[0]}, jit alone {micro[1]}, added {micro[2]}, splitjax's part alone {micro[3]}"
    )


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `overhead.json` holds."""
    compared = [Compared(**{**fields, "spread": tuple(fields["spread"])}) for fields in stored["compared"]]
    dispatch = [Dispatch(**fields) for fields in stored["dispatch"]]
    planned = [planning_time.Planned(**fields) for fields in stored["planned"]]
    lines = ["# Overhead: against the same sharding by hand", "", stored["header"], ""]
    if compared:
        rows = [
            [
                one.name,
                one.rules,
                one.style,
                _program(one),
                "the same" if one.collectives_alike else "**others**",
                "" if one.ratio is None else f"{one.ratio:.3f} ({one.spread[0]:.2f} to {one.spread[1]:.2f})",
                f"{1e3 * one.seconds:.0f} ms",
                "yes" if one.ok else "**no**",
            ]
            for one in compared
        ]
        lines += [
            "## The step",
            "",
            (
                "The same model and step, once under `splitjax.parallelize`, once under `jax.jit` with"
                " `NamedSharding`s for state and batch and `with_sharding_constraint` where the table says"
                " (`benchmarks/_by_hand.py`); mesh data=2 x model=4. Programs are XLA's optimised text without module"
                " names and source lines. The ratio is splitjax's median step time over the other's,"
                f" {stored['num_steps']} steps each (a quarter where the programs are identical), taking turns (in"
                " brackets the quartiles of the pairs' ratios: the noise of this machine, which identical programs"
                " show, too). Passes: identical"
                f" programs, or a ratio of at most {MOST_RATIO}. Under `splitbrain` the programs differ on purpose:"
                " what XLA makes of constraints sums whole input gradients over the group and slices them, splitjax's"
                " crossings are reduce-scatters of half the bytes."
            ),
            "",
            *table(
                ["model", "rules", "constrained by hand", "program", "collectives", "ratio", "step by hand", "passes"],
                rows,
            ),
            "",
        ]
    if dispatch:
        rows = [[str(one.num_devices), str(one.num_leaves),
                 *(f"{1e6 * s:.0f}" for s in (one.whole_seconds, one.inner_seconds)),
                 *(f"**{1e6 * s:.1f}**" for s in (one.added_seconds, one.alone_seconds)), "yes" if one.ok else "**no**"]
                for one in dispatch]  # fmt: skip
        lines += [
            "## The call",
            "",
            (
                "Microseconds until a call returns, for a step that hardly computes over a state with the structure of"
                f" VGG-16's (parameters and momentum); medians of {dispatch[0].num_calls} calls of each kind, taking"
                " turns. *Added* is the median difference between neighbours, *alone* the call with a function in place"
                f" of the jitted one that returns at once. Passes: both at most {1e6 * MOST_DISPATCH_SECONDS:.0f}."
            ),
            "",
            *table(["devices", "leaves", "call", "jit alone", "added", "alone", "passes"], rows),
            "",
        ]
    if planned:
        lines += ["## Trace and plan", "", *planning_time.section(planned)]
    return lines


def _program(one: Compared) -> str:
    return "identical" if one.compiled_alike else f"{one.differing_lines} lines differ"


if __name__ == "__main__":
    sys.exit(main())
