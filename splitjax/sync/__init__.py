"""Row-sparse gradients of embedding tables, and the schemes that synchronise them.

What schemes cost (`costs`) is all that planning asks; what runs is imported when one of the names below is first used.

Schemes by name: `dense`, `all_gather`, `recursive_doubling`, `blocks`, `parameter_server`, `hierarchical`, `zen`,
`row_exchange`; `register_scheme` adds one.

A worker, inside a `shard_map` over the data axis with `check_vma=False`:

    local = from_lookups(ids, cotangents, num_rows) table, stats = synchronise_into(scheme, local, "data", capacities,
    table, lambda rows, table: rows.update(table, row_update))

with `capacities = scheme.plan(measure(ids of the first steps, ...))`; `choose.choose` picks the scheme.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitjax.sync.all_gather import AllGather
    from splitjax.sync.blocks import Blocks
    from splitjax.sync.costs.capacities import Capacities
    from splitjax.sync.costs.owner import plan_owner
    from splitjax.sync.costs.schemes import ByRows, Link
    from splitjax.sync.dense import Dense
    from splitjax.sync.feedback import synchronise_rounded
    from splitjax.sync.hierarchical import Hierarchical
    from splitjax.sync.owner import OwnerSharded, Requests, logical_table, shard_table
    from splitjax.sync.parameter_server import ParameterServer
    from splitjax.sync.profile import Sparsity, Table, measure
    from splitjax.sync.recursive_doubling import RecursiveDoubling
    from splitjax.sync.row_exchange import RowExchange
    from splitjax.sync.rows import RowSparse, from_lookups
    from splitjax.sync.scheme import (
        SCHEMES,
        Attempt,
        Scheme,
        Stats,
        by_name,
        finish,
        finish_into,
        register_scheme,
        synchronise,
        synchronise_into,
    )
    from splitjax.sync.zen import Zen

__all__ = [
    "AllGather",
    "Attempt",
    "Blocks",
    "ByRows",
    "Capacities",
    "Dense",
    "Hierarchical",
    "Link",
    "OwnerSharded",
    "ParameterServer",
    "RecursiveDoubling",
    "Requests",
    "RowExchange",
    "RowSparse",
    "SCHEMES",
    "Scheme",
    "Sparsity",
    "Stats",
    "Table",
    "Zen",
    "by_name",
    "finish",
    "finish_into",
    "from_lookups",
    "logical_table",
    "measure",
    "plan_owner",
    "register_scheme",
    "shard_table",
    "synchronise",
    "synchronise_into",
    "synchronise_rounded",
]

_PLACES = {
    "AllGather": "all_gather",
    "Attempt": "scheme",
    "Blocks": "blocks",
    "ByRows": "costs.schemes",
    "Capacities": "costs.capacities",
    "Dense": "dense",
    "Hierarchical": "hierarchical",
    "Link": "costs.schemes",
    "OwnerSharded": "owner",
    "ParameterServer": "parameter_server",
    "RecursiveDoubling": "recursive_doubling",
    "Requests": "owner",
    "RowExchange": "row_exchange",
    "RowSparse": "rows",
    "SCHEMES": "scheme",
    "Scheme": "scheme",
    "Sparsity": "profile",
    "Stats": "scheme",
    "Table": "profile",
    "Zen": "zen",
    "by_name": "scheme",
    "finish": "scheme",
    "finish_into": "scheme",
    "from_lookups": "rows",
    "logical_table": "owner",
    "measure": "profile",
    "plan_owner": "costs.owner",
    "register_scheme": "scheme",
    "shard_table": "owner",
    "synchronise": "scheme",
    "synchronise_into": "scheme",
    "synchronise_rounded": "feedback",
}
_SUBMODULES = (
    "analysis",
    "choose",
    "codes",
    "feedback",
    "link",
    "local",
    "masks",
    "owner",
    "owners",
    "profile",
    "routes",
    "rows",
    "scheme",
    "wire",
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"splitjax.sync.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'splitjax.sync' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"splitjax.sync.{_PLACES[name]}"), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
