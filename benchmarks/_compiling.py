"""How a process compiles for CPUs in half the time, for tests and for walks through the benchmarks, whose programs need
not be fast. Nothing here imports JAX, which reads its environment when it is imported."""

from __future__ import annotations

import importlib.metadata

# Without LLVM's optimisations; the programs are the same down to LLVM.
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def flags() -> str:
    """Returns what belongs into `XLA_FLAGS`."""
    # Each program in one piece: by default it is cut into up to 32, for many threads.
    found = "--xla_cpu_parallel_codegen_split_count=1"
    # The older of XLA's two ways to write a fusion's code compiles a step in half the time. Newer releases have one,
    # and no such flag.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        found += " --xla_cpu_use_fusion_emitters=false"
    return found
