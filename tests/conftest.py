"""What every test relies on: eight virtual CPU devices, set before JAX is imported, and a quiet TPU compiler."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

# Most of the suite's time is the CPU backend's: without LLVM's optimisations a third of all time is gone, and the programs are the
# same down to LLVM. `make test-core`, which CI runs beside this on another Python, has them on.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# The older of XLA's two ways to write a fusion's code compiles a step in half the time. Newer releases have one, and no such flag.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FAST_COMPILE += " --xla_cpu_use_fusion_emitters=false"
FLAGS = "--xla_force_host_platform_device_count=8" + ("" if os.environ.get("SPLITJAX_TEST_OPTIMISED") else f" {FAST_COMPILE}")
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# All virtual devices share one pool of threads, by default as many as there are devices. Steps in flight can take all of them
# and wait for each other forever ("may be stuck", then an abort); from twice as many threads on that was not seen.
os.environ.setdefault("NPROC", "32")
# libtpu looks for a TPU host's metadata unless told not to, and refuses to be loaded by two processes at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("libtpu") is None:
        absent = pytest.mark.skip(reason="needs libtpu: pip install 'splitjax[tpu]'")
        for item in items:
            if item.get_closest_marker("tpu_aot"):
                item.add_marker(absent)


@pytest.fixture
def strict_promotion():
    """Mixed dtypes are an error inside the test, so that no operation widens a dtype by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield
