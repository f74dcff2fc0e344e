"""Row-sparse gradients of embedding tables, and the schemes that synchronise them.

Schemes by name: `dense`, `all_gather`, `recursive_doubling`, `blocks`, `parameter_server`, `hierarchical`, `zen`, `row_exchange`.
"""

from splitjax.sync.all_gather import AllGather
from splitjax.sync.blocks import Blocks
from splitjax.sync.choose import Choice, choose
from splitjax.sync.dense import Dense
from splitjax.sync.feedback import synchronise_rounded
from splitjax.sync.hierarchical import Hierarchical
from splitjax.sync.owner import OwnerSharded, Requests, logical_table, plan_owner, shard_table
from splitjax.sync.parameter_server import ParameterServer
from splitjax.sync.profile import Sparsity, Table, measure
from splitjax.sync.recursive_doubling import RecursiveDoubling
from splitjax.sync.row_exchange import RowExchange
from splitjax.sync.rows import RowSparse, from_lookups
from splitjax.sync.scheme import SCHEMES, Attempt, Capacities, Link, Scheme, Stats, finish, scheme, synchronise
from splitjax.sync.zen import Zen

__all__ = [
    "Choice",
    "choose",
    "finish",
    "synchronise_rounded",
    "AllGather",
    "Attempt",
    "Blocks",
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
    "from_lookups",
    "logical_table",
    "measure",
    "plan_owner",
    "scheme",
    "shard_table",
    "synchronise",
]
