"""TPU kernels on the CPU: the interpreter's two ways of carrying out copies, with its race detector."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

# the race detectors' verdicts are not public
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as gpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

MODES = ("eager", "on_wait")
by_mode = pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.one_version), "on_wait"])
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


@contextlib.contextmanager
def interpreting(mode: str):
    """What to pass as `interpret`; afterwards no race may have been seen."""
    try:
        yield pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
        jax.block_until_ready(jax.live_arrays())  # a kernel that has not begun has seen no race yet
        assert not interpreter.races.races_found
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise


@contextlib.contextmanager
def interpreting_gpu():
    """The same for Mosaic GPU kernels."""
    try:
        yield InterpretGPUParams(detect_races=True)
        jax.block_until_ready(jax.live_arrays())
        assert not gpu_interpreter.get_races().races_found
    except BaseException:
        gpu_interpreter.reset_gpu_interpret_mode_state()
        raise


def tpu_mesh(topology: str, count: int = 1):
    """A mesh `x` of `count` chips that need not be there, with every axis free to be made manual."""
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices).reshape(-1)
    return jax.sharding.Mesh(devices[:count], ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def compiled_for_tpu(function, *types, topology: str) -> str:
    """The optimised program of a function of replicated arguments for one chip. `types`: pairs (shape, dtype)."""
    place = jax.sharding.NamedSharding(tpu_mesh(topology), jax.sharding.PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in types]
    return jax.jit(function).lower(*arguments).compile().as_text()


def lowered_for_gpu(function, *types) -> str:
    """The program of a function lowered for CUDA, kernels down to their MLIR; needs no GPU. `types`: pairs (shape,
    dtype)."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
