"""Makes a checked `Recipe` of what a decorator was told.

A step and the options as the user wrote them come in; what every later room relies on comes out, or a typed error that
names the option. It stands apart from `splitjax.compile.entry` because that builds programs, and a mistake in an option
has to be told before anything is traced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from splitjax._plan_parts import EVERY_BLOCK
from splitjax.choosing import AutoMesh, mesh_asked_for
from splitjax.compile.entry import Recipe
from splitjax.display.figures import bytes_of
from splitjax.errors import BudgetError, TargetError
from splitjax.machines.calibration import Calibration
from splitjax.machines.targets import Target, parse_target
from splitjax.plan import BlockRemat, Plan
from splitjax.planning.tables.sync_request import parse
from splitjax.roles import read_roles
from splitjax.rules import load_rules
from splitjax.rules.ruleset import AUTO, TO_BE_CHOSEN
from splitjax.step.options import OptionError, check_options, resolve_plan
from splitjax.step.positions import make_options
from splitjax.step.remat.rematerialising import Remat


def make_recipe(fn: Callable[..., Any], given: Mapping[str, Any]) -> Recipe:
    """Returns the recipe for a step.

    **Arguments:**

    - `fn`: the step.
    - `given`: every option with its value (`splitjax.step.keywords.complete`).

    Raises `OptionError`, `MeshError`, `RuleError`, `SyncError`, `StateError`, `TargetError`, `CalibrationError` or
    `PlanError` for a value that an option cannot have."""
    check_options(fn, given)
    options = make_options(
        fn,
        given["state_argnums"],
        given["batch_argnums"],
        given["static_argnums"],
        given["static_argnames"],
        given["state_outnums"],
    )
    place = f"parallelize({getattr(fn, '__name__', fn)!s})"
    target, pinned = given["target"], resolve_plan(given["plan"])
    return Recipe(
        fn,
        options,
        TO_BE_CHOSEN if _is_auto(given["rules"]) else load_rules(given["rules"]),
        pinned,
        given["donate"],
        given["unknown"],
        returns_state=True,
        uneven=given["uneven"],
        group_comm=given["group_comm"],
        shard_state=given["shard_state"] is True,
        microbatches=_microbatches(given["microbatches"], pinned),
        chooses_state=_is_auto(given["shard_state"]),
        chooses_microbatches=_is_auto(given["microbatches"]),
        remat=_remat(given["remat"], pinned),
        chooses_remat=_is_auto(given["remat"]),
        sync=parse(given["sync"], place),
        backprop=given["backprop"],
        verify=given["verify"],
        memory_budget_bytes=_budget_bytes(given, place),
        target=read_target(target, f"{place}, target"),
        calibration=_read_calibration(target),
        roles=read_roles(given["roles"], f"{place}, roles"),
        compile_best=_compile_best(given, place),
    )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _microbatches(asked: Any, pinned: Plan | None) -> int | None:
    """Returns the number of microbatches that is `asked` for; where that is to be chosen, the one that a `pinned` plan
    has, if there is one."""
    if not _is_auto(asked):
        return None if asked is None else int(asked)
    boundaries = () if pinned is None else pinned.boundaries
    return max((each.num_parts for each in boundaries if each.how == "microbatches"), default=None)


def _remat(asked: Any, pinned: Plan | None) -> Remat:
    """Returns which blocks are `asked` to be computed again; where nothing is said, or that is to be chosen, those that
    a `pinned` plan has."""
    if asked is None or _is_auto(asked):
        return () if pinned is None else pinned.remat
    named = {EVERY_BLOCK: asked} if isinstance(asked, str) else asked
    return tuple(BlockRemat(name, keeps) for name, keeps in named.items())


def read_target(target: object, place: str) -> Target | None:
    """Returns the machine that the option `target` names; None where it names none, or is what was measured of this
    one. Raises `TargetError` for what is none of these."""
    if target is None or isinstance(target, Target):
        return target
    return None if _is_calibration(target) else parse_target(cast("str", target), place)


def _is_calibration(target: object) -> bool:
    """Whether the option `target` is a calibration, or the path of its file."""
    return isinstance(target, (Calibration, os.PathLike)) or (isinstance(target, str) and target.endswith(".json"))


def _read_calibration(target: Any) -> Calibration | None:
    """Returns the calibration that the option `target` is, or names the file of; None for anything else. Raises
    `CalibrationError` for a file that cannot be read."""
    if not _is_calibration(target):
        return None
    return target if isinstance(target, Calibration) else Calibration.load(target)


def _budget_bytes(given: Mapping[str, Any], place: str) -> float:
    """Returns the option `memory_budget` of those `given` in bytes, infinity for None. Raises `BudgetError` for what is
    no size, and where nothing is chosen."""
    budget = given["memory_budget"]
    num_bytes = read_budget(budget, place)
    if budget is not None and not _is_chosen(given):
        raise BudgetError(
            "a budget decides among layouts, and rules and mesh are said already",
            value=budget,
            place=f"{place}, memory_budget",
            remedy='give it beside rules="auto", mesh="auto", shard_state="auto", remat="auto" or microbatches="auto";'
            " `splitjax plan --assert-max-memory` checks what rules need",
        )
    return num_bytes


def _is_chosen(given: Mapping[str, Any]) -> bool:
    """Returns whether one of the options `given` is left to be chosen."""
    chosen = any(_is_auto(given[option]) for option in ("rules", "shard_state", "microbatches", "remat"))
    return chosen or isinstance(mesh_asked_for(given["mesh"]), AutoMesh)


def _compile_best(given: Mapping[str, Any], place: str) -> int:
    """Returns the option `compile_best` of those `given`. Raises `TargetError` where there is no machine to compile
    for, and `OptionError` where nothing is chosen."""
    number, target = int(given["compile_best"]), given["target"]
    if number and not _is_chosen(given):
        raise OptionError(
            "layouts are compiled to choose among them, and rules and mesh are said already",
            value=number,
            place=f"{place}, compile_best",
            remedy='give it beside rules="auto" or mesh="auto"; step.check_target(...) compiles a layout that is said',
        )
    if number and (target is None or _is_calibration(target)):
        raise TargetError(
            "the machine to compile for is not said",
            value=target,
            place=f"{place}, compile_best",
            remedy='name it: target="tpu:v5e:4x4"',
        )
    return number


def read_budget(budget: str | int | None, place: str) -> float:
    """Returns a budget in bytes, infinity for None. Raises `BudgetError`, which names the `place`, for what is no
    size."""
    if budget is None:
        return math.inf
    try:
        num_bytes = bytes_of(budget) if isinstance(budget, str) else budget
    except ValueError:
        num_bytes = 0
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes <= 0:
        raise BudgetError(
            "a budget is a number of bytes",
            value=budget,
            place=f"{place}, memory_budget",
            remedy='write it as "16GiB", or as a whole number above 0',
        )
    return num_bytes


def target_and_budget(
    recipe: Recipe, on: str | Target | None, memory_budget: int | str | None, place: str
) -> tuple[Target, int | None]:
    """Returns the machine that a step is to be checked on, and what a device of it may need in bytes, None for what it
    has: as said, or else as the step of `recipe` was decorated.

    Raises `TargetError` and `BudgetError`, which name the `place`, for what is no machine and no size."""
    target = recipe.target if on is None else on if isinstance(on, Target) else parse_target(on, f"{place}, on")
    if target is None:
        raise TargetError(
            "the machine to compile for is not said",
            place=place,
            remedy='name it: on="tpu:v5e:4x4", or decorate the step with target=',
        )
    budget = recipe.memory_budget_bytes if memory_budget is None else read_budget(memory_budget, place)
    return target, None if math.isinf(budget) else int(budget)
