"""The document of a verification: what was compared, what is wrong, and the sizes, in tables of single figures."""

from __future__ import annotations

import re

import pytest

from splitjax import display
from splitjax.verify import ComparedValue, DimSize, Finding, Verification, VerifiedRun

WRONG = ComparedValue("gradient", "params/a/kernel", (8, 8), 3.0, 0.5, False, ratio=4.0)
RIGHT = ComparedValue("loss", "loss_fn", (), 0.0, 0.0, True)
DIMS = (DimSize("params/a/kernel dim 0", 96, 8), DimSize("batch dim 1", 32, 32, "conv_general_dilated at net.py:7"))
FINDING = Finding("dot_general", "value", "", "params/a", "net.py:3", "", 0.5, 4.0, "the value of dot_general: 4 times")


def verification(*values, findings=(), notes=(), sizes="shrunken"):
    return Verification("step", "data=8", "megatron", (VerifiedRun(sizes, DIMS, values, findings, 1.234, notes),))


def test_it_is_laid_out_in_tables():
    text = display.show(verification(RIGHT, WRONG, findings=(FINDING,), notes=("a note",)), 100)
    assert text.split("\n\n") == [
        "step on data=8, rules megatron",
        "shrunken sizes, float64, 1.23 s\nfound  the value of dot_general: 4 times",
        "kind      values  wrong  largest relative difference\n"
        "────────────────────────────────────────────────────\n"
        "loss           1      0                     0.00e+00\n"
        "gradient       1      1                     5.00e-01",
        "wrong value      kind      relative difference  times one device's\n"
        "──────────────────────────────────────────────────────────────────\n"
        "params/a/kernel  gradient             5.00e-01                   4",
        "dims that were shrunken\n"
        "dim                    in the step  compared at\n"
        "───────────────────────────────────────────────\n"
        "params/a/kernel dim 0           96            8",
        "dims that keep their size\n"
        "dim          size  why\n"
        "───────────────────────────────────────────────────\n"
        "batch dim 1    32  conv_general_dilated at net.py:7",
        "note  a note",
        "OTHER NUMBERS THAN ON ONE DEVICE",
    ]


def test_what_is_absent_has_no_column_and_no_table():
    text = str(verification(RIGHT, sizes="given"))
    assert text.endswith("the same numbers as on one device") and "given sizes" in text
    for absent in ("wrong value", "own precision", "dims that", "found", "note"):
        assert absent not in text
    own = ComparedValue("loss", "loss_fn", (), 0.0, 0.0, True, own_relative=1.5e-7, note="copies differ")
    assert "in own precision" in str(verification(own)) and "1.50e-07" in str(verification(own))
    noted = ComparedValue("loss", "loss_fn", (), 1.0, 1.0, False, note="copies differ")
    assert "copies differ" in str(verification(noted)) and "copies differ" not in str(verification(own))


@pytest.mark.parametrize(("count", "more"), [(12, ""), (15, "3 more wrong values are not shown")])
def test_long_tables_are_cut_and_say_so(count, more):
    values = [ComparedValue("state", f"leaf{n}", (), 1.0, 1.0, False) for n in range(count)]
    text = str(verification(*values))
    assert len(re.findall(r"^leaf\d+ ", text, flags=re.MULTILINE)) == 12 and ("more wrong" in text) == bool(more)
    assert more in text


def test_html_has_the_verdict_on_top():
    source = verification(WRONG, findings=(FINDING,))._repr_html_()
    assert source.index("OTHER NUMBERS") < source.index("<table") and "<code>params/a/kernel</code>" in source
