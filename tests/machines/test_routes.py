"""What carries the axes of a mesh: by hand, from the figures of the tables."""

from __future__ import annotations

import pytest

from splitjax.errors import TargetError
from splitjax.machines import parse_target
from splitjax.machines.routes import routes


def carried(target, sizes):
    return {axis: route.link.bytes_per_second / 1e9 for axis, route in routes(parse_target(target), sizes).items()}


def test_axes_of_a_torus():
    # 4x4 of v5e has no rings: a line receives from one side at its ends.
    assert carried("tpu:v5e:4x4", {"data": 4, "model": 4}) == {"data": 50, "model": 50}
    # A whole pod has them, and one mesh axis over all of it uses both.
    assert carried("tpu:v5e:16x16", {"data": 16, "model": 16}) == {"data": 100, "model": 100}
    assert carried("tpu:v5e:16x16", {"data": 256, "model": 1}) == {"data": 200}
    # The last mesh axis takes as many torus axes as it fills.
    assert carried("tpu:v5p:4x4x4", {"data": 4, "model": 16}) == {"data": 200, "model": 400}


def test_mesh_axes_that_divide_a_torus_axis_share_its_links():
    found = routes(parse_target("tpu:v5e:16x16"), {"data": 64, "model": 4})
    assert found["model"].link.bytes_per_second == 50e9  # four neighbours, a line
    # Four rings of four interleave over the axis that both have; the other axis is whole.
    assert found["data"].over & found["model"].over
    assert found["data"].link.bytes_per_second == pytest.approx(100e9 + 100e9 / 4)
    assert found["data"].link.latency_seconds == 4 * found["model"].link.latency_seconds


def test_axes_that_cross_hosts():
    found = routes(parse_target("gpu:h200:2x8"), {"data": 2, "model": 8})
    assert found["model"].link.bytes_per_second == 450e9 and not found["model"].is_slow
    # Eight rings leave a host over its eight networks of 50 GB/s.
    assert found["data"].link.bytes_per_second == 50e9 and found["data"].is_slow
    # A single ring through all devices leaves a host once.
    (only,) = routes(parse_target("gpu:h200:2x8"), {"data": 16}).values()
    assert only.link.bytes_per_second == 400e9 and only.is_slow
    # Two slices: 32 hosts each, 256 rings.
    crossing = routes(parse_target("tpu:v5e:2*16x16"), {"slice": 2, "data": 16, "model": 16})["slice"]
    assert crossing.link.bytes_per_second == 32 * 25e9 / 256 and crossing.is_slow


def test_a_mesh_of_another_size_does_not_fit():
    with pytest.raises(TargetError, match="8 devices and the target 16"):
        routes(parse_target("tpu:v5e:4x4"), {"data": 8})
