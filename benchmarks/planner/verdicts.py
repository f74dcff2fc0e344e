"""How often a prediction says rightly whether a step fits into a budget, before it is compiled.

The verdict is that of `step.check_target`: a step fits where the upper bound is within the budget, does not fit where
the estimate is beyond it, and may fit between the two, where only its compiler knows. Cells of a page come in, with
what was predicted and compiled of each; counts come out. Budgets are from half to twice what the compiler needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

SHARES = tuple(2.0 ** (step / 20) for step in range(-20, 21))  # budgets over what the compiler needs
MOST_FALSE = {"fits": 0.0, "does not fit": 0.10}  # goals: of the verdicts that say so, how many may be false


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """Counts verdicts. `fits`, `does_not`, `may`: by what they say. `false_fits`, `false_does_not`: those of the first
    two that the compiler contradicts."""

    fits: int
    false_fits: int
    does_not: int
    false_does_not: int
    may: int

    @property
    def is_met(self) -> dict[str, bool]:
        """Which goals are met."""
        return {
            "fits": self.false_fits <= MOST_FALSE["fits"] * self.fits,
            "does not fit": self.false_does_not <= MOST_FALSE["does not fit"] * self.does_not,
        }


def counted(cells: Sequence[Mapping[str, Any]]) -> Verdicts:
    """The verdicts on `cells` of a page, each against every budget."""
    from splitjax.plan import Memory
    from splitjax.report.target.value import predicted_fit

    found = {(said, holds): 0 for said in (True, False, None) for holds in (True, False)}
    for cell in cells:
        arguments, expected, needed = cell["argument_bytes"], cell["estimate_bytes"], cell["total_bytes"]
        memory = Memory(arguments, expected - arguments, expected, cell["bound_bytes"])
        for share in SHARES:
            budget = int(needed * share)
            found[predicted_fit(memory, budget), needed <= budget] += 1
    return Verdicts(
        fits=found[True, True] + found[True, False], false_fits=found[True, False],
        does_not=found[False, True] + found[False, False], false_does_not=found[False, True],
        may=found[None, True] + found[None, False],
    )  # fmt: skip


def lines(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The lines of a page on the verdicts. `groups`: cells by what they are for, such as `held out`."""
    from benchmarks._common import table

    rows = []
    for kind, cells in groups.items():
        found = counted(cells)
        of = lambda false, said, name, met=found.is_met: (
            f"{false / said if said else 0:.1%} of {MOST_FALSE[name]:.0%}{'' if met[name] else ' (missed)'}"
        )
        rows.append([
            kind, str(found.fits), of(found.false_fits, found.fits, "fits"),
            str(found.does_not), of(found.false_does_not, found.does_not, "does not fit"), str(found.may),
        ])  # fmt: skip
    return [
        f"What `step.check_target` says before it compiles, of every cell against {len(SHARES)} budgets from half to"
        " twice what its compiler needs, evenly in their ratios. A step *fits* where the upper bound is within the"
        " budget, *does not fit* where the estimate is beyond it, and *may fit* between the two:",
        "",
        *table(
            ["cells", "said to fit", "of these false", "said not to fit", "false among those", "may fit"],
            rows,
        ),
        "",
    ]  # fmt: skip
