"""Shares among the kernels the filler, checks of operands, and the choice of a kernel by lowering platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from splitjax._compat import vary_all, varying_axes
from splitjax.errors import KernelError

P = ParamSpec("P")  # what a kernel takes
R = TypeVar("R", covariant=True)  # what a kernel returns

# Stands where there is no id: in the slots behind the last one, so that arrays have static sizes. It sorts behind every
# id.
FILLER = 2**31 - 1

LANES = 128  # of a TPU's vector registers
TILE_ROWS = 8  # of 32-bit values in a TPU's memory tile
MIN_WIDTH = 16  # of the rows that TPU kernels take: padding to lanes makes narrower ones more than eight times as large
_COPIED_PER_ROW = 8  # rows of a table that may be copied for each one that is asked for
WARPGROUP = 128  # threads that run one Mosaic GPU program


def ceil_div(number: int, by: int) -> int:
    """`number / by`, rounded up."""
    return -(-number // by)


class DifferentiableKernel(Protocol[P, R]):
    """A kernel with a derivative of its own, called as the function that it was made from."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], /) -> None:
        """Sets the derivative, as that of `jax.custom_vjp`: `fwd` returns the result and what is kept for `bwd`, which
        returns the cotangents of the operands."""
        ...


def custom_vjp(nondiff_argnums: tuple[int, ...]) -> Callable[[Callable[P, R]], DifferentiableKernel[P, R]]:
    """Returns the decorator that gives a kernel a derivative of its own: `jax.custom_vjp`, which keeps what the kernel
    returns visible to a type checker (`functools.partial` around it does not).

    **Arguments:** `nondiff_argnums`: the positions of the kernel's static arguments, counted from 0.
    """

    def decorate(kernel: Callable[P, R]) -> DifferentiableKernel[P, R]:
        # JAX's annotation names an experimental class too, which takes no keywords; it is used under a flag only.
        decorated: Any = jax.custom_vjp(kernel, nondiff_argnums=nondiff_argnums)
        return decorated

    return decorate


def round_up(number: int, to: int) -> int:
    """Returns `number` rounded up to the next multiple of `to`."""
    return ceil_div(number, to) * to


def pad_rows(array: jax.Array, num_rows: int, value: Any = 0) -> jax.Array:
    """Returns `array` with at least `num_rows` entries in its leading dim, the new ones `value`; the same array where
    nothing is missing."""
    missing = num_rows - array.shape[0]
    if missing <= 0:
        return array
    return jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], constant_values=value)


def dispatch(
    reference: Callable[..., Any], *operands: Any, tpu: Callable[..., Any] | None, gpu: Callable[..., Any] | None
) -> Any:
    """Evaluates the function made for the platform that the program is lowered for, which need not be the one it is
    traced on: `tpu` or `gpu` (None: there is no kernel), else `reference`, on `operands`.

    A kernel has to stand where every mesh axis is manual: XLA does not partition it. Where the mesh in use has other
    axes, the reference is evaluated.
    """
    if not partitions_nothing() or (tpu is None and gpu is None):
        return reference(*operands)
    axes = varying_axes(*operands)

    def varying(kernel):
        # All branches have to vary over the same mesh axes, and Mosaic GPU does not say what its results vary over.
        return lambda *operands: vary_all(kernel(*operands), axes)

    branches = {name: varying(kernel) for name, kernel in (("tpu", tpu), ("cuda", gpu)) if kernel is not None}
    return lax.platform_dependent(*vary_all(operands, axes), default=varying(reference), **branches)


