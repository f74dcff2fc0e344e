"""Compiles a signature of a step, and makes its report; nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.mesh import platform_of
from splitjax.report.value import Report, make_report
from splitjax.step.arguments import argument_names


def step_report(
    recipe: Recipe,
    entry: CompiledEntry,
    args: tuple[Any, ...],
    device: Any,
    options: Mapping[str, int | str] | None = None,
) -> Report:
    """Returns the report of what runs once the warm-up of partial backpropagation is over, or at once where there is
    none.

    **Arguments:** `recipe`: the step. `entry`: a signature of it. `args`: the arguments of the call, arrays or
    `ShapeDtypeStruct`s. `device`: one of those to compile it for. `options`: of the compiler."""
    program = entry.program(0 if recipe.backprop is None else recipe.backprop.warmup_steps)
    with _compat.metadata_in_cache_key(device):
        lowered = program.lower(*entry.lowered_operands(args))
        compiled = lowered.compile(compiler_options=dict(options) if options else None)
    names = argument_names(entry.bound, getattr(program, "num_before", 0))
    return make_report(compiled, entry.plan, entry.graph, names, step=recipe.name, platform=platform_of(entry.mesh))
