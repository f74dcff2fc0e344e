"""Compares the values of a step under its plan with those on one device.

Two arrays go in, a `Difference` comes out, which tells rounding from an error; with what the value does on one device
when its inputs change in their last digits, a `ComparedValue`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.verify.result import ComparedValue

# Two float64 programs whose sums are ordered otherwise differ by some 1e-16 per operation, relative to the largest
# value of an array. What an error of the program leaves is larger by many orders of magnitude.
TOLERANCE: float = 1e-9
# Of an array that is zero but for rounding: differences below this much of 1 are none.
FLOOR: float = 1e-12
# A difference that is no more than this many times what the last digits of the inputs change on one device is that of a
# jump.
_JUMP = 100.0


@dataclasses.dataclass(frozen=True)
class Difference:
    """Measures how far an array is from the reference.

    - `absolute`: the largest difference of an entry.
    - `relative`: the same, over the largest magnitude in the reference; where that is zero but for rounding, the
      difference itself.
    - `ratio`: what every entry is multiplied by, where that is one number; else None.
    - `replicas`: True where devices that should hold the same hold different numbers.
    - `comparable`: False where the reference is not finite.
    """

    absolute: float
    relative: float
    ratio: float | None = None
    replicas: bool = False
    comparable: bool = True

    def exceeds(self, tolerance: float = TOLERANCE) -> bool:
        """Tells whether it is more than rounding: more than `tolerance`, relative to the largest magnitude."""
        return self.comparable and self.absolute > FLOOR and not self.relative <= tolerance


def compare(value: Any, reference: Any) -> Difference:
    """Compares the array `value`, on whatever devices its parts and copies are, with the `reference` of one device."""
    expected = _host(reference)
    if expected.dtype == object or expected.size == 0:
        return Difference(0.0, 0.0)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        expected = expected.astype(np.float64)
    finite = bool(np.all(np.isfinite(expected)))
    scale = float(np.max(np.abs(expected))) if finite else float("nan")
    worst = 0.0
    ratios: list[tuple[np.ndarray, np.ndarray]] = []
    parts: dict[str, np.ndarray] = {}
    replicas = False
    shards = (
        [(shard.data, shard.index) for shard in value.addressable_shards]
        if isinstance(value, jax.Array)
        else [(value, ())]
    )
    for data, index in shards:
        part, mine = _host(data), expected[index]
        part = part.astype(mine.dtype)
        known = parts.setdefault(str(index), part)
        with np.errstate(all="ignore"):
            gap = np.abs(part - mine)
            apart = np.abs(part - known)
        replicas |= bool(np.nanmax(apart, initial=0.0) > TOLERANCE * max(scale, FLOOR))
        largest = np.max(gap, initial=0.0)
        worst = max(worst, float("inf") if np.isnan(largest) else float(largest))
        ratios.append((part, mine))
    if not finite:
        return Difference(worst, worst, comparable=False)
    return Difference(worst, worst / scale if scale > FLOOR else worst, _ratio(ratios), replicas)


def _host(array: Any) -> np.ndarray:
    """Returns a numpy array of the same numbers, in a dtype that numpy computes with; of random keys, their words."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return (
        array.astype(np.float32)
        if array.dtype.kind == "V" or array.dtype.itemsize < 4 and array.dtype.kind == "f"
        else array
    )


def _ratio(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """Returns the number that the reference is multiplied by in all parts; None if there is none, or if it is 1."""
    dots, squares = 0.0, 0.0
    for part, mine in pairs:
        dots += float(np.sum(np.real(part * np.conj(mine))))
        squares += float(np.sum(np.abs(mine) ** 2))
    if not squares or not np.isfinite(dots):
        return None
    ratio = dots / squares
    residual = max(float(np.max(np.abs(part - ratio * mine), initial=0.0)) for part, mine in pairs)
    apart = max(float(np.max(np.abs(part - mine), initial=0.0)) for part, mine in pairs)
    return ratio if residual <= 1e-6 * apart else None


def differences_of(values: Sequence[Any], references: Sequence[Any]) -> list[Difference]:
    """Compares every array of `values` with the array of `references` at the same position."""
    return [compare(value, reference) for value, reference in zip(values, references, strict=True)]


def is_wrong(difference: Difference) -> bool:
    """Tells whether a `difference` is an error: more than rounding, or devices that do not agree."""
    return difference.exceeds() or difference.replicas


def compared_value(
    kind: str, name: str, reference: Any, difference: Difference, jump: float, own: float | None
) -> ComparedValue:
    """Judges a value by its difference from one device.

    **Arguments:**

    - `kind`, `name`: of the value, as it is shown. `reference`: the value on one device.
    - `difference`: how far the value under the plan is from it.
    - `jump`: by how much the value changes on one device when the inputs do in their last digits.
    - `own`: the relative difference in the step's own precision, if that was asked for.
    """
    note = "devices that should hold the same numbers hold different ones" if difference.replicas else ""
    if not difference.comparable:
        note = "not finite on one device"
    ok = not is_wrong(difference)
    if not ok and jump > TOLERANCE and difference.relative < _JUMP * jump:
        ok, note = (
            True,
            f"jumps by {jump:.1g} of its largest entry on one device, too, when the inputs change in their last "
            "digits: it is not compared",
        )
    return ComparedValue(
        kind, name, tuple(reference.shape), difference.absolute, difference.relative, ok, difference.ratio, own, note
    )
