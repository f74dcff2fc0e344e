"""The machine's Chromium, without a window, for tests that look at pages as a person does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.product import site


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Gives a browser of Playwright's. Where there is none the test is skipped; in CI, which installs it, it fails."""
    pytest.importorskip("playwright.sync_api")
    with contextlib.ExitStack() as stack:
        try:
            browser = stack.enter_context(site.chromium())
        except LookupError as error:
            pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
        yield browser


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
