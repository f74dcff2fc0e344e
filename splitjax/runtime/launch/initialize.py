"""Joining the processes of a run: those that `splitjax launch` started, or a cluster did."""

from __future__ import annotations

import atexit
import os
import threading
import time

import jax
import jax.monitoring

from splitjax import _compat
from splitjax.errors import LaunchError
from splitjax.runtime.launch import stacks
from splitjax.runtime.launch.stages import StageClock
from splitjax.runtime.launch.variables import (
    ALIVE,
    COORDINATOR,
    DEFAULT_HEARTBEAT_SECONDS,
    EXIT_FD,
    HEARTBEAT_SECONDS,
    JOINED_PID,
    LOCAL_DEVICE_IDS,
    NUM_PROCESSES,
    PROCESS_ID,
    SIGNS_PER_HEARTBEAT,
)
from splitjax.runtime.launch.whereabouts import StepRecorder


def initialize() -> None:
    """Joins this process to its run; without effect in a process that runs alone, and when called again.

    Under `splitjax launch` importing splitjax does this already. In SLURM, Open MPI, Kubernetes and on TPU pods the
    processes find each other by JAX's own cluster detection. No device is touched: call it before anything that does.

    **Raises:** `LaunchError` if the launcher's variables are incomplete or contradict each other, if a JAX backend was
    started before, or if JAX cannot join.
    """
    if jax.distributed.is_initialized():
        return
    if COORDINATOR in os.environ:
        join_launched()
        return
    cluster = _compat.detected_cluster()
    # Open MPI 5 is not found by older versions of JAX: its processes would silently train alone, each of them.
    method = "mpi4py" if cluster is None and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 else None
    if cluster is None and method is None:
        return
    _refuse_backend(f"a process of {cluster or 'Open MPI'}")
    try:
        jax.distributed.initialize(cluster_detection_method=method)
    except (RuntimeError, ValueError, KeyError) as error:
        raise LaunchError(
            f"JAX could not join the processes that {cluster or 'Open MPI'} started: {error}",
            remedy=(
                "see docs/launching.md on clusters; a process that shall run alone must not call splitjax.initialize()"
            ),
        ) from error


def join_launched() -> None:
    """Joins, when splitjax is imported, if `splitjax launch` started this process, and nothing in any other.

    The first process of a worker that gets here joins; processes that it starts inherit the variables, and the mark
    that says so.

    **Raises:** `LaunchError` as `initialize`.
    """
    if COORDINATOR not in os.environ or JOINED_PID in os.environ or jax.distributed.is_initialized():
        return
    num_processes, process_id = _count(NUM_PROCESSES, at_least=1), _count(PROCESS_ID)
    if process_id >= num_processes:
        raise LaunchError(
            f"the run has {num_processes} processes, numbered from 0, and this one is number {process_id}",
            value=process_id,
            place=PROCESS_ID,
            remedy="start workers with `splitjax launch`, which sets these variables",
        )
    _refuse_backend("a worker of splitjax launch")
    devices = os.environ.get(LOCAL_DEVICE_IDS)
    heartbeat_seconds = (
        _count(HEARTBEAT_SECONDS, at_least=1) if HEARTBEAT_SECONDS in os.environ else DEFAULT_HEARTBEAT_SECONDS
    )
    os.environ[JOINED_PID] = str(os.getpid())
    stacks.answer()
    recorder = StepRecorder.open()
    recorder.joined()
    clock = StageClock(recorder)
    jax.distributed.initialize(
        os.environ[COORDINATOR],
        num_processes,
        process_id,
        local_device_ids=[int(number) for number in devices.split(",")] if devices else None,
        cluster_detection_method="deactivate",
        # The launcher holds the service that all processes connect to, so that process 0 may end before the others, and
        # any process without waiting for the rest. JAX starts one in process 0 all the same: it gets any free port of
        # the loopback, unused.
        coordinator_bind_address="127.0.0.1:0",
        heartbeat_timeout_seconds=heartbeat_seconds,
    )
    clock.joined()
    jax.monitoring.register_event_listener(clock.on_event)
    jax.monitoring.register_event_duration_secs_listener(clock.on_duration)
    if EXIT_FD in os.environ:
        file = _count(EXIT_FD)
        atexit.register(_announce_exit, file, process_id, os.getpid())
        every_seconds = heartbeat_seconds / SIGNS_PER_HEARTBEAT
        threading.Thread(target=_give_signs, args=(file, every_seconds), name="splitjax-alive", daemon=True).start()


def _give_signs(file: int, every_seconds: float) -> None:
    """Tells the launcher that this process runs, for as long as it does. Its coordination service would not tell:
    processes that may leave it without the others may also fall silent."""
    sign = f"{ALIVE} {os.getpid()}\n".encode()
    try:
        while True:
            os.write(file, sign)
            time.sleep(every_seconds)
    except OSError:
        pass  # the launcher is gone


def _announce_exit(file: int, process_id: int, pid: int) -> None:
    """Tells the launcher that this process is leaving, before JAX closes its connections: processes that lose them fail
    within milliseconds, and may well be gone before this one is."""
    if os.getpid() == pid:
        try:
            os.write(file, f"{process_id}\n".encode())
        except OSError:
            pass  # the launcher is gone


def _count(name: str, *, at_least: int = 0) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal() or int(text) < at_least:
        raise LaunchError(
            f"{COORDINATOR} is set, and {name} is {'missing' if text is None else 'no number that it can be'}",
            value=text,
            place=name,
            remedy=f"start workers with `splitjax launch`, which sets both; or unset {COORDINATOR} to run alone",
        )
    return int(text)


def _refuse_backend(what: str) -> None:
    if _compat.backend_started():
        raise LaunchError(
            f"this process is {what}, and its JAX backend was started before it joined: it would see its own devices"
            " only",
            remedy=(
                "import splitjax, or call splitjax.initialize(), before the first JAX computation and before"
                " jax.devices()"
            ),
        )
