"""Holds what is decided about the parameters of a step, as values: what `decide` and `storing` make and the rest of the
room reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Axes = tuple[str, ...]  # of size above 1, major first; () is whole


@dataclasses.dataclass(frozen=True)
class ParameterDecision:
    """Records what became of one parameter.

    - `path`: its path.
    - `kind`: the kind of its layer.
    - `axes`: per dim the axes of size above 1 that split it, major first.
    - `rule`: what the plan shows as its rule.
    - `note`: what the plan says besides.
    - `matched`: the name of the first rule that matches, or None.
    - `problem`: "misfit": the rule matched and no alternative fits; "conflict": a tie outvotes an explicit rule;
      else "".
    - `unfit`: why it does not lie as its rule would have it first: a size that does not divide, or no alternative that
      fits; else "".
    """

    path: str
    kind: str
    axes: tuple[Axes, ...]  # per dim
    rule: str  # what the plan shows
    note: str
    matched: str | None  # name of the first rule that matches
    problem: str = ""  # "misfit": the rule matched and no alternative fits; "conflict": a tie outvotes an explicit rule
    unfit: str = ""


@dataclasses.dataclass(frozen=True)
class Decisions:
    """Holds the decisions on all parameters in graph order, and the hard classes for what follows them.

    - `params`: path -> decision.
    - `classes`: hard label -> axes.
    - `owners`: hard label -> path of the first parameter that has it.
    """

    params: Mapping[str, ParameterDecision]
    classes: Mapping[int, Axes]  # hard label -> axes
    owners: Mapping[int, str]  # hard label -> path of the first parameter that has it
