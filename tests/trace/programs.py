"""Small programs that hold, between them, every primitive that has a dim rule and that a CPU can run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import splitjax

_KEYS = itertools.count()


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(next(_KEYS)).normal(size=shape).astype(dtype)


def integers(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(next(_KEYS)).integers(0, high, size=shape).astype("int32")


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + 0.5


def matrix(*lead: int, size: int = 4) -> np.ndarray:
    a = normal(*lead, size, size)
    return a @ a.swapaxes(-1, -2) + size * np.eye(size, dtype="float32")


def conv(lhs: str, rhs: str, out: str, **options):
    def run(x, w):
        stride, padding = (1,) * (len(lhs) - 2), "SAME"
        return lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=(lhs, rhs, out), **options)

    return run


def gradient(fn: Callable, argnum: int = 0) -> Callable:
    return jax.grad(lambda *args: (fn(*args) ** 2).sum(), argnum)


def fused_qkv(x, w):
    q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 3, 4, 2), 3, axis=2)
    return q + k * v


def dynamic(x, i):
    return lax.dynamic_slice(x, (0, i, 0), (3, 2, 5)), lax.dynamic_update_slice(x, x[:, :2], (0, i, 0))


def windows(x):
    one = (1, 2, 2, 1)
    return (
        lax.reduce_window(x, -jnp.inf, lax.max, one, one, "VALID"),
        lax.reduce_window(x, jnp.inf, lax.min, one, one, "VALID"),
        lax.reduce_window(x, 0.0, lax.add, one, (1, 1, 1, 1), "SAME"),
        lax.reduce_window(x, 1.0, lambda a, b: a * b * 0.5, one, one, "VALID"),
    )


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def ragged(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


UNARY = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
""".split()
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub igamma igammac zeta".split()
INTEGER = ["and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "mulhi"]


def by_rows(x, y):
    """A Pallas call with a grid dim for each dim of `x`."""

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] * y_ref[...]

    each, row = pl.BlockSpec((1, 1), lambda i, j: (i, j)), pl.BlockSpec((1,), lambda i, j: (j,))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, shape, grid=x.shape, in_specs=[each, row], out_specs=each, interpret=True)(x, y)


