"""Makes the memory timelines of a signature of a step: predicted of its program, and read from what XLA compiles."""

from __future__ import annotations

from typing import Any

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.memory import placed_program
from splitjax.cost.memory.lifetimes import predict_timeline
from splitjax.report.memory.value import MemoryTimelines, read_timeline
from splitjax.step.arguments import argument_names


def step_timelines(
    recipe: Recipe, entry: CompiledEntry, args: tuple[Any, ...] = (), device: Any = None
) -> MemoryTimelines:
    """Returns what a device stores when.

    **Arguments:** `recipe`: the step. `entry`: a signature of it. `args`: the arguments of the call, arrays or
    `ShapeDtypeStruct`s. `device`: one of those to compile it for; None not to compile it.

    Raises `UnavailableError` for a step that runs as several programs, one a worker."""
    predicted = predict_timeline(placed_program(recipe, entry, "memory"))
    if device is None:
        return MemoryTimelines(recipe.name, predicted)
    program = entry.program(0 if recipe.backprop is None else recipe.backprop.warmup_steps)
    with _compat.metadata_in_cache_key(device):
        compiled = program.lower(*entry.lowered_operands(args)).compile()
    names = argument_names(entry.bound, getattr(program, "num_before", 0))
    return MemoryTimelines(recipe.name, predicted, read_timeline(compiled, entry.plan, entry.graph, names))
