"""Checks the decorator's options: what a value may be.

The values that a user gave come in; nothing comes out but errors, so that a mistake is named at the decorator and not
at the first call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from splitjax._plan_parts import DOTS, EVERY_BLOCK, NOTHING
from splitjax.errors import PlanError, SplitjaxError, TraceError
from splitjax.partial.request import PartialBackprop
from splitjax.plan import Plan
from splitjax.rules.ruleset import AUTO

_GROUP_COMM = ("auto", "gather", "turns", "modulo")


class OptionError(SplitjaxError, ValueError):
    """Is raised for an option of `parallelize` that is none of its documented values."""


def check_options(fn: object, given: Mapping[str, Any]) -> None:
    """Raises `OptionError` for values that are not documented.

    **Arguments:** `fn`: what is decorated. `given`: by name every option of `splitjax.parallelize`, with what the user
    gave for it, which may be any value at all (`splitjax.step.keywords.complete`). Rules, `sync`, pinned plans and
    argument numbers are checked where they are read."""
    mesh, group_comm, backprop = given["mesh"], given["group_comm"], given["backprop"]
    shard_state, verify = given["shard_state"], given["verify"]
    place = f"parallelize({getattr(fn, '__name__', fn)!s})"
    if not callable(fn):
        raise OptionError(
            "parallelize decorates a function", value=fn, place="parallelize", remedy="pass the training step"
        )
    _one_of("unknown", given["unknown"], ("error", "gather"), place)
    _one_of("uneven", given["uneven"], ("error", "pad"), place)
    _one_of("group_comm", group_comm, _GROUP_COMM, place)
    if backprop is not None and not isinstance(backprop, PartialBackprop):
        raise OptionError(
            "backprop has no such value",
            value=backprop,
            place=f"{place}, backprop",
            remedy="pass a splitjax.PartialBackprop, or None for full backpropagation",
        )
    if backprop is not None and group_comm in ("turns", "modulo"):
        raise OptionError(
            "partial backpropagation and group communication in turns both decide how a boundary runs",
            value=group_comm,
            place=f"{place}, group_comm",
            remedy='use group_comm="gather" or "auto" with backprop=',
        )
    if not isinstance(shard_state, bool) and not (isinstance(shard_state, str) and shard_state == AUTO):
        raise OptionError(
            "shard_state is true or false, or chosen",
            value=shard_state,
            place=f"{place}, shard_state",
            remedy='pass True to shard the optimizer state and gradients of whole parameters, or "auto" to have it'
            " chosen",
        )
    microbatches = given["microbatches"]
    is_number = isinstance(microbatches, (int, np.integer)) and not isinstance(microbatches, bool) and microbatches > 0
    if not (microbatches is None or is_number or (isinstance(microbatches, str) and microbatches == AUTO)):
        raise OptionError(
            "microbatches is a positive whole number, None, or chosen",
            value=microbatches,
            place=f"{place}, microbatches",
            remedy='give the number of parts in which a device takes its gradient, or "auto" to have it chosen',
        )
    _check_remat(given["remat"], place)
    if verify not in (None, "first"):
        raise OptionError(
            "verify has no such value",
            value=verify,
            place=f"{place}, verify",
            remedy=(
                'use "first" to verify the step before its first call, or None; step.verify(...) does it at any time'
            ),
        )
    compile_best = given["compile_best"]
    is_number = isinstance(compile_best, (int, np.integer)) and not isinstance(compile_best, bool)
    if not is_number or compile_best < 0:
        raise OptionError(
            "compile_best is how many layouts are compiled at most before one is chosen",
            value=compile_best,
            place=f"{place}, compile_best",
            remedy="give a whole number, 0 for none",
        )
    if isinstance(mesh, str) and mesh != AUTO:
        raise OptionError(
            "a mesh is no string",
            value=mesh,
            place=f"{place}, mesh",
            remedy='give {"data": 2, "model": 4}, or "auto" to have it chosen',
        )


def _check_remat(remat: Any, place: str) -> None:
    """Raises `OptionError` for what says nothing of which blocks are computed again."""
    named = remat if isinstance(remat, Mapping) else {EVERY_BLOCK: remat}
    is_left = remat is None or (isinstance(remat, str) and remat == AUTO)
    if not is_left and not all(isinstance(name, str) and keeps in (DOTS, NOTHING) for name, keeps in named.items()):
        raise OptionError(
            "remat is what repeated blocks keep for the backward pass, None, or chosen",
            value=remat,
            place=f"{place}, remat",
            remedy=f'give "{DOTS}" or "{NOTHING}", for all blocks or as {{"params/block*": "{DOTS}"}}, or "auto" to'
            " have it chosen",
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...], place: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(
            f"{name} has no such value",
            value=value,
            place=f"{place}, {name}",
            remedy=f"use one of {', '.join(allowed)}",
        )


def resolve_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """Returns a pinned `plan` as a value: as it is, or read from its JSON file. Raises `PlanError` for anything else,
    and for a file that is no plan."""
    if not (plan is None or isinstance(plan, (Plan, str, os.PathLike))):
        raise PlanError(
            "a plan to pin is a splitjax.Plan, or the path of its JSON file",
            value=plan,
            place="parallelize, plan",
            remedy="give what step.plan(...) returned, or the file that `plan.save` wrote",
        )
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


def reject_mutating_modules(args: tuple[Any, ...], name: str) -> None:
    """Raises `TraceError` where the arguments `args` of the plain step called `name` hold NNX modules or optimizers:
    their updates would be lost without a word."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    import jax

    for number, arg in enumerate(args):
        for node in jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, nnx.Module | nnx.Optimizer)):
            if isinstance(node, nnx.Module | nnx.Optimizer):
                raise TraceError(
                    f"argument {number} is an NNX {type(node).__name__}, which a step changes in place; a plain"
                    " parallel step would throw those changes away",
                    value=type(node).__name__,
                    place=f"call of {name}",
                    remedy=(
                        "decorate with splitjax.nnx.parallelize, or pass nnx.split's state and merge inside the step"
                    ),
                )
