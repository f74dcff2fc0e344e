"""Gives the schemes by name, and all that a module with a scheme of its own takes: protocol, capacities, fallback.

What a scheme costs (`costs.schemes`), how it runs (`running`) and what is done where it lacks room (`synchronising`)
are one here, for who writes a scheme in one class, and for who calls it by hand.
"""

from __future__ import annotations

import dataclasses

from splitjax.sync.all_gather import AllGather
from splitjax.sync.blocks import Blocks
from splitjax.sync.costs.capacities import (
    Capacities,
    bucket,
    local_capacity,
    partial_capacity,
    room,
    union_capacity,
)
from splitjax.sync.costs.schemes import ByRows, Link, SchemeCosts
from splitjax.sync.dense import Dense
from splitjax.sync.hierarchical import Hierarchical
from splitjax.sync.parameter_server import ParameterServer
from splitjax.sync.recursive_doubling import RecursiveDoubling
from splitjax.sync.row_exchange import RowExchange
from splitjax.sync.running import SCHEMES, Attempt, Scheme, Stats, check_levels, register_scheme
from splitjax.sync.synchronising import (
    finish,
    finish_into,
    gather_all,
    lossless_rows,
    once,
    synchronise,
    synchronise_into,
)
from splitjax.sync.zen import Zen

__all__ = [
    "SCHEMES",
    "SHIPPED",
    "Attempt",
    "ByRows",
    "Capacities",
    "Link",
    "Scheme",
    "Stats",
    "bucket",
    "by_name",
    "check_levels",
    "finish",
    "finish_into",
    "gather_all",
    "local_capacity",
    "lossless_rows",
    "once",
    "partial_capacity",
    "register_scheme",
    "room",
    "runnable",
    "synchronise",
    "synchronise_into",
    "union_capacity",
]

SHIPPED: tuple[type[Scheme], ...] = (
    AllGather,
    Blocks,
    Dense,
    RowExchange,
    Hierarchical,
    ParameterServer,
    RecursiveDoubling,
    Zen,
)


def by_name(which: str | Scheme) -> Scheme:
    """Returns the scheme called `which`, with its default options; a scheme is itself. Raises `SyncError` for an
    unknown name, `ExtensionError` for one whose package cannot be loaded."""
    return which if isinstance(which, Scheme) else SCHEMES.find(which, place="sync")()


def runnable(which: SchemeCosts) -> Scheme:
    """Returns the scheme of which `which` says what it costs, with the same options: as it runs."""
    if isinstance(which, Scheme):
        return which
    options = {field.name: getattr(which, field.name) for field in dataclasses.fields(which)}
    return SCHEMES.find(which.name, place="sync")(**options)
