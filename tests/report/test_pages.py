"""Everything that is drawn, as pages in a browser: text there, console empty, light and dark, wide and narrow."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from splitjax import display, schedule
from splitjax.cost.memory.lifetimes import ProgramMemory
from splitjax.cost.memory.moments import MemoryTimeline, StoredSpan
from splitjax.cost.time.prediction import LayerCost, StepTime, TimedPart
from splitjax.machines.calibration import Calibration
from splitjax.plan import StoredArray
from splitjax.report.memory.value import MemoryTimelines
from splitjax.search.network import CostNetwork, Memory, MemoryUse
from splitjax.search.solving import solve
from tests.display.browsers import chromium, quiet_page
from tests.report.advice.test_rows import ADVICE
from tests.report.profile.test_rows import PROFILE
from tests.report.test_render import SMALL
from tests.report.test_report import made
from tests.verify.test_document import FINDING, RIGHT, WRONG, verification

pytestmark = pytest.mark.one_version


def simulated():
    profile = schedule.JobProfile.uniform("resnet", 0.3, num_depths=4)
    jobs = [schedule.Job(f"job{i}", 40.0 * i, 1 + i % 2, 100, profile) for i in range(6)]
    return schedule.compare(jobs, schedule.Cluster(1, 2), ["gang-srtf", "spb"], schedule.Options(spans=True))


DATA = pathlib.Path(__file__).parents[1] / "codec" / "data"
CALIBRATION = Calibration.load(DATA / "calibration.json")
MEMORY = ProgramMemory(1 << 20, 1 << 19, 1 << 21, (StoredArray((64, 128), 32768, "dot_general", "params/dense"),))
PREDICTED = MemoryTimeline(
    100,
    ("dot_general", "tanh", "dot_general", "add"),
    ("forward", "forward", "backward", "other"),
    (
        StoredSpan(StoredArray((10,), 40, "dot_general", "params/dense"), 0, 3),
        StoredSpan(StoredArray((5,), 20, "tanh", "params/out"), 1, 4),
    ),
)
COMPILED = dataclasses.replace(PREDICTED, argument_bytes=90, set_aside_bytes=64)
TIMELINES = MemoryTimelines("train_step", PREDICTED, COMPILED)
TIME = StepTime(
    2e-3,
    1.5e-3,
    1e-3,
    0.5e-3,
    0.0,
    (
        TimedPart("dot_general", (64, 128), 1.5e-3, 2, 1e9, 1e6),
        TimedPart("psum", (128,), 1e-3, 1, 0.0, 1e3, "all_reduce", ("data", "model"), 4096.0),
    ),
    True,
    (LayerCost("params/dense", 1.9e-3, 4096.0, 2048, 1024), LayerCost("", 1e-4, 0.0)),
)


def searched(limit_bytes):
    """What the search answers where two variables share a memory: the cheap values need 96 bytes."""
    uses = tuple(MemoryUse(variable, 0, 1, np.array([48.0, 8.0])) for variable in (0, 1))
    costs = (np.array([1.0, 5.0]), np.array([2.0, 9.0]))
    return solve(CostNetwork(costs, (), (Memory("HBM", limit_bytes, uses),), ("first layer", "second layer")))


def test_what_a_search_says_of_an_answer():
    assert str(searched(100.0)).endswith("proven best")
    assert str(searched(10.0)).endswith("nothing fits, which is proven")


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def colours(page):
    """How bright the text is, and a bar beside it: 0 to 255."""
    text = page.evaluate("getComputedStyle(document.querySelector('div.splitjax')).color")
    return sum(map(int, re.findall(r"\d+", text)[:3])) / 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: SMALL,
            ["saves", "sends", "next", "params/Dense_0", "P(None, 'model')", "data=2 x model=4 (8 devices)"],
        ),
        (made, ["memory per device", "net/a", "train.py:12"]),
        (lambda: PROFILE, ["tensors, mean over steps", "densification"]),
        (lambda: ADVICE, ["everything", "spatial"]),
        (simulated, ["gang-srtf", "spb", "avg JCT"]),
        (lambda: simulated().results[0], ["gang-srtf", "job0"]),
        (
            lambda: verification(RIGHT, WRONG, findings=(FINDING,), notes=("a note",)),
            ["OTHER NUMBERS", "params/a/kernel", "times one device's", FINDING.text],
        ),
        (lambda: verification(RIGHT, sizes="given"), ["the same numbers as on one device", "given sizes"]),
        (
            lambda: TIME,
            ["a step takes at least 2.00 ms", "dot_general", "over data, model, 4.0 KiB", "3.0 KiB"],
        ),
        (lambda: MEMORY, ["peak, estimated", "1.5 MiB", "params/dense"]),
        (
            lambda: TIMELINES,
            ["predicted: 160 B at the peak", "compiled: 150 B", "dot_general", "params/dense", "forward"],
        ),
        (lambda: CALIBRATION, ["calibration of cpu", "all_reduce", "latency"]),
        (lambda: searched(100.0), ["proven best", "least cost proven", "0, 0"]),
        (lambda: searched(10.0), ["nothing fits, which is proven", "second layer", "HBM of 10 bytes"]),
    ],
    ids=[
        *("plan", "report", "profile", "advice", "simulation", "timeline", "wrong", "verified"),
        *("time", "memory", "memory timeline", "calibration", "search", "nothing fits"),
    ],
)
def test_a_page_as_a_person_sees_it(make, words, browser, tmp_path):
    value = make()
    path = tmp_path / "page.html"
    path.write_text(display.page(value._repr_html_(), "splitjax shows"), encoding="utf-8")
    with quiet_page(browser) as page:
        page.emulate_media(color_scheme="light")
        page.goto(path.as_uri())
        assert (
            page.get_by_role("heading", level=1).inner_text() == "splitjax shows" and page.title() == "splitjax shows"
        )
        text = page.inner_text("body")
        for word in words:
            assert word in text
        assert colours(page) < 60
        page.emulate_media(color_scheme="dark")
        assert colours(page) > 180
        for width in (360, 700, 1400):
            page.set_viewport_size({"width": width, "height": 800})
            # Tables scroll within the page, which itself does not.
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.get_by_role("heading", level=1).is_visible()
