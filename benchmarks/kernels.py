"""Bandwidth of the kernels of sparse synchronisation, beside a copy and XLA's own operations in the same run.

    python -m benchmarks kernels [--rows 200000] [--width 512] [--repeats 20] [--write]

Each operation runs as splitjax dispatches it on this accelerator, and as XLA alone does it: `.at[].add` for the segment
sum, `.at[].get` for the gather, `.at[].set` for the scatter, `jnp.nonzero` for the bitmap's ids. The useful bytes are
those that any implementation has to read and write; a copy of an array past the caches says what the memory gives.
On a GPU the time is that of the kernels of a call, by the device's own clock: a call of some microseconds would tell
how fast Python is.
Where there is no accelerator there is no kernel: then the references are measured, the program says so, and it writes
no page.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._common import quiet_tpu_compiler, table, write_page
from benchmarks.machine import header, this_machine
from splitjax import kernels
from splitjax.measure.calibrating.kernel_time import kernel_seconds

GOAL = 0.8  # of the bandwidth of a copy, on an accelerator
_COPY_BYTES = 2**30  # past any cache
_CALLS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation: ours, XLA's, what both are given, and the bytes that have to move."""

    name: str
    own: Callable[..., Any]
    xla: Callable[..., Any]
    operands: tuple[jax.Array, ...]
    num_bytes: int
    in_place: bool = False  # the result takes the place of the first operand


@dataclasses.dataclass(frozen=True)
class Measured:
    """Median seconds of one operation, ours and XLA's, and how much of a copy's bandwidth ours reaches."""

    name: str
    num_bytes: int
    own_seconds: float
    xla_seconds: float
    copy_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.own_seconds

    @property
    def of_copy(self) -> float:
        return self.bytes_per_second / self.copy_bytes_per_second

    @property
    def ok(self) -> bool:
        return self.of_copy >= GOAL and self.own_seconds <= self.xla_seconds


def cases(num_rows: int, width: int) -> list[Case]:
    """The operations on the rows that a batch with frequent words touches: numbers drawn log-uniformly, a table four
    times as long."""
    rng = np.random.default_rng(0)
    size = 4 * num_rows
    ids = np.sort(np.exp(rng.uniform(0, np.log(size), num_rows)).astype(np.int32) % size)
    unique = np.unique(ids)
    slots = -(-len(unique) // 1024) * 1024
    picked = np.full(slots, kernels.FILLER, np.int32)
    picked[: len(unique)] = unique
    rows, values = jnp.asarray(picked), jnp.asarray(rng.normal(size=(num_rows, width)), jnp.float32)
    new, table_ = values[jnp.arange(slots) % num_rows], jnp.zeros((size, width), jnp.float32)
    present = np.zeros(128 * size, bool)  # past the caches too
    present[rng.choice(len(present), num_rows, replace=False)] = True
    presence = jnp.asarray(present)
    words, row_bytes = jax.jit(kernels.encode)(presence), 4 * width
    at = lambda table, rows: table.at[jnp.where(rows < 0, table.shape[0], rows)]
    return [
        Case("bitmap encode", kernels.encode, _pack_by_xla, (presence,), presence.size + 4 * words.size),
        Case(
            "bitmap decode",
            lambda words: kernels.decode(words, num_rows),
            lambda words: _nonzero(words, num_rows),
            (words,),
            4 * words.size + 4 * num_rows,
        ),
        Case(
            "segment sum",
            lambda ids, values: kernels.segment_sum(ids, values, slots).sums,
            lambda ids, values: _sum_by_xla(ids, values, slots),
            (jnp.asarray(ids), values),
            (num_rows + len(unique)) * row_bytes,
        ),
        Case(
            "gather",
            kernels.gather_rows,
            lambda table, rows: at(table, rows).get(mode="fill", fill_value=0),
            (table_, rows),
            2 * len(unique) * row_bytes,
        ),
        Case(
            "scatter",
            kernels.scatter_rows,
            lambda table, rows, new: at(table, rows).set(new, mode="drop"),
            (table_, rows, new),
            2 * len(unique) * row_bytes,
            in_place=True,
        ),
    ]


def _pack_by_xla(presence):
    return jnp.packbits(presence, bitorder="little")


def _nonzero(words, size):
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.nonzero(bits.reshape(-1), size=size, fill_value=kernels.FILLER)[0]


def _sum_by_xla(ids, values, slots):
    ranks = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ids[1:] != ids[:-1]]).astype(jnp.int32))
    return jnp.zeros((slots, values.shape[1]), values.dtype).at[ranks].add(values, mode="drop")


