"""Which mesh a run goes on with when workers are gone, and when a worker counts as gone: values in, values out."""

from __future__ import annotations

import math

import pytest

from splitjax.errors import LaunchError
from splitjax.runtime.launch.config import LaunchConfig
from splitjax.runtime.launch.outcome import LaunchAttempt, WorkerExit
from splitjax.runtime.launch.rejoining import Absence, absence
from splitjax.runtime.launch.shrinking import RunLayout, smaller_mesh
from splitjax.runtime.launch.whereabouts import Board, StepRecorder


def layout(axes: dict[str, int], batch_size: int, num_processes: int, *, stored=(), roles=()) -> RunLayout:
    return RunLayout(tuple(axes.items()), tuple(roles), batch_size, tuple(stored), num_processes)


@pytest.mark.parametrize(
    ("axes", "batch", "processes", "left", "stored", "chosen", "used"),
    [
        ({"data": 4}, 12, 4, 3, (), {"data": 3}, 3),
        ({"data": 4}, 32, 4, 3, (), {"data": 2}, 2),  # three devices do not divide 32 examples
        ({"data": 3}, 12, 3, 2, (), {"data": 2}, 2),
        ({"data": 2}, 6, 2, 1, (), {"data": 1}, 1),
        ({"data": 2, "model": 2}, 8, 4, 3, ("model",), {"data": 1, "model": 2}, 2),  # weights stay split
        ({"data": 2, "model": 2}, 8, 2, 1, ("model",), {"data": 1, "model": 2}, 1),  # a process of two devices
        ({"data": 2, "fsdp": 2, "model": 2}, 8, 8, 7, ("fsdp", "model"), {"data": 1, "fsdp": 2, "model": 2}, 4),
        ({"fsdp": 4}, 32, 4, 3, ("fsdp",), {"fsdp": 2}, 2),
        ({"fsdp": 2, "model": 2}, 8, 4, 3, ("fsdp", "model"), {"fsdp": 1, "model": 2}, 2),  # storage before tensor
        ({"data": 1, "model": 4}, 8, 4, 3, ("model",), {"data": 1, "model": 2}, 2),  # what 4 divides, 3 may not
        ({"data": 8}, 24, 4, 3, (), {"data": 6}, 3),  # two devices each
        ({"data": 8}, 32, 4, 1, (), {"data": 2}, 1),
    ],
)
def test_the_mesh_divides_the_batch_and_batch_axes_shrink_first(axes, batch, processes, left, stored, chosen, used):
    found = smaller_mesh(layout(axes, batch, processes, stored=stored), left)
    assert (dict(found.axes), found.num_processes) == (chosen, used)
    assert [name for name, _ in found.axes] == list(axes)
    per_process = math.prod(axes.values()) // processes
    assert math.prod(size for _, size in found.axes) == per_process * used
    assert f"{left} of {processes} workers are left" in found.reason


def test_what_costs_memory_is_said():
    kept = smaller_mesh(layout({"data": 2, "model": 2}, 8, 4, stored=("model",)), 3).reason
    assert "holds" not in kept and "1 of them not used" in kept
    shrunk = smaller_mesh(layout({"data": 1, "model": 4}, 8, 4, stored=("model",)), 3).reason
    assert "axis 'model'" in shrunk and "goes from 4 to 2: each device holds 2 times as much" in shrunk


def test_roles_that_were_said_count_and_not_the_names():
    # An axis called `model` that holds examples is shrunk to what divides the batch, and one called `x` of weights is
    # kept.
    given = layout({"model": 3, "x": 2}, 12, 6, stored=("x",), roles=(("model", "data"), ("x", "tensor")))
    assert dict(smaller_mesh(given, 5).axes) == {"model": 2, "x": 2}


def test_where_no_mesh_fits_the_error_names_a_remedy():
    for axes, batch, left, least in [({"data": 4}, 4, 3, 3), ({"data": 2}, 4, 0, 1), ({"data": 3}, 3, 2, 2)]:
        with pytest.raises(LaunchError, match="no mesh for") as error:
            smaller_mesh(layout(axes, batch, axes["data"]), left, least=least)
        assert "batch size" in error.value.remedy and error.value.value == axes


def test_the_launcher_reads_what_the_loop_notes():
    board = Board(2)
    given = layout({"data": 2, "x": 1}, 32, 2, stored=("data",), roles=(("x", "tensor"),))
    assert RunLayout.read(board, 1) is None
    given.note(StepRecorder(board._memory, 1))
    assert RunLayout.read(board, 1) == given and RunLayout.read(board, 0) is None
    board.close()


def failed(rank: int, code: int = -9, completed_step: int = 0) -> LaunchAttempt:
    end = WorkerExit(rank, code, 1.0, False)
    return LaunchAttempt(0, 0.0, 1.0, (end,), end, completed_step=completed_step)


def test_a_worker_is_away_until_a_step_is_completed_with_it():
    first = absence(None, failed(1, completed_step=40), (0, 1, 2), 10.0)
    assert first == Absence(1, 10.0)
    assert absence(first, failed(1), (0, 1, 2), 15.0) is first  # failed again, before a step
    assert not first.is_over(15.0, 6.0) and first.is_over(16.0, 6.0)
    assert absence(first, failed(1, completed_step=41), (0, 1, 2), 15.0) == Absence(1, 15.0)  # it had come back
    assert absence(first, failed(0), (0, 1, 2), 15.0) == Absence(0, 15.0)  # another
    # Ranks are those of the attempt, workers those that the run began with.
    assert absence(None, failed(0), (1, 2), 15.0) == Absence(1, 15.0)


def test_a_mistake_in_the_command_is_nobodys_absence():
    assert absence(None, failed(1, code=2, completed_step=40), (0, 1), 10.0) is None


def test_rejoining_needs_restarts():
    with pytest.raises(LaunchError, match="only where workers are started again"):
        LaunchConfig(num_processes=2, rejoin_timeout_seconds=5)
    assert LaunchConfig(num_processes=2, rejoin_timeout_seconds=0).starts_again
