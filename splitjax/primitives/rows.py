"""States what operations do with the rows of a table, and answers it for any operation.

An update that acts on a table row by row can run on the rows alone that a step has touched (`trace.row_update`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from splitjax.primitives.operation import Examples, OperationFacts, RowAction, RowFacts, Trait
from splitjax.primitives.table import OPERATIONS

Shape = tuple[int, ...]


def row_facts(
    operation: OperationFacts, params: Mapping[str, Any], shapes: Sequence[Shape], results: Sequence[Shape]
) -> RowFacts:
    """Returns what an equation of an `operation` with these `params`, operands of `shapes` and `results` does with
    rows.

    Where nothing is stated, elementwise operations keep rows apart, and so does what users teach with a dim rule that
    says so. All else takes its operands whole.
    """
    if operation.rows is not None:
        return operation.rows
    if len(results) == 1 and (Trait.ELEMENTWISE in operation.traits or _apart(operation, params, shapes, results)):
        return RowFacts(RowAction.APART)
    return RowFacts(RowAction.WHOLE)


def _apart(
    operation: OperationFacts, params: Mapping[str, Any], shapes: Sequence[Shape], results: Sequence[Shape]
) -> bool:
    """Tells whether an operation's dim rule promises that each row of its result is made of the same row of operands.

    Only the rules of operations that users teach do: splitjax's own label dims alike along which values move."""
    if operation.examples is not Examples.BY_DIMS or operation.dims is None or not results[0]:
        return False
    dim_map = operation.dims(shapes, results, params)
    rows = dim_map.outputs[0][0]
    if len(rows) != 1 or str(rows[0]).startswith("_") or str(rows[0]) in operation.along:
        return False
    places = [d for labels in dim_map.inputs for d, dim in enumerate(labels) if rows[0] in dim]
    once = all(sum(rows[0] in dim for dim in labels) <= 1 for labels in (*dim_map.inputs, *dim_map.outputs))
    alike = all(
        labels[0] == rows for labels, shape in zip(dim_map.inputs, shapes, strict=True) if shape[:1] == results[0][:1]
    )
    return once and alike and set(places) == {0}


def _keeps_first_dim(_params: Mapping[str, Any], before: Shape, after: Shape) -> bool:
    return after[:1] == before[:1]


def _states(names: str, keeps: Callable[[Mapping[str, Any], Shape, Shape], bool]) -> None:
    OPERATIONS.state(names, rows=RowFacts(RowAction.ARRANGES, keeps=keeps))


_states(
    "broadcast_in_dim",
    lambda params, before, after: params["broadcast_dimensions"][:1] == (0,) and after[0] == before[0],
)
_states("transpose", lambda params, before, after: params["permutation"][0] == 0)
_states("squeeze", lambda params, before, after: 0 not in params["dimensions"])
_states("reshape", _keeps_first_dim)

OPERATIONS.state("reduce_sum reduce_or", rows=RowFacts(RowAction.REDUCES, neutral=0.0))
OPERATIONS.state("reduce_and", rows=RowFacts(RowAction.REDUCES, neutral=1.0))
OPERATIONS.state("reduce_max reduce_min reduce_prod", rows=RowFacts(RowAction.REDUCES))
# They say where an array lies, all of it.
OPERATIONS.state(
    "device_put layout_constraint reshard sharding_constraint with_memory_space_constraint",
    rows=RowFacts(RowAction.WHOLE),
)


def _value(names: str, value: Callable[..., Any]) -> None:
    """States elementwise operations that are evaluated on known numbers."""
    OPERATIONS.state(names, rows=RowFacts(RowAction.APART, value=value))


_value("add add_any", lambda params, a, b: a + b)
_value("sub", lambda params, a, b: a - b)
_value("mul", lambda params, a, b: a * b)
_value("div", lambda params, a, b: np.float64(a) / b)
_value("max", lambda params, a, b: max(a, b))
_value("min", lambda params, a, b: min(a, b))
_value("pow", lambda params, a, b: np.float64(a) ** b)
_value("integer_pow", lambda params, a: np.float64(a) ** params["y"])
_value("neg", lambda params, a: -a)
_value("abs", lambda params, a: abs(a))
_value("sign", lambda params, a: np.sign(a))
_value("square", lambda params, a: a * a)
_value("sqrt", lambda params, a: np.sqrt(a))
_value("exp", lambda params, a: np.exp(a))
_value("log1p", lambda params, a: np.log1p(a))
_value("expm1", lambda params, a: np.expm1(a))
_value("tanh", lambda params, a: np.tanh(a))
_value("sin", lambda params, a: np.sin(a))
_value("cos", lambda params, a: np.cos(a))
_value("eq", lambda params, a, b: a == b)
_value("ne", lambda params, a, b: a != b)
_value("lt", lambda params, a, b: a < b)
_value("le", lambda params, a, b: a <= b)
_value("gt", lambda params, a, b: a > b)
_value("ge", lambda params, a, b: a >= b)
_value("is_finite", lambda params, a: np.isfinite(a))
_value("not", lambda params, a: not a)
_value("and", lambda params, a, b: bool(a) and bool(b))
_value("or", lambda params, a, b: bool(a) or bool(b))
_value("clamp", lambda params, low, a, high: min(max(a, low), high))
_value("convert_element_type copy reduce_precision", lambda params, a: a)
