"""The protocol of how a scheme runs: row-sparse values of all workers -> their sum, the same on every worker.

A scheme is a frozen dataclass. What it costs is one half of it (`costs.schemes.SchemeCosts`), all that planning asks;
`attempt` is the other: the exchange itself, within static capacities, which says, alike on all workers, whether
everything fitted. `sync.synchronising` adds the lossless fallback.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeVar

import jax
from jax import Array

from splitjax._registry import NamedRegistry
from splitjax.errors import SyncError
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.registry import COSTS, GROUP, REGISTER, check_loaded, check_scheme, same_class, unfit
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.rows import RowSparse
from splitjax.sync.wire import Axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Reports what an exchange did.

    **Attributes:**

    - `local_rows`: i32[], this worker's rows. `union_rows`: i32[], rows of the sum. `sent_rows`: i32[], rows that
      this worker really sent point to point or into gathers (each gather counted n-1 times), without the padding
      up to the capacities.
    - `fell_back`: bool[], capacities did not suffice and the fallback ran, on all workers.
    - `incomplete`: bool[], a worker's own rows were cut off before (`RowSparse.overflowed`): the sum lacks them.
    """

    local_rows: Array
    union_rows: Array
    sent_rows: Array
    fell_back: Array
    incomplete: Array


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An exchange within its capacities. `fits`: bool[], alike on all workers (True itself where it always fits); where
    False `rows` lack some. `sent_rows`: as in `Stats`."""

    rows: RowSparse
    fits: Array | bool
    sent_rows: Array


@dataclasses.dataclass(frozen=True)
class Scheme(SchemeCosts):
    """Synchronises a row-sparse gradient in some way; subclasses are frozen dataclasses that `register_scheme` makes
    known. What it costs is declared by `SchemeCosts`: a scheme of another package writes both halves in one class."""

    @abc.abstractmethod
    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Exchanges rows within the capacities, inside `shard_map`; no branches.

        **Arguments:**

        - `local`: this worker's rows.
        - `axis`: the mesh axis or axes of the workers.
        - `capacities`: the room there is.
        """


SchemeClass = TypeVar("SchemeClass", bound=type[Scheme])


def register_scheme(cls: SchemeClass) -> SchemeClass:
    """Makes the scheme `cls` known by its `name`; a decorator.

    From then on `sync="name"` takes it, `sync="auto"` weighs its `variants`, and plans and checkpoints are read back
    with it. `cls` is a `Scheme`, a frozen dataclass whose fields are its options: plain values, each with a default.

    Raises `SyncError` for a class that is no such scheme, and for a name that another class has.
    """
    if not (isinstance(cls, type) and issubclass(cls, Scheme)):
        raise unfit(cls, "a scheme is a class derived from splitjax.sync.Scheme", "derive it from Scheme")
    check_scheme(cls)
    known = COSTS.get(cls.name)
    SCHEMES.add(cls.name, cls, same=same_class)
    if known is None or not issubclass(cls, known):  # of a shipped scheme, planning knows the half that costs
        COSTS.add(cls.name, cls, same=same_class)
    return cls


def _accept(name: str, loaded: Any) -> None:
    """Registers the class that an entry point called `name` has loaded, where importing it did not."""
    check_loaded(name, loaded)
    register_scheme(loaded)


SCHEMES: NamedRegistry[type[Scheme]] = NamedRegistry(
    "scheme", group=GROUP, error=SyncError, register=REGISTER, accept=_accept
)


def check_levels(which: SchemeCosts, capacities: Capacities, num_levels: int) -> None:
    """Raises `SyncError` where `capacities` have other than `num_levels` levels: they were planned for another
    number of workers.

    `which` is the scheme, for the message.
    """
    if len(capacities.levels) != num_levels:
        raise SyncError(
            f"{which.name} needs capacities for {num_levels} rounds here",
            value=capacities.levels,
            place="Capacities.levels",
            remedy="plan with a profile of as many workers as the axis has",
        )
