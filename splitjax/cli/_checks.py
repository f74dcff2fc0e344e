"""What `splitjax doctor` tries: whether this machine's devices add up and exchange values rightly, and whether a folder
keeps what is written to it, as checkpoints need."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitjax._files import replace_atomically

# A collective that hangs says nothing: it is given up after this.
LIMIT_SECONDS = 60.0
_SAMPLE_BYTES = 2**23
_LITTLE_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Check:
    """Holds what a try gave.

    - `name`: what was tried.
    - `passed`: whether it went well.
    - `found`: a sentence: what was found, or what went wrong.
    - `remedy`: what to do about it; empty where it went well.
    - `seconds`: what it took.
    """

    name: str
    passed: bool
    found: str
    remedy: str
    seconds: float


def check_collectives(devices: Sequence[Any], limit_seconds: float = LIMIT_SECONDS) -> Check:
    """Sums, gathers, exchanges and passes on small arrays over all `devices`, and compares with what comes out on the
    host; gives up after `limit_seconds`."""
    name, begin = "collectives", time.perf_counter()
    answer: list[list[str] | BaseException] = []

    def attempt() -> None:
        try:
            answer.append(wrong_collectives(devices))
        except BaseException as error:  # of the backend, whatever it is: told below
            answer.append(error)

    # In a thread: a link that does not answer holds up whoever waits for it.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    seconds = time.perf_counter() - begin
    done = answer[0] if answer else None
    if done is None:
        remedy = "look at what connects the devices; NCCL_DEBUG=INFO shows where NVIDIA's library waits"
        return Check(name, False, f"no answer within {limit_seconds:g} s", remedy, seconds)
    if isinstance(done, BaseException):
        first = str(done).strip().split("\n")[0]
        remedy = "try fewer devices (CUDA_VISIBLE_DEVICES=0), and drivers of JAX's version"
        return Check(name, False, f"{type(done).__name__}: {first}", remedy, seconds)
    if done:
        remedy = "do not train on these devices together: sums of gradients would be wrong"
        return Check(name, False, f"wrong numbers from {', '.join(done)} over {len(devices)} devices", remedy, seconds)
    return Check(name, True, f"sum, gather, exchange and passing on are right over {len(devices)} devices", "", seconds)


def wrong_collectives(devices: Sequence[Any]) -> list[str]:
    """Returns the names of the collectives over `devices` whose numbers differ from the host's."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    size = len(devices)
    mesh = Mesh(np.asarray(devices), ("all",))
    values = np.arange(size * size, dtype=np.float32).reshape(size, size)
    ring = [(number, (number + 1) % size) for number in range(size)]

    def talk(row: Any) -> tuple[Any, ...]:
        return (
            jax.lax.psum(row, "all"),
            jax.lax.all_gather(row, "all", axis=0, tiled=True),
            jax.lax.all_to_all(row, "all", split_axis=1, concat_axis=0, tiled=True),
            jax.lax.ppermute(row, "all", ring),
        )

    split, whole = PartitionSpec("all"), PartitionSpec()
    program = jax.jit(
        jax.shard_map(
            talk,
            mesh=mesh,
            in_specs=split,
            out_specs=(whole, whole, PartitionSpec(None, "all"), split),
            check_vma=False,
        )
    )
    found = program(jax.device_put(values, NamedSharding(mesh, split)))
    expected = (values.sum(0, keepdims=True), values, values, np.roll(values, 1, axis=0))
    names = ("sum", "gather", "exchange", "passing on")
    return [
        name
        for name, got, right in zip(names, found, expected, strict=True)
        if not np.array_equal(np.asarray(got.addressable_data(0) if name in ("sum", "gather") else got), right)
    ]


def check_folder(folder: pathlib.Path) -> Check:
    """Writes a file to `folder` (or to the nearest folder above it that exists, where it would be made) as a checkpoint
    is written: to the disk under another name, then renamed; reads it back, and removes it."""
    begin = time.perf_counter()
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    name = "checkpoint folder"
    path, data = there / f".splitjax-doctor-{uuid.uuid4().hex[:8]}", os.urandom(_SAMPLE_BYTES)
    took: Callable[[], float] = lambda: time.perf_counter() - begin
    try:
        replace_atomically(path, lambda scratch: scratch.write_bytes(data))
        rate = _SAMPLE_BYTES / 2**20 / took()
        read_back = path.read_bytes()
        free_bytes = shutil.disk_usage(there).free
    except OSError as error:
        remedy = "name another with --checkpoint-dir, or make it one that you may write to, on a disk with room"
        return Check(name, False, f"{there} cannot be written to: {error.strerror or error}", remedy, took())
    finally:
        path.unlink(missing_ok=True) if there.is_dir() else None
    if read_back != data:
        remedy = "do not keep checkpoints there: look at the disk, or at the network file system"
        return Check(name, False, f"{there} gives back other bytes than were written", remedy, took())
    found = f"{there} keeps what is written, {rate:.0f} MiB/s to the disk, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < _LITTLE_BYTES:
        return Check(
            name, False, found, "make room: a checkpoint is as large as parameters and optimizer state", took()
        )
    return Check(name, True, found, "", took())
