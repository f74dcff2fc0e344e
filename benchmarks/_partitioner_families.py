"""All families together, and the draw of a program by its seed and number."""

from __future__ import annotations

import functools
import importlib

from benchmarks._partitioner_draw import Dice, Draw, Family, case_of
from benchmarks._partitioner_layouts import draw_layouts, mesh_of
from benchmarks._partitioner_wrappers import SHARES

_MODULES = ("products", "lookups", "shapes", "values", "blocks")


@functools.cache
def families() -> dict[str, Family]:
    """Every family by its name."""
    modules = [importlib.import_module(f"benchmarks._partitioner_{name}") for name in _MODULES]
    return {family.name: family for module in modules for family in module.FAMILIES}


def draw(seed: str, number: int, only: str = "") -> Draw:
    """The program of this seed and number, of one family if `only` names it. Parameters that do not fit each other are drawn again."""
    known = [family for family in families().values() if family.name == only or not only]
    dice = Dice(f"{seed}:{number}")
    mesh = mesh_of(number)
    while True:
        family = dice.choices(known, [family.share for family in known])[0]
        params = tuple(sorted(family.draw(dice).items()))
        wrapper = dice.pick(*[name for name in SHARES if name not in family.without])
        chosen = Draw(
            seed, number, family.name, params, wrapper, dice.pick("once", "once", "result", "operand", "fixed"), dice.pick(*family.dtypes), mesh, (),
            dice.chance(0.5), dice.chance(0.5),
        )  # fmt: skip
        try:
            case = case_of(chosen, families())
        except ValueError:
            continue
        return Draw(**{**vars(chosen), "layouts": draw_layouts(dice, mesh, case)})
