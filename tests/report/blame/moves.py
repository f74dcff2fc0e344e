"""Moves between layouts that XLA's partitioner makes or gives up on, compiled: what its log says of each, and what is
found in the module.

`python -m tests.report.blame.moves tpu|gpu` compiles them ahead of time, for devices that need not be there, and prints
a list of pairs (warnings, arrays found) as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.report.blame.rematerialised import rematerialised
from splitjax.report.dataflow import Dataflow
from splitjax.report.hlo import read_collectives
from splitjax.report.wire import read_module

WARNING = "Involuntary full rematerialization"
AXES = ("data", "model")
AB, BA = ("data", "model"), ("model", "data")
# from, to, sizes (10 and 12 do not divide), and how many warnings XLA logs
MOVES = [
    ((AB, None), (None, "model"), (64, 64), 1),
    ((None, BA), ("data", None), (64, 64), 1),
    (("data", None), (None, "model"), (64, 64), 1),
    ((AB, None), (BA, None), (64, 64), 0),
    (("data", "model"), ("model", "data"), (64, 64), 0),
    ((AB, None), (None, None), (64, 64), 0),
    ((None, "data"), ("model", None), (10, 12), 1),
    ((AB, None), ("data", "model"), (10, 12), 1),
    (("data", None), ("model", None), (10, 12), 0),
]


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """What comes from a cache logs nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def found_of(mesh: Any, before: Any, after: Any, sizes: tuple[int, ...], logged: Callable[[], str]) -> tuple[int, int]:
    """(warnings, arrays found) of one move on `mesh`. `logged`: what was logged since it was asked last."""

    def move(x):
        x = jax.lax.with_sharding_constraint(2 * jnp.sin(x), NamedSharding(mesh, PartitionSpec(*before)))
        x = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(mesh, PartitionSpec(*after)))
        return jnp.sum(3 * x)

    whole = NamedSharding(mesh, PartitionSpec())
    logged()
    with uncached():
        compiled = jax.jit(move).lower(jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=whole)).compile()
    warnings, shape, count = logged().count(WARNING), MeshShape.of(mesh), 0
    for module in map(read_module, _compat.serialized_modules(compiled)):
        flow = Dataflow(module)
        for each in read_collectives(module, shape):
            found = rematerialised(flow.collective(each.name, each.member), flow, shape, each.axis)
            count += found is not None
    return warnings, count


def _main() -> None:
    from jax.experimental import topologies

    if sys.argv[1] == "tpu":
        devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    else:
        from tests.kernels import h200

        devices = h200.devices(8)
    mesh = Mesh(devices.reshape(2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)  # where the compilers log to

        def logged() -> str:
            text = file.seek(0) or file.read().decode(errors="replace")
            file.truncate(0)
            return text

        print(json.dumps([found_of(mesh, *move[:3], logged) for move in MOVES]))


if __name__ == "__main__":
    _main()
