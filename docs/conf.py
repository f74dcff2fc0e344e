"""Configuration of the site that `make docs` builds from this checkout's Markdown.

The source folder is the checkout itself, so that links between README, docs, results and notebooks are the same on the
site as where one reads the files. What the files need not show (tables of contents) is added while they are read.
"""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from _site.contents import PAGES, contents
from _site.docstrings import as_restructured_text
from _site.tabs import with_tabs

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "splitjax"
author = "the splitjax developers"
project_copyright = "the splitjax developers, Apache License 2.0"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/api/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "sharding_rules/README.md",
    "benchmarks/results/*.md",
]
# Not looked through at all.
exclude_patterns = [".venv*", ".git", "build", "dist", "docs/_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
html_theme = "sphinx_book_theme"
html_title = "splitjax"
html_theme_options = {
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
}
html_extra_path = ["_site/root"]
html_search_scorer = str(pathlib.Path(__file__).resolve().parent / "_site" / "scorer.js")
html_static_path = ["_site/static"]
html_css_files = ["narrow.css"]
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_copy_source = False
pygments_style = "default"
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "code"


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Appends the table of contents to the pages that have one, and puts tabs where a page asks for them."""
    source[0] = with_tabs(source[0])
    if name in PAGES:
        source[0] += contents(name)


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are Markdown; autodoc wants reStructuredText."""
    lines[:] = as_restructured_text(lines)


def setup(app: Sphinx) -> None:
    """Connects what changes sources while they are read."""
    app.connect("source-read", _add_contents)
    app.connect("autodoc-process-docstring", _docstring)
