"""Reads what is asked for with `sync=`: a scheme, its name, "auto", or one of these by parameter.

The option's value goes in, a `SyncRequest` comes out, which is asked by the path of a parameter. Whoever plans a table
need not know in how many ways it can be asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax._registry import near
from splitjax.errors import SyncError, UnavailableError
from splitjax.rules.match import glob_pattern
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.schemes import ByRows, SchemeCosts
from splitjax.sync.costs.shipped import COSTS, costs_by_name

AUTO: str = "auto"
EVERY: str = "**"


@dataclasses.dataclass(frozen=True)
class SyncRequest:
    """Says by parameter how its rows are to be synchronised; parameters without a match are dense.

    - `choices`: patterns of parameter paths with what they ask for, first match first.
    """

    choices: tuple[tuple[str, ByRows], ...]

    @property
    def is_dense(self) -> bool:
        """Tells whether nothing but the dense exchange is asked for."""
        return all(isinstance(choice.scheme, DenseCosts) for _, choice in self.choices)

    def of(self, path: str) -> ByRows:
        """Gives what is asked for the parameter at `path`; its scheme is a `SchemeCosts`, or `"auto"`."""
        return next(
            (choice for pattern, choice in self.choices if glob_pattern(pattern).fullmatch(path)), ByRows(DenseCosts())
        )

    def names(self, path: str) -> bool:
        """Tells whether a pattern fits the parameter at `path`."""
        return any(glob_pattern(pattern).fullmatch(path) for pattern, _ in self.choices)

    def check(self, paths: Sequence[str]) -> None:
        """Raises `SyncError` for a pattern that fits none of `paths`, those of a step's parameters."""
        for pattern, _ in self.choices:
            if pattern != EVERY and not any(glob_pattern(pattern).fullmatch(path) for path in paths):
                close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
                raise SyncError(
                    "no parameter has such a path",
                    value=pattern,
                    place="parallelize, sync",
                    remedy=f"did you mean {', '.join(map(repr, close))}?"
                    if close
                    else "see the paths in `step.plan(...).leaves`; `**/name` finds any depth",
                )


DENSE: SyncRequest = SyncRequest(())


def parse(sync: Any, place: str) -> SyncRequest:
    """Reads the value `sync` of the option. `place`: what an error names as its place.

    Raises `SyncError` for what the option may not be, `UnavailableError` for a `wire_dtype` that the scheme lacks.
    """
    entries = sync.items() if isinstance(sync, Mapping) else [(EVERY, sync)]
    choices = []
    for pattern, given in entries:
        choice = given if isinstance(given, ByRows) else ByRows(given)
        scheme = choice.scheme
        known = isinstance(scheme, SchemeCosts) or (isinstance(scheme, str) and (scheme == AUTO or COSTS.knows(scheme)))
        if not isinstance(pattern, str) or not known or not isinstance(choice.lazy, bool):
            raise SyncError(
                f"sync has no such value{near(scheme, [*COSTS, AUTO])}",
                value=sync,
                place=f"{place}, sync",
                remedy=(
                    f'use one of {", ".join(COSTS)}, "auto", a scheme of splitjax.sync, splitjax.sync.ByRows, or'
                    " {parameter pattern: one of these}; splitjax.sync.register_scheme makes a scheme of your own known"
                ),
            )
        scheme = scheme if scheme == AUTO else costs_by_name(scheme)
        if choice.wire_dtype is not None:
            scheme = _rounded(scheme, choice.wire_dtype, place)
        wire_dtype = getattr(scheme, "wire_dtype", None)
        if wire_dtype not in (None, "bfloat16"):
            raise UnavailableError(
                "values are sent as they are or as bfloat16, which has float32's range: a residual could not make up"
                " for infinities",
                value=wire_dtype,
                place=f"{place}, sync, wire_dtype",
                remedy='pass wire_dtype="bfloat16" or leave it None',
            )
        choices.append((pattern, dataclasses.replace(choice, scheme=scheme, wire_dtype=None)))
    return SyncRequest(tuple(choices))


def _rounded(scheme: Any, wire_dtype: str, place: str) -> SchemeCosts:
    """Gives a scheme with its values rounded on the wire."""
    rounding = [
        name for name, cls in COSTS.items() if any(field.name == "wire_dtype" for field in dataclasses.fields(cls))
    ]
    if scheme == AUTO or scheme.name not in rounding:
        problem = (
            "auto chooses among schemes that keep the numbers"
            if scheme == AUTO
            else f"{scheme.name} sends values as they are"
        )
        raise UnavailableError(
            problem, value=scheme, place=f"{place}, sync, wire_dtype",
            remedy=f"name a scheme that rounds and keeps the rest: {', '.join(rounding)}",
        )  # fmt: skip
    return dataclasses.replace(scheme, wire_dtype=wire_dtype)
