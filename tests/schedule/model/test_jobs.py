"""Jobs, profiles and clusters as values."""

from __future__ import annotations

import ast
import dataclasses
import pathlib

import pytest

import splitjax.schedule
from splitjax.errors import ScheduleError
from splitjax.schedule import Cluster, Depth, Job, JobProfile, Stages
from splitjax.schedule.model.jobs import JobColumns, resident_bytes

RESNET = JobProfile(
    "resnet101",
    0.033,
    tuple(Depth(*one) for one in [(1.0, 0.0749, 656), (0.9, 0.0742, 653), (0.5, 0.0518, 486), (0.1, 0.0083, 305)]),
    0.01,
    200,
)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8, 32])
def test_perfect_packing_needs_two_thirds_and_a_third_over_n(num_workers):
    profile = JobProfile.uniform("m", 0.3, num_depths=96)
    assert profile.phi(num_workers) == pytest.approx((2 + 1 / num_workers) / 3)


def test_depths_are_rounded_up_to_real_cuts():
    assert [RESNET.depth_at(fraction) for fraction in (1.0, 0.95, 0.9, 0.75, 0.5, 0.3, 0.1, 0.01)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert RESNET.partial_depths(4) == (0, 1, 2, 2)  # 1, 3/4, 1/2, 1/4
    for num_workers in range(1, 40):
        covered = [RESNET.depths[depth].fraction for depth in RESNET.partial_depths(num_workers)]
        assert all(have >= (num_workers - index) / num_workers - 1e-9 for index, have in enumerate(covered))
    assert RESNET.iteration_seconds == pytest.approx(0.033 + 0.0749 + 0.01)
    assert RESNET.partial_seconds(2) == pytest.approx(0.033 + (0.0749 + 0.0518) / 2)
    updated = dataclasses.replace(RESNET, update_seconds=0.002)  # which every worker does
    assert updated.iteration_seconds == pytest.approx(RESNET.iteration_seconds + 0.002) and updated.partial_seconds(
        2
    ) == pytest.approx(RESNET.partial_seconds(2) + 0.002)


def test_resources_and_memory():
    staged = JobProfile.uniform("s", 1.0, exposed_fraction=0.4, stages=Stages(0.1, 0.2, 0.6, 0.3))
    assert staged.resource_seconds(1) == pytest.approx((0.1, 0.2, 0.6, 0.3))
    assert JobProfile.uniform("s", 1.0, stages=Stages(cpu_seconds=1.1)).resource_seconds(2)[1] == 1.0
    # that others' all-reduces cannot go on meanwhile, nobody said
    assert RESNET.resource_seconds(1) == pytest.approx((0, 0, 0.1079, 0))
    assert resident_bytes([RESNET, RESNET]) == 2 * 200 + 456  # the state of both, and one's activations at a time
    assert resident_bytes([]) == 0
    columns = JobColumns.of([Job("a", 3.0, 2, 7, RESNET)])
    assert columns.resource_seconds[0, 2] == pytest.approx(2 * RESNET.partial_seconds(2))
    with pytest.raises(ValueError, match="read-only"):
        columns.num_workers[0] = 1


def test_profiles_as_json():
    for profile in (RESNET, JobProfile.uniform("s", 1.0, num_depths=3, stages=Stages(network_seconds=0.2))):
        assert JobProfile.from_json(profile.to_json()) == profile
    with pytest.raises(ScheduleError, match="a field is missing"):
        JobProfile.from_json({"name": "x"})


@pytest.mark.parametrize("fractions", [[], [0.9], [1.0, 1.0], [1.0, 0.0], [0.5, 1.0]])
def test_profiles_that_cannot_be(fractions):
    with pytest.raises(ScheduleError, match="depths have to fall"):
        JobProfile("x", 1.0, tuple(Depth(fraction, 1.0) for fraction in fractions))


def test_times_and_counts_that_cannot_be():
    with pytest.raises(ScheduleError, match="an iteration takes time"):
        JobProfile("x", -1.0, (Depth(1.0, 2.0),))
    with pytest.raises(ScheduleError, match="a job arrives at 0 or later"):
        Job("x", 0.0, 0, 5, RESNET)
    with pytest.raises(ScheduleError, match="nothing less than none"):
        Cluster(0, 8)


def test_clusters_are_written_as_nodes_by_devices():
    cluster = Cluster.parse("16x8", memory_bytes=5)
    assert (
        cluster == Cluster(16, 8, 5)
        and cluster.num_devices == 128
        and str(cluster) == "16x8"
        and cluster.node_of(8) == 1
    )
    for text in ("16", "0x8", "8x", "axb", "-1x2"):
        with pytest.raises(ScheduleError, match="nodes x devices"):
            Cluster.parse(text)


def test_the_room_knows_neither_jax_nor_the_rest():
    folder = pathlib.Path(splitjax.schedule.__file__).parent
    below = ("errors", "_files", "_registry", "codec", "display")
    allowed = ("splitjax.schedule", *(f"splitjax.{room}" for room in below))
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert name.split(".")[0] not in ("jax", "flax", "optax"), f"{file.name} imports {name}"
                assert not name.startswith("splitjax") or name.startswith(allowed), f"{file.name} imports {name}"
