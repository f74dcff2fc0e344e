"""Lays a job profile out for reading.

A `JobProfile` and a number of workers come in; a document comes out, which prints and which notebooks show.
"""

from __future__ import annotations

from splitjax.display.document import Column, Document, Pairs, Table
from splitjax.display.figures import bytes_text, seconds_text
from splitjax.display.registry import Shown
from splitjax.schedule.model.jobs import JobProfile

_MOST_ROWS = 16


def profile_table(profile: JobProfile, num_workers: int) -> Shown:
    """Makes the document of `profile`: a table with a row for each depth (where there are very many, for the first, the
    last, and those that a worker has) and with how many of `num_workers` workers have it in an iteration of partial
    backpropagation; below it what all have."""
    used = profile.partial_depths(num_workers)
    count = len(profile.depths)
    shown = [number for number in range(count) if count <= _MOST_ROWS or number in (0, count - 1) or number in used]
    rows = []
    for number in shown:
        depth = profile.depths[number]
        rows.append(
            (
                depth.layer,
                f"{100 * depth.fraction:.1f} %",
                seconds_text(depth.backward_seconds),
                seconds_text(profile.task_seconds(number)),
                bytes_text(round(depth.memory_bytes)),
                bytes_text(round(depth.gradient_bytes)),
                str(used.count(number) or ""),
            )
        )
    columns = (
        Column("ends at layer", "code"),
        *(
            Column(title, "number")
            for title in ("share", "backward", "task", "memory", "gradients", f"of {num_workers} workers")
        ),
    )
    lines = (
        ("task", "forward pass, backward pass and update of a worker in an iteration"),
        ("forward pass", seconds_text(profile.forward_seconds)),
        ("update", seconds_text(profile.update_seconds)),
        ("wait", f"{seconds_text(profile.exposed_seconds)} for the exchange of gradients, after the task"),
        ("state", bytes_text(round(profile.state_bytes))),
        (
            "saving",
            f"with partial backpropagation an iteration takes {100 * profile.phi(num_workers):.1f} % of its devices'"
            " time alone, where tasks of other jobs fill all holes",
        ),
        *((("not shown", f"{count - len(shown)} more depths"),) if len(shown) < count else ()),
    )
    return Shown(
        Document(
            f"{profile.name}: one iteration of a worker",
            (Table(columns, tuple(rows)), Pairs(tuple((title, (text,)) for title, text in lines))),
        )
    )
