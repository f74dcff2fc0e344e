"""What counts as a difference: rounding does not, a factor is named, and copies have to agree."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from splitjax.mesh import make_mesh
from splitjax.verify.comparing import compare

REFERENCE = np.linspace(1.0, 2.0, 8)


def on_devices(parts, spec):
    """An array on two devices whose parts (or copies) are these."""
    sharding = NamedSharding(make_mesh({"data": 2}), spec)
    buffers = [jax.device_put(part, device) for part, device in zip(parts, jax.devices()[:2], strict=True)]
    return jax.make_array_from_single_device_arrays((8,), sharding, buffers)


def test_rounding_is_no_difference_and_a_factor_is_named():
    with jax.enable_x64(True):
        rounded = compare(REFERENCE * (1 + 1e-13), REFERENCE)
        doubled = compare(on_devices(np.split(2 * REFERENCE, 2), PartitionSpec("data")), REFERENCE)
    assert not rounded.exceeds() and doubled.exceeds()
    assert doubled.ratio == pytest.approx(2.0) and doubled.relative == pytest.approx(1.0)
    assert compare(REFERENCE + 1e-6, REFERENCE).exceeds() and not doubled.replicas


def test_copies_that_differ_are_told():
    with jax.enable_x64(True):
        apart = compare(on_devices([REFERENCE, REFERENCE + 0.5], PartitionSpec()), REFERENCE)
        alike = compare(on_devices([REFERENCE, REFERENCE], PartitionSpec()), REFERENCE)
    assert apart.replicas and apart.exceeds()
    assert not alike.replicas and not alike.exceeds()
