"""Says which operations are timed, of which sizes, and what they are: one list, kind by kind.

Sizes are those of a device's part of a training step: from what fits a processor's first cache to what fits none; on
an accelerator up to what takes it a millisecond. The
figures of a kind count the way `machines.calibration.OperationKind` says, and the time model counts alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.machines.calibration import OperationKind

Array = Any


@dataclasses.dataclass(frozen=True)
class Probe:
    """Is an operation to be timed: its `kind`, `narrow` and `size` as the kind counts them, what a device does in a
    `turn`, and the shapes of the `arrays` that it does it with. `in_loop`: as of `Timer.seconds`."""

    kind: OperationKind
    narrow: int
    size: float
    turn: Callable[..., Array]
    arrays: tuple[Any, ...]
    dtype: str = "float32"
    in_loop: bool = True


def probes(most_elements: int = 1 << 21, most_flops: float = 2.0**31, is_accelerator: bool = False) -> Iterator[Probe]:
    """Yields the operations to be timed; none with more than `most_elements` in an array or `most_flops` flops.
    `is_accelerator`: those of an accelerator's sizes instead, which go up to 2^28 elements and 2^40 flops."""
    if is_accelerator:
        yield from _on_accelerators()
        return
    for probe in (*_products(), *_convolutions(), *_elementwise(), *_sums(), *_windows(), *_rows(), *_others()):
        elements = max(math.prod(array.shape) for array in probe.arrays)
        if elements <= most_elements and (not probe.kind.counts_flops or probe.size <= most_flops):
            yield probe


def _f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# (rows, contracted, columns) with the narrow dim in front, as few examples are, from small to large; by narrow dim.
_PRODUCTS = {
    8: ((8, 64, 64), (8, 256, 256), (8, 1024, 512), (8, 1024, 2048)),
    32: ((32, 32, 32), (32, 128, 128), (32, 512, 512), (32, 1024, 2048)),
    128: ((128, 128, 128), (256, 256, 128), (512, 128, 512), (1024, 128, 2048)),
    512: ((512, 512, 512), (512, 1024, 512), (1024, 1024, 512)),
}
_LARGE_PRODUCTS = {
    64: ((64, 512, 512), (4096, 64, 1024), (32_768, 64, 1024), (32_768, 64, 16_384)),
    256: ((256, 1024, 1024), (256, 4096, 4096), (4096, 256, 16_384)),
    1024: ((1024, 1024, 1024), (1024, 4096, 4096), (8192, 1024, 8192)),
    4096: ((4096, 4096, 4096), (8192, 4096, 8192), (8192, 4096, 16_384)),
}


def _products(
    sizes: Mapping[int, Sequence[tuple[int, int, int]]] = _PRODUCTS, dtype: str = "float32"
) -> Iterator[Probe]:
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    for narrow, shapes in sizes.items():
        for m, k, n in shapes:
            flops = 2.0 * m * k * n
            yield Probe(OperationKind.PRODUCT, narrow, flops, lambda x, w: x @ w, (array(m, k), array(k, n)), dtype)
            # The same operation with the roles that a backward pass gives them: the fewest are summed over.
            operands = (array(m, k), array(m, n))
            yield Probe(OperationKind.WEIGHT_GRADIENT, narrow, flops, lambda x, ct: x.T @ ct, operands, dtype)


# (examples, side, channels in, channels out), of 3x3 filters; by the fewest channels. Every width that networks have:
# rates do not grow evenly with it, from 32 channels on they are the processor's, and with 256 the filters leave caches.
_CONVOLUTIONS = {
    3: ((4, 16, 3, 32), (16, 32, 3, 32)),
    16: ((2, 8, 16, 16), (4, 16, 16, 32), (16, 32, 16, 16), (64, 32, 16, 16)),
    32: ((2, 8, 32, 32), (8, 16, 32, 32), (32, 16, 32, 64)),
    64: ((2, 4, 64, 64), (4, 8, 64, 64), (8, 16, 64, 128)),
    128: ((2, 4, 128, 128), (16, 4, 128, 256), (16, 8, 128, 128)),
    256: ((4, 4, 256, 256), (8, 4, 256, 512)),
}
# (examples, channels in, channels out) of images of 2x2; by the fewest channels. Several sizes of each width, up to
# those of a step: where wider ones were larger, too, a split of channels looked better than one of examples by chance.
_SMALL_CONVOLUTIONS = {
    16: ((2, 16, 16), (64, 16, 32)),
    64: ((8, 64, 64), (32, 64, 128), (64, 128, 64)),
    128: ((8, 128, 128), (32, 128, 128)),
}
_LARGE_CONVOLUTIONS = {
    3: ((32, 64, 3, 64), (64, 224, 3, 64)),
    64: ((32, 32, 64, 64), (64, 112, 64, 128)),
    256: ((32, 14, 256, 256), (64, 28, 256, 512)),
}


