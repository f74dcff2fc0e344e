"""Says what is known of platforms' compilers, each fact with where it shows: what they transpose, combine and fuse."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Says what a platform's compiler is known to do.

    - `transposes_operands`: a product reads operands with batch dims first and contracted dims last (the left one) or
      anywhere (the right one); others are transposed into an array of their own.
    - `combines_bytes`: all-reduces over the same axes that do not wait for each other become one, up to so many bytes.
    - `reduces_apart`: an all-reduce writes another array than it reads.
    - `weighs_bytes`: a loop is fused into all that read it where fewer bytes are moved so (XLA's `PriorityFusion`),
      costly operations too, which run beside the memory; and steps become one kernel as `cost.memory.joining` says.
    """

    transposes_operands: bool
    combines_bytes: int
    reduces_apart: bool
    weighs_bytes: bool = False


CPU = Compiler(transposes_operands=True, combines_bytes=2**62, reduces_apart=True)
TPU = Compiler(transposes_operands=False, combines_bytes=2**62, reduces_apart=False)
# A GPU's products read operands in any order of dims, and XLA joins all-reduces up to 30 MB there
# (`xla_gpu_all_reduce_combine_threshold_bytes`). What is fused shows in modules that it compiles for an H200 ahead of
# time: `tests/cost/memory/test_joining.py` has the small ones.
GPU = Compiler(transposes_operands=False, combines_bytes=30 * 2**20, reduces_apart=True, weighs_bytes=True)


def compiler_of(platform: str) -> Compiler:
    """Returns what is known of the compiler of a `platform`, such as `cpu`: of one that was not looked at, as of the
    CPU's."""
    return {"tpu": TPU, "gpu": GPU, "cuda": GPU}.get(platform, CPU)
