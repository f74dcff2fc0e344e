"""The order in which devices make a mesh: as JAX chooses it by topology, with slow networks between slices or nodes."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from splitjax.errors import MeshError

SLOW, FAST = "dcn", "ici"  # the networks of an axis, as JAX's own hybrid meshes call them
# Kinds of TPU whose torus `jax.make_mesh` splits along an axis where sizes ask for it.
_SPLIT_TORUS = ("TPU v5 lite", "TPU v5e")


def arrange(devices: Sequence[Any], networks: Mapping[str, tuple[int, int]]) -> np.ndarray:
    """Arranges `devices` in the order that JAX chooses by their topology.

    **Arguments:** `devices`: as many as the sizes make (those of a topology description serve). `networks`: by axis,
    (how many slices or nodes it crosses, how many devices it has within each). Where nothing is said to cross several
    slices, the major axes that divide by them do, as those that send least.

    Returns the devices, as an array with a dim for each axis. Raises `MeshError` where the devices do not stand in as
    many slices or nodes."""
    # TPU slices and GPU nodes are told apart by the devices themselves; elsewhere a process is such a unit.
    slices = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    is_said = any(slow > 1 for slow, _ in networks.values())
    if len(slices) == 1 and not is_said:
        return _within_slice([fast for _, fast in networks.values()], devices)
    if not is_said:
        networks, left = _crossing(networks, len(slices))
        if left > 1 or len(set(slices.values())) > 1:
            return np.asarray(devices).reshape([slow * fast for slow, fast in networks.values()])
    num_slow, by_process = math.prod(slow for slow, _ in networks.values()), len(slices) == 1
    num_units = len({device.process_index for device in devices}) if by_process else len(slices)
    if num_units != num_slow:
        unit = "processes" if by_process else "slices or nodes"
        raise MeshError(
            f"the mesh crosses {num_slow} slices or nodes over the slow network, and the devices stand in {num_units}"
            f" {unit}",
            value={axis: {SLOW: slow, FAST: fast} for axis, (slow, fast) in networks.items()},
            place="mesh",
            remedy=f'make the product of the "{SLOW}" sizes {num_units}'
            + ("; without a slow network give whole sizes alone" if num_units == 1 else ""),
        )
    slow_sizes, fast_sizes = zip(*networks.values(), strict=True)
    arrange = functools.partial(mesh_utils.create_hybrid_device_mesh, fast_sizes, slow_sizes, devices)
    return _splitting_the_torus(functools.partial(arrange, process_is_granule=by_process), devices)


def _crossing(networks: Mapping[str, tuple[int, int]], num_slices: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Returns `networks` with the axes that cross `num_slices` slices, major ones first, and how many slices are left
    over because no axis divides by them."""
    chosen = {}
    for axis, (_, fast) in networks.items():
        slow = math.gcd(fast, num_slices)
        chosen[axis], num_slices = (slow, fast // slow), num_slices // slow
    return chosen, num_slices


def _within_slice(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arranges the `devices` of one slice into axes of `sizes`."""
    return _splitting_the_torus(functools.partial(mesh_utils.create_device_mesh, sizes, devices), devices)


def _splitting_the_torus(arrange: Callable[..., np.ndarray], devices: Sequence[Any]) -> np.ndarray:
    """Returns what `arrange` makes of `devices`: with each mesh axis on whole dims of the TPU's torus where that is
    possible, and these dims split among axes otherwise."""
    if devices[0].device_kind not in _SPLIT_TORUS:
        try:
            return arrange(allow_split_physical_axes=False)
        except NotImplementedError:  # no dims of the torus make an axis of one of the sizes
            pass
    return arrange(allow_split_physical_axes=True)
