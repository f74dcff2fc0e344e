"""Drawn operations value by value, on integers, random bits, and matrices: elementwise functions, linear algebra,
Fourier transforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy import special

from benchmarks.partitioner.draw import Case, Dice, Family, Input

# Functions of one array by the values that they are defined for.
_UNARY = {
    "normal": (
        "abs sin cos tan tanh sinh cosh exp exp2 expm1 atan asinh logistic erf erfc sign neg floor ceil round square"
        " cbrt bessel_i0e bessel_i1e is_finite stop_gradient integer_pow reduce_precision copy convert real_imag clamp"
        " relu gelu sigmoid swish name platform"
    ),
    "positive": "sqrt rsqrt log log1p log2 lgamma digamma reciprocal polynomial",
    "unit": "asin acos atanh erf_inv",
    "above": "acosh",
}
_BINARY = (
    "add sub mul div max min pow atan2 rem nextafter select where eq ne lt le gt ge igamma igammac polygamma zeta"
    " betainc complex and_or threshold hypot random_gamma_grad igamma_grad_a".split()
)
_INTEGER = (
    "and or xor not shift_left shift_right_logical shift_right_arithmetic clz population_count rem div sign mulhi add"
    " min max convert pow abs".split()
)
DTYPES = ("float64",) * 8 + ("float32", "bfloat16")


def _own_unary(name: str) -> Any:
    special_ones = {
        "sign": jnp.sign,
        "stop_gradient": lax.stop_gradient,
        "integer_pow": lambda x: lax.integer_pow(x, 3),
        "reduce_precision": lambda x: lax.reduce_precision(x, 11, 52) if x.dtype == jnp.float64 else x,
        "copy": jnp.copy,
        "convert": lambda x: x.astype(jnp.float32).astype(x.dtype) + x,
        "clamp": lambda x: jnp.clip(x, -0.5, 0.7) + lax.clamp(jnp.asarray(-0.5, x.dtype), x, jnp.asarray(0.7, x.dtype)),
        "relu": jax.nn.relu,
        "gelu": jax.nn.gelu,
        "sigmoid": jax.nn.sigmoid,
        "swish": jax.nn.swish,
        "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
        "is_finite": lambda x: lax.is_finite(x),
        "real_imag": lambda x: (lambda z: z.real * z.imag + lax.conj(z).imag + jnp.abs(z))(
            lax.complex(x, x * 2 + 1)
            if x.dtype != jnp.bfloat16
            else lax.complex(x.astype(jnp.float32), x.astype(jnp.float32))
        ).astype(x.dtype),
        "log2": jnp.log2,
        "polynomial": lambda x: jnp.polyval(jnp.asarray([0.3, -1.0, 2.0], x.dtype), x),
        "platform": lambda x: lax.platform_dependent(x, cpu=lambda a: a * 2, default=lambda a: a * 3),
        "name": lambda x: checkpoint_name(x, "here"),
    }
    return special_ones.get(name) or getattr(lax, name)


def _draw_elementwise(dice: Dice) -> dict[str, Any]:
    kind = dice.pick("normal", "normal", "normal", "positive", "unit", "above")
    return {
        "batch": dice.batch(),
        "sizes": dice.sizes(dice.pick(0, 1, 2, 3)),
        "kind": kind,
        "unary": dice.pick(*_UNARY[kind].split()),
        "binary": dice.pick(*_BINARY),
        "shape": dice.pick("same", "weight", "weight_ones", "vector", "scalar"),
    }


def _build_elementwise(params: Mapping[str, Any]) -> Case:
    shape = (params["batch"], *params["sizes"])
    if params["unary"] not in _UNARY[params["kind"]].split():
        raise ValueError("the function is not of this kind")
    unary, binary = _own_unary(params["unary"]), params["binary"]
    needs_wide = {"lgamma", "digamma", "erf_inv", "bessel_i0e", "bessel_i1e"}
    others = {
        "same": Input(shape, "data", "positive"),
        "weight": Input(shape[1:], "weight", "positive"),
        "weight_ones": Input(tuple(1 if d % 2 else s for d, s in enumerate(shape[1:])), "weight", "positive"),
        "vector": Input(shape[-1:] if len(shape) > 1 else (1,), "weight", "positive"),
        "scalar": Input((), "weight", "positive"),
    }

    def run(x: Any, y: Any) -> Any:
        if params["unary"] in needs_wide and x.dtype == jnp.bfloat16:
            x = x.astype(jnp.float32)
        first = unary(x)
        y = jnp.broadcast_to(y, first.shape).astype(x.dtype)
        positive = jnp.abs(x) + 0.5
        if x.dtype == jnp.bfloat16 and binary in (
            "igamma",
            "igammac",
            "polygamma",
            "zeta",
            "betainc",
            "complex",
            "random_gamma_grad",
            "igamma_grad_a",
            "nextafter",
        ):
            return (first, x * y)
        changes = {
            "atan2": lambda: lax.atan2(x, y),
            "rem": lambda: lax.rem(x, y),
            "nextafter": lambda: lax.nextafter(lax.stop_gradient(x), lax.stop_gradient(y)),
            "pow": lambda: lax.pow(positive, y),
            "select": lambda: lax.select(x > y, x * 2, y),
            "where": lambda: jnp.where(x > 0, jnp.sqrt(positive), y * x),
            "igamma": lambda: lax.igamma(lax.stop_gradient(y), positive),
            "igammac": lambda: lax.igammac(lax.stop_gradient(y), positive),
            "polygamma": lambda: lax.polygamma(jnp.ones_like(x), positive),
            "zeta": lambda: lax.zeta(lax.stop_gradient(y) + 1.5, lax.stop_gradient(positive)),
            "betainc": lambda: special.betainc(lax.stop_gradient(y), lax.stop_gradient(y + 0.3), jax.nn.sigmoid(x)),
            "complex": lambda: lax.complex(x, y) * lax.complex(y, x),
            "and_or": lambda: ((x > 0) & (y > 1)) | ~(x < y) ^ (y > 0.7),
            "threshold": lambda: jnp.maximum(x - y, 0) + lax.select_n((x > y).astype(jnp.int32), x, y),
            "hypot": lambda: jnp.sqrt(x * x + y * y),
            "random_gamma_grad": lambda: lax.random_gamma_grad(lax.stop_gradient(y), lax.stop_gradient(positive)),
            "igamma_grad_a": lambda: lax.igamma_grad_a(lax.stop_gradient(y), lax.stop_gradient(positive)),
        }
        return (first, changes[binary]() if binary in changes else getattr(lax, binary)(x, y))

    return Case((Input(shape, "data", params["kind"]), others[params["shape"]]), run)


def every_elementwise() -> list[dict[str, Any]]:
    """Parameters of programs that together hold every function that elementwise programs are drawn from."""
    names = [(kind, name) for kind, text in _UNARY.items() for name in text.split()]
    base = {"batch": 2, "sizes": (), "shape": "same"}
    return [{**base, "kind": kind, "unary": name, "binary": "add"} for kind, name in names] + [
        {**base, "kind": "normal", "unary": "sin", "binary": name} for name in _BINARY
    ]


def _draw_integer(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "sizes": dice.sizes(dice.pick(0, 1, 2)),
        "first": dice.pick(*_INTEGER),
        "form": dice.pick("two", "reduce", "one_hot", "cumsum", "sum_by_float", "count"),
        "axis": dice.pick(0, 0, 1),
    }


def _build_integer(params: Mapping[str, Any]) -> Case:
    shape = (params["batch"], *params["sizes"])
    name, form, axis = params["first"], params["form"], min(params["axis"], len(shape) - 1)
    unary = {
        "not": lax.bitwise_not,
        "clz": lax.clz,
        "population_count": lax.population_count,
        "sign": lax.sign,
        "convert": lambda a: a.astype(jnp.int8),
        "abs": lax.abs,
    }
    binary = {
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "add": lax.add,
        "min": lax.min,
        "max": lax.max,
        "rem": lax.rem,
        "div": lax.div,
        "pow": lambda a, b: lax.integer_pow(a, 2) + b,
        "shift_left": lambda a, b: lax.shift_left(a, b % 5),
        "shift_right_logical": lambda a, b: lax.shift_right_logical(a, b % 5),
        "shift_right_arithmetic": lambda a, b: lax.shift_right_arithmetic(a, b % 5),
        "mulhi": lambda a, b: lax.mulhi(a, b) if hasattr(lax, "mulhi") else a * b,
    }

    def run(a: Any, b: Any, scale: Any) -> Any:
        value = unary[name](a) if name in unary else binary[name](a, b + 1)
        others = {
            "two": lambda: value,
            "reduce": lambda: jnp.stack([jnp.sum(value, axis=axis), jnp.max(value, axis=axis)]),
            "one_hot": lambda: jax.nn.one_hot(a % 5, 5, dtype=scale.dtype) @ scale[:, None],
            "cumsum": lambda: jnp.cumsum(value, axis=axis),
            "sum_by_float": lambda: jnp.sum(value.astype(scale.dtype)[..., None] * scale * 0.01, axis=axis),
            "count": lambda: jnp.stack([lax.reduce_and(value, axes=(axis,)), lax.reduce_or(value, axes=(axis,))]),
        }
        return (value, others[form]())

    return Case((Input(shape, values="below:37"), Input(shape, values="below:7"), Input((5,), "weight")), run)


def _draw_random(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "length": dice.size(),
        "features": dice.size(),
        "rate": 0.3,
        "impl": dice.pick("threefry2x32", "threefry2x32", "threefry2x32", "rbg", "unsafe_rbg"),
        "form": dice.pick(
            "dropout",
            "dropout",
            "normal",
            "uniform",
            "bits",
            "split",
            "fold_in",
            "gamma",
            "categorical",
            "permutation",
            "randint",
            "per_key",
            "seed",
            "bernoulli",
            "truncated",
            "raw",
            "clone",
            "keys_of_data",
        ),
    }


def _build_random(params: Mapping[str, Any]) -> Case:
    n, length, features, form = (params[name] for name in ("batch", "length", "features", "form"))
    shape = (n, length, features)
    words = 2 if params["impl"] == "threefry2x32" else 4
    key_of = lambda raw: jax.random.wrap_key_data(
        raw if words == 2 else jnp.concatenate([raw, raw], -1), impl=params["impl"]
    )
    changes = {
        "dropout": lambda k, x: jnp.where(jax.random.bernoulli(k, 0.7, x.shape), x / 0.7, 0),
        "normal": lambda k, x: x + jax.random.normal(k, shape, x.dtype),
        "uniform": lambda k, x: x * jax.random.uniform(k, shape, x.dtype),
        "bits": lambda k, x: jax.random.bits(k, shape),
        "split": lambda k, x: jax.random.normal(jax.random.split(k, 3)[1], shape, x.dtype) * x,
        "fold_in": lambda k, x: jax.random.normal(jax.random.fold_in(k, n), shape, x.dtype) * x,
        "gamma": lambda k, x: jax.random.gamma(k, 1.5 + jnp.abs(x[:, 0])),
        "categorical": lambda k, x: jax.random.categorical(k, x),
        "permutation": lambda k, x: jax.random.permutation(k, x, axis=1),
        "randint": lambda k, x: jax.random.randint(k, shape, 0, 17),
        "bernoulli": lambda k, x: jax.random.bernoulli(k, jax.nn.sigmoid(x)),
        "truncated": lambda k, x: jax.random.truncated_normal(k, -1.0, 1.0, shape) * x,
        "clone": lambda k, x: x * jax.random.normal(jax.random.clone(k), shape, x.dtype),
        "keys_of_data": lambda k, x: x * jax.random.uniform(jax.random.key(jnp.sum(x > 0)), shape, x.dtype),
        "raw": lambda k, x: lax.rng_bit_generator(jax.random.key_data(k).repeat(4 // words), shape, dtype=jnp.uint32)[
            1
        ],
        "seed": lambda k, x: jax.random.uniform(jax.random.key(7), shape, x.dtype) * x,
    }
    if form == "per_key":
        each = lambda k, x: (
            jax.vmap(lambda one, row: row * jax.random.uniform(key_of(one), row.shape, row.dtype))(k, x),
        )
        return Case((Input((n, 2), "data", "key"), Input(shape)), each)
    return Case((Input((2,), "other", "key"), Input(shape)), lambda k, x: (changes[form](key_of(k), x),))


def _draw_linalg(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "n": dice.pick(1, 2, 3, 4, 4, 8),
        "m": dice.pick(1, 2, 3, 4, 8),
        "weight": dice.chance(0.4),
        "left": dice.chance(0.5),
        "lower": dice.chance(0.5),
        "transposed": dice.chance(0.3),
        "form": dice.pick(
            "cholesky",
            "triangular_solve",
            "qr",
            "eigh",
            "svd",
            "lu",
            "solve",
            "inverse",
            "slogdet",
            "tridiagonal_solve",
            "eig",
            "schur",
            "hessenberg",
            "householder",
            "tridiagonal",
            "symmetric_product",
            "expm",
            "linear_solve",
            "cg",
        ),
    }


def _build_linalg(params: Mapping[str, Any]) -> Case:
    batch, n, m, form, lower = (params[name] for name in ("batch", "n", "m", "form", "lower"))
    role = "weight" if params["weight"] else "data"
    lead = (4,) if params["weight"] else (batch,)
    spd = Input((*lead, n, n), role, "spd")
    square = Input((*lead, n, n), role, "matrix")
    tall = Input((*lead, n + m, n), role)
    right = Input((*lead, n, m), role)
    symmetric = lambda a: (a + jnp.swapaxes(a, -1, -2)) / 2
    stop = lax.stop_gradient
    low = lambda a: jnp.tril(a) if lower else jnp.triu(a)
    if form == "triangular_solve":
        solve = lambda a, b: lax.linalg.triangular_solve(
            low(a),
            b if params["left"] else jnp.swapaxes(b, -1, -2),
            left_side=params["left"],
            lower=lower,
            transpose_a=params["transposed"],
        )
        return Case((square, right), lambda a, b: (solve(a, b),))
    if form == "solve":
        return Case((square, right), lambda a, b: (jnp.linalg.solve(a, b),))
    if form == "tridiagonal_solve":
        return Case(
            (square, right),
            lambda a, b: (lax.linalg.tridiagonal_solve(a[..., 0] * 0.1, 2 + a[..., 0] ** 2, a[..., -1] * 0.1, b),),
        )
    if form == "symmetric_product":
        return Case(
            (tall, Input((*lead, n + m, n + m), role)),
            lambda a, c: (lax.linalg.symmetric_product(stop(a), stop(symmetric(c)), alpha=1.5, beta=0.5),),
        )
    if form in ("linear_solve", "cg"):
        if form == "linear_solve":
            of = lambda a, b: lax.custom_linear_solve(
                lambda v: a @ v, b, lambda _, v: jnp.linalg.solve(a, v), lambda _, v: jnp.linalg.solve(a.T, v)
            )
        else:
            of = lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: symmetric(a) @ v, b, tol=1e-13, maxiter=4 * n)[0]
        return Case((spd, right), lambda a, b: (jax.vmap(of)(a, b),))
    changes = {
        "cholesky": (spd, lambda a: jnp.linalg.cholesky(a)),
        "qr": (tall, lambda a: jnp.abs(jnp.linalg.qr(a)[1])),
        "lu": (square, lambda a: lax.linalg.lu(a)[0] + lax.linalg.lu(a)[2][..., None, :]),
        "inverse": (square, jnp.linalg.inv),
        "eigh": (spd, lambda a: jnp.linalg.eigh(symmetric(a))[0]),
        "svd": (tall, lambda a: jnp.linalg.svd(a, full_matrices=False)[1]),
        "slogdet": (square, lambda a: jnp.linalg.slogdet(a)[1]),
        "eig": (square, lambda a: jnp.sum(jnp.abs(stop(jnp.linalg.eigvals(a))), -1)),
        "schur": (square, lambda a: jnp.abs(lax.linalg.schur(stop(a))[0])),
        "hessenberg": (square, lambda a: jnp.abs(lax.linalg.hessenberg(stop(a))[0])),
        "householder": (
            tall,
            lambda a: jnp.abs(lax.linalg.householder_product(*[stop(v) for v in (a * 0.1, a[..., 0, :])])),
        ),
        "tridiagonal": (spd, lambda a: jnp.abs(lax.linalg.tridiagonal(stop(a))[1])),
        "expm": (square, lambda a: jax.scipy.linalg.expm(a * 0.3, max_squarings=2)),
    }
    one, change = changes[form]
    return Case((one, Input((one.shape[0],), role)), lambda a, s: (change(a * (1 + 0.01 * s[:, None, None])),))


def _draw_fft(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "sizes": dice.sizes(dice.pick(1, 2, 3)),
        "dims": dice.randint(1, 3),
        "form": dice.pick("fft", "ifft", "rfft", "irfft", "convolve"),
        "weight": dice.chance(0.25),
        "examples": dice.chance(0.2),
    }


def _build_fft(params: Mapping[str, Any]) -> Case:
    shape = (params["batch"], *params["sizes"])
    dims = min(params["dims"], len(shape) if params["examples"] else len(shape) - 1)
    if dims < 1:
        raise ValueError("no dim to transform")
    axes, form = tuple(range(len(shape) - dims, len(shape))), params["form"]
    changes = {
        "fft": lambda a: jnp.fft.fftn(a, axes=axes),
        "ifft": lambda a: jnp.fft.ifftn(a, axes=axes),
        "rfft": lambda a: jnp.fft.rfftn(a, axes=axes),
        "irfft": lambda a: jnp.fft.irfftn(lax.complex(a, 0.5 * a), axes=axes),
        "convolve": lambda a: jnp.fft.irfftn(
            jnp.fft.rfftn(a, axes=axes) * 0.5, s=tuple(shape[d] for d in axes), axes=axes
        ),
    }
    if form == "irfft" and shape[-1] < 2:
        raise ValueError("nothing would be left")
    return Case((Input(shape, "weight" if params["weight"] else "data"),), lambda a: (changes[form](a),))


_NO_SECOND = frozenset({"per_example_gradient"})
FAMILIES = (
    Family(
        "elementwise",
        _draw_elementwise,
        _build_elementwise,
        {"kind": "normal", "shape": "same", "sizes": ()},
        share=3,
        dtypes=DTYPES,
        without=_NO_SECOND | {"per_example"},
    ),
    Family(
        "integer",
        _draw_integer,
        _build_integer,
        {"form": "two", "sizes": ()},
        share=2,
        without=_NO_SECOND | {"jvp", "custom_jvp"},
    ),
    Family(
        "random",
        _draw_random,
        _build_random,
        {"impl": "threefry2x32"},
        share=2,
        without=_NO_SECOND | {"per_example", "jvp", "custom_jvp", "vmap_data", "vmap_both"},
    ),
    Family(
        "linalg",
        _draw_linalg,
        _build_linalg,
        {"weight": False, "m": 1},
        share=3,
        without=_NO_SECOND | {"jvp", "per_example"},
    ),
    Family("fft", _draw_fft, _build_fft, {"weight": False, "examples": False}, share=2, without=_NO_SECOND),
)
