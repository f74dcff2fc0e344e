"""Runs a test's own script in several processes that share a `jax.distributed` run on this machine."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compile_flags() -> str:
    """`XLA_FLAGS` for a process that makes its own devices: what lets it compile as quickly as the tests do."""
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)


def run_processes(
    script: pathlib.Path, *arguments: str, num: int, devices: int, timeout_seconds: float = 180
) -> list[str]:
    """What each process printed. The script is called as `script RANK NUM PORT ARGUMENTS...`; fails if one does not
    exit with 0."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": compile_flags(),
    }
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(num), port, *arguments],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(num)
    ]
    try:
        outputs = [worker.communicate(timeout=timeout_seconds)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0, f"process {rank} ended with {worker.returncode}:\n{output[-4000:]}"
    return outputs
