"""The site: built as `make docs` builds it, searched as its page of results searches, looked at in a browser."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.product.pages import ROOT

# What a person asks, and the page that answers.
QUESTIONS = {
    "How do I use my own Linen model?": "docs/frameworks",
    "How do I use NNX?": "docs/frameworks",
    "How do I use Equinox?": "docs/frameworks",
    "How do I use my own loader?": "docs/data",
    "How do I use grain?": "docs/data",
    "How do I use PyTorch's DataLoader?": "docs/data",
    "How do I use two GPUs on one machine?": "docs/launching",
    "two hosts by ssh": "docs/launching",
    "SLURM": "docs/launching",
    "save and restore": "docs/checkpoints",
    "evaluate": "docs/quickstart",
    "a last partial batch": "docs/data",
    "mixed precision in my own step": "docs/mixed_precision",
    "Which rules do I choose?": "docs/rules",
    "write my own rules": "docs/rules",
    'What does sync="auto" do, and when do I want it?': "docs/sparse",
    "What is partial backpropagation good for?": "docs/partial_backpropagation",
    "Why is this collective there?": "docs/reports",
    "Will it fit into 16 GiB?": "docs/reports",
    "Why is my parameter not split?": "docs/troubleshooting",
}
# Sphinx's own search, run as the page of results runs it.
SEARCH = r"""
const fs = require("fs"), vm = require("vm"), folder = process.argv[1], questions = JSON.parse(process.argv[2]);
const none = () => null;
const document = {getElementById: none, querySelector: none, addEventListener: none, readyState: "loading",
  documentElement: {dataset: {content_root: ""}}, createElement: () => ({appendChild: none})};
const context = vm.createContext({document, addEventListener: none, localStorage: {setItem: none}, console,
  URLSearchParams, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text, DOCUMENTATION_OPTIONS: {}});
context._ready = none;
context.window = context;
const file = (name) => vm.runInContext(fs.readFileSync(folder + "/" + name, "utf8"), context);
for (const name of ["_static/documentation_options.js", "_static/language_data.js"]) file(name);
vm.runInContext(fs.readFileSync(folder + "/_static/searchtools.js", "utf8")
  .replace("const _removeChildren =", "const _removeChildren = () => null, _unused =")
  + "\nthis.Search = Search;", context);
file("searchindex.js");
const found = questions.map((question) =>
  vm.runInContext(`Search._performSearch(...Search._parseQuery(${JSON.stringify(question)}))`, context)
    .slice().reverse().map((result) => result[0]));
console.log(JSON.stringify(found));
"""

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It is started as root in containers, and must look nothing up.
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def build(folder: pathlib.Path) -> None:
    """Builds the site of this checkout into a `folder`, and raises `RuntimeError` where Sphinx warns of anything."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-c", "docs"]
    done = subprocess.run(
        [*command, "-d", str(folder.with_name("doctrees")), ".", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


def answers(site: pathlib.Path, node: str, questions: Sequence[str] = tuple(QUESTIONS)) -> dict[str, list[str]]:
    """Returns by question the pages that the search of a built `site` finds, best first, each once. `node`: the path of
    Node's program. Raises `RuntimeError` where the search cannot be run."""
    done = subprocess.run(
        [node, "-e", SEARCH, str(site), json.dumps(list(questions))], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = zip(questions, json.loads(done.stdout), strict=True)
    return {question: list(dict.fromkeys(pages)) for question, pages in found}


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Gives a browser of Playwright's that shows no window. Raises `LookupError` where the machine has none."""
    from playwright import sync_api

    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        raise LookupError("there is no Chromium; Debian and Ubuntu have it as `apt-get install chromium`")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()
