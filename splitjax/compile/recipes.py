"""Makes a checked `Recipe` of what a decorator was told.

A step and the options as the user wrote them come in; what every later room relies on comes out, or a typed error that
names the option. It stands apart from `splitjax.compile.entry` because that builds programs, and a mistake in an option
has to be told before anything is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from splitjax.compile.entry import Recipe
from splitjax.planning.tables.sync_request import parse
from splitjax.roles import read_roles
from splitjax.rules import load_rules
from splitjax.step.options import check_options, resolve_plan
from splitjax.step.positions import make_options


def make_recipe(fn: Callable[..., Any], given: Mapping[str, Any]) -> Recipe:
    """Returns the recipe for a step.

    **Arguments:**

    - `fn`: the step.
    - `given`: every option with its value (`splitjax.step.keywords.complete`).

    Raises `OptionError`, `MeshError`, `RuleError`, `SyncError`, `StateError` or `PlanError` for a value that an option
    cannot have."""
    check_options(fn, given)
    options = make_options(
        fn,
        given["state_argnums"],
        given["batch_argnums"],
        given["static_argnums"],
        given["static_argnames"],
        given["state_outnums"],
    )
    return Recipe(
        fn,
        options,
        load_rules(given["rules"]),
        resolve_plan(given["plan"]),
        given["donate"],
        given["unknown"],
        returns_state=True,
        uneven=given["uneven"],
        group_comm=given["group_comm"],
        shard_state=given["shard_state"],
        sync=parse(given["sync"], f"parallelize({getattr(fn, '__name__', fn)!s})"),
        backprop=given["backprop"],
        verify=given["verify"],
        roles=read_roles(given["roles"], f"parallelize({getattr(fn, '__name__', fn)!s}), roles"),
    )
