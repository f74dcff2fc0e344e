"""`splitjax report`: what it prints, and the files it writes."""

from __future__ import annotations

import json

import pytest

import splitjax

SMALL = "report --model mlp --mesh data=2,model=4 --batch-size 32"


def test_report_prints_memory_collectives_and_a_verdict(run):
    status, out, _ = run(SMALL)
    assert status == 0
    for part in (
        "mlp (linen",
        "32 examples",
        "memory per device",
        "by layer",
        "gradient of kernel",
        "params/dense1",
        "mlp.py:",
    ):
        assert part in out
    assert " 0 unattributed" in out


def test_report_writes_json_that_reads_back_and_a_page(run, tmp_path):
    status, out, _ = run(
        "report --model mlp --library nnx --rules fsdp --mesh data=8 --json report.json --html report.html"
    )
    assert status == 0 and "report: report.json" in out and "page: report.html" in out
    report = splitjax.Report.from_json((tmp_path / "report.json").read_text())
    assert report.rules == "fsdp" and report.mesh.num_devices == 8 and report.unattributed == ()
    assert json.loads((tmp_path / "report.json").read_text())["collectives"][0]["layer"].startswith("model/")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "<title>splitjax report</title>" in page and "model/dense1" in page


@pytest.mark.parametrize(
    "line",
    [
        "report --mesh data:2",
        "report --rules none",
        "report --batch-size 0",
        f"{SMALL} --html missing/r.html",
        f"{SMALL} --json missing/r.json",
    ],
)
def test_mistakes_are_short_and_exit_with_2(run, line):
    status, _, err = run(line)
    assert status == 2 and err.startswith("error: ") and "remedy: " in err and "Traceback" not in err


def test_a_memory_timeline_below_the_report_and_on_its_page(run, tmp_path):
    status, out, _ = run(f"{SMALL} --memory-timeline --html report.html --svg memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert drawn.count("<svg") == 3 and ">predicted: " in drawn and ">compiled: " in drawn
    assert "picture: memory.svg" in out
    assert status == 0 and "predicted: " in out and "compiled: " in out and "^ the peak" in out
    assert "XLA sets aside" in out and out.index("by layer") < out.index("memory of a device during")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2 and "gradient of kernel" in page


def test_a_report_alone_has_no_picture(run):
    status, out, err = run(f"{SMALL} --svg memory.svg")
    assert status == 2 and "--memory-timeline" in err and "memory per device" not in out


def test_remedies_below_the_report(run):
    status, out, _ = run(f"{SMALL} --remedies")
    assert status == 0 and "no array is gathered whole to keep a part of it" in out
