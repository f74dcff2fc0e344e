"""The table of a job's profile: a row for each depth, figures with their units, and what is left out."""

from __future__ import annotations

import dataclasses

from splitjax import display, schedule
from splitjax.schedule import JobProfile


def test_a_row_for_each_depth():
    profile = JobProfile.uniform("m", 1.0, num_depths=4)
    profile = dataclasses.replace(
        profile, depths=tuple(dataclasses.replace(d, layer=f"net/{n}") for n, d in enumerate(profile.depths))
    )
    shown = schedule.profile_table(profile, 4)
    title, table, lines = display.show(shown, 100).split("\n\n")
    assert title == "m: one iteration of a worker"
    head, _, *rows = table.splitlines()
    assert head.split("  ")[0] == "ends at layer" and head.endswith("of 4 workers")
    assert [row.split()[0] for row in rows] == [f"net/{n}" for n in range(4)]
    assert rows[0].split()[1:3] == ["100.0", "%"] and len({len(row) for row in rows}) == 1
    assert lines.startswith("task ") and "saving" in lines and "not shown" not in lines
    assert "<code>net/0</code>" in shown._repr_html_()


def test_of_many_depths_those_that_somebody_has():
    text = str(schedule.profile_table(JobProfile.uniform("m", 1.0, num_depths=64), 4))
    table, lines = text.split("\n\n")[1:]
    assert len(table.splitlines()) == 2 + 5 and "59 more depths" in " ".join(lines.split())
