"""Makes the mesh of a step: of the devices that JAX sees, or of those of a target that is not here.

What a user asks for and a `Target` come in, a mesh comes out. It stands apart from `splitjax.mesh`, which knows no
machines.
"""

from __future__ import annotations

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from splitjax.choosing import AutoMesh, Prices
from splitjax.errors import TargetError
from splitjax.machines.calibration import Calibration
from splitjax.machines.targets import Target
from splitjax.mesh import MeshShape, MeshSizes, abstract_mesh, make_mesh, platform_of, shape_over


def mesh_for(asked: Mesh | AbstractMesh | MeshSizes | None, target: Target | None) -> Mesh | AbstractMesh:
    """Makes the mesh for what the user `asked` for.

    **Arguments:** `asked`: as `splitjax.mesh.make_mesh` takes it. `target`: the machine that the step is for; None for
    this one. Where JAX sees no such devices, sizes make a mesh of abstract ones, for which steps are planned and
    lowered.

    Raises what `make_mesh` raises, and `TargetError` where the mesh has another number of devices than the target."""
    if target is None:
        return make_mesh(asked)
    given = isinstance(asked, (Mesh, AbstractMesh))
    shape = MeshShape.of(asked) if given else shape_over(asked, target.num_devices)
    if shape.num_devices != target.num_devices:
        raise TargetError(
            f"the mesh has {shape.num_devices} devices and the target {target.num_devices}",
            value=dict(shape.axes),
            place="mesh",
            remedy=f"give sizes whose product is {target.num_devices}, or another target",
        )
    if given or _is_here(target):
        return make_mesh(asked)
    kind = target.kind
    return abstract_mesh(shape, AbstractDevice(kind.name, None, kind.platform))


def num_devices_for(asked: AutoMesh, target: Target | None) -> int:
    """Returns how many devices a mesh has that is to be chosen. Raises `TargetError` where that is said twice and
    differs."""
    if target is None:
        return len(jax.devices()) if asked.num_devices is None else asked.num_devices
    if asked.num_devices not in (None, target.num_devices):
        raise TargetError(
            f"the mesh is to have {asked.num_devices} devices and the target has {target.num_devices}",
            value=asked.num_devices,
            place="AutoMesh, num_devices",
            remedy="leave it away: a target says how many there are",
        )
    return target.num_devices


def prices_for(
    mesh: Mesh | AbstractMesh | None, shape: MeshShape, target: Target | None, calibration: Calibration | None
) -> Prices:
    """Returns what a machine takes. `mesh`: that of the step; None while it is to be chosen. `shape`: that of the mesh
    that is priced. `target`, `calibration`: the machine, or what was measured of it; None, both, for what stands for
    the platform of the mesh."""
    if target is not None:
        return Prices.of_target(target, shape)
    if calibration is not None:
        return Prices.of_calibration(calibration, shape)
    return Prices.of_platform(jax.default_backend() if mesh is None else platform_of(mesh))


def _is_here(target: Target) -> bool:
    """Whether JAX sees devices of a target's platform, and as many."""
    return jax.default_backend() == target.kind.platform and len(jax.devices()) >= target.num_devices
