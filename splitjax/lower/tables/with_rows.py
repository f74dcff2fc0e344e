"""Runs a gradient boundary whose tables are synchronised by rows: wraps the way in which the edited boundary runs.

The boundary's lookups are edited once, while the step is planned. Its evaluation pulls rows that workers own, runs the
edited boundary, and exchanges the rows of its tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from splitjax.lower.way import Wrapping
from splitjax.planning.tables.sparse_step import TableEdit
from splitjax.planning.ways import BoundaryCall


@dataclasses.dataclass(frozen=True, eq=False)
class WithRows(Wrapping):
    """Runs a boundary in the way of another, with gradients of tables as rows.

    - `inner`: how the edited boundary runs. `edit`: that boundary, and its tables.
    """

    edit: TableEdit

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`, with `Rows` for the gradients of tables."""
        assert call.rows is not None, "a step with tables brings what exchanges their rows"
        deltas = call.rows.pull(self.edit, call.operands)
        edited = dataclasses.replace(call, eqn=self.edit.edited.eqn, operands=[*call.operands, *deltas])
        return call.rows.push(self.edit, call.eqn, self.inner.evaluate(edited))
