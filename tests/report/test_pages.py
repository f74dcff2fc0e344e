"""Everything that is drawn, as pages in a browser: text there, console empty, light and dark, wide and narrow."""

from __future__ import annotations

import re

import pytest

from splitjax import display, schedule
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
    ],
    ids=["plan", "report", "profile", "advice", "simulation", "timeline", "wrong", "verified"],
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
