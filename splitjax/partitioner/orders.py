"""The order in which several mesh axes split one dim (row `axes-out-of-mesh-order` of the table).

`P(("expert", "model"), "data")` and `P(("model", "expert"), "data")` give every device a part of the same size; which part
differs. On a mesh that lists `model` before `expert`, XLA computes gradients in the former layout wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.mesh import MeshShape


def in_mesh_order(axes: Sequence[str], mesh: MeshShape) -> tuple[str, ...]:
    """The axes that split one dim, in the order in which XLA can be trusted with them: the mesh's, where it has three axes or
    more of a size above 1. Two axes are right in either order."""
    if len(axes) < 2 or len(mesh.present(mesh.names)) < 3:
        return tuple(axes)
    return tuple(sorted(axes, key=mesh.names.index))
