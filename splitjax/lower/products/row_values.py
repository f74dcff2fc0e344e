"""Keeps values with one row per row of a table as what they are computed from, until the touched rows are known.

The equations of an update come in, whose operands may be `Rows`; `Rows` come out, or sums over them, and in the end the
table's state with the touched rows replaced. It exists because a table has many rows and a batch touches few: the dense
update would read and write all of them.

Behind a gradient boundary whose tables give rows (`lookups.py`), the update's operations on a table's gradient and
state are not bound but written down as `Rows`. What is then computed: sums over all rows (a norm), from the touched
ones, for the others add nothing; and the new rows of the state. `trace.row_update` has found before that this gives the
numbers of the dense update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax import _compat
from splitjax.primitives.calls import CALLS, call_body
from splitjax.primitives.operation import RowAction, RowFacts
from splitjax.primitives.rows import row_facts
from splitjax.primitives.table import OPERATIONS
from splitjax.sync.local import set_rows, take_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Stands for a value whose leading dim counts a table's rows.

    - `shape`, `dtype`: of the whole value, which is not made.
    - `table`: the table's number; None for what is alike for the rows of any table (a number laid out over them).
    - `behind`: whether it depends on the table's gradient.
    - `leaf`, `array`: of a leaf of the state, its flat argument and its value. `eqn`, `operands`: of what an operation
      made. Neither: the gradient itself.
    """

    shape: tuple[int, ...]
    dtype: Any
    table: int | None
    behind: bool
    leaf: int | None = None
    array: Any = None
    eqn: Any = None
    operands: tuple[Any, ...] = ()

    def arrays(self) -> Iterator[Any]:
        """Yields every array that computing the rows takes, leaves of the state aside; some more than once."""
        for operand in self.operands:
            if isinstance(operand, Rows):
                yield from operand.arrays()
            elif not isinstance(operand, (int, float, complex, bool)):
                yield operand


@dataclasses.dataclass(frozen=True, eq=False)
class RowView:
    """Computes some rows of a table, where they are needed.

    - `ids`: i32[k], different positions in the given `leaves`; those past the end name no row.
    - `gradient`: f[k, *row], the gradient of these rows.
    - `leaves`: the arrays of the state, by flat argument.
    - `given`: all else that is read, by `id` of what it stands for.
    - `is_sorted`: whether `ids` ascend.
    - `made`: remembers what was computed, by `id`.
    """

    ids: jax.Array
    gradient: jax.Array
    leaves: Mapping[int, Any]
    given: Mapping[int, Any]
    is_sorted: bool = True
    made: dict[int, Any] = dataclasses.field(default_factory=dict)

    def rows(self, value: Any) -> Any:
        """Returns these rows of `value`; an array that is no `Rows` is itself, or what is given for it."""
        if not isinstance(value, Rows):
            return self.given.get(id(value), value)
        if id(value) not in self.made:
            self.made[id(value)] = self._compute(value)
        return self.made[id(value)]

    def reduced(self, eqn: Any, value: Rows, num_rows: int) -> Any:
        """Evaluates the reduction `eqn` of `value` over these rows only, of a table of `num_rows`.

        Ids past the end take no part: what is computed from zeros for them may be no number.
        """
        rows = self.rows(value)
        is_row = (self.ids < num_rows).reshape(-1, *[1] * (rows.ndim - 1))
        neutral = _facts(eqn).neutral
        assert neutral is not None, "a reduction without a neutral number is not admitted"
        return _compat.rebind(eqn, [jnp.where(is_row, rows, jnp.asarray(neutral, rows.dtype))])[0]

    def _compute(self, value: Rows) -> Any:
        if value.array is not None:
            assert value.leaf is not None, "rows of the state without the flat argument that they are"
            return take_rows(self.leaves[value.leaf], self.ids)
        if value.eqn is None:
            return self.gradient.astype(value.dtype)
        eqn, size = value.eqn, self.ids.shape[0]
        for name in ("shape", "new_sizes"):
            if name in eqn.params:
                eqn = _compat.with_params(eqn, **{name: (size, *eqn.params[name][1:])})
        return _compat.rebind(eqn, [self.rows(operand) for operand in value.operands])[0]