def seconds(
    function: Callable[..., Any], operands: tuple[jax.Array, ...], repeats: int, in_place: bool = False
) -> float:
    """What a call takes, compiled before: on a GPU its kernels, by the device's own clock (a mean); elsewhere the
    median of calls that are timed by tens, so that the time to start one hides behind the others."""
    run = jax.jit(function, donate_argnums=0 if in_place else ())
    first, *rest = operands
    first = jnp.copy(first) if in_place else first
    if jax.default_backend() == "gpu":
        jax.block_until_ready(run(jnp.copy(first) if in_place else first, *rest))
        return _kernel_seconds(run, first, rest, repeats, in_place)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(_CALLS):
            result = run(first, *rest)
            first = result if in_place else first
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(times[1:])  # the first compiles


def _kernel_seconds(run: Callable[..., Any], first: Any, rest: list[Any], repeats: int, in_place: bool) -> float:
    if not in_place:
        return kernel_seconds(lambda: run(first, *rest), repeats)
    held = [first]  # what a call writes over, the next one takes

    def once() -> Any:
        held[0] = run(held[0], *rest)
        return held[0]

    return kernel_seconds(once, repeats)


def measure(num_rows: int, width: int, repeats: int, copy_bytes: int = _COPY_BYTES) -> list[Measured]:
    """All operations, and the copy before them."""
    whole = jnp.zeros(copy_bytes // 4, jnp.float32)
    rate = 2 * whole.nbytes / seconds(lambda x: x + 1, (whole,), repeats, in_place=True)
    del whole
    found = []
    for one in cases(num_rows, width):
        own, xla = (seconds(function, one.operands, repeats, one.in_place) for function in (one.own, one.xla))
        found.append(Measured(one.name, one.num_bytes, own, xla, rate))
    return found


def main(argv: list[str] | None = None) -> int:
    """Returns 0 where every kernel reaches its goal or there is no accelerator, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000, help="rows before equal ones are added up")
    parser.add_argument("--width", type=int, default=512, help="numbers in a row")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/kernels.md (on an accelerator only)"
    )
    options = parser.parse_args(argv)
    quiet_tpu_compiler()
    is_accelerator = jax.default_backend() in ("tpu", "gpu")
    if not is_accelerator:
        print("no accelerator here: what follows are the references on the CPU, not the kernels")
    found = measure(options.rows, options.width, options.repeats, _COPY_BYTES if is_accelerator else 2**27)
    lines = table(
        ("operation", "MB", "ms", "GB/s", "of a copy", "XLA alone, ms", "goal"),
        [
            (
                one.name,
                f"{one.num_bytes / 1e6:.1f}",
                f"{one.own_seconds * 1e3:.3f}",
                f"{one.bytes_per_second / 1e9:.1f}",
                f"{one.of_copy:.0%}",
                f"{one.xla_seconds * 1e3:.3f}",
                ("met" if one.ok else "missed") if is_accelerator else "-",
            )
            for one in found
        ],
    )
    lines = [f"Copy: {found[0].copy_bytes_per_second / 1e9:.1f} GB/s read and written.", "", *lines]
    print("\n".join(lines))
    if options.write and not is_accelerator:
        print(
            "error: a page holds figures of an accelerator\n  remedy: run this where jax.devices() shows a TPU or GPU",
            file=sys.stderr,
        )
        return 2
    if options.write:
        command = (
            f"python -m benchmarks kernels --rows {options.rows} --width {options.width} --repeats {options.repeats}"
            " --write"
        )
        write_page("kernels", ["# Kernels", "", *__doc__.split("\n")[4:], header(this_machine(), command), "", *lines])
    return 0 if not is_accelerator or all(one.ok for one in found) else 1
