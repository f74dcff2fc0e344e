"""Runs that go on with fewer workers: on a smaller mesh, from the newest checkpoint, with the same numbers; and workers
that are forked from a process that was started ahead."""

from __future__ import annotations

import io
import os
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest

from splitjax.errors import LaunchError
from splitjax.runtime import read_metrics
from splitjax.runtime.launch import launch
from splitjax.runtime.launch.output import Console
from splitjax.runtime.launch.stages import Stage
from tests.runtime.conftest import ROOT

SCRIPT = pathlib.Path(__file__).parent / "elastic_worker.py"
LIMIT_SECONDS = 500
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks workers, and kills itself with SIGKILL")


def run(folder: pathlib.Path, num: int, devices: int, last: int, gone: str = "-", at: int = 0, **options):
    """What the launcher said, and how the run went."""
    folder.mkdir(exist_ok=True)
    out, err = io.StringIO(), io.StringIO()
    base = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    base |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
    }
    config = launch.LaunchConfig(num_processes=num, threads=1, grace_seconds=0.5, **options)
    command = [sys.executable, str(SCRIPT), str(folder), str(devices), str(last), gone, str(at)]
    started = launch.start(config, command, environment=base, console=Console(out, err))
    try:
        outcome = started.wait(LIMIT_SECONDS)
    finally:
        started.kill()
    assert outcome is not None, f"the run hangs:\n{out.getvalue()}{err.getvalue()}"
    return outcome, out.getvalue() + err.getvalue()


def end_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(folder / "end.npz") as arrays:
        return dict(arrays)


@linux
def test_worker_0_that_is_gone_leaves_the_run_to_the_other(tmp_path):
    outcome, text = run(tmp_path / "run", 2, 2, 14, "0", 7, rejoin_timeout_seconds=0)
    assert outcome.status == 0, text
    assert [attempt.workers for attempt in outcome.attempts] == [(0, 1), (1,)]
    assert "worker 0 did not come back within 0 s: going on without it from the newest checkpoint" in text
    assert "mesh data=1 in place of data=2: 1 of 2 workers are left, and the batch stays at 24 examples" in text
    rows = read_metrics(tmp_path / "run" / "m.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 15))
    (chosen,) = [row for row in rows if "mesh" in row]
    assert (chosen["step"], chosen["num_devices"], chosen["mesh"]) == (6, 1, "data=1")
    assert "1 of 2 workers are left" in chosen["mesh_reason"]
    assert "rows 0 to 23 of process 0 from step 6" in text and "rows 12 to 23 of process 1 from step 1" in text


@linux
def test_workers_of_a_restart_are_forked_and_read_their_programs(tmp_path):
    outcome, text = run(tmp_path / "run", 2, 2, 10, "1+", 7, restarts=1)
    assert outcome.status == 0, text
    first, second = outcome.attempts
    assert first.recovery is None and second.recovery.ahead and second.recovery.step == 6, text
    stages = second.recovery.stages
    assert sum(stages.values()) + second.recovery.ending_seconds <= second.recovery.seconds + 0.1
    # Nothing is imported: what a fork takes, on a machine however busy, is far from what the first start took.
    assert stages[Stage.IMPORT] < 0.5 * (second.started_unix_seconds - first.started_unix_seconds)
    assert "back at step 6, " in text and "forked from a process started ahead" in text
    told = re.findall(r"step (\d+) has loss (\S+)", text)
    again = {step for step, _ in told if [number for number, _ in told].count(step) == 2}
    assert again == {"6"} or again == {"6", "7"}, text  # by workers that were forked, and by others
    assert len(set(told)) == 10
    assert list((tmp_path / "compiled").glob("splitjax-*")), "worker 1 kept no program"
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "m.jsonl")] == list(range(1, 11))


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("num", "gone", "left"), [(4, "1", (0, 2)), (3, "0", (1, 2)), (3, "2", (0, 1))])
def test_a_smaller_mesh_computes_the_same(tmp_path, num, gone, left):
    """Against a run of the smaller mesh that nothing disturbs, from the same checkpoint: bit for bit. Against the old
    mesh, 20 steps later: to 1e-10. Three devices divide the batch of 24 as well, so that four workers leave three."""
    outcome, text = run(tmp_path / "run", num, num, 30, gone, 12, restarts=1, rejoin_timeout_seconds=1)
    assert outcome.status == 0, text
    last = outcome.attempts[-1]
    wanted = tuple(number for number in range(num) if str(number) != gone)
    assert last.workers == wanted and set(left) <= set(wanted)
    shutil.copytree(tmp_path / "run" / "ck" / "10", tmp_path / "small" / "ck" / "10")
    small, said = run(tmp_path / "small", len(wanted), len(wanted), 30)
    assert small.status == 0, said
    whole, said = run(tmp_path / "whole", num, num, 30)
    assert whole.status == 0, said
    for name, array in end_of(tmp_path / "run").items():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, end_of(tmp_path / "small")[name])
        np.testing.assert_allclose(array, end_of(tmp_path / "whole")[name], rtol=1e-10, atol=1e-12)
    losses = lambda folder: {row["step"]: row["loss"] for row in read_metrics(tmp_path / folder / "m.jsonl")}
    ours, theirs = losses("run"), losses("small")
    assert sorted(ours) == list(range(1, 31))
    assert all(ours[step] == theirs[step] for step in range(11, 31))


@linux
@pytest.mark.slow
def test_fewer_workers_than_allowed_end_the_run_with_a_remedy(tmp_path):
    with pytest.raises(LaunchError, match="no mesh for 1 of 2 workers") as error:
        run(tmp_path / "run", 2, 2, 14, "1", 7, rejoin_timeout_seconds=0, least_processes=2)
    assert "--least-processes" in error.value.remedy
