"""Screenshots of the site's pages, light and dark, wide and narrow, and what is wrong with any."""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks.product.site import chromium

LOOKS = tuple((scheme, width) for scheme in ("light", "dark") for width in (1280, 360))
_HEIGHT = 900


def take(site: pathlib.Path, names: list[str], folder: pathlib.Path) -> tuple[int, list[str]]:
    """Takes screenshots of pages in every look.

    **Arguments:** `site`: the built site. `names`: of its pages, without suffix. `folder`: where the pictures go.

    **Returns** how many were taken, and a line for each thing that is wrong: an error or a warning on the console, a
    page wider than the window, one without heading or text.
    """
    wrong: list[str] = []
    number = 0
    with chromium() as browser:
        page = browser.new_page()
        page.on("console", lambda message: wrong.extend(_serious(page.url, message)))
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        for scheme, width in LOOKS:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": _HEIGHT})
            for name in names:
                page.goto((site / f"{name}.html").as_uri())
                wrong += [f"{name}, {scheme}, {width}: {what}" for what in _complaints(page, width)]
                page.screenshot(path=folder / f"{name.replace('/', '-')}-{scheme}-{width}.png")
                number += 1
    return number, wrong


def _serious(url: str, message: Any) -> list[str]:
    return [f"{url}: {message.text}"] if message.type in ("error", "warning") else []


def _complaints(page: Any, width: int) -> list[str]:
    complaints = []
    if page.evaluate("document.documentElement.scrollWidth") > width:
        complaints.append("it is wider than the window")
    if not page.get_by_role("heading", level=1).first.is_visible():
        complaints.append("it shows no heading")
    if len(page.inner_text("article")) < 100:
        complaints.append("it has no text")
    return complaints
