"""The time of a GPU's kernels, by the device's own clock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from splitjax.errors import CalibrationError
from splitjax.machines.calibration import OperationKind
from splitjax.measure.calibrating import calibrate
from splitjax.measure.calibrating.kernel_time import kernel_seconds
from splitjax.measure.calibrating.operations import probes


def test_without_a_gpu_there_are_no_kernels():
    double = jax.jit(lambda x: 2 * x)
    with pytest.raises(CalibrationError, match="no kernel of a GPU") as caught:
        kernel_seconds(lambda: double(jnp.ones(3)), 2)
    assert "CUPTI" in str(caught.value)


def test_an_accelerator_is_measured_at_its_own_sizes():
    own, large = list(probes()), list(probes(is_accelerator=True))
    # Neither new memory nor waiting is an operation; only XLA's CPU compiler rewrites small convolutions.
    operations = set(OperationKind) - {OperationKind.NEW_MEMORY, OperationKind.WAITING}
    assert {probe.kind for probe in own} == operations
    assert {probe.kind for probe in large} == operations - {OperationKind.SMALL_CONVOLUTION}
    most = lambda among: max(probe.size for probe in among if probe.kind is OperationKind.PRODUCT)
    assert most(large) > 100 * most(own)
    assert {probe.dtype for probe in large} == {"float32", "bfloat16"}
    for probe in large:  # every one is an operation
        assert jax.eval_shape(probe.turn, *probe.arrays).size > 0


@pytest.mark.gpu
def test_a_gpu_is_calibrated():
    found = calibrate(quick=True)
    assert found.platform == "gpu"
    seconds = [found.seconds(OperationKind.ELEMENTWISE, 2.0**size) for size in (13, 30)]
    assert 0 < seconds[0] < seconds[1]
    assert found.node_seconds < 1e-4 < 1  # microseconds, not those of a host's loop


@pytest.mark.gpu
def test_kernels_take_what_they_move():
    """A copy of 1 GiB goes at some TB/s on any GPU of today; a host's clock would count its launch besides."""
    source = jnp.ones(2**28, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(source))
    assert 2e11 < 2 * source.nbytes / kernel_seconds(lambda: copy(source), 3) < 2e13
