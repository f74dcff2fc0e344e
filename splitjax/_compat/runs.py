"""Sees the run that this process belongs to: its place, coordination service, backend and cluster manager."""

from __future__ import annotations

import os
from typing import Any

from jax._src import clusters, distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  # where JAX itself takes it from


def coordination_client() -> Any | None:
    """The client of JAX's coordination service (key-value store, barriers), or None in a process that joined no run."""
    return distributed.global_state.client


def place_in_run() -> tuple[int, int]:
    """(number of this process, number of processes) in the run that it joined, (0, 1) alone. Unlike `jax.process_index`
    it starts no backend."""
    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def detected_cluster() -> str | None:
    """A name for the cluster manager that JAX finds this process to be started by, such as `slurm`; None if it finds
    none."""
    present = (
        kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method and kind.is_env_present()
    )
    kind = next(present, None)
    return None if kind is None else kind.name or kind.__name__


def backend_started() -> bool:
    """Returns whether a JAX backend is running, so that it is too late to join other processes."""
    return xla_bridge.backends_are_initialized()


def coordination_service(address: str, num_processes: int, heartbeat_seconds: int) -> Any:
    """Starts the service that `jax.distributed.initialize` connects to, for `num_processes` processes, listening on
    `address` (`host:port`) in this one. A process that is silent for `heartbeat_seconds` counts as gone.

    Its processes are recoverable: one that leaves does not wait for the others, and does not take them along. Ends with
    its `shutdown()`. Raises `RuntimeError` if it cannot listen there.
    """
    # XLA says on standard error, past any log level, that this is experimental.
    with open(os.devnull, "w") as nowhere:
        before = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            return _jax.get_distributed_runtime_service(
                address, num_processes, heartbeat_timeout=heartbeat_seconds, recoverable=True
            )
        finally:
            os.dup2(before, 2)
            os.close(before)
