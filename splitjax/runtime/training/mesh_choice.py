"""The mesh of a run that goes on with fewer workers: the training loop notes for the launcher what the run is laid out
on, and a script asks which mesh to use.

```python
step = splitjax.parallelize(step_fn, mesh=runtime.run_mesh({"data": 4}), rules="data_parallel")
```
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from splitjax import _compat
from splitjax.errors import LaunchError
from splitjax.mesh import MeshSizes
from splitjax.runtime.launch import variables
from splitjax.runtime.launch.shrinking import RunLayout, mesh_text
from splitjax.runtime.launch.whereabouts import StepRecorder


def run_mesh(mesh: MeshSizes | None) -> MeshSizes | None:
    """Returns the mesh that this run is to use: `mesh` as the script has it, or the smaller one that the launcher chose
    when workers did not come back (`splitjax launch --rejoin-timeout-seconds`).

    **Arguments:** `mesh`: sizes by axis, as `splitjax.parallelize` takes them; None for all devices on `data`.

    Raises `LaunchError` where the launcher's choice is of other axes than `mesh`.
    """
    chosen = _chosen()
    if chosen is None:
        return mesh
    if mesh is None:
        return chosen
    if set(chosen) != set(mesh):
        raise LaunchError(
            f"the launcher chose the mesh {mesh_text(tuple(chosen.items()))} for a run on the axes {', '.join(mesh)}",
            value=chosen,
            place=variables.MESH,
            remedy="give every mesh of the run's training loop the same axes, or unset the variable to run alone",
        )
    return {axis: chosen[axis] for axis in mesh}


def chosen_mesh_row() -> dict[str, Any]:
    """Returns what the metrics say of the first step on a mesh that the launcher chose: `num_devices`, `mesh`,
    `mesh_reason`; nothing on any other."""
    chosen = _chosen()
    if chosen is None:
        return {}
    return {
        "num_devices": math.prod(chosen.values()),
        "mesh": mesh_text(tuple(chosen.items())),
        "mesh_reason": os.environ.get(variables.MESH_REASON, ""),
    }


def note_layout(step: Any, state: Any, batch_size: int, recorder: StepRecorder) -> None:
    """Notes for the launcher what a run is laid out on, so that it can choose a smaller mesh.

    **Arguments:** `step`: what is trained; a plain function has no mesh, and is not noted. `state`: whose leaves say
    over which axes it is stored in parts. `batch_size`: examples of the global batch. `recorder`: of this process.
    """
    mesh = getattr(step, "mesh", None)
    if not isinstance(mesh, Mesh):
        return
    shape = dict(mesh.shape)
    stored = {
        axis
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
        for entry in leaf.sharding.spec
        if entry is not None
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    _, num_processes = _compat.place_in_run()
    roles = getattr(step, "roles", {})
    RunLayout(
        tuple(shape.items()),
        tuple((axis, str(role)) for axis, role in roles.items()),
        batch_size,
        tuple(axis for axis in shape if axis in stored and shape[axis] > 1),
        num_processes,
    ).note(recorder)


def _chosen() -> dict[str, int] | None:
    text = os.environ.get(variables.MESH)
    return None if text is None else json.loads(text)
