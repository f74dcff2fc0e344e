"""Parts of a mesh axis have names: those of groups of devices along it, and sizes."""

from __future__ import annotations

import pytest

from splitjax.errors import MeshError
from splitjax.mesh import MeshShape
from splitjax.mesh.axis_parts import AxisPart, part_of_places, read_part, whole_axis


@pytest.mark.parametrize(
    ("places", "num_devices", "name"),
    [
        ((0, 1, 2, 3), 4, "tensor"),
        ((0, 1), 4, "tensor:(2)2"),
        ((2, 3), 4, "tensor:(2)2"),
        ((1, 3), 4, "tensor:(1)2"),
        ((1, 3), 8, "tensor:(2)2"),
        ((5, 7), 8, "tensor:(2)2"),
        ((1, 5, 9), 12, "tensor:(1)3"),
        ((2, 4), 8, None),  # one from each of two blocks
        ((1, 2), 4, None),
        ((0, 3), 4, None),
        ((0, 1, 3), 4, None),
        ((0, 1, 2), 4, None),
    ],
)
def test_devices_at_even_distances_are_a_part_of_an_axis(places, num_devices, name):
    assert part_of_places("tensor", places, num_devices) == name


def test_a_part_reads_back_from_its_name():
    part = AxisPart("tensor", 2, 4)
    assert read_part(str(part)) == part and whole_axis(str(part)) == "tensor"
    assert read_part("tensor") is None and whole_axis("tensor") == "tensor"


def test_a_mesh_knows_the_size_of_a_part_and_refuses_what_is_none_of_its_own():
    mesh = MeshShape((("data", 3), ("tensor", 8)))
    assert mesh.size("tensor:(2)4") == 4 and mesh.size(("data", "tensor:(1)2")) == 6
    for name in ("tensor:(3)2", "tensor:(4)4", "model:(1)2"):
        with pytest.raises(MeshError, match="no axis"):
            mesh.size(name)
