"""Holds what removes the involuntary full rematerialisations of a step: changes that were compiled, as values."""

from __future__ import annotations

import dataclasses

from splitjax.display import registry
from splitjax.mesh import MeshShape
from splitjax.report.attribute import ReportedCollective


@dataclasses.dataclass(frozen=True)
class CompiledCost:
    """Holds what a step takes of a device as XLA compiled it.

    **Attributes:**

    - `seconds`: its compiled products, twice its arguments and temporaries through memory, and its collectives, one
      after the other, by the figures of a machine.
    - `sent_bytes`: what a device sends in a step. `memory_bytes`: arguments, temporaries and results, where the
      backend says; else None.
    - `num_rematerialised`: arrays that are gathered whole although every device keeps a part.
    """

    seconds: float
    sent_bytes: int
    memory_bytes: int | None
    num_rematerialised: int


@dataclasses.dataclass(frozen=True)
class Change:
    """Describes a change of the step or of its layout that was compiled, with everything else as it is.

    **Attributes:**

    - `name`: in words. `code`: what to write: a line of the step, or a rule as TOML.
    - `removes`: which of `Remedies.gathered` are gone with it, by position.
    - `cost`: of the step with it; None where it cannot be had, and `refused` says why.
    """

    name: str
    code: str
    removes: tuple[int, ...] = ()
    cost: CompiledCost | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Says what removes the arrays that a step gathers whole to keep a part of: XLA's involuntary full
    rematerialisations. Print it, or show it in a notebook.

    **Attributes:**

    - `step`, `mesh`: of the step. `machine`: whose figures the seconds are made of.
    - `gathered`: the collectives that gather them, as in `Report.rematerialised`.
    - `planned`: the cost of the step as it is.
    - `changes`: what was tried, the cheapest first; what cannot be had last.
    """

    step: str
    mesh: MeshShape
    machine: str
    gathered: tuple[ReportedCollective, ...]
    planned: CompiledCost
    changes: tuple[Change, ...] = ()

    def cheapest(self, number: int) -> Change | None:
        """Returns the cheapest change that removes `gathered[number]` and brings no other; None where no change that
        was tried does."""
        before = self.planned.num_rematerialised
        return next(
            (
                each
                for each in self.changes
                if number in each.removes and each.cost is not None and each.cost.num_rematerialised < before
            ),
            None,
        )

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)