def _convolutions(
    sizes: Mapping[int, Sequence[tuple[int, int, int, int]]] = _CONVOLUTIONS,
) -> Iterator[Probe]:
    def forward(x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    for narrow, shapes in sizes.items():
        for batch, side, before, after in shapes:
            flops = 2.0 * batch * side * side * 9 * before * after
            image, filters, made = (
                _f32(batch, side, side, before),
                _f32(3, 3, before, after),
                _f32(batch, side, side, after),
            )

            def of_filter(x: Array, ct: Array, filters: Any = filters) -> Array:
                _, transposed = jax.vjp(lambda w: forward(x, w), jnp.zeros(filters.shape, filters.dtype))
                return transposed(ct)[0]

            yield Probe(OperationKind.CONVOLUTION, narrow, flops, forward, (image, filters), in_loop=False)
            yield Probe(OperationKind.FILTER_GRADIENT, narrow, flops, of_filter, (image, made), in_loop=False)
    if sizes is _CONVOLUTIONS:
        for narrow, small in _SMALL_CONVOLUTIONS.items():
            for batch, before, after in small:
                flops = 2.0 * batch * 4 * 9 * before * after
                arrays = _f32(batch, 2, 2, before), _f32(3, 3, before, after)
                yield Probe(OperationKind.SMALL_CONVOLUTION, narrow, flops, forward, arrays, in_loop=False)


_LENGTHS = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
_LARGE_LENGTHS = (1 << 13, 1 << 18, 1 << 22, 1 << 25, 1 << 28)


def _elementwise(
    lengths: Sequence[int] = _LENGTHS,
    matrices: Sequence[tuple[int, int]] = ((60, 60), (250, 250), (1000, 500), (2000, 1000)),
) -> Iterator[Probe]:
    for count in lengths:
        yield Probe(OperationKind.ELEMENTWISE, 0, 12.0 * count, lambda x, y: 0.5 * x + y, (_f32(count), _f32(count)))
    for count in lengths[:-1]:
        yield Probe(OperationKind.COSTLY, 0, float(count), lambda x: jnp.exp(-x), (_f32(count),))
    for rows, columns in matrices:
        # No powers of two: rows that far apart share sets of a cache.
        yield Probe(
            OperationKind.TRANSPOSE, 0, 8.0 * rows * columns, lambda x: lax.transpose(x, (1, 0)), (_f32(rows, columns),)
        )


def _sums(
    matrices: Sequence[tuple[int, int]] = ((16, 64), (128, 128), (512, 256), (2048, 512)),
) -> Iterator[Probe]:
    for rows, columns in matrices:
        size, shape = float(rows * columns), _f32(rows, columns)
        yield Probe(OperationKind.ROW_SUM, 0, size, lambda x: jnp.sum(x, 1), (shape,))
        yield Probe(OperationKind.COLUMN_SUM, 0, size, lambda x: jnp.sum(x, 0), (shape,))


def _windows(
    images: Sequence[tuple[int, int, int]] = ((2, 8, 16), (4, 16, 32), (8, 32, 64)),
) -> Iterator[Probe]:
    for batch, side, channels in images:
        image, size = _f32(batch, side, side, channels), float(batch * side * side * channels)

        def pooled(x: Array) -> Array:
            return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

        def gradient(x: Array, ct: Array) -> Array:
            return jax.vjp(pooled, x)[1](ct)[0]

        yield Probe(OperationKind.WINDOW, 0, size, pooled, (image,))
        made = _f32(batch, side // 2, side // 2, channels)
        yield Probe(OperationKind.WINDOW_GRADIENT, 0, size, gradient, (image, made))


def _rows(
    lookups: Sequence[tuple[int, int]] = ((64, 16), (256, 64), (2048, 64), (8192, 128)), num_rows: int = 1024
) -> Iterator[Probe]:
    for count, width in lookups:
        ids, table, rows = jax.ShapeDtypeStruct((count,), jnp.int32), _f32(num_rows, width), _f32(count, width)
        size = float(count * width)
        yield Probe(OperationKind.GATHER, 0, size, lambda table, ids: table[ids], (table, ids))
        yield Probe(
            OperationKind.SCATTER, 0, size, lambda rows, ids, table: table.at[ids].add(rows), (rows, ids, table)
        )


def _others(lengths: Sequence[int] = (1 << 10, 1 << 13, 1 << 17)) -> Iterator[Probe]:
    for count in lengths:
        size, shape = float(count), _f32(count)
        yield Probe(OperationKind.SORT, 0, size, lambda x: jnp.sort(x), (shape,))

        def drawn(x: Array) -> Array:
            key = jax.random.key(x[0].astype(jnp.uint32))
            return jax.random.uniform(key, x.shape)

        yield Probe(OperationKind.RANDOM, 0, size, drawn, (shape,))


def _on_accelerators() -> Iterator[Probe]:
    yield from _products(_LARGE_PRODUCTS)
    yield from _products(_LARGE_PRODUCTS, "bfloat16")
    yield from _convolutions(_LARGE_CONVOLUTIONS)
    yield from _elementwise(_LARGE_LENGTHS, ((500, 500), (4000, 2000), (16_000, 8000)))
    yield from _sums(((128, 512), (2048, 2048), (32_768, 4096)))
    yield from _windows(((8, 32, 64), (64, 112, 64)))
    yield from _rows(((1024, 64), (16_384, 512), (65_536, 1024)), 65_536)
    yield from _others((1 << 13, 1 << 17, 1 << 22))
