"""This room lists what XLA's SPMD partitioner computes wrongly, as a table, and what splitjax does instead.

See `defects.py` for the table, docs/partitioner.md for how it came about, and `benchmarks/partitioner/main.py` for the
search."""

from splitjax.partitioner.choice import check_partitioner
from splitjax.partitioner.defects import COVERED, DEFECTS, Action, Defect, Operation, Touched, defect_named, defect_of

__all__ = [
    "COVERED",
    "DEFECTS",
    "Action",
    "Defect",
    "Operation",
    "Touched",
    "check_partitioner",
    "defect_named",
    "defect_of",
]
