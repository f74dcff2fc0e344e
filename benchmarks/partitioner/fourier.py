"""Drawn Fourier transforms between two dense layers, along dims that the layers' weights split: mixing of positions and
features, spectra of real numbers, long convolutions.

The family `fft` of the main search transforms inputs as they come; here what is transformed lies as a layer before it
leaves it, and is read by a layer behind it. The main search does not draw it (its programs stay what they are): `--only
fourier` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.draw import Case, Dice, Family, Input


def _draw(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "length": dice.size(),
        "features": dice.size(),
        "hidden": dice.size(),
        "out": dice.size(),
        "form": dice.pick("fft", "fft", "ifft", "fft2", "positions", "rfft", "irfft", "convolve", "filter"),
        "residual": dice.chance(0.3),
    }


def _build(params: Mapping[str, Any]) -> Case:
    n, length, features, hidden, out, form = (
        params[name] for name in ("batch", "length", "features", "hidden", "out", "form")
    )
    if form == "irfft" and hidden < 2:
        raise ValueError("nothing would be left")
    wide = lambda a: a.real - 0.5 * a.imag
    changes = {
        "fft": lambda a, s: wide(jnp.fft.fft(a)),
        "ifft": lambda a, s: jnp.fft.ifft(a * (1 + s)).real,
        "fft2": lambda a, s: jnp.fft.fft2(a).real,
        "positions": lambda a, s: wide(jnp.fft.fft(a, axis=1)),
        "rfft": lambda a, s: wide(jnp.fft.rfft(a)),
        "irfft": lambda a, s: jnp.fft.irfft(lax.complex(a, 0.5 * a)),
        "convolve": lambda a, s: jnp.fft.irfft(jnp.fft.rfft(a) * 0.5, n=hidden) + a,
        "filter": lambda a, s: jnp.fft.irfft(
            jnp.fft.rfft(a, n=2 * length, axis=1) * jnp.fft.rfft(s, n=2 * length, axis=0), n=2 * length, axis=1
        )[:, :length],
    }
    change = changes[form]
    left = {"rfft": hidden // 2 + 1, "irfft": 2 * (hidden - 1)}.get(form, hidden)

    def run(x: Any, first: Any, scale: Any, second: Any) -> tuple[Any]:
        before = jnp.tanh(x @ first)
        after = change(before, scale)
        if params["residual"] and left == hidden:
            after = after + before
        return (after @ second,)

    inputs = (
        Input((n, length, features)),
        Input((features, hidden), "weight"),
        Input((length, hidden), "weight"),
        Input((left, out), "weight"),
    )
    return Case(inputs, run)


FAMILIES = (
    Family(
        "fourier",
        _draw,
        _build,
        {"form": "fft", "residual": False},
        without=frozenset({"per_example_gradient"}),
        share=0,
    ),
)
