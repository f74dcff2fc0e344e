"""Targets as they are written, and kinds of devices that others describe."""

from __future__ import annotations

import dataclasses

import pytest

from splitjax.errors import TargetError
from splitjax.machines import parse_target, register_device
from splitjax.machines.devices import DEVICES
from splitjax.machines.tables import TPU_V5E
from splitjax.machines.targets import SHIPPED


@pytest.mark.parametrize(
    ("text", "devices", "islands", "topology"),
    [
        ("tpu:v5e:4x4", 16, 1, "v5e:4x4"),
        ("tpu:v5p:4x4x4", 64, 1, "v5p:4x4x4"),
        ("tpu:v6e:2*16x16", 512, 2, "v6e:16x16"),
        ("gpu:h200:2x8", 16, 2, "1x2x8"),
        ("GPU:B200:8", 8, 1, "1x1x8"),
        ("cpu:8", 8, 1, "1x1x8"),
    ],
)
def test_read(text, devices, islands, topology):
    target = parse_target(text)
    assert (target.num_devices, target.num_islands, target.topology_name) == (devices, islands, topology)
    assert str(target) == text.lower()
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu:v7:4x4", "no kind of device"),
        ("tpu:v5ee:4x4", "did you mean 'tpu:v5e'"),
        ("tpu:v5p:4x4", "joined along 3 axes, and 2 are given"),
        ("gpu:h200:2x2x8", "hosts x devices"),
        ("gpu:h200:2*8", "hosts x devices"),
        ("cpu:1x2x3", "processes x devices"),
        ("cpu:0", "written as sizes"),
        ("cpu:-1", "written as sizes"),
        ("cpu:٣", "written as sizes"),
        ("cpu:999999x999999", "no machine is this large"),
        ("cpu", "a kind of device and how many"),
        ("", "a kind of device and how many"),
        (8, "a kind of device and how many"),
    ],
)
def test_refused(text, message):
    with pytest.raises(TargetError, match=message) as caught:
        parse_target(text)
    assert caught.value.remedy
    if "no kind" in message:
        assert "tpu:v5e" in caught.value.remedy and "gpu:b200" in caught.value.remedy


def test_every_shipped_kind_cites_its_figures():
    accelerators = [kind for kind in SHIPPED if kind.platform != "cpu"]
    assert len(accelerators) == 7
    for kind in accelerators:
        assert kind.sources and all("https://" in source or "tpu_info.py" in source for source in kind.sources)
        # A byte takes longer than a flop, the network longer than the memory, other hosts longer than neighbours.
        fabric = kind.fabric
        per_device = fabric.host_link.bytes_per_second / kind.devices_per_host
        assert kind.flops_per_second("bfloat16") > 100 * kind.memory_bytes_per_second
        assert kind.memory_bytes_per_second > fabric.link.bytes_per_second > per_device
        assert kind.memory_bytes > 50 * kind.fast_memory_bytes > 0


def test_a_processor_has_no_published_peak():
    with pytest.raises(TargetError, match="has to be measured"):
        parse_target("cpu:8").kind.flops_per_second("float32")


def test_others_describe_their_own():
    own = dataclasses.replace(TPU_V5E, name="tpu:own")
    try:
        assert register_device(own) is own and register_device(dataclasses.replace(own)) == own
        assert parse_target("tpu:own:2x2").kind == own
        with pytest.raises(TargetError, match="of this name"):
            register_device(dataclasses.replace(own, memory_bytes=1))
    finally:
        DEVICES.remove("tpu:own")
