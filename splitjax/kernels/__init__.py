"""Local work of sparse synchronisation, as Pallas kernels: one operation a file, each beside its oracle in plain JAX.

Each operation picks its kernel by the platform that a program is lowered for, so that programs compiled ahead of time
have it too. A kernel for TPU (Mosaic) or GPU (Mosaic GPU) stands where the measured or expected gain is; everything
else, and every shape that a kernel does not take, is XLA's: the oracle, which is the fast form on CPU. Kernels have to
stand where every mesh axis is manual (inside `jax.shard_map`): XLA does not partition them. Where the mesh has other
axes too, the oracle stands. Sizes are static; the number of entries that count is a result beside the arrays, and slots
behind the last one hold `FILLER`, or what the caller wants there.
"""

from splitjax.kernels._common import FILLER, dispatch
from splitjax.kernels.bitmap_decode import decode, ranks, select
from splitjax.kernels.bitmap_encode import encode, encode_ids, num_words
from splitjax.kernels.exchange_rows import exchange_counts, exchange_rows
from splitjax.kernels.gather_rows import gather_rows
from splitjax.kernels.in_memory import in_memory
from splitjax.kernels.running_sum import running_sum
from splitjax.kernels.scatter_rows import scatter_rows
from splitjax.kernels.segment_sum import Segments, segment_sum
from splitjax.kernels.sum_rows import sum_rows

__all__ = [
    "FILLER",
    "Segments",
    "decode",
    "dispatch",
    "encode",
    "encode_ids",
    "exchange_counts",
    "exchange_rows",
    "gather_rows",
    "in_memory",
    "num_words",
    "ranks",
    "running_sum",
    "scatter_rows",
    "segment_sum",
    "select",
    "sum_rows",
]
