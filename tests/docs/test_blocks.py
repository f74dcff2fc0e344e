"""Every code block of the docs runs: as part of a page's script in a test of its own, or here, on what `setups` says it
may take for granted. At most one in ten is left out, with the reason beside it on the page."""

from __future__ import annotations

import ast
import json
import re

import pytest

from benchmarks.product.pages import documents, python_blocks
from tests.docs.setups import BEFORE, COMMON, RAISES, SCRIPTS
from tests.test_docs import ROOT, run_script

pytestmark = pytest.mark.one_version
# A step of which the page only says that it is as before.
_AS_BEFORE = re.compile(r"(def train_step\(state, batch\):)(?:[^\n]*\n)?\s*\.\.\.[^\n]*")


def test_every_block_is_python_and_few_do_not_run():
    blocks = python_blocks()
    assert len(blocks) > 50 and len(blocks) == sum(page.read_text().count("```python") for page in documents())
    for block in blocks:
        ast.parse(block.code)
    assert sum(bool(block.reason) for block in blocks) <= len(blocks) / 10
    for page, file in SCRIPTS.items():
        assert f"{page}.md" in (ROOT / file).read_text()
    known = {(block.page, block.number) for block in blocks}
    assert {(page, number) for page, before in BEFORE.items() for number in before} | set(RAISES) <= known


# Runs in a process of its own, with eight devices: each page's blocks in a namespace that begins as the common one.
RUNNER = """
import jax, json, pathlib, traceback
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
common, blocks = json.loads(pathlib.Path("blocks.json").read_text())
failed = []
pages = {}
for page, number, before, code, raises in blocks:
    if page not in pages:
        pages[page] = {"__name__": page}
        exec(common, pages[page])
    try:
        exec(before, pages[page])
        exec(code, pages[page])
        error = ""
    except Exception as caught:
        error = type(caught).__name__
        if error != raises:
            failed.append(f"{page}.md, block {number}: " + "".join(traceback.format_exception(caught)[-3:]))
            continue
    if error != raises:
        failed.append(f"{page}.md, block {number} does not end with {raises}")
print("\\n".join(failed) or "all ran")
"""


@pytest.mark.slow
def test_every_block_that_is_no_script_runs(tmp_path):
    wanted = [
        (
            block.page,
            block.number,
            BEFORE.get(block.page, {}).get(block.number, ""),
            _AS_BEFORE.sub(r"\1 return step_fn(state, batch)", block.code),
            RAISES.get((block.page, block.number), ""),
        )
        for block in python_blocks()
        if block.page not in SCRIPTS and not block.reason
    ]
    assert len(wanted) > 20
    (tmp_path / "blocks.json").write_text(json.dumps([COMMON, wanted]))
    assert run_script(RUNNER, tmp_path).strip().endswith("all ran")
