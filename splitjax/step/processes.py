"""Makes a step's arguments, in a run of several processes, arrays over the whole mesh.

What each process holds comes in, global arrays in the plan's layout come out: `jax.jit` takes only those there. A
script that runs alone should run unchanged, so a step takes three things more:

- a host value (NumPy array, Python number, array on this process's devices) that is the same in every process; each
  places its parts;
- a global array in another layout than the plan's, such as `global_batch` makes: laid out anew;
- and what the plan wants already, which is handed on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from splitjax.errors import BatchError


def on_mesh(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Returns every leaf of `leaves` as the program takes it: a global array laid out by the entry of `shardings` at
    its position, or a Python number."""
    return [_place(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    """Returns a leaf as the program takes it, by the rules in the module's docstring."""
    if isinstance(leaf, jax.Array):
        if leaf.sharding == sharding:
            return leaf
        if not leaf.is_fully_addressable:
            # a layout that is equal under different names is moved too: it would be another program to jax.jit
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _from_host(np.asarray(jax.random.key_data(leaf)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    elif isinstance(leaf, (bool, int, float, complex)):
        return leaf  # replicated, and with its weak type
    return _from_host(np.asarray(leaf), sharding)


def _from_host(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def host_digests(leaves: Sequence[Any], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns (name, digest of the value) of every leaf that is a host value, that is, of what must be the same in
    every process. `leaves`: the flat arguments of a call; `names`: their paths."""
    digests = []
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                continue
            leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        digests.append((name, value_digest(np.asarray(leaf))))
    return tuple(digests)


def value_digest(value: np.ndarray) -> str:
    """Returns a short digest of dtype, shape and bytes of the array `value`, as 16 hexadecimal digits."""
    kind = f"{value.dtype}{value.shape}".encode()
    return hashlib.sha256(kind + np.ascontiguousarray(value).tobytes()).hexdigest()[:16]


def global_batch(local_batch: Any) -> Any:
    """Makes this process's examples its part of the global batch.

    **Arguments:**

    - `local_batch`: a pytree of host arrays `[b, ...]`, with the same b in every process and array.

    **Returns** the pytree of global arrays `[b * processes, ...]`: process p's examples are the rows from `p * b` on. A
    decorated step lays them out by its plan. In a run of one process: the batch as it is.

    Raises `BatchError` for arrays without an example dim or of unequal lengths. Unequal lengths among processes are
    noticed by the first step (`ProcessError`).
    """
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(local_batch)}
    if len(lengths) > 1 or () in lengths:
        raise BatchError(
            "the arrays of a batch must have the same number of examples",
            value=jax.tree.map(np.shape, local_batch),
            place="global_batch",
            remedy="give every array the examples as its leading dim",
        )
    if jax.process_count() == 1 or not lengths:
        return local_batch
    devices = np.asarray(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    mesh = Mesh(devices.reshape(jax.process_count(), -1), ("process", "local"), axis_types=(AxisType.Auto,) * 2)
    # Split over all devices where the examples divide; else every device of a process gets all of the process's
    # examples.
    divides = next(iter(lengths))[0] % jax.local_device_count() == 0
    sharding = NamedSharding(mesh, PartitionSpec(("process", "local") if divides else "process"))
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), local_batch)
