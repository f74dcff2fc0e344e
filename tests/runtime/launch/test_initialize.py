"""Joining: by importing splitjax in a launched worker, by `splitjax.initialize()` in a cluster, and not at all
alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from splitjax.errors import LaunchError
from splitjax.runtime.launch.initialize import join_launched
from tests.runtime.conftest import ROOT

VARIABLES = ("SPLITJAX_COORDINATOR", "SPLITJAX_NUM_PROCESSES", "SPLITJAX_PROCESS_ID", "SPLITJAX_JOINED_PID")
COLLECTIVE = """
import os, sys, splitjax, jax, numpy as np
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank, n = jax.process_index(), jax.device_count()
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
x = jax.make_array_from_callback((n,), rows, lambda index: np.arange(1.0, n + 1, dtype=np.float32)[index])
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(rows.mesh, P()))
"""


def fresh(script: str, **environment: str) -> subprocess.Popen[str]:
    base = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", *VARIABLES)}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**base, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_importing_splitjax_joins_a_launched_worker_and_not_its_children(launched):
    child = "import splitjax, jax; splitjax.initialize(); print('child', jax.distributed.is_initialized())"
    script = (
        COLLECTIVE + "splitjax.initialize()\nprint('sum', float(total(x)), rank, n)\nimport subprocess\nif rank == 0:"
        f" print(subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True,"
        " check=True).stdout)"
    )
    run = launched(script, num_processes=2, devices_per_process=2, threads=4)
    assert run.wait().status == 0, run.err.getvalue()
    lines = run.out.getvalue().splitlines()
    assert "[0] sum 10.0 0 4" in lines and "[1] sum 10.0 1 4" in lines and "[0] child False" in lines


@pytest.mark.parametrize(("death", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_worker_that_dies_while_the_others_are_in_a_collective(launched, death, status):
    # Rank 0 dies: in JAX's own arrangement, where it holds the coordinator, it would wait five minutes for the others.
    script = (
        COLLECTIVE + f"total(x).block_until_ready()\nif rank == 0: print('dies', flush=True); {death}\nwhile True:"
        " total(x).block_until_ready()"
    )
    run = launched(script, num_processes=2, threads=1)
    outcome = run.wait()
    assert outcome.status == status and outcome.attempts[0].failed.rank == 0
    exits = outcome.attempts[0].exits
    assert max(end.seconds for end in exits) - exits[0].seconds < 5


def test_a_sigterm_to_one_worker_reaches_all_at_the_same_step(launched):
    script = COLLECTIVE + (
        "from jax.experimental import multihost_utils\nfor step in range(10**9):\n    total(x).block_until_ready()\n"
        "    if step == 10: print('trains', flush=True)\n"
        "    if multihost_utils.reached_preemption_sync_point(step): print('saves at', step); sys.exit(143)"
    )
    run = launched(script, num_processes=2, threads=1)
    run.until("trains", 2)
    os.kill(run.run.workers[1].pid, signal.SIGTERM)
    outcome = run.wait()
    assert outcome.status == 143 and [end.code for end in outcome.attempts[0].exits] == [143, 143]
    steps = [line.split("saves at ")[1] for line in run.out.getvalue().splitlines() if "saves at" in line]
    assert len(steps) == 2 and steps[0] == steps[1]


def test_a_cluster_is_found_by_jax():
    script = (
        "import splitjax; splitjax.initialize(); splitjax.initialize(); import jax; print(jax.process_index(),"
        " jax.process_count())"
    )
    job = str(os.getpid())  # JAX takes the port from it
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    workers = [fresh(script, **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    done = [worker.communicate(timeout=100) for worker in workers]
    assert [out.split() for out, _ in done] == [["0", "2"], ["1", "2"]], done


def test_alone_nothing_happens_and_after_a_backend_it_is_too_late():
    script = (
        "import os, jax, splitjax; splitjax.initialize(); assert not jax.distributed.is_initialized();"
        " jax.devices()\nsplitjax.initialize()\nos.environ |= {'SPLITJAX_COORDINATOR': '127.0.0.1:1',"
        " 'SPLITJAX_NUM_PROCESSES': '2', 'SPLITJAX_PROCESS_ID': '0'}\ntry: splitjax.initialize()\nexcept"
        " splitjax.errors.LaunchError as error: print(error)"
    )
    out, err = fresh(script).communicate(timeout=100)
    assert "its JAX backend was started before it joined" in out and "remedy: import splitjax" in out, err


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "SPLITJAX_NUM_PROCESSES"),
        ({"SPLITJAX_NUM_PROCESSES": "0", "SPLITJAX_PROCESS_ID": "0"}, "SPLITJAX_NUM_PROCESSES"),
        ({"SPLITJAX_NUM_PROCESSES": "2", "SPLITJAX_PROCESS_ID": "one"}, "SPLITJAX_PROCESS_ID"),
        ({"SPLITJAX_NUM_PROCESSES": "2", "SPLITJAX_PROCESS_ID": "2"}, "SPLITJAX_PROCESS_ID"),
    ],
)
def test_variables_that_cannot_be(variables, place, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPLITJAX_COORDINATOR", "127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        join_launched()
    assert caught.value.place == place and "SPLITJAX_JOINED_PID" not in os.environ


def test_a_worker_that_joined_gives_signs_of_life_until_it_is_stopped(launched):
    script = (
        "import splitjax, os, signal, time; time.sleep(2.5); print('awake', flush=True); os.kill(os.getpid(),"
        " signal.SIGSTOP)"
    )
    run = launched(script, heartbeat_seconds=1)
    assert run.wait().attempts[0].failed.silent_seconds == 1
    assert "awake" in run.out.getvalue()
