"""One process of a run of two, for test_checkpoint_processes.py: rank, port, folder."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import jax

rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from splitjax.errors import CheckpointError  # noqa: E402
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints  # noqa: E402
from tests.runtime.states import assert_same as assert_local_same  # noqa: E402
from tests.runtime.states import no_file_beyond  # noqa: E402

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@functools.partial(
    jax.jit,
    out_shardings={
        "split": NamedSharding(mesh, P("data", "model")),
        "copies": NamedSharding(mesh, P()),
        "keys": NamedSharding(mesh, P("data")),
    },
)
def arrays_at(step):
    return {
        "split": jnp.arange(64.0).reshape(8, 8) + step,
        "copies": jnp.arange(5, dtype=jnp.bfloat16) * step.astype(jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(step), 4),
    }


def state_at(step):
    local = {
        "here": jnp.arange(3.0) * step,
        "bound": jax.device_put(jnp.arange(2), jax.local_devices()[1]),
        "key": jax.random.key(step),
    }
    return {**arrays_at(np.int32(step)), "position": np.full(3, step), "count": step, "local": local}


def assert_same(found, expected):
    for name in ("split", "copies", "keys"):
        assert found[name].sharding == expected[name].sharding, name
        data = jax.random.key_data if name == "keys" else lambda array: array
        for one, other in zip(data(found[name]).addressable_shards, data(expected[name]).addressable_shards):
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes(), name
    assert_local_same(found["local"], expected["local"])
    assert (found["position"] == expected["position"]).all() and found["count"] == expected["count"]


def refusal(action):
    started = time.monotonic()
    try:
        action()
    except CheckpointError as error:
        return error.message, time.monotonic() - started
    raise AssertionError("no CheckpointError")


with Checkpoints(CheckpointOptions(folder / "run", keep_last=2, keep_best=0, timeout_seconds=30)) as checkpoints:
    # What dead attempts left is removed by one process, before another goes on.
    assert "7.saving-00" not in os.listdir(folder / "run")
    assert checkpoints.newest_good() is None and checkpoints.steps() == ()
    for step in (1, 2, 3):
        assert checkpoints.save(step, state_at(step), {"position": step}, own={"rank": rank, "step": step})
    assert checkpoints.steps() == (2, 3)
    restored = checkpoints.restore(state_at(0))
    assert (restored.step, restored.extra) == (3, {"position": 3})
    assert restored.position == {"rank": rank, "step": 3}
    assert_same(restored.state, state_at(3))

    # Process 0 damages the newest: all agree on the one before.
    if rank == 0:
        file = max((folder / "run" / "3" / "state").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    assert checkpoints.newest_good() == 2
    restored = checkpoints.restore(state_at(0))
    assert restored.step == 2 and [step for step, _ in restored.skipped] == [3]
    assert_same(restored.state, state_at(2))
    message, _ = refusal(lambda: checkpoints.restore({**state_at(0), "count": "3"}))
    assert "count: saved int32[], wanted str[]" in message, message

    # The disk of process 1 is full: both know at once, and whose it was; the next save works.
    if rank == 1:
        with no_file_beyond(100):
            message, seconds = refusal(lambda: checkpoints.save(4, state_at(4), wait=True))
    else:
        message, seconds = refusal(lambda: checkpoints.save(4, state_at(4), wait=True))
    assert "step 4 was not saved: process 1: " in message and "File too large" in message, message
    assert seconds < 10, seconds
    assert checkpoints.save(5, state_at(5), own={"rank": rank}, wait=True)
    assert checkpoints.steps() == (2, 5)

# Folders that are not shared are noticed, not half used.
with Checkpoints(CheckpointOptions(folder / f"own-{rank}", timeout_seconds=30)) as checkpoints:
    message, _ = refusal(lambda: checkpoints.save(1, state_at(1), wait=True))
    assert "process 1: sees no folder" in message, message
    refusal(checkpoints.close)

# A process that does not come: the other one is not kept beyond the timeout.
with Checkpoints(CheckpointOptions(folder / "absent", timeout_seconds=2)) as checkpoints:
    state = state_at(1)
    if rank == 0:
        message, seconds = refusal(lambda: checkpoints.save(1, state, wait=True))
        assert "process 1 did not answer in time" in message, message
        assert seconds < 5, seconds
        assert os.listdir(folder / "absent") == []
        assert refusal(checkpoints.close)[0] == message
    else:
        time.sleep(3)
print("done", rank, flush=True)
