"""Writes what XLA's compiler has to know of a GPU that is not here: a `GpuTargetConfigProto` as text.

Figures of a kind of GPU go in; the text that `jax.experimental.topologies.get_topology_desc` takes as `target_config`
comes out. The figures are those of XLA itself (openxla/xla, xla/backends/gpu/target_config/specs: a100_sxm_80,
h100_sxm, h200, b200), without its rates of arithmetic, which decide nothing about memory or what is sent.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuConfig:
    """Holds the figures of a kind of GPU; the defaults are those of NVIDIA's Hopper.

    **Attributes:**

    - `name`: as its driver gives it. `major`: of its compute capability, such as 9. `has_own_features`: whether it is
      compiled for with the instructions that later GPUs lack (`sm_90a`).
    - `memory_bytes`, `memory_bytes_per_second`: of its main memory, as its driver gives them.
    - `num_cores`: its multiprocessors; `units_per_core`: float32 units of each.
    - `core_shared_bytes`, `block_shared_bytes`: shared memory of a core, and what a block may ask for.
    - `cache_bytes`: of its second level. `clock_ghz`: the fastest. `cudnn`: the version that it is compiled for.
    """

    name: str
    major: int
    memory_bytes: int
    memory_bytes_per_second: int
    has_own_features: bool = True
    num_cores: int = 132
    units_per_core: int = 128
    core_shared_bytes: int = 233472
    block_shared_bytes: int = 232448
    cache_bytes: int = 52428800
    clock_ghz: float = 1.98
    cudnn: tuple[int, int] = (9, 10)

    @property
    def text(self) -> str:
        """The configuration, as text of the protocol buffer."""
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.core_shared_bytes,
            "shared_memory_per_block_optin": self.block_shared_bytes,
            "threads_per_core_limit": 2048,
            "core_count": self.num_cores,
            "fpus_per_core": self.units_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "memory_bandwidth": self.memory_bytes_per_second,
            "l2_cache_size": self.cache_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "device_vendor": '"NVIDIA Corporation"',
            "name": f'"{self.name}"',
        }
        features = "ACCELERATED_FEATURES" if self.has_own_features else "NONE"
        fields = "".join(f"  {field}: {value}\n" for field, value in device.items())
        return (
            f"gpu_device_info {{\n{fields}"
            f"  cuda_compute_capability {{ major: {self.major} feature_extension: {features} }}\n}}\n"
            f'platform_name: "CUDA"\ndnn_version_info {{ major: {self.cudnn[0]} minor: {self.cudnn[1]} }}\n'
            f'device_description_str: "{self.name}"\n'
        )