def partitions_nothing() -> bool:
    """Returns whether no axis of the mesh in use (inside `shard_map` or under `jax.set_mesh`) is left to XLA to
    partition over."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)


def check_vector(
    name: str, array: Any, *, kinds: str = "i", bits: tuple[int, ...] = (32,), ranks: tuple[int, ...] = (1,)
) -> None:
    """Refuses an `array`, the operand `name`, that is not a vector of the wanted dtypes. `kinds`: numpy's letters (b,
    i, u); `bits`: of an entry; `ranks`: 2 for several.

    Raises `KernelError`.
    """
    _check(name, array, *ranks)
    dtype = jnp.dtype(array.dtype)
    if dtype.kind not in kinds or (dtype.kind != "b" and dtype.itemsize * 8 not in bits):
        words = {"b": "bool", "i": "int", "u": "uint"}
        wanted = " or ".join(words[kind] + ("" if kind == "b" else str(bits[0])) for kind in kinds)
        raise KernelError(f"{name} has the wrong dtype", value=str(dtype), place=name, remedy=f"pass {wanted}")


def check_matrix(name: str, array: Any) -> None:
    """Refuses an `array`, the operand `name`, that is not a matrix, of whatever dtype. Raises `KernelError`."""
    _check(name, array, 2)


def check_rows(name: str, array: Any, *, floating: bool = False) -> None:
    """Refuses an `array`, the operand `name`, that is not a matrix of rows of 16- or 32-bit numbers; where `floating`,
    of integers too. Raises `KernelError`."""
    _check(name, array, 2)
    dtype = jnp.dtype(array.dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if dtype.itemsize not in (2, 4) or (floating and not is_float) or not (is_float or dtype.kind in "iu"):
        remedy = "pass float32, bfloat16 or float16" + ("" if floating else ", or 16- or 32-bit integers")
        raise KernelError(f"{name} has the wrong dtype", value=str(dtype), place=name, remedy=remedy)


def check_capacity(capacity: Any) -> None:
    """Refuses a `capacity`, the number of slots of a result, that is not a static, non-negative integer. Raises
    `KernelError`."""
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
        raise KernelError(
            "a capacity is the static number of slots of a result",
            value=capacity,
            place="capacity",
            remedy="pass an int from 0",
        )


def _check(name: str, array: Any, *ranks: int) -> None:
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise KernelError(f"{name} is not an array", value=array, place=name, remedy="pass a JAX or numpy array")
    if len(array.shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise KernelError(
            f"{name} has {len(array.shape)} dims instead of {wanted}",
            value=tuple(array.shape),
            place=name,
            remedy="reshape it",
        )


def has_tpu_rows(table: jax.Array, num_rows: int) -> bool:
    """Returns whether a TPU kernel gains by copying `num_rows` single rows of `table`.

    - 32-bit rows: in tiles of 16-bit numbers two rows share a word.
    - At least 16 numbers wide: a kernel's operands are padded to 128 lanes.
    - Of a width that is no multiple of 128 XLA stores tables by columns, to save that padding. A kernel would have the
      whole table copied into rows, and back: only for tables of up to eight times the rows.
    """
    width = table.shape[1]
    is_compact = width % LANES == 0 or table.shape[0] <= _COPIED_PER_ROW * num_rows
    return jnp.dtype(table.dtype).itemsize == 4 and width >= MIN_WIDTH and is_compact


def rows_in_flight(table: jax.Array, num_rows: int) -> int:
    """Returns how many of the `num_rows` rows of `table` a TPU kernel copies at a time: few enough for 2 MiB of vector
    memory, a multiple of a tile."""
    row_bytes = round_up(table.shape[1], LANES) * table.dtype.itemsize
    return min(256, round_up(num_rows, TILE_ROWS), max(TILE_ROWS, 2**21 // row_bytes // TILE_ROWS * TILE_ROWS))


def tma_shape(table: jax.Array) -> tuple[int, ...] | None:
    """Returns the shape of a row of `table` with which a GPU's tensor copy engine can move rows: dims of at most 256
    entries, 128 bytes for alignment in shared memory. None for a row that is no multiple of 128 bytes, and for other
    numbers than 16- and 32-bit ones."""
    if jnp.dtype(table.dtype).itemsize not in (2, 4):
        return None
    width, unit = table.shape[1], 128 // table.dtype.itemsize
    if width == 0 or width % unit:
        return None
    if width <= 256:
        return (width,)
    last = max(size for size in range(unit, 257, unit) if width % size == 0)
    return (width // last, last) if width // last <= 256 else None
