"""Holds the kinds of devices that are shipped, with the figures that their vendors publish.

The figures of TPUs were read on Google's pages and in the scaling book, and the networks of H100, H200 and B200 hosts
on NVIDIA's. All other figures of GPUs were compared with copies of NVIDIA's data sheets on pages of others, which
`sources` name (`COPY`); NVIDIA's own sheets were not read. What was found nowhere says so (`UNCHECKED`).

Peaks are those of dense products (vendors print twice as much for 2:4 sparse ones). Those of float32 are what JAX's
default precision computes with: bfloat16 on TPU, TF32 on GPU (`jax.lax.Precision`). Where pages of a vendor differ, the
faster figure is here, since times on these machines are meant as lower bounds. GB and TB are powers of ten; of a TPU
what Google calls GB of memory are GiB.

Latencies of a TPU's links are those that the scaling book reckons with; of NVLink and of networks between GPU hosts
those of NCCL's own model (ring algorithm, simple protocol; its protocols for small messages are faster). No latency
between TPU slices is published: it is assumed to be that of the network between GPU hosts.
"""

from __future__ import annotations

from splitjax.machines.devices import DeviceKind, register_device
from splitjax.machines.gpu_configs import GpuConfig
from splitjax.machines.links import Fabric, Link, Topology

SCALING_BOOK = (
    "https://jax-ml.github.io/scaling-book/tpus/ (Austin et al. 2025, How to Scale Your Model, key takeaways)"
)
PALLAS = "jax/_src/pallas/mosaic/tpu_info.py of jax 0.10.2 (VMEM)"
NCCL = "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc (latencies)"
COPY = "copy of the vendor's figures"
UNCHECKED = "not checked against the vendor's page"
DGX = (
    "https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/"
    "core-components.html (eight 400 Gb/s networks a host)"
)

_GB, _TB, _MIB, _GIB = 10**9, 10**12, 2**20, 2**30
_TERA = 1e12
_HOP_SECONDS, _NVLINK_SECONDS, _NETWORK_SECONDS = 1e-6, 3.4e-6, 14e-6


def _torus(link_rate: float, host_rate: float, num_dims: int, wraps_every: int) -> Fabric:
    return Fabric(
        Topology.TORUS, Link(_HOP_SECONDS, link_rate), Link(_NETWORK_SECONDS, host_rate), num_dims, wraps_every
    )


def _switch(rate: float, host_rate: float) -> Fabric:
    return Fabric(Topology.SWITCH, Link(_NVLINK_SECONDS, rate), Link(_NETWORK_SECONDS, host_rate))


