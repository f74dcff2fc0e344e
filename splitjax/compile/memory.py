"""Predicts what a signature's program needs of a device's memory, by the lifetimes of its arrays.

An entry comes in, which has its plan and its program; the program is traced, as it would be to compile it, which
it is not, and `cost.memory.lifetimes` is asked.
"""

from __future__ import annotations

from typing import Any

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.cost.memory.lifetimes import PlacedProgram, ProgramMemory, predict_program_memory
from splitjax.cost.memory.reading import split_of
from splitjax.errors import SplitjaxError, UnavailableError
from splitjax.mesh import device_kind_of, platform_of
from splitjax.plan import Memory


def program_memory(recipe: Recipe, entry: CompiledEntry) -> ProgramMemory:
    """Predicts the memory of the program that runs once the warm-up of partial backpropagation is over, or at once
    where there is none.

    **Arguments:** `recipe`: the step. `entry`: a signature of it.

    Raises `UnavailableError` for a step that runs as several programs, one a worker."""
    return predict_program_memory(placed_program(recipe, entry, "memory"))


def placed_program(recipe: Recipe, entry: CompiledEntry, what: str) -> PlacedProgram:
    """Returns the program of a step with what is decided of its arrays; it is traced, and not compiled.

    **Arguments:** `what`: is to be predicted of it, for errors: `memory` or `time`. The others are those of
    `program_memory`, as is what it raises."""
    program: Any = entry.program(0 if recipe.backprop is None else recipe.backprop.warmup_steps)
    program = getattr(program, "jitted", program)
    if not hasattr(program, "trace"):
        raise UnavailableError(
            f"the {what} of a step whose workers run programs of their own is not predicted",
            value=type(program).__name__,
            place=f"{recipe.name}.{what}",
            remedy="ask step.report(...), which compiles it, or predict the step without backprop=",
        )
    jaxpr = program.trace(*entry.operands(entry.abstract_args, entry.residuals)).jaxpr
    inner, _ = _compat.open_jaxpr(jaxpr)
    leaves = [split_of(leaf.spec, len(leaf.shape)) for leaf in entry.plan.leaves]
    # What rounding took away comes before the step's own operands, and goes behind its results. Programs of several
    # depths have further operands in front.
    residuals = [
        split_of(tuple(entry.residual_shardings[name].spec), len(entry.residuals[name].shape))
        for name in sorted(entry.residuals)
    ]
    first, num_results = len(inner.invars) - len(leaves), len(inner.outvars)
    splits = [None] * (first - len(residuals)) + residuals + leaves
    donated = {target: first + source for source, target in entry.matched.items()}
    donated |= {num_results - k: first - k for k in range(1, len(residuals) + 1)}
    mesh = entry.plan.mesh
    return PlacedProgram(
        jaxpr,
        splits,
        [splits[donated[number]] if number in donated else None for number in range(num_results)],
        donated if recipe.donate else {},
        {axis: mesh.size((axis,)) for axis in mesh.names},
        platform_of(entry.mesh),
        ("",) * first + tuple(leaf.path for leaf in entry.plan.leaves),
        tuple(layer.name for layer in entry.plan.layers),
        device_kind_of(entry.mesh),
    )


@_compat.outside_mesh
def plan_memory(recipe: Recipe, entry: CompiledEntry) -> Memory:
    """Predicts the memory that the plan of a signature tells. Where its program cannot be predicted, or not even
    traced, it is the sum that the entry holds, which has no bound.

    **Arguments:** `recipe`: the step. `entry`: a signature of it."""
    try:
        found = program_memory(recipe, entry)
    except SplitjaxError:
        return entry.summed
    return Memory(
        entry.summed.state_bytes, found.temporary_bytes, found.estimate_bytes, found.bound_bytes, found.at_peak
    )
