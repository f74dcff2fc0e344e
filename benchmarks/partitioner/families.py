"""All families together, and the draw of a program by its seed and number."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math

from benchmarks.partitioner.draw import Dice, Draw, Family, case_of
from benchmarks.partitioner.layouts import draw_layouts, mesh_of
from benchmarks.partitioner.wrappers import SHARES

_MODULES = ("products", "lookups", "shapes", "values", "blocks", "fourier")

# Of the programs under splitjax half have a rule set of their own, with the drawn layouts.
_RULES = ("own",) * 5 + ("splitbrain", "megatron", "fsdp", "data_parallel", "embedding_owner")


@functools.cache
def families() -> dict[str, Family]:
    """Every family by its name."""
    modules = [importlib.import_module(f"benchmarks.partitioner.{name}") for name in _MODULES]
    return {family.name: family for module in modules for family in module.FAMILIES}


def draw(seed: str, number: int, only: str = "") -> Draw:
    """The program of this seed and number, of one family if `only` names it. Parameters that do not fit each other are
    drawn again."""
    known = [family for family in families().values() if (family.name == only if only else family.share)]
    dice = Dice(f"{seed}:{number}")
    mesh = mesh_of(number)
    while True:
        family = dice.choices(known, [max(family.share, 1) for family in known])[0]
        params = tuple(sorted(family.draw(dice).items()))
        wrapper = dice.pick(*[name for name in SHARES if name not in family.without])
        chosen = Draw(
            seed,
            number,
            family.name,
            params,
            wrapper,
            dice.pick("once", "once", "result", "operand", "fixed"),
            dice.pick(*family.dtypes),
            mesh,
            (),
            dice.chance(0.5),
            dice.chance(0.5),
        )
        try:
            case = case_of(chosen, families())
        except ValueError:
            continue
        chosen = dataclasses.replace(chosen, layouts=draw_layouts(dice, mesh, case))
        examples = next((one.shape[0] for one in case.inputs if one.role == "data"), 0)
        return _with_rules(chosen, examples)


def _with_rules(chosen: Draw, examples: int) -> Draw:
    """With the rule set that it has under splitjax: one that can divide its examples, if there is one."""
    workers, sizes = math.prod(size for _, size in chosen.mesh), dict(chosen.mesh)
    if examples % workers == 0:
        names = _RULES
    else:
        names = ("own", "megatron")
    rules = Dice(f"rules {chosen.seed}:{chosen.number}").pick(*names)
    if rules == "own":
        axes = {axis for axis, size in chosen.mesh if size > 1}
        spread = any(set(dim) == axes for layout in chosen.layouts for dim in layout[:1])
        rules = "own/all" if spread and examples % workers == 0 and len(axes) > 1 else "own/data"
    if examples % sizes["data"]:
        rules = "own/data"  # refused, as it should be
    # What embeddings are owned by is known at the boundary of the gradient only.
    return dataclasses.replace(chosen, rules=rules, boundary=chosen.boundary or rules == "embedding_owner")
