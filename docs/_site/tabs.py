"""Tabs with the same step in each framework. They are put in while the site is built, from the page that has the whole
scripts, so that the files stay plain Markdown and say nothing twice."""

from __future__ import annotations

import pathlib
import re

_SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "frameworks.md"
_WANTED = re.compile(r"<!-- tabs: [^\n]*-->")
# What the scripts call a framework, and what a person does.
TITLES = {"linen": "Flax Linen", "nnx": "Flax NNX", "equinox": "Equinox", "jax": "Plain JAX"}


def with_tabs(source: str) -> str:
    """Returns the `source` of a page with a set of tabs in place of each comment that asks for them."""
    return _WANTED.sub(lambda wanted: _tabs(), source)


def _tabs() -> str:
    blocks = re.findall(
        r"^```python\n# (\w+)\n(.*?)^```$", _SCRIPTS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    first = {name: code for name, code in reversed(blocks)}
    tabs = [
        f":::{{tab-item}} {title}\n:sync: {name}\n```python\n{first[name]}```\n:::" for name, title in TITLES.items()
    ]
    return "\n".join(["::::{tab-set}", ":sync-group: framework", *tabs, "::::"])
