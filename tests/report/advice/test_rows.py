"""The cells of an advice, worked out by hand."""

from __future__ import annotations

from splitjax.partial.advice import Advice, AdviceRow, Recommendation, StageAdvice
from splitjax.report.advice import rows

FULL = AdviceRow("full", "everything", 1.0, 4.0, 4.0, 2048.0, 1.0, 1024.0, 1024.0, 2.0)
HALF = AdviceRow("spatial", "as asked", 0.5, 2.0, 3.0, 1024.0, 0.5, 512.0, 1024.0, 3.0)
STAGES = (
    StageAdvice("first", 1024, 1.0, 4.0, 1.0, True, 1024),
    StageAdvice("last", 1024, 3.0, 4.0, 1.0, True, 512),
)
ADVICE = Advice(
    "step", 4, 64, 1, "cpu", 1e-4, 1.25e8, 2.0, STAGES, (FULL, HALF), False, Recommendation("full", "full", (), ())
)


def test_the_headline_names_the_link_in_bits():
    assert "4 workers with 64 examples, 1 batch measured on cpu, link 1,000 Mbit/s and 100 us" in rows.headline(ADVICE)


def test_the_forward_pass_is_charged_to_the_last_layers_alone():
    # Of 4 s the first layer takes 1 and has a quarter of the noise; the last takes 1, and 2 of the forward pass.
    cells = [dict(zip(rows.LAYER_COLUMNS, line, strict=True)) for line in rows.layer_rows(ADVICE)]
    assert [line["noise / cost"] for line in cells] == ["1.00", "1.00"]
    assert [line["share"] for line in cells] == ["50.0 %", "50.0 %"]
    assert [line["memory to here"] for line in cells] == ["1.0 KiB", "512 B"]


def test_a_way_is_compared_with_full_backpropagation():
    _, half = rows.rows(ADVICE)
    assert half[:4] == ("spatial", "50.0 %", "2.00 s", "3.00 s") and half[9] == "1.50"
