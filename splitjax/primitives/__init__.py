"""What an operation is: one table of what each does to dims, to examples, to sums, and to rows of tables, for every
analysis; which equations are calls (`calls`), how jaxprs are walked (`walk`) and evaluated (`interpreter`).

Importing the package completes the table (`table.OPERATIONS`); `register_primitive` adds to it.
"""

from splitjax.primitives import (
    dealt,
    dims_elementwise,
    dims_fused,
    dims_mixing,
    dims_shape,
    domains,
    example_rules,
    example_rules_mixing,
    foreign,
    linear,
    rows,
    traits,
    unknown,
    weights,
)

__all__ = [
    "dealt",
    "dims_elementwise",
    "dims_fused",
    "dims_mixing",
    "dims_shape",
    "domains",
    "example_rules",
    "example_rules_mixing",
    "foreign",
    "linear",
    "rows",
    "traits",
    "unknown",
    "weights",
]
