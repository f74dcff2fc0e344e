"""Holds what a step keeps between its calls: residuals on its mesh, and what a resumed run knew.

Entries of the step come in; the residuals that their programs take, laid out for them, and observers that go on where
the resumed run stopped come out. `planning.carried.Carried` is the same as a value, for checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.compile.entry import CompiledEntry
from splitjax.errors import DonatedStateError, SyncError
from splitjax.planning.carried import Residual, Seen, inputs_of
from splitjax.planning.observing import TableObserver
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.step.padding.stored import logical_array, stored_array

logger: logging.Logger = logging.getLogger("splitjax")


@dataclasses.dataclass
class Session:
    """Keeps what a step has between calls; `carried.Carried` is this and the observers as a value.

    **Attributes:**

    - `residuals`: by table that is rounded on the wire, what that took away from each of n workers: f[n, num_rows,
      *row], a JAX or NumPy array.
    - `resumed`: what the resumed run knew of tables, by signature (`carried.inputs_of`).
    - `num_steps`: how many steps of partial backpropagation have run.
    """

    residuals: dict[str, Residual] = dataclasses.field(default_factory=dict)
    resumed: dict[str, Seen] = dataclasses.field(default_factory=dict)
    num_steps: int = 0

    def observer(self, entry: CompiledEntry) -> TableObserver:
        """Makes the observer of the steps of `entry`: it has seen nothing, or what the resumed run saw of them."""
        seen = self.resumed.get(inputs_of(entry.call, entry.mesh))
        if seen is None or entry.sparse is None or bool(seen.syncs) == entry.observes:
            return TableObserver()
        if entry.observes and not _observed_alike(seen, entry.sparse):
            return TableObserver()
        return TableObserver.of(seen)

    def residuals_of(self, entry: CompiledEntry) -> dict[str, Residual]:
        """Returns the residuals that the program of `entry` takes, by table, laid out for it: zeros at first."""
        for param in set(self.residuals) - set(entry.residuals):
            logger.warning(
                "splitjax: what rounding took away from %s is dropped: its values are not rounded any more", param
            )
            del self.residuals[param]
        for param, wanted in entry.residuals.items():
            held = self.residuals.get(param)
            if held is None:
                self.residuals[param] = jax.jit(
                    lambda wanted=wanted: jnp.zeros(wanted.shape, wanted.dtype), out_shardings=wanted.sharding
                )()
            elif not _is_laid_out(held, wanted):
                self.residuals[param] = _laid_out(param, held, wanted, entry.known_residuals[param])
        return self.residuals

    def known_residuals(self, entries: Iterable[CompiledEntry]) -> dict[str, Residual]:
        """Returns the residuals in the sizes that the step knows, of which any other padding can be made. `entries`: of
        the step."""
        known = dict(self.residuals)
        for entry in entries:
            for param, stored in entry.residuals.items():
                held, wanted = self.residuals.get(param), entry.known_residuals[param]
                if held is not None and stored.shape != wanted.shape and held.shape == stored.shape:
                    known[param] = logical_array(held, wanted.shape, wanted.sharding)
        return known


def _observed_alike(seen: Seen, sparse: SparseStep) -> bool:
    """Returns whether a resumed run's samples are of the tables and workers that an entry observes."""
    workers = {table.param: table.num_workers for table in sparse.tables}
    return {param: ids.shape[1] for param, ids in seen.samples.items()} == workers


def _is_laid_out(held: Residual, wanted: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a residual is an array on the device as a program wants it."""
    if not isinstance(held, jax.Array) or held.is_deleted() or (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
        return False
    return held.sharding.is_equivalent_to(wanted.sharding, held.ndim)


def _laid_out(param: str, held: Residual, wanted: jax.ShapeDtypeStruct, known: jax.ShapeDtypeStruct) -> jax.Array:
    """Lays out a residual for another number of workers, another padding, or from the host. The sum over the workers is
    what counts: each of fewer workers takes those of several, each of more its own or none. `known`: the residual that
    is `wanted`, in the sizes that the step knows."""
    if isinstance(held, jax.Array) and held.is_deleted():
        raise DonatedStateError(
            "what the step carried was consumed by a later call",
            value=param,
            place="resume",
            remedy="save it, or resume with it, before the step is called again; or pass donate=False",
        )
    if tuple(held.shape[1:]) not in (wanted.shape[1:], known.shape[1:]) or held.dtype != wanted.dtype:
        raise SyncError(
            f"the residual of {param!r} is of a table {held.dtype}{list(held.shape[1:])}, and the step's is"
            f" {known.dtype}{list(known.shape[1:])}",
            value=param,
            place="resume",
            remedy="resume with what a step over the same tables carried",
        )
    if held.shape == wanted.shape and isinstance(held, jax.Array):
        return jax.device_put(held, wanted.sharding)
    if held.shape == known.shape:
        return stored_array(held, wanted.shape, wanted.sharding)
    parts, folded = np.asarray(held), np.zeros(wanted.shape, wanted.dtype)
    inside = tuple(map(slice, held.shape[1:]))
    for worker, part in enumerate(parts):
        folded[worker % len(folded)][inside] += part
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: folded[index])


def merged(
    seen: Mapping[str, Seen], entries: Mapping[Any, CompiledEntry], observers: Mapping[Any, TableObserver]
) -> dict[str, Seen]:
    """Returns what is known of the tables of every signature (`carried.inputs_of`).

    **Arguments:** `seen`: what the resumed run knew. `entries`, `observers`: by signature of a call, the entries of
    this run and what it has seen since."""
    known = dict(seen)
    for signature, observer in observers.items():
        entry = entries[signature]
        known[inputs_of(entry.call, entry.mesh)] = observer.seen(entry.observes, entry.plan.syncs)
    return known
