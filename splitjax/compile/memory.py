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
from splitjax.errors import UnavailableError
from splitjax.mesh import platform_of


def program_memory(recipe: Recipe, entry: CompiledEntry, step_number: int, args: tuple[Any, ...]) -> ProgramMemory:
    """Predicts the memory of the program that runs as step `step_number` (counted from 0).

    **Arguments:** `recipe`: the step. `entry`: the signature of its positional arguments `args` (arrays or
    `ShapeDtypeStruct`s).

    Raises `UnavailableError` for a step that runs as several programs, one a worker."""
    return predict_program_memory(placed_program(recipe, entry, step_number, args, "memory"))


def placed_program(
    recipe: Recipe, entry: CompiledEntry, step_number: int, args: tuple[Any, ...], what: str
) -> PlacedProgram:
    """Returns the program of a step with what is decided of its arrays; it is traced, and not compiled.

    **Arguments:** `what`: is to be predicted of it, for errors: `memory` or `time`. The others are those of
    `program_memory`, as is what it raises."""
    program: Any = entry.program(step_number)
    program = getattr(program, "jitted", program)
    if not hasattr(program, "trace"):
        raise UnavailableError(
            f"the {what} of a step whose workers run programs of their own is not predicted",
            value=type(program).__name__,
            place=f"{recipe.name}.{what}",
            remedy="ask step.report(...), which compiles it, or predict the step without backprop=",
        )
    jaxpr = program.trace(*entry.operands(args, entry.residuals)).jaxpr
    inner, _ = _compat.open_jaxpr(jaxpr)
    leaves = [split_of(leaf.spec, len(leaf.shape)) for leaf in entry.plan.leaves]
    # Further operands, such as what rounding took away, come before the step's own.
    first = len(inner.invars) - len(leaves)
    results = {target: leaves[source] for source, target in entry.matched.items()}
    mesh = entry.plan.mesh
    return PlacedProgram(
        jaxpr,
        [None] * first + leaves,
        [results.get(number) for number in range(len(inner.outvars))],
        {target: first + source for source, target in entry.matched.items()} if recipe.donate else {},
        {axis: mesh.size((axis,)) for axis in mesh.names},
        platform_of(entry.mesh),
    )
