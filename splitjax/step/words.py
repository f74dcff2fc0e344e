"""How a decorated step calls itself where a person prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitjax.auto_mesh import AutoMesh, mesh_asked_for

HINT = "print(step.plan(...)) shows where its arrays lie"


def step_words(name: str, mesh: Any, rules: Any, num_compiles: int) -> str:
    """Returns the `repr` of a step called `name`.

    **Arguments:** `mesh`: as it was asked for, or chosen; None for all devices. No device is looked at. `rules`: the
    name of a rule set, its path, or the set. `num_compiles`: for how many kinds of arguments it was planned.
    """
    if mesh is None:
        where = "all devices"
    elif isinstance(mesh, AutoMesh | str):
        where = str(mesh_asked_for(mesh))
    else:
        sizes = mesh if isinstance(mesh, Mapping) else mesh.shape
        where = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    planned = "not called yet" if not num_compiles else f"planned {num_compiles} time{'s' * (num_compiles != 1)}"
    return f"<step {name} on {where}, rules {getattr(rules, 'name', rules)}, {planned}; {HINT}>"
