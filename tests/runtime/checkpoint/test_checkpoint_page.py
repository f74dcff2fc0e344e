"""The page on checkpoints is a script that runs."""

from __future__ import annotations

import os
import re

from tests.test_docs import blocks, run_script


def test_the_page_on_checkpoints_is_one_script(tmp_path):
    out = run_script("".join(blocks("docs/checkpoints.md", "python")), tmp_path)
    assert re.search(r"step 30 metrics {'loss': \d\.\d+} skipped \(\)", out)
    assert out.count("equal True") == 3
    assert "{'data': 2, 'model': 2}" in out
    assert "equal True P(None, 'model')" in out
    assert sorted(os.listdir(tmp_path / "run")) == ["30", "40", "40.superseded-1"]
