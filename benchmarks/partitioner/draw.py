"""What a drawn program is: an operation of some family with its inputs, a wrapper around it, a mesh and a layout for
every input.

A `Draw` is data: `draw(seed, number)` gives the same one in every process, and it goes through JSON, so that a worker
that dies can be asked for the same program again and a shrunk one can be kept. `step_of` turns it into a small training
step (state = weights, batch = data) that serves a `jax.jit` by hand, `splitjax.parallelize` and one device alike.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Layout = tuple[tuple[str, ...], ...]  # per dim, the mesh axes over which it is split, major first
Mesh = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """An operand of a drawn operation. `role`: "data" (dim 0 holds the examples), "weight" or "other" (whole
    everywhere). `values`: what `values_of` fills it with: "normal", "positive", "unit" (-0.9 to 0.9), "above" (1.1 to
    3), "matrix" (well conditioned), "spd", "below:N" (integers), "around:N" (integers, some of them outside 0 to N),
    "distinct:N" (no integer twice), "bool", "bits", "key" (raw keys: the last dim is 2, and stays whole) or "distinct"
    (floats, no ties)."""

    shape: tuple[int, ...]
    role: str = "data"
    values: str = "normal"

    @property
    def is_float(self) -> bool:
        return self.values in FLOATS


FLOATS = frozenset({"normal", "positive", "unit", "above", "matrix", "spd", "distinct"})


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation ready to run: its inputs and a function of them that returns a tuple of arrays."""

    inputs: tuple[Input, ...]
    run: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of operation. `draw` picks parameters (JSON values), `build` makes the `Case` of them, `simplest` holds
    the values that shrinking tries first, `wrappers` names those that its operations cannot stand in, `share` is how
    often it is drawn: 0 for a family that is drawn only where it is asked for (`--only`), so that the programs of the
    other families stay what they are."""

    name: str
    draw: Callable[[Dice], dict[str, Any]]
    build: Callable[[Mapping[str, Any]], Case]
    simplest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: frozenset[str] = frozenset()
    share: int = 1
    dtypes: tuple[str, ...] = ("float64",)


class Dice(random.Random):
    """Random choices, the same in every process for the same text."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pick(self, *options: Any) -> Any:
        return options[int(self.random() * len(options))]

    def size(self) -> int:
        """Of a dim that layouts may split: odd, one, or with factors of the mesh."""
        return self.pick(1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8, 9, 12, 16)

    def batch(self) -> int:
        """Number of examples; mostly one that all devices divide."""
        return self.pick(8, 8, 8, 8, 8, 16, 16, 24, 4, 2, 6, 12)

    def sizes(self, count: int) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(count))


@dataclasses.dataclass(frozen=True)
class Draw:
    """A program. `params`: pairs, sorted by name; `layouts`: one for each input; `pinned`: whether gradients are to
    have the layout of what they are taken for; `reuse`: "once", "result" (results are used a second time), "operand"
    (the operation runs a second time on the same weights) or "fixed" (it runs a second time without a derivative, of
    which some operations have another form); `boundary`: whether the step calls `splitjax.value_and_grad` under
    splitjax, or JAX's; `rules`: under splitjax, "own/all" or "own/data" for a rule set that gives the drawn layouts to
    weights and spreads the examples over all axes or `data`, or the name of a shipped one."""

    seed: str
    number: int
    family: str
    params: tuple[tuple[str, Any], ...]
    wrapper: str
    reuse: str
    dtype: str
    mesh: Mesh
    layouts: tuple[Layout, ...]
    pinned: bool = False
    boundary: bool = False
    rules: str = "own/data"

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.params)

    def with_params(self, params: Mapping[str, Any]) -> Draw:
        return dataclasses.replace(self, params=tuple(sorted(params.items())))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Draw:
        return Draw(**{key: _tuples(value) for key, value in json.loads(text).items()})

    @property
    def used_axes(self) -> frozenset[str]:
        return frozenset(axis for layout in self.layouts for dim in layout for axis in dim)

    @property
    def is_partly_replicated(self) -> bool:
        """Whether some axis of the mesh splits no input."""
        return any(size > 1 and axis not in self.used_axes for axis, size in self.mesh)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def case_of(draw: Draw, families: Mapping[str, Family]) -> Case:
    """The wrapped operation of a draw. Raises whatever the operation says of parameters that do not fit each other."""
    from benchmarks.partitioner.wrappers import WRAPPERS

    family = families[draw.family]
    return WRAPPERS[draw.wrapper](family.build, draw.settings)


def values_of(draw: Draw, case: Case) -> list[np.ndarray]:
    """Values for the inputs of a case, the same for the same draw's seed and number."""
    text = f"{draw.seed}:{draw.number}"
    source = np.random.default_rng(list(text.encode()))
    dtype = jnp.dtype(draw.dtype)
    return [_values(source, one, dtype) for one in case.inputs]


