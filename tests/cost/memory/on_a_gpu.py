"""What is predicted of small programs, and what XLA's compiler for H200s makes of those of `tests.kernels.h200`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import jax

from splitjax.cost.memory.lifetimes import PlacedProgram, predict_program_memory


def temporaries(function: Any, *arguments: Any, platform: str) -> int:
    """The bytes that a program is expected to store beside its arguments."""
    placed = PlacedProgram(
        jax.make_jaxpr(function)(*arguments), [None] * len(arguments), [None], {}, {"data": 1}, platform
    )
    return predict_program_memory(placed).temporary_bytes


def compiled(name: str) -> str:
    """The compiled module of a function of `tests.kernels.h200`, of a process that has the CUDA plugin."""
    root = pathlib.Path(__file__).resolve().parents[3]
    here = {"JAX_PLATFORMS": "cpu,cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": str(root)}
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.h200", name],
        cwd=root, env={**os.environ, **here, "XLA_FLAGS": "--xla_gpu_autotune_level=0"}, capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout
