"""Measures the link between workers: what `choose` needs to know of a network. A mesh goes in, a `Link` comes out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from splitjax.sync import wire
from splitjax.sync.costs.schemes import Link

_SMALL_BYTES, _LARGE_BYTES, _MOST_BYTES = 4, 1 << 20, 1 << 23
_ROUNDS = 5
# A message should take this long for its rate to be told from the latency.
_WORTHWHILE_SECONDS = 0.02


def measure_link(mesh: Mesh, axes: tuple[str, ...]) -> Link:
    """Measures latency and rate of the links along `axes` of a `mesh`.

    Every worker sends to the next one at once, as the schemes do. In a run of several processes all must call
    this at the same time; all get what process 0 measured.
    """
    size = math.prod(mesh.shape[axis] for axis in axes)
    small = _median_seconds(_ring(mesh, axes, size, _SMALL_BYTES))
    num_bytes, seconds = _LARGE_BYTES, 0.0
    while True:
        seconds = _median_seconds(_ring(mesh, axes, size, num_bytes))
        (seconds,) = of_process_0([seconds])  # all must agree on whether to go on
        if seconds > _WORTHWHILE_SECONDS or num_bytes >= _MOST_BYTES:
            break
        num_bytes *= 4
    (small,) = of_process_0([small])
    return Link(float(small), num_bytes / max(float(seconds - small), 1e-9))


def _ring(mesh: Mesh, axes: tuple[str, ...], size: int, num_bytes: int) -> Callable[[], jax.Array]:
    spec = PartitionSpec(axes)
    pairs = [(i, (i + 1) % size) for i in range(size)]
    run = jax.jit(jax.shard_map(lambda x: wire.permute([x], axes, pairs)[0], mesh=mesh, in_specs=spec, out_specs=spec))
    message = jax.jit(
        lambda: jnp.zeros((size * num_bytes // 4,), jnp.float32), out_shardings=NamedSharding(mesh, spec)
    )()
    return lambda: run(message)


def _median_seconds(run: Callable[[], jax.Array]) -> float:
    jax.block_until_ready(run())
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def of_process_0(values: list[float]) -> list[float]:
    """Returns the `values` that process 0 has, on all processes; all must call it at the same time."""
    if jax.process_count() == 1:
        return values
    return [float(value) for value in multihost_utils.broadcast_one_to_all(np.asarray(values, np.float32))]
