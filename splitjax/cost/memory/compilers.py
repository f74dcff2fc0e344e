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
    - `combines_gathers`: all-gathers and reduce-scatters become one as all-reduces do.
    - `takes_least`: it tries the orders of three schedulers and takes the one that needs least memory.
    - `stores_zeros`: zeros that are added into and read by loops too are stored, as `cost.memory.zeros` says.
    - `splits_products`: products with few tiles are stored in parts, as `cost.memory.products` says.
    - `copies_donated`: copies are decided on before steps have an order, as `cost.memory.donating` says.
    - `sends_apart`: all-reduces that became one are still sent array by array.
    - `swaps_filters`: in a convolution of an image with fewer places than the filter has, the two change roles, for
      which there is no library.
    - `fills_tiles`: arrays are filled up to whole tiles, as `cost.memory.tiles` says, tables that are looked up lie in
      rows (`cost.memory.rows`), and others as products and arguments decide (`cost.memory.layouts`).
    - `fuses_operands`: a product computes the loops over elements that it reads, but for a gather, and those that are
      all that reads it; what products alone read is stored in two bytes an element, to which they round it, and what is
      compared of a product's result as bits (`cost.memory.uses`); what loops convert of stacked arrays is converted in
      front of them (`cost.memory.rewriting`), and a sum over devices of what a product makes is written over it. What
      is repeated between dims is stored so, and whole tiles that are put together are not.
    - `fuses_costly`: what products alone read is computed in each of them, even where exponentials or divisions are in
      it; otherwise, and where others read it too, it is stored once where it has two bytes an element.
    - `frees_soon`: what frees memory does not wait long, and not behind a loop.
    - `reduces_by_library`: sums and maxima of many float32 elements are kernels of a library, which reads stored arrays
      but for the arithmetic that it does itself.
    """

    transposes_operands: bool
    combines_bytes: int
    reduces_apart: bool
    weighs_bytes: bool = False
    combines_gathers: bool = False
    takes_least: bool = False
    stores_zeros: bool = False
    splits_products: bool = False
    copies_donated: bool = False
    reduces_by_library: bool = False
    sends_apart: bool = False
    swaps_filters: bool = False
    fills_tiles: bool = False
    fuses_operands: bool = False
    fuses_costly: bool = False
    frees_soon: bool = False


# What is fused and ordered on a CPU shows in the modules of the cells that `python -m benchmarks planner` does not hold
# out, and in those of `tests/cost/memory`: copies in `test_donating.py`, the order in `test_orders.py`, and sums of the
# library in `test_library.py` (`IsReduceOpOffloadedToYnn` in XLA). Its all-reduces wait once for each array that they
# sum (xla/backends/cpu/runtime/all_reduce_thunk.cc), and its simplifier swaps the operands of convolutions
# (`SwapConvOperands` in xla/hlo/transforms/simplifiers/algebraic_simplifier.cc).
CPU = Compiler(
    transposes_operands=True,
    combines_bytes=2**62,
    reduces_apart=True,
    copies_donated=True,
    reduces_by_library=True,
    sends_apart=True,
    swaps_filters=True,
)
# That of TPUs shows in the modules that libtpu compiled for the cells of `python -m benchmarks planner` that are not
# held out, with their layouts (`f32[2772200,64]{0,1:T(8,128)}`): how arrays lie and are filled up, that all-reduces of
# 64 MiB stay apart and write another array, what fusions named after a product compute and in which type their operands
# are stored, converted stacks in front of loops, and in which order all of it runs. `tests/cost/memory/test_on_tpus.py`
# has small ones.
TPU = Compiler(
    transposes_operands=False,
    combines_bytes=2**26,
    reduces_apart=True,
    weighs_bytes=True,
    frees_soon=True,
    fills_tiles=True,
    fuses_operands=True,
)
# For v5e, the softmaxes of two models are not stored in the backward pass; for v5p they are (`divide_convert_fusion` in
# the module of `llama_8b/transformer/64`).
TPU_V5E = dataclasses.replace(TPU, fuses_costly=True)
_V5E = ("TPU v5 lite", "TPU v5e", "tpu:v5e")  # as devices, JAX's documentation and targets call it
# A GPU's products read operands in any order of dims, and XLA joins collectives up to 30 MB there
# (`xla_gpu_all_reduce_combine_threshold_bytes` and its like). The rest shows in modules that it compiles for an H200
# ahead of time, small ones of which are in `tests/cost/memory`: what is fused in `test_joining.py`, gathers that become
# one in `test_orders.py`, zeros and parts of products in `test_zeros.py` and `test_products.py`. That it takes the
# least of three orders shows in the module of the LSTM of `benchmarks.accelerator`: gathered rows of 2 GB are gone
# before their gradient of 2 GB is made, as in the list scheduler's order and not in the depth-first one.
GPU = Compiler(
    transposes_operands=False,
    combines_bytes=30 * 2**20,
    reduces_apart=True,
    weighs_bytes=True,
    combines_gathers=True,
    takes_least=True,
    stores_zeros=True,
    splits_products=True,
)


def compiler_of(platform: str, device_kind: str = "") -> Compiler:
    """Returns what is known of the compiler of a `platform`, such as `cpu`, for devices of a `device_kind`, such as
    `TPU v5 lite` or, of a target, `tpu:v5e`: of a platform that was not looked at as of the CPU, of another kind of TPU
    as of v5p."""
    if platform == "tpu" and device_kind in _V5E:
        return TPU_V5E
    return {"tpu": TPU, "gpu": GPU, "cuda": GPU}.get(platform, CPU)
