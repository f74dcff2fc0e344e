"""Writes arrays to disk and reads them back, by orbax: decides what is copied off the devices before a save returns,
and which layout arrays come back in.

Orbax's handler is used, not its `CheckpointManager` or `AsyncCheckpointer`: these remove old checkpoints as soon as the
new one has its name, which is before it could be verified, and their processes wait at barriers that one failed process
never reaches.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from splitjax import _compat
from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint.orbax_tree import by_path, stored_tree
from splitjax.runtime.checkpoint.state_match import PYTHON_TYPES, StateLeaf, is_key


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """Holds what is written to one folder of a checkpoint.

    - `folder`: where, on a file system that all processes share; made where it is missing.
    - `leaves`: describe the leaves of `tree`, in its order.
    - `tree`: a pytree of arrays, numbers and strings.
    - `as_tree`: whether it is stored as the pytree that it is (`orbax_tree.keeps_structure`), or flat by path.
    """

    folder: Path
    leaves: Sequence[StateLeaf]
    tree: Any
    as_tree: bool


class ArrayWriter:
    """Writes the arrays of one save, whole or this process's shards of them.

    **Arguments:** `parts`: what is written, each to a folder of its own; those without anything to store have none.
    """

    def __init__(self, parts: Sequence[StoredPart]):
        """Copies to the host and starts writing. Once this returns, the state's arrays may be donated."""
        self._futures: list[Any] = []
        self._started: list[tuple[ocp.PyTreeCheckpointHandler, epath.Path]] = []
        for part in parts:
            arrays = stored_tree(part.leaves, part.tree, _written, as_tree=part.as_tree)
            if not jax.tree.leaves(arrays):
                continue
            handler, folder = _handler(), epath.Path(part.folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._started.append((handler, folder))
            self._futures += _run(handler.async_save(folder, args=ocp.args.PyTreeSave(arrays))) or ()

    def wait(self, deadline: float) -> str | None:
        """Waits until everything is written, at most until `deadline` (`time.monotonic`). Returns what went wrong."""
        problem = None
        for future in self._futures:
            try:
                future.result(timeout=max(0.001, deadline - time.monotonic()))
            except TimeoutError:
                problem = problem or "writing took longer than the timeout"
            except Exception as error:  # whatever storage raises fails this save, and only this save
                problem = problem or f"{type(error).__name__}: {error}"
        return problem

    def finish(self) -> None:
        """Joins what the processes wrote; by one process, after all of them waited."""
        for handler, folder in self._started:
            handler.finalize(folder)


def read_arrays(
    folder: Path, saved: Sequence[StateLeaf], like: Any, wanted: Sequence[StateLeaf], *, as_tree: bool
) -> Any:
    """Reads the state that lies in a `folder` into the structure, kinds of leaves and shardings of `like`. `saved`
    describes the leaves in the folder, `wanted` those of `like`; the two agree. `as_tree`: how it was stored.

    A leaf of `like` that has a sharding comes back as a `jax.Array` in it; without one (or an array that is not
    committed to its device), as an uncommitted array on the default device; numpy arrays and scalars and Python values
    as what they are.
    """
    known = {leaf.path: leaf for leaf in saved}
    leaves = [known[leaf.path] for leaf in wanted]
    stored = stored_tree(leaves, like, _restore_args, as_tree=as_tree)
    arrays: Mapping[str, Any] = {}
    if jax.tree.leaves(stored):
        # Orbax looks at the structure of `item` alone, and takes the kinds and layouts of leaves from the other.
        item = jax.tree.map(lambda _: 0, stored) if as_tree else None
        restored = _handler().restore(epath.Path(folder), args=ocp.args.PyTreeRestore(item=item, restore_args=stored))
        arrays = by_path(leaves, like, restored, as_tree=as_tree)
    targets, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(
        tree, [_restored(leaf, target, arrays.get(leaf.path)) for leaf, target in zip(leaves, targets)]
    )


def check_targets(wanted: Sequence[StateLeaf], like: Any) -> None:
    """Raises `CheckpointError` where JAX would narrow a leaf on the way into an array of `like`, whose leaves are
    `wanted`."""
    for leaf, target in zip(wanted, jax.tree.leaves(like)):
        if isinstance(target, (np.ndarray, np.generic, *PYTHON_TYPES)) or is_key(target):
            continue
        dtype = np.dtype(target.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise CheckpointError(
                f"{dtype.name} arrays need JAX's 64-bit types, which are off; restored without them, values would be"
                " rounded",
                place=leaf.path,
                remedy='jax.config.update("jax_enable_x64", True) before the state is made',
            )


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Trained weights do not compress (a few per cent), and compressing takes processor time from the training.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _written(leaf: StateLeaf, value: Any) -> Any:
    """Returns what orbax gets of a leaf: Python values stand in the tree as they are."""
    return _storable(value) if leaf.value is None else leaf.value


def _storable(value: Any) -> jax.Array | np.ndarray:
    """A leaf as orbax writes it. Views of device memory need no copy: a buffer that the host looks at is not given away
    by donation (the runtime copies it then), which the tests watch. NumPy arrays can be changed in place by anyone."""
    if is_key(value):
        value = jax.random.key_data(value)
    is_global = isinstance(value, jax.Array) and not _is_local(value)
    return value if is_global else np.array(value)


def _is_local(array_or_sharding: Any) -> bool:
    """Tells whether an array of a run of several processes is this process's alone: orbax takes such ones for a
    mistake."""
    return jax.process_count() > 1 and array_or_sharding.is_fully_addressable


def _sharding(target: Any) -> Any | None:
    """The sharding that a target asks for. An array that is not committed, such as `jnp.zeros(3)`, asks for none: jit
    may move it."""
    return target.sharding if getattr(target, "committed", True) and hasattr(target, "sharding") else None


def _stored_sharding(target: Any) -> Any | None:
    """The sharding for the array that is stored for a target; None to read it as a whole first."""
    sharding = _sharding(target)
    if sharding is not None and _is_local(sharding):
        return None
    if is_key(target) and not isinstance(sharding, (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding)):
        return None  # these two also fit the key's data, which has one dim more
    return sharding


def _restore_args(leaf: StateLeaf, target: Any) -> Any:
    """Returns orbax's arguments for reading the `leaf` that becomes `target`."""
    if not leaf.is_stored_as_array:  # a Python value of a tree: the description has it
        return ocp.RestoreArgs()
    sharding = _stored_sharding(target)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if is_key(target):
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=sharding, global_shape=leaf.shape, dtype=jnp.dtype(leaf.dtype)
    )


def _restored(leaf: StateLeaf, target: Any, array: Any) -> Any:
    """Returns the `leaf` as what `target` is, from the `array` that was read; None for a leaf without one."""
    if leaf.dtype == "str":
        return leaf.value
    sharding = _sharding(target)
    if is_key(target):
        if array is None:  # no elements
            array = jax.random.key_data(jax.random.split(jax.random.key(0, impl=leaf.key_impl), leaf.shape))
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.key_impl)
        return keys if sharding is None or keys.sharding == sharding else jax.device_put(keys, sharding)
    if array is None:
        array = np.full(leaf.shape, 0 if leaf.value is None else leaf.value, jnp.dtype(leaf.dtype))
    if isinstance(target, np.generic):
        return np.asarray(array)[()]
    if isinstance(target, np.ndarray):
        return np.asarray(array)
    if isinstance(target, PYTHON_TYPES):
        return leaf.value if leaf.value is not None else np.asarray(array).item()
    if not isinstance(array, jax.Array):
        values = array
        array = (
            jnp.asarray(values)
            if sharding is None
            else jax.make_array_from_callback(leaf.shape, sharding, lambda at: values[at])
        )
    return _compat.as_weakly_typed(array) if getattr(target, "weak_type", False) else array


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end, also where an event loop runs already (notebooks): in a thread then. Otherwise in
    the calling thread, whose settings of JAX (64-bit types under a context manager) hold."""

    def alone() -> Any:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return alone()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(alone).result()


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps orbax from printing the traceback of every thread whose write failed: the failure is reported once, by
    us."""
    drop = lambda record: "_SignalingThread.run() raised" not in record.getMessage()
    logger = logging.getLogger("absl")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