PROGRAMS: dict[str, tuple[Callable, tuple]] = {
    "elementwise one operand": (lambda x: [getattr(lax, name)(x) for name in UNARY], (positive(2, 3),)),
    "elementwise two operands": (
        lambda x, y: [getattr(lax, name)(x, y) for name in BINARY],
        (positive(2, 3), positive(2, 3)),
    ),
    "elementwise on integers": (
        lambda x, y: (
            [
                getattr(lax, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(name, name))(x, y)
                for name in INTEGER
                if hasattr(lax, name) or name in ("and", "or", "xor")
            ]
            + [lax.bitwise_not(x), lax.population_count(x), lax.clz(x)]
        ),
        (integers(9, 2, 3), integers(9, 2, 3)),
    ),
    "elementwise on complex numbers": (
        lambda x, y: [
            lax.complex(x, y),
            lax.conj(lax.complex(x, y)),
            lax.real(lax.complex(x, y)),
            lax.imag(lax.complex(x, y)),
        ],
        (normal(2, 3), normal(2, 3)),
    ),
    "elementwise on the rest": (
        lambda x: [
            lax.clamp(0.1, x, 0.5),
            lax.select(x > 0, x, -x),
            lax.integer_pow(x, 3),
            lax.convert_element_type(x, "bfloat16"),
            lax.reduce_precision(x, 5, 10),
            lax.stop_gradient(x),
            lax.betainc(x, x, x / 4),
            lax.random_gamma_grad(x, x),
            jnp.copy(x),
            jax.device_put(x),
            lax.polygamma(x * 0 + 2, x),
        ],
        (positive(2, 3),),
    ),
    "implicit broadcast of size 1": (lambda x, y: jnp.add(x, y), (normal(2, 3), normal(2, 1))),
    "clamp by arrays": (lambda x, a: lax.clamp(-a, x, a), (normal(2, 3), positive(2, 3))),
    "derivative of tanh and pow": (gradient(lambda x: jnp.tanh(x) + x**2.5 + jnp.sqrt(x)), (positive(2, 3),)),
    "named and barrier": (
        lambda x, y: [lax.optimization_barrier((x, y)), checkpoint_name(x, "x")],
        (normal(2, 3), normal(4)),
    ),
    "reductions": (
        lambda x: [
            x.sum(1),
            x.max((0, 2)),
            x.min(0),
            x.prod(2),
            x.argmax(1),
            x.argmin(0),
            (x > 0).all(1),
            (x > 0).any((0, 1)),
            lax.reduce_xor(jnp.int32(x * 9), (1,)),
        ],
        (normal(2, 3, 5),),
    ),
    "general reduce": (lambda x: lax.reduce(x, 0.5, lambda a, b: a * b + a + b, (1,)), (normal(2, 3, 5) * 0.1,)),
    "general reduce of two": (
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        (normal(2, 3, 5), normal(2, 3, 5)),
    ),
    "along a dim": (
        lambda x: [
            jnp.cumsum(x, 1),
            jnp.cumprod(x, 0),
            lax.cummax(x, 1),
            lax.cummin(x, 1),
            lax.cumlogsumexp(x, 2),
            jnp.flip(x, (0, 2)),
            jnp.sort(x, 1),
            jnp.argsort(x, 1),
            jnp.cumsum(x, 1, dtype="bfloat16"),
        ],
        (normal(2, 3, 5),),
    ),
    "sort by keys": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (normal(2, 5), normal(2, 5))),
    "top k": (lambda x: [lax.top_k(x, 2), lax.approx_max_k(x, 2, reduction_dimension=1)], (normal(2, 3, 5),)),
    "median": (lambda x: jnp.median(x, axis=1), (normal(2, 5, 3),)),
    "keys": (
        lambda k: [
            jax.random.bits(k, (3, 2)),
            jax.random.split(k, 4),
            jax.random.fold_in(k, 3),
            jax.random.clone(k),
            jax.random.normal(k, (2, 5)),
            jax.random.key_data(k),
        ],
        (jax.random.key(0),),
    ),
    "a batch of keys": (
        lambda k, x: [
            jax.vmap(lambda key: jax.random.normal(key, (3,)))(k),
            jax.vmap(jax.random.split)(k),
            jax.random.key_data(k),
            jax.vmap(jax.random.fold_in, (0, None))(k, 7),
            jax.vmap(jax.random.fold_in)(k, x),
            jax.random.clone(k),
        ],
        (jax.random.split(jax.random.key(1), 5), integers(9, 5)),
    ),
    "a vector folded into one key": (
        lambda k, x: jax.vmap(jax.random.fold_in, (None, 0))(k, x),
        (jax.random.key(1), integers(9, 5)),
    ),
    "a batch of seeds": (lambda s: jax.vmap(jax.random.key)(s), (integers(9, 5),)),
    "raw keys": (
        lambda k: [
            jax.random.uniform(k, (3, 2)),
            jax.random.split(k),
            lax.rng_bit_generator(jnp.tile(k, 2), (3, 2)),
            jax.random.fold_in(k, 1),
        ],
        (np.array([0, 3], "uint32"),),
    ),
    "raw keys in a batch": (
        lambda k: jax.vmap(lambda one: jax.random.uniform(one, (3,)))(k),
        (np.arange(8, dtype="uint32").reshape(4, 2),),
    ),
    "a batch of bit generators": (
        lambda k: jax.vmap(lambda one: lax.rng_bit_generator(one, (3,)))(k),
        (np.arange(12, dtype="uint32").reshape(3, 4),),
    ),
    "dropout": (
        lambda k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0.0),
        (jax.random.key(0), normal(3, 4)),
    ),
    "matrix product": (lambda x, w: [x @ w, jnp.dot(w, x, precision="highest")], (normal(3, 3), normal(3, 3))),
    "product with batch dims": (
        lambda x, y: jnp.einsum("abcd,ebad->ebac", x, y),
        (normal(2, 3, 4, 5), normal(6, 3, 2, 5)),
    ),
    "product of experts": (lambda x, w: jnp.einsum("ecd,edf->ecf", x, w), (normal(2, 3, 4), normal(2, 4, 5))),
    "attention": (
        lambda q, k, v: jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bshd->bhqs", q, k)), v),
        (normal(2, 3, 4, 5), normal(2, 6, 4, 5), normal(2, 6, 4, 5)),
    ),
    "fused attention": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        (normal(2, 3, 4, 5), normal(2, 3, 2, 5), normal(2, 3, 2, 5)),
    ),
    "gradient of a product": (gradient(lambda w, x: jnp.tanh(x @ w)), (normal(3, 4), normal(2, 3))),
    "ragged product": (ragged, (normal(6, 3), normal(2, 3, 5), np.array([2, 4], "int32"))),
    "ragged product, data": (gradient(ragged), (normal(6, 3), normal(2, 3, 5), np.array([2, 4], "int32"))),
    "ragged product, weights": (gradient(ragged, 1), (normal(6, 3), normal(2, 3, 5), np.array([2, 4], "int32"))),
    "convolution": (conv("NHWC", "HWIO", "NHWC"), (normal(2, 6, 6, 3), normal(3, 3, 3, 4))),
    "convolution, channels first": (conv("NCHW", "OIHW", "NCHW"), (normal(2, 3, 6, 6), normal(4, 3, 3, 3))),
    "convolution in one dim": (conv("NHC", "HIO", "NHC"), (normal(2, 6, 3), normal(3, 3, 4))),
    "depthwise convolution": (
        conv("NHWC", "HWIO", "NHWC", feature_group_count=4),
        (normal(2, 5, 5, 4), normal(3, 3, 1, 4)),
    ),
    "depthwise convolution, two outputs each": (
        conv("NHWC", "HWIO", "NHWC", feature_group_count=4),
        (normal(2, 5, 5, 4), normal(3, 3, 1, 8)),
    ),
    "grouped convolution": (
        conv("NHWC", "HWIO", "NHWC", feature_group_count=2),
        (normal(2, 5, 5, 6), normal(3, 3, 3, 8)),
    ),
    "convolution in batch groups": (
        conv("NHWC", "HWIO", "NHWC", batch_group_count=2),
        (normal(4, 5, 5, 3), normal(3, 3, 3, 6)),
    ),
    "convolution, gradient of the kernel": (
        gradient(conv("NHWC", "HWIO", "NHWC"), 1),
        (normal(2, 6, 6, 3), normal(3, 3, 3, 4)),
    ),
    "convolution, gradient of the data": (
        gradient(conv("NHWC", "HWIO", "NHWC")),
        (normal(2, 6, 6, 3), normal(3, 3, 3, 4)),
    ),
    "grouped convolution, gradient of the kernel": (
        gradient(conv("NHWC", "HWIO", "NHWC", feature_group_count=2), 1),
        (normal(2, 5, 5, 6), normal(3, 3, 3, 8)),
    ),
    "depthwise convolution, gradient of the kernel": (
        gradient(conv("NHWC", "HWIO", "NHWC", feature_group_count=4), 1),
        (normal(2, 5, 5, 4), normal(3, 3, 1, 8)),
    ),
    "depthwise convolution, gradient of the data": (
        gradient(conv("NHWC", "HWIO", "NHWC", feature_group_count=4)),
        (normal(2, 5, 5, 4), normal(3, 3, 1, 8)),
    ),
    "batch groups, gradient of the kernel": (
        gradient(conv("NHWC", "HWIO", "NHWC", batch_group_count=2), 1),
        (normal(4, 5, 5, 3), normal(3, 3, 3, 6)),
    ),
    "per-example convolution": (jax.vmap(conv("NHWC", "HWIO", "NHWC")), (normal(2, 1, 5, 5, 3), normal(2, 3, 3, 3, 4))),
    "per-example gradient of a kernel": (
        lambda x, w: jax.vmap(gradient(conv("NHWC", "HWIO", "NHWC"), 1), (0, None))(x[:, None], w),
        (normal(2, 5, 5, 3), normal(3, 3, 3, 4)),
    ),
    "patches": (lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "SAME"), (normal(2, 3, 4, 4),)),
    "1x1 convolution": (conv("NHWC", "HWIO", "NHWC"), (normal(2, 5, 5, 3), normal(1, 1, 3, 4))),
    "take rows": (
        lambda t, i: [jnp.take(t, i, axis=0), t[i], t.at[i].get(mode="clip")],
        (normal(7, 4), integers(7, 2, 3)),
    ),
    "take columns": (lambda t, i: jnp.take(t, i, axis=1), (normal(4, 7), integers(7, 2, 3))),
    "index pairs": (lambda t, i, j: t[i, j], (normal(7, 5, 4), integers(7, 3), integers(5, 3))),
    "index pairs around a dim": (lambda t, i, j: t[i, :, j], (normal(7, 4, 5), integers(7, 3), integers(5, 3))),
    "index by one's own number": (lambda t, i: t[jnp.arange(3), i], (normal(3, 5), integers(5, 3))),
    "take along an axis": (lambda t, i: jnp.take_along_axis(t, i[:, None], 1), (normal(3, 5), integers(5, 3))),
    "take along an axis, three dims": (
        lambda t, i: jnp.take_along_axis(t, i, 1),
        (normal(3, 5, 4), integers(5, 3, 2, 4)),
    ),
    "one key a table": (jax.vmap(lambda t, i: t[i]), (normal(3, 5, 4), integers(5, 3))),
    "keys of one table": (jax.vmap(lambda t, i: t[i], (None, 0)), (normal(5, 4), integers(5, 3))),
    "one key of several tables": (jax.vmap(lambda t, i: t[i], (0, None)), (normal(3, 5, 4), integers(5, 2))),
    "lookups of lookups": (
        jax.vmap(jax.vmap(lambda t, i: t[i], (None, 0)), (0, 0)),
        (normal(3, 5, 4), integers(5, 3, 2)),
    ),
    "slices by index": (
        jax.vmap(lambda t, i: lax.dynamic_slice(t, (i, 0), (2, 4)), (None, 0)),
        (normal(7, 4), integers(5, 3)),
    ),
    "take on the last dim, keeping it": (lambda t, i: jnp.take(t, i, axis=-1), (normal(2, 3, 5), integers(5, 4))),
    "scatter": (
        lambda t, i, u: [t.at[i].add(u), t.at[i].set(u), t.at[i].mul(u), t.at[i].min(u), t.at[i].max(u)],
        (normal(7, 4), np.array([1, 4, 6], "int32"), normal(3, 4)),
    ),
    "scatter pairs": (
        lambda t, i, j, u: t.at[i, j].add(u),
        (normal(7, 5, 4), np.array([1, 4]), np.array([0, 3]), normal(2, 4)),
    ),
    "scatter by one's own number": (lambda t, i: t.at[jnp.arange(3), i].add(1.0), (normal(3, 5), integers(5, 3))),
    "scatter in a batch": (
        jax.vmap(lambda t, i, u: t.at[i].add(u)),
        (normal(3, 5, 4), integers(5, 3, 2), normal(3, 2, 4)),
    ),
    "scatter through a function": (lambda t, i: t.at[i].apply(jnp.sin), (normal(7, 4), np.array([1, 4, 6], "int32"))),
    "gradient of a lookup": (gradient(lambda t, i: t[i]), (normal(7, 4), integers(7, 2, 3))),
    "gradient of a batch of lookups": (gradient(jax.vmap(lambda t, i: t[i])), (normal(3, 5, 4), integers(5, 3, 2))),
    "gradient of taking along an axis": (
        gradient(lambda t, i: jnp.take_along_axis(t, i[:, None], 1)),
        (normal(3, 5), integers(5, 3)),
    ),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), (normal(6, 3), integers(4, 6))),
    "one-hot": (lambda i: jax.nn.one_hot(i, 5), (integers(5, 2, 3),)),
    "merge dims": (lambda x: x.reshape(6, 20), (normal(2, 3, 4, 5),)),
    "split a dim": (lambda x: x.reshape(2, 3, 4, 5), (normal(6, 20),)),
    "regroup dims": (lambda x: x.reshape(4, 6), (normal(6, 4),)),
    "regroup dims with a common front": (lambda x: x.reshape(3, 4, 6, 2), (normal(3, 6, 4, 2),)),
    "regroup coprime dims": (lambda x: x.reshape(3, 2), (normal(2, 3),)),
    "regroup a tail": (lambda x: x.reshape(4, 3, 8), (normal(4, 6, 4),)),
    "flatten all": (lambda x: [x.reshape(-1), x.reshape(1, -1), x.reshape(2, 1, 3, 1, 4)], (normal(2, 3, 4),)),
    "reshape with ones": (lambda x: x.reshape(2, 3, 1), (normal(1, 2, 3),)),
    "broadcast": (
        lambda x: [
            jnp.broadcast_to(x, (4, 2, 3)),
            x[:, None, :],
            jnp.broadcast_to(x[:, :1], (2, 3)),
            lax.broadcast_in_dim(x, (2, 5, 3), (0, 2)),
        ],
        (normal(2, 3),),
    ),
    "transpose": (lambda x: [x.T, x.transpose(2, 0, 1)], (normal(2, 3, 4),)),
    "squeeze and expand": (lambda x: [x.squeeze(1), jnp.expand_dims(x, (0, -1))], (normal(2, 1, 3),)),
    "slices": (
        lambda x: [x[:, 1:3], x[::2], x[..., ::-1], x[:, 0], lax.slice_in_dim(x, 0, 4, axis=1)],
        (normal(3, 4, 5),),
    ),
    "dynamic slices": (dynamic, (normal(3, 4, 5), np.int32(1))),
    "pad": (
        lambda x: [
            jnp.pad(x, ((0, 0), (1, 2))),
            lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1))),
            lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))),
        ],
        (normal(2, 3),),
    ),
    "concatenate": (
        lambda x, y: [jnp.concatenate([x, y], 1), jnp.concatenate([x, x], 1)],
        (normal(2, 3), normal(2, 4)),
    ),
    "stack and unstack": (
        lambda x, y: [
            jnp.stack([x, y], 1),
            jnp.unstack(x, axis=1),
            jnp.split(x, 3, axis=1),
            jnp.array_split(x, 2, axis=1),
        ],
        (normal(2, 3, 4), normal(2, 3, 4)),
    ),
    "tile and repeat": (
        lambda x: [jnp.tile(x, (2, 1)), jnp.repeat(x, 3, axis=1), jnp.tile(x, (4, 2, 3))],
        (normal(2, 3),),
    ),
    "roll": (lambda x: jnp.roll(x, 1, axis=1), (normal(2, 3),)),
    "fused qkv": (fused_qkv, (normal(2, 3, 5), normal(5, 24))),
    "windows": (windows, (normal(2, 4, 4, 3),)),
    "gradient of pooling": (gradient(max_pool), (normal(2, 4, 4, 3),)),
    "second derivative of pooling": (lambda x: jax.jvp(gradient(max_pool), (x,), (x * 2,)), (normal(2, 4, 4, 3),)),
    "gradient of average pooling": (
        gradient(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")),
        (normal(2, 4, 4, 3),),
    ),
    "bit casts": (
        lambda x: [
            lax.bitcast_convert_type(x, "int32"),
            lax.bitcast_convert_type(x, "uint8"),
            lax.bitcast_convert_type(lax.bitcast_convert_type(x, "uint8"), "float32"),
        ],
        (normal(2, 3),),
    ),
    "triangular solve": (
        lambda a, b: [jax.scipy.linalg.solve_triangular(a, b, lower=True), jnp.linalg.solve(a, b)],
        (matrix(), normal(4, 3)),
    ),
    "triangular solves in a batch": (
        jax.vmap(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)),
        (matrix(2), normal(2, 4, 3)),
    ),
    "triangular solve from the right": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False, lower=True),
        (matrix(2), normal(2, 3, 4)),
    ),
    "cholesky": (jnp.linalg.cholesky, (matrix(3),)),
    "decompositions": (
        lambda a: [jnp.linalg.qr(a), jnp.linalg.eigh(a), jnp.linalg.svd(a), jnp.linalg.slogdet(a), lax.linalg.lu(a)],
        (matrix(2),),
    ),
    "fourier": (lambda x: [jnp.fft.fft(x), jnp.fft.rfft2(x), jnp.fft.irfft(jnp.fft.rfft(x))], (normal(2, 4, 6),)),
    "tridiagonal": (
        lambda a, b: lax.linalg.tridiagonal_solve(a[0], a[1], a[2], b),
        (np.abs(normal(3, 5)) + np.array([[0], [9], [0]], "float32"), normal(5, 2)),
    ),
    "rare functions": (
        lambda x: [
            jax.grad(lambda a: lax.igamma(a, x).sum())(x),
            jnp.log2(x),
            jnp.empty((2, 3)),
            jnp.zeros_like(x),
            lax.exp2(x),
            x.at[0].subtract(1.0),
        ],
        (positive(2, 3),),
    ),
    "rare decompositions": (
        lambda a: [
            lax.linalg.eig(a),
            lax.linalg.schur(a[0]),
            lax.linalg.hessenberg(a),
            lax.linalg.tridiagonal(a),
            lax.linalg.householder_product(a, a[:, 0]),
            lax.linalg.symmetric_product(a, a, symmetrize_output=True),
        ],
        (matrix(2),),
    ),
    "placed": (
        lambda x: [
            lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
            lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        ],
        (normal(2, 3),),
    ),
    "create": (lambda: [jnp.arange(5), lax.broadcasted_iota("int32", (2, 3), 1), jnp.eye(3)], ()),
    "calls": (
        lambda x: [
            jax.checkpoint(jnp.sin)(x),
            jax.jit(jnp.cos)(x),
            jax.nn.relu(x),
            jax.named_call(jnp.exp)(x),
            lax.composite(lambda v: v * 2, name="twice.it")(x),
        ],
        (normal(2, 3),),
    ),
    "kernels": (
        lambda x, y, w: [
            splitjax.kernel(lambda x, w: jnp.tanh(x @ w), "b i, i o -> b o")(x, w),
            splitjax.kernel(lambda x: x / x.sum(-1, keepdims=True), "b i -> b i", whole="i")(x),
            by_rows(x, y),
        ],
        (normal(4, 3), normal(3), normal(3, 5)),
    ),
}