def _values(source: np.random.Generator, one: Input, dtype: Any) -> np.ndarray:
    kind, _, bound = one.values.partition(":")
    shape, count = one.shape, int(np.prod(one.shape))
    if kind == "below":
        return source.integers(0, int(bound), shape).astype(np.int32)
    if kind == "around":
        return source.integers(-int(bound) - 2, int(bound) + 3, shape).astype(np.int32)
    if kind == "distinct" and bound:
        # Along the last dim no integer comes twice.
        return np.argsort(source.random((*shape[:-1], int(bound))), axis=-1)[..., : shape[-1]].astype(np.int32)
    if kind == "bool":
        return source.random(shape) < 0.5
    if kind in ("bits", "key"):
        return source.integers(0, 2**31 - 1, shape).astype(np.uint32)
    floats = {
        "normal": lambda: source.normal(size=shape),
        "positive": lambda: source.uniform(0.2, 2.0, shape),
        "unit": lambda: source.uniform(-0.9, 0.9, shape),
        "above": lambda: source.uniform(1.1, 3.0, shape),
        "distinct": lambda: source.permutation(count).reshape(shape) / max(count, 1) * 4 - 1.9,
        "matrix": lambda: source.normal(size=shape) * 0.2 + 2 * np.eye(*shape[-2:]),
        "spd": lambda: _spd(source, shape),
    }[kind]()
    return np.asarray(floats).astype(dtype)


def _spd(source: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    half = source.normal(size=shape) * 0.4
    return half @ np.swapaxes(half, -1, -2) + np.diag(np.arange(1.0, shape[-1] + 1))


def step_of(draw: Draw, case: Case, value_and_grad: Callable[..., Any] = jax.value_and_grad) -> Callable[..., Any]:
    """The training step of a draw: `step(state, batch, others) -> (new state, results)`, with the weights `w0`, `w1`,
    ... in `state` and the data `x0`, ... in `batch`. A weight becomes itself less its gradient; `results` has the loss,
    what the operation returned, and the gradients of the floating-point data. `others` are the inputs that every device
    has whole."""

    def step(
        state: dict[str, Any], batch: dict[str, Any], others: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        floating = {name: value for name, value in batch.items() if jnp.issubdtype(value.dtype, jnp.floating)}
        fixed = {name: value for name, value in batch.items() if name not in floating}

        def loss_fn(weights: dict[str, Any], data: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
            named = {**weights, **data, **fixed, **others}
            values = [named[name] for name in names_of(case)]
            results = case.run(*values)
            loss = _loss(results, draw)
            if draw.reuse == "operand":
                again = [
                    value * 0.5 if name in data else value for name, value in zip(names_of(case), values, strict=True)
                ]
                loss = loss + _loss(case.run(*again), draw)
            if draw.reuse == "fixed":
                results = (results, case.run(*[jax.lax.stop_gradient(value) for value in values]))
            return loss, results

        if not (state or floating):
            return state, {"results": loss_fn(state, floating)[1]}
        (loss, results), (gradients, of_data) = value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(state, floating)
        new = jax.tree.map(lambda weight, gradient: weight - gradient, state, gradients)
        return new, {"loss": loss, "results": results, "of_data": of_data}

    return step


def names_of(case: Case) -> list[str]:
    """`w0`, `x0`, `o0`, ... for each input, in order."""
    counts: dict[str, int] = {}
    names = []
    for one in case.inputs:
        letter = {"weight": "w", "data": "x", "other": "o"}[one.role]
        names.append(f"{letter}{counts.get(letter, 0)}")
        counts[letter] = counts.get(letter, 0) + 1
    return names


def arguments_of(draw: Draw, case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """State, batch and others of a draw, as NumPy arrays."""
    named = dict(zip(names_of(case), values_of(draw, case), strict=True))
    return tuple({name: value for name, value in named.items() if name[0] == letter} for letter in "wxo")  # type: ignore[return-value]


def _loss(results: tuple[Any, ...], draw: Draw) -> Any:
    dtype = jnp.dtype(draw.dtype)
    total = jnp.zeros((), dtype)
    for result in results:
        if jnp.issubdtype(result.dtype, jnp.complexfloating):
            result = result.real + 0.3 * result.imag
        if not jnp.issubdtype(result.dtype, jnp.floating):
            continue
        total = total + jnp.sum(jnp.sin(result)).astype(dtype)
        if draw.reuse == "result" and result.ndim:
            total = total + jnp.sum(jnp.tanh(jnp.sum(result, axis=0) * 0.3)).astype(dtype)
    return total
