"""This room lists what XLA's SPMD partitioner computes wrongly, as a table, and what splitjax does instead.

See `defects.py` for the table, `touches.py` for what its rows ask of an operation, docs/partitioner.md for how it came
about, and `benchmarks/partitioner/main.py` for the search."""

from splitjax.partitioner.choice import check_partitioner
from splitjax.partitioner.defects import COVERED, DEFECTS, Action, Defect, defect_named, defect_of
from splitjax.partitioner.touches import Operation, Touched

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
