"""Compiles a signature of a step, and makes its report; nothing runs."""

from __future__ import annotations

from typing import Any

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.mesh import platform_of
from splitjax.report.value import Report, make_report
from splitjax.step.arguments import argument_names


def step_report(recipe: Recipe, entry: CompiledEntry, args: tuple[Any, ...], device: Any) -> Report:
    """Returns the report of what runs once the warm-up of partial backpropagation is over, or at once where there is
    none.

    **Arguments:** `recipe`: the step. `entry`: a signature of it. `args`: the arguments of the call, arrays or
    `ShapeDtypeStruct`s. `device`: one of those to compile it for."""
    program = entry.program(0 if recipe.backprop is None else recipe.backprop.warmup_steps)
    with _compat.metadata_in_cache_key(device):
        compiled = program.lower(*entry.operands(args, entry.residuals)).compile()
    names = argument_names(entry.bound, getattr(program, "num_before", 0))
    return make_report(compiled, entry.plan, entry.graph, names, step=recipe.name, platform=platform_of(entry.mesh))
