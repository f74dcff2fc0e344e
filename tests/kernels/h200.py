"""An NVIDIA H200 for XLA's GPU compiler, which needs no such device: `devices(count)`, with the CUDA plugin installed.

Run as a program, in a process of its own (the suite's has CPU devices only), it compiles what its argument names and
prints the program:

    JAX_PLATFORMS=cpu,cuda JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m tests.kernels.h200 gather_rows
"""

from __future__ import annotations

import sys
from typing import Any


def devices(count: int) -> Any:
    """So many H200s of one host, as an array."""
    import numpy as np
    from jax.experimental import topologies

    from splitjax.machines.tables import GPU_H200

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology=f"1x1x{count}", target_config=GPU_H200.xla_config
    )
    return np.array(topology.devices).reshape(-1)


def _kernel(function: Any, *types: tuple[tuple[int, ...], Any]) -> str:
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    place = NamedSharding(Mesh(devices(1), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in types]
    return jax.jit(function).lower(*arguments).compile().as_text()


def gather_rows(width: int = 128, dtype: str = "float32") -> str:
    from splitjax.kernels import gather_rows

    return _kernel(gather_rows, ((5000, int(width)), dtype), ((700,), "int32"))


def segment_sum(width: int = 128, dtype: str = "float32") -> str:
    from splitjax.kernels import segment_sum

    return _kernel(segment_sum, ((700,), "int32"), ((700, int(width)), dtype))


def sum_rows(width: int = 256, dtype: str = "float32") -> str:
    import functools

    from splitjax.kernels import sum_rows

    return _kernel(functools.partial(sum_rows, capacity=300), ((700, int(width)), dtype), ((700,), "int32"))


def batch_sums() -> str:
    """Two sums of one array over its examples, as batch norm takes them."""
    return _kernel(lambda x: (x.sum(0), (x * x).sum(0)), ((4096, 1024), "float32"))


def softmax() -> str:
    import jax

    return _kernel(jax.nn.softmax, ((4096, 1024), "float32"))


def scanned_slices() -> str:
    """A loop that reads a row of an array in every turn."""
    import jax
    import jax.numpy as jnp

    def turn(carry: Any, row: Any) -> tuple[Any, None]:
        return carry + jnp.sin(row), None

    return _kernel(lambda x: jax.lax.scan(turn, x[0], x)[0], ((1024, 1024), "float32"))


def rectified() -> str:
    """A product with a bias and a rectifier behind it."""
    import jax

    return _kernel(
        lambda x, w, b: jax.nn.relu(x @ w + b),
        ((4096, 1024), "float32"), ((1024, 4096), "float32"), ((4096,), "float32"),
    )  # fmt: skip


def small_product() -> str:
    """Two products of few elements over many, and their sum."""
    types = ((256, 512), "float32"), ((512, 256), "float32")
    return _kernel(lambda a, b, c, d: a @ b + c @ d, *types, *types)


def table_update() -> str:
    """The update of a table whose gradient is added into zeros, by a rule that reads zeros too."""
    from tests.cost.memory.test_zeros import update

    table = (4096, 128), "float32"
    return _kernel(update, table, table, ((64,), "int32"), ((64, 128), "float32"))


def gathered_weights() -> str:
    """Two layers whose weights are gathered before they are used, on eight devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(devices(8), ("data",), axis_types=(AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    def layers(x: Any, first: Any, second: Any) -> Any:
        for part in (first, second):
            x = jnp.tanh(x @ jax.lax.all_gather(part, "data", tiled=True))
        return x

    split = NamedSharding(mesh, PartitionSpec("data"))
    shapes = (1024, 512), (512, 512), (512, 512)
    types = [jax.ShapeDtypeStruct(shape, "float32", sharding=split) for shape in shapes]
    return jax.jit(layers).lower(*types).compile().as_text()


def synchronisation(name: str) -> str:
    """A scheme with the update of a table, on four devices."""
    from jax.sharding import AxisType, Mesh

    from splitjax.sync import by_name
    from tests.sync.test_kernels import WORKERS, compiled_for

    return compiled_for(
        Mesh(devices(WORKERS), ("data",), axis_types=(AxisType.Auto,)), by_name(name), 20_000, 40, 128
    ).as_text()


def train_step(plan: str) -> str:
    """The final program of a step, by a pinned plan that knows schemes and capacities. `plan`: a file of it."""
    import pathlib

    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    import splitjax
    from splitjax.plan import Plan
    from tests.lower.tables.test_sparse import one_table

    pinned = Plan.from_json(pathlib.Path(plan).read_text(encoding="utf-8"))
    mesh = Mesh(devices(4), ("data",), axis_types=(AxisType.Auto,))
    step = splitjax.parallelize(one_table, mesh=mesh, rules="data_parallel", plan=pinned)
    types = {"table": jax.ShapeDtypeStruct((4096, 128), np.float32)}, {"ids": jax.ShapeDtypeStruct((8, 4), np.int32)}
    return step.lower(*types).compile().as_text()


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*sys.argv[2:]))
