"""The machine's Chromium, without a window, for tests that look at pages as a person does."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It is started as root in containers, and must look nothing up.
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Gives a browser of Playwright's. Where there is none the test is skipped; in CI, which installs it, it fails."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = "there is no Chromium; Debian and Ubuntu have it as `apt-get install chromium`"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def quiet_page(browser: Any) -> Iterator[Any]:
    """Gives a page of the browser's; what it complains about in its console fails the test."""
    page, complaints = browser.new_page(), []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        yield page
        assert not complaints
    finally:
        page.close()
