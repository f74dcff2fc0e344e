"""What a step holds between its calls: residuals on its mesh, and what a resumed run knew of signatures that it has not
met yet."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.compile.entry import Entry
from splitjax.errors import DonatedStateError, SyncError
from splitjax.planning.carried import Seen, inputs_of
from splitjax.planning.observing import Observer

logger = logging.getLogger("splitjax")


@dataclasses.dataclass
class Kept:
    """See `carried.Carried`, which is this and the observers as a value."""

    residuals: dict[str, Any] = dataclasses.field(default_factory=dict)
    resumed: dict[str, Seen] = dataclasses.field(default_factory=dict)
    num_steps: int = 0  # of partial backpropagation

    def observer(self, entry: Entry) -> Observer:
        """What was seen of an entry's steps: nothing, or what the resumed run saw of them."""
        seen = self.resumed.get(inputs_of(entry.bound, entry.mesh))
        fits = seen is not None and entry.sparse is not None and bool(seen.syncs) != entry.observes
        if not fits or (entry.observes and not _observed_alike(seen, entry)):
            return Observer()
        return Observer.of(seen)

    def residuals_of(self, entry: Entry) -> dict[str, Any]:
        """The residuals that an entry's program takes, laid out for it: zeros at first."""
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
                self.residuals[param] = _laid_out(param, held, wanted)
        return self.residuals


def _observed_alike(seen: Seen, entry: Entry) -> bool:
    """Whether a resumed run's samples are of the tables and workers that an entry observes."""
    workers = {one.param: one.num_workers for one in entry.sparse.tables}
    return {param: ids.shape[1] for param, ids in seen.samples.items()} == workers


def _is_laid_out(held: Any, wanted: jax.ShapeDtypeStruct) -> bool:
    if not isinstance(held, jax.Array) or held.is_deleted() or (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
        return False
    return held.sharding.is_equivalent_to(wanted.sharding, held.ndim)


def _laid_out(param: str, held: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """A residual for another number of workers, or from the host. The sum over the workers is what counts: each of
    fewer workers takes those of several, each of more its own or none."""
    if isinstance(held, jax.Array) and held.is_deleted():
        raise DonatedStateError(
            "what the step carried was consumed by a later call",
            value=param,
            place="resume",
            remedy="save it, or resume with it, before the step is called again; or pass donate=False",
        )
    if tuple(held.shape[1:]) != tuple(wanted.shape[1:]) or held.dtype != wanted.dtype:
        raise SyncError(
            f"the residual of {param!r} is of a table {held.dtype}{list(held.shape[1:])}, and the step's is"
            f" {wanted.dtype}{list(wanted.shape[1:])}",
            value=param,
            place="resume",
            remedy="resume with what a step over the same tables carried",
        )
    if held.shape == wanted.shape and isinstance(held, jax.Array):
        return jax.device_put(held, wanted.sharding)
    parts, folded = np.asarray(held), np.zeros(wanted.shape, wanted.dtype)
    for worker, part in enumerate(parts):
        folded[worker % len(folded)] += part
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: folded[index])


def merged(
    seen: Mapping[str, Seen], entries: Mapping[Any, Entry], observers: Mapping[Any, Observer]
) -> dict[str, Seen]:
    """What a resumed run knew, and what was seen since."""
    found = dict(seen)
    for signature, observer in observers.items():
        entry = entries[signature]
        found[inputs_of(entry.bound, entry.mesh)] = observer.seen(entry.observes, entry.plan.syncs)
    return found
