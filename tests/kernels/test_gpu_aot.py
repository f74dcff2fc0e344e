"""The GPU kernels, a synchronisation and a training step through XLA's GPU compiler, for an H200 that need not be
there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import splitjax
from tests.lower.tables.test_sparse import one_table

pytestmark = pytest.mark.gpu_aot
ROOT = pathlib.Path(__file__).resolve().parents[2]


def compiled(*arguments):
    """The program for an H200, compiled in a process that has the GPU compiler."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu,cuda",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": str(ROOT),
    }
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.h200", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert "mosaic_gpu" in found.stdout
    return found.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("gather_rows", "128"),
        ("gather_rows", "768", "bfloat16"),
        ("segment_sum", "128"),
        ("segment_sum", "256", "bfloat16"),
        ("sum_rows",),
    ],
)
def test_kernels_compile_for_an_h200(arguments):
    text = compiled(*arguments)
    kernels = {
        "gather_rows": ["gather_rows"],
        "segment_sum": ["segment_sum"],
        "sum_rows": ["gather_rows", "segment_sum"],
    }[arguments[0]]
    assert [name for name in kernels if f"splitjax_{name}" not in text] == []


@pytest.mark.parametrize("name", ["row_exchange", "all_gather", "zen"])
def test_whole_synchronisations_compile_for_h200s(name):
    text = compiled("synchronisation", name)
    assert "splitjax_gather_rows" in text and "splitjax_segment_sum" in text and "tpu_custom_call" not in text


def test_a_train_step_for_h200s_contains_the_kernels(tmp_path):
    state, batch = {"table": np.zeros((4096, 128), np.float32)}, {"ids": np.arange(32, dtype=np.int32).reshape(8, 4)}
    step = splitjax.parallelize(one_table, mesh={"data": 4}, rules="data_parallel", sync="row_exchange", donate=False)
    for _ in range(4):
        step(state, batch)
    (tmp_path / "plan.json").write_text(step.plan(state, batch).to_json(), encoding="utf-8")
    text = compiled("train_step", str(tmp_path / "plan.json"))
    assert "splitjax_gather_rows" in text and "splitjax_segment_sum" in text
