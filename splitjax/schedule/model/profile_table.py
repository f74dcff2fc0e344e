"""Lays a job profile out as a table for reading.

A `JobProfile` and a number of workers come in; a `rich` table comes out, which the command line prints.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from splitjax.schedule.model.jobs import JobProfile

_MOST_ROWS = 16


def profile_table(profile: JobProfile, num_workers: int) -> Table:
    """Makes a table of `profile`: a row for each depth (where there are very many, for the first, the last, and those
    that a worker has), with how many of `num_workers` workers have it in an iteration of partial backpropagation; below
    them what all have."""
    table = Table(
        title=f"{profile.name}: one iteration of a worker", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("ends at", overflow="fold")
    for column in ("share", "backward ms", "task ms", "memory", "gradients", f"of {num_workers}"):
        table.add_column(column, justify="right", no_wrap=True)
    used = profile.partial_depths(num_workers)
    count = len(profile.depths)
    shown = [number for number in range(count) if count <= _MOST_ROWS or number in (0, count - 1) or number in used]
    for number in shown:
        depth = profile.depths[number]
        table.add_row(
            depth.layer or "-",
            f"{depth.fraction:.1%}",
            _milliseconds(depth.backward_seconds),
            _milliseconds(profile.task_seconds(number)),
            _size(depth.memory_bytes),
            _size(depth.gradient_bytes),
            str(used.count(number) or ""),
        )
    table.caption_justify = "left"
    table.caption = (
        f"a task is forward {_milliseconds(profile.forward_seconds)} ms, backward, update"
        f" {_milliseconds(profile.update_seconds)} ms; then it waits {_milliseconds(profile.exposed_seconds)} ms; state"
        f" {_size(profile.state_bytes)}\nwith partial backpropagation, others' tasks in all its holes, an iteration"
        f" takes {profile.phi(num_workers):.1%} of its devices' time alone"
        + (f"\n{count - len(shown)} more depths are not shown" if len(shown) < count else "")
    )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}" if seconds < 0.1 else f"{1e3 * seconds:,.1f}"


def _size(num_bytes: float) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= length:
            return f"{num_bytes / length:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
