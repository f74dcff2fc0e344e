"""The cells of a profile, worked out by hand."""

from __future__ import annotations

from splitjax.report.profile import rows
from splitjax.sync.analysis import Figures, Profile, TensorProfile

STEPS = tuple(
    Figures((0.02, 0.04), densities, ((1, sum(densities) / 2), (2, 0.3)), 0.25, 1.5)
    for densities in ((0.1, 0.2), (0.2, 0.2))
)
TABLE = TensorProfile("table", (10, 2), "float32", "loss", True, "", STEPS, ((1.0, 0.25), (0.25, 1.0)))
PROFILE = Profile("step", 2, (8, 8), (TABLE,))


def test_steps_of_a_table_say_mean_least_and_most():
    cells = [dict(zip(rows.STEP_COLUMNS, line, strict=True)) for line in rows.step_rows(PROFILE)]
    assert [line["table"] for line in cells] == ["table", ""]
    assert (cells[0]["rows"], cells[0]["least of a worker"], cells[0]["most of a worker"]) == (
        "15.0 %",
        "10.0 %",
        "20.0 %",
    )
    assert [line["sum of all"] for line in cells] == ["2.00", "1.50"]


def test_the_headline_counts_steps_and_examples():
    assert rows.headline(PROFILE) == "gradients of step: 2 workers, 2 steps of 8 examples"