TPU_V5E = register_device(
    DeviceKind(
        name="tpu:v5e",
        platform="tpu",
        peak_flops=(("bfloat16", 197 * _TERA), ("int8", 393 * _TERA)),
        memory_bytes=16 * _GIB,
        memory_bytes_per_second=819 * _GB,
        fast_memory_bytes=128 * _MIB,
        devices_per_host=8,
        fabric=_torus(50e9, 25e9, num_dims=2, wraps_every=16),
        sources=("https://docs.cloud.google.com/tpu/docs/v5e", SCALING_BOOK, PALLAS),
    )
)
TPU_V5P = register_device(
    DeviceKind(
        name="tpu:v5p",
        platform="tpu",
        peak_flops=(("bfloat16", 459 * _TERA), ("int8", 918 * _TERA)),  # int8: scaling book
        memory_bytes=95 * _GIB,
        memory_bytes_per_second=2765 * _GB,
        fast_memory_bytes=128 * _MIB,  # 64 MiB for each of two cores
        devices_per_host=4,
        fabric=_torus(100e9, 25e9, num_dims=3, wraps_every=4),
        sources=("https://docs.cloud.google.com/tpu/docs/v5p-training", SCALING_BOOK, PALLAS),
    )
)
TPU_V6E = register_device(
    DeviceKind(
        name="tpu:v6e",
        platform="tpu",
        peak_flops=(("bfloat16", 918 * _TERA), ("int8", 1836 * _TERA)),
        memory_bytes=32 * _GIB,
        memory_bytes_per_second=1638 * _GB,
        fast_memory_bytes=128 * _MIB,
        devices_per_host=8,
        fabric=_torus(100e9, 100e9, num_dims=2, wraps_every=16),
        sources=("https://docs.cloud.google.com/tpu/docs/v6e", SCALING_BOOK, PALLAS),
    )
)
GPU_A100 = register_device(
    DeviceKind(
        name="gpu:a100",
        platform="gpu",
        peak_flops=(
            ("bfloat16", 312 * _TERA),
            ("float16", 312 * _TERA),
            ("float32", 156 * _TERA),
            ("float64", 19.5 * _TERA),
            ("int8", 624 * _TERA),
        ),
        memory_bytes=80 * _GB,
        memory_bytes_per_second=2039 * _GB,
        fast_memory_bytes=108 * 164 * 2**10,
        devices_per_host=8,
        fabric=_switch(300e9, 200e9),
        sources=(
            f"https://glennklockwood.com/garden/processors/A100 ({COPY}, SXM 80 GB: peaks, memory, NVLink, 108 SMs)",
            f"https://docs.nvidia.com/cuda/ampere-tuning-guide/ (shared memory; {UNCHECKED})",
            f"https://docs.nvidia.com/dgx/dgxa100-user-guide/ (eight 200 Gb/s networks a host; {UNCHECKED})",
            NCCL,
        ),
        xla_config=GpuConfig(
            "NVIDIA A100-SXM4-80GB",
            major=8,
            has_own_features=False,
            num_cores=108,
            units_per_core=64,
            core_shared_bytes=167936,
            block_shared_bytes=166912,
            memory_bytes=85100068864,
            memory_bytes_per_second=2039040000000,
            cache_bytes=41943040,
            clock_ghz=1.41,
            cudnn=(8, 9),
        ).text,
    )
)
_HOPPER_PEAKS = (
    ("bfloat16", 989.5 * _TERA),
    ("float16", 989.5 * _TERA),
    ("float32", 494.7 * _TERA),
    ("float64", 67 * _TERA),
    ("float8_e4m3fn", 1979 * _TERA),
    ("float8_e5m2", 1979 * _TERA),
    ("int8", 1979 * _TERA),
)
GPU_H100 = register_device(
    DeviceKind(
        name="gpu:h100",
        platform="gpu",
        peak_flops=_HOPPER_PEAKS,
        memory_bytes=80 * _GB,
        memory_bytes_per_second=3.35 * _TB,
        fast_memory_bytes=132 * 228 * 2**10,
        devices_per_host=8,
        fabric=_switch(450e9, 400e9),
        sources=(
            f"https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html ({COPY}, SXM: peaks are half of the sparse"
            " where it says so, shared memory)",
            DGX,
            NCCL,
        ),
        xla_config=GpuConfig(
            "NVIDIA H100 80GB HBM3", 9, memory_bytes=84942979072, memory_bytes_per_second=3352320000000
        ).text,
    )
)
GPU_H200 = register_device(
    DeviceKind(
        name="gpu:h200",
        platform="gpu",
        peak_flops=_HOPPER_PEAKS,
        memory_bytes=141 * _GB,
        memory_bytes_per_second=4.8 * _TB,
        fast_memory_bytes=132 * 228 * 2**10,
        devices_per_host=8,
        fabric=_switch(450e9, 400e9),
        sources=(
            f"https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html ({COPY}, SXM, as H100 but memory)",
            f"https://docs.nvidia.com/cuda/hopper-tuning-guide/ (shared memory, as H100; {UNCHECKED})",
            DGX,
            NCCL,
        ),
        xla_config=GpuConfig("NVIDIA H200", 9, memory_bytes=151397597184, memory_bytes_per_second=4800000000000).text,
    )
)
GPU_B200 = register_device(
    DeviceKind(
        name="gpu:b200",
        platform="gpu",
        peak_flops=(
            ("bfloat16", 2250 * _TERA),
            ("float16", 2250 * _TERA),
            ("float32", 1125 * _TERA),
            ("float64", 37 * _TERA),
            ("float8_e4m3fn", 4500 * _TERA),
            ("float8_e5m2", 4500 * _TERA),
            ("int8", 4500 * _TERA),
        ),
        memory_bytes=180 * _GB,
        memory_bytes_per_second=8 * _TB,
        fast_memory_bytes=148 * 228 * 2**10,
        devices_per_host=8,
        fabric=_switch(900e9, 400e9),
        sources=(
            f"https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html ({COPY}, HGX B200: peaks are"
            " half of the sparse; NVLink, memory)",
            f"https://brent-newsom-nvidia.github.io/AIPS-Boom/wiki/NVIDIA-DGX-B200 ({COPY}: 64 TB/s of eight)",
            f"https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100 ({COPY}: 148 SMs, 1.13 PFLOPS of TF32)",
            f"https://docs.nvidia.com/cuda/blackwell-tuning-guide/ (shared memory; {UNCHECKED})",
            DGX,
            NCCL,
        ),
        xla_config=GpuConfig(
            "NVIDIA B200",
            major=10,
            num_cores=148,
            memory_bytes=191514411008,
            memory_bytes_per_second=7672320000000,
            cache_bytes=132644864,
            clock_ghz=1.965,
        ).text,
    )
)
# Processors differ too much for a table: their figures are a calibration's.
CPU = register_device(
    DeviceKind(
        name="cpu",
        platform="cpu",
        peak_flops=(),
        memory_bytes=0,
        memory_bytes_per_second=0.0,
        fast_memory_bytes=0,
        devices_per_host=1,
        fabric=Fabric(Topology.MEMORY, Link(0.0, float("inf")), Link(0.0, float("inf"))),
        sources=(),
    )
)
