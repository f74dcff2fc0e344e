"""Checkpoints of a run of two processes, each with two virtual devices; restored by one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints
from tests.runtime.states import assert_same

_WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.mark.skipif(os.name != "posix", reason="the full disk is played by a limit that Windows does not have")
def test_two_processes_save_agree_and_fail_together(tmp_path):
    (tmp_path / "run" / "7.saving-00").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, _WORKER, str(rank), str(port), tmp_path],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, (worker, output) in enumerate(zip(workers, outputs)):
        assert worker.returncode == 0 and f"done {rank}" in output, output

    # Saved by two processes on four devices, restored by one on one.
    expected = {
        "split": jnp.arange(64.0).reshape(8, 8) + 5,
        "copies": jnp.arange(5, dtype=jnp.bfloat16) * 5,
        "keys": jax.random.split(jax.random.key(5), 4),
        "position": np.full(3, 5),
        "count": 5,
        "local": {"here": jnp.arange(3.0) * 5, "bound": jnp.arange(2), "key": jax.random.key(5)},
    }
    with Checkpoints(CheckpointOptions(tmp_path / "run", read_only=True)) as checkpoints:
        restored = checkpoints.restore(expected)
    assert restored.step == 5
    assert_same(restored.state, expected)
    assert restored.own == ({"rank": 0}, {"rank": 1})
    with pytest.raises(CheckpointError, match="there were 2 processes"):
        _ = restored.position  # this is one process, and the two were at other places of other data