@dataclasses.dataclass(frozen=True, eq=False)
class RowWriter:
    """Evaluates the equations around a boundary, as far as they act on rows.

    - `num_rows`: the numbers of rows of the tables.
    - `total`: (reduction's equation, what it reduces over all touched rows) -> its result.
    - `holds_boundary`: whether an equation has a gradient boundary inside.
    """

    num_rows: frozenset[int]
    total: Callable[[Any, Rows], Any]
    holds_boundary: Callable[[Any], bool]

    def equation(self, eqn: Any, values: list[Any], walk: Callable[[Any, list[Any]], list[Any]]) -> list[Any] | None:
        """Evaluates the equation `eqn` on `values`, and returns its results.

        None where it is to be bound as it is, with `values` then free of `Rows` (in place). `walk(body, operands)`
        evaluates the body of a call.
        """
        name, rows = eqn.primitive.name, [value for value in values if isinstance(value, Rows)]
        if not rows and not any(v.aval.shape[:1] and v.aval.shape[0] in self.num_rows for v in eqn.outvars):
            return None
        if name in CALLS and self.holds_boundary(eqn):
            return None
        body = call_body(eqn) if name in CALLS else None
        if body is not None:
            return walk(body, values)
        if not rows:
            is_spread = name == "broadcast_in_dim" and 0 not in eqn.params["broadcast_dimensions"]
            return [_of(eqn, values, None)] if is_spread else None
        tables = {value.table for value in rows} - {None}
        if name == "optimization_barrier" and len(tables) <= 1:
            return values
        facts = _facts(eqn)
        if (
            len(tables) <= 1
            and len(eqn.outvars) == 1
            and (facts.action is RowAction.APART or _keeps_rows(eqn, facts, rows[0]))
        ):
            return [_of(eqn, values, next(iter(tables), None))]
        if facts.action is RowAction.REDUCES and rows[0].behind:
            if 0 not in eqn.params["axes"]:
                return [_of(eqn, values, rows[0].table)]
            return [self.total(eqn, rows[0])]
        values[:] = all_dense(values)
        return None


def _of(eqn: Any, operands: Sequence[Any], table: int | None) -> Rows:
    """Writes an operation down as the rows that it would make."""
    aval = eqn.outvars[0].aval
    return Rows(
        tuple(aval.shape),
        aval.dtype,
        table,
        any(isinstance(operand, Rows) and operand.behind for operand in operands),
        eqn=eqn,
        operands=tuple(operands),
    )


def _facts(eqn: Any) -> RowFacts:
    """Returns what an equation does with rows."""
    shapes = [[getattr(v.aval, "shape", ()) for v in side] for side in (eqn.invars, eqn.outvars)]
    return row_facts(OPERATIONS.of(eqn.primitive.name, eqn.params), eqn.params, *shapes)


def _keeps_rows(eqn: Any, facts: RowFacts, value: Rows) -> bool:
    """Returns whether an operation that changes shapes leaves every row of a value to itself."""
    after = tuple(eqn.outvars[0].aval.shape)
    return facts.keeps is not None and after[:1] == value.shape[:1] and facts.keeps(eqn.params, value.shape, after)


def all_dense(values: Sequence[Any]) -> list[Any]:
    """Returns what `dense` says of each of `values`."""
    return [dense(value) for value in values]


def dense(value: Any) -> Any:
    """Returns the whole of `value`, which does not depend on a gradient; an array is itself."""
    if not isinstance(value, Rows):
        return value
    if value.array is not None:
        return value.array
    if value.behind:
        raise AssertionError("a gradient of rows reached an operation that the analysis of its update did not admit")
    return _compat.rebind(value.eqn, [dense(operand) for operand in value.operands])[0]


def written(view: RowView, new: Mapping[int, Rows]) -> dict[int, jax.Array]:
    """Returns the leaves of the state with the rows of `view` replaced; all other rows are as they were.

    `new` maps the flat argument of each leaf to what its rows become; so does the result to whole arrays.
    """
    rows = {leaf: view.rows(value) for leaf, value in new.items()}
    return {
        leaf: set_rows(view.leaves[leaf], view.ids, new_rows.astype(view.leaves[leaf].dtype), is_sorted=view.is_sorted)
        for leaf, new_rows in rows.items()
    }
