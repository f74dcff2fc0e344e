"""Row-sparse gradients of embedding tables, and the schemes that synchronise them.

Schemes by name: `dense`, `all_gather`.
"""

from splitjax.sync.all_gather import AllGather
from splitjax.sync.dense import Dense
from splitjax.sync.profile import Sparsity, Table, measure
from splitjax.sync.rows import RowSparse, from_lookups
from splitjax.sync.scheme import SCHEMES, Attempt, Capacities, Link, Scheme, Stats, scheme, synchronise
