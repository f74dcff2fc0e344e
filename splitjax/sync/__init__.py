"""Row-sparse gradients of embedding tables, and the schemes that synchronise them.

Schemes by name: `dense`, `all_gather`, `recursive_doubling`, `blocks`, `parameter_server`, `hierarchical`, `zen`,
`row_exchange`; `register_scheme` adds one.

A worker, inside a `shard_map` over the data axis with `check_vma=False`:

    local = from_lookups(ids, cotangents, num_rows) table, stats = synchronise_into(scheme, local, "data", capacities,
    table, lambda rows, table: rows.update(table, row_update))

with `capacities = scheme.plan(measure(ids of the first steps, ...))`; `choose.choose` picks the scheme.
"""

from splitjax.sync.all_gather import AllGather
from splitjax.sync.blocks import Blocks
from splitjax.sync.dense import Dense
from splitjax.sync.feedback import synchronise_rounded
from splitjax.sync.hierarchical import Hierarchical
from splitjax.sync.owner import OwnerSharded, Requests, logical_table, plan_owner, shard_table
from splitjax.sync.parameter_server import ParameterServer
from splitjax.sync.profile import Sparsity, Table, measure
from splitjax.sync.recursive_doubling import RecursiveDoubling
from splitjax.sync.row_exchange import RowExchange
from splitjax.sync.rows import RowSparse, from_lookups
from splitjax.sync.scheme import (
    SCHEMES,
    Attempt,
    ByRows,
    Capacities,
    Link,
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
