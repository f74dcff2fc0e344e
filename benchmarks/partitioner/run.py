"""Runs drawn programs on a mesh and on one device, and compares them. Nothing here survives a crash of the compiler:
see `partitioner.worker`."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.partitioner.draw import Case, Draw, Mesh, arguments_of, case_of, names_of, step_of
from benchmarks.partitioner.families import families
from benchmarks.partitioner.references import NOTHING_KEPT, References
from splitjax.primitives.walk import walk

# Relative to the largest value of the array: what another order of additions may change.
TOLERANCE = {"float64": 1e-8, "float32": 2e-3, "bfloat16": 0.15}
# Below this the largest value of an array is rounding noise of the values that cancelled in it.
_FLOOR = {"float64": 1e-5, "float32": 0.05, "bfloat16": 1.0}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program. `status`: "right", "wrong", "refused" (a typed error of splitjax), "invalid" (it cannot
    be traced, or one device cannot run it, or not twice alike), "failed" (an untyped error), and from outside "crash".
    `wrong`: pairs (leaf, relative error). `primitives` counts what its jaxpr holds."""

    number: int
    family: str
    status: str
    wrong: tuple[tuple[str, float], ...] = ()
    message: str = ""
    primitives: tuple[str, ...] = ()
    kept: bool = False  # read from what an earlier run left


@dataclasses.dataclass(frozen=True)
class Ready:
    """A traced program with its arguments."""

    draw: Draw
    case: Case
    function: Callable[..., Any]  # of (state, batch, others), jitted and traced
    arguments: tuple[dict[str, Any], ...]
    primitives: tuple[str, ...]
    rounding: str  # the narrowest floating dtype inside: attention takes its softmax in float32


def run_by_hand(draws: Sequence[Draw], planted: str = "", references: References = NOTHING_KEPT) -> list[Outcome]:
    """Compiles the programs together, with shardings on arguments (and on the gradients of those that are pinned); what
    differs from one device there (or from what `references` keep of one), or cannot be compiled, is run again alone and
    without references, which decides. All of them have one mesh.
    `planted` names a family whose results are spoiled on the mesh where there is more than one example: a search has to
    find that."""
    ready: list[tuple[int, Ready]] = []
    outcomes: dict[int, Outcome] = {}
    for k, draw in enumerate(draws):
        prepared = prepare(draw)
        if isinstance(prepared, Outcome):
            outcomes[k] = prepared
        else:
            ready.append((k, prepared))
    alone = len(draws) == 1
    expected: Any = None
    try:
        expected = references.of([one for _, one in ready], on_one_device)
        got = _on_mesh([one for _, one in ready], expected)
        verdicts = [
            verdict(one, right, value, planted) for (_, one), right, value in zip(ready, expected, got, strict=True)
        ]
    except Exception as error:  # whatever it is, it belongs to some of the programs
        for k, one in ready:
            # what one device cannot do either says nothing of the partitioner
            status = "invalid" if expected is None else "failed"
            outcomes[k] = (
                Outcome(one.draw.number, one.draw.family, status, (), _line(error), one.primitives)
                if alone
                else run_by_hand([one.draw], planted, references)[0]
            )
        return [outcomes[k] for k in range(len(draws))]
    for (k, one), wrong in zip(ready, verdicts, strict=True):
        if wrong and (references.folder or not alone):
            outcomes[k] = run_by_hand([one.draw], planted)[0]
        elif wrong and (fault := fault_of_reference(one)):
            outcomes[k] = Outcome(one.draw.number, one.draw.family, "invalid", message=fault, primitives=one.primitives)
        else:
            outcomes[k] = Outcome(
                one.draw.number, one.draw.family, "wrong" if wrong else "right", wrong, primitives=one.primitives
            )
    return [outcomes[k] for k in range(len(draws))]


def mesh(shape: Mesh) -> jax.sharding.Mesh:
    """The mesh of the first devices, all axes Auto."""
    sizes = tuple(size for _, size in shape)
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, tuple(axis for axis, _ in shape), axis_types=(AxisType.Auto,) * len(sizes))


def prepare(draw: Draw) -> Ready | Outcome:
    """Builds and traces a program; an "invalid" outcome where that cannot be done."""
    try:
        case = case_of(draw, families())
        arguments = arguments_of(draw, case)
        function = jax.jit(step_of(draw, case), inline=True)
        traced = function.trace(*arguments)
    except Exception as error:
        return Outcome(draw.number, draw.family, "invalid", message=_line(error))
    primitives, dtypes = contents_of(traced.jaxpr)
    rounding = next(dtype for dtype in ("bfloat16", "float32", "float64") if dtype in dtypes | {draw.dtype})
    return Ready(draw, case, function, arguments, tuple(sorted(primitives)), rounding)


def contents_of(jaxpr: Any) -> tuple[set[str], set[str]]:
    """The names of all primitives in a jaxpr and in those that it holds, and of the dtypes of what they return."""
    names: set[str] = set()
    dtypes: set[str] = set()
    for visit in walk(jaxpr):
        names.add(visit.eqn.primitive.name)
        dtypes.update(str(getattr(var.aval, "dtype", "")) for var in visit.eqn.outvars)
    return names, dtypes


def _together(ready: Sequence[Ready]) -> Callable[..., Any]:
    functions = [one.function for one in ready]
    return lambda operands: [function(*args) for function, args in zip(functions, operands, strict=True)]


def on_one_device(ready: Sequence[Ready]) -> Any:
    """What the programs give on one device, compiled together."""
    return jax.device_get(jax.jit(_together(ready))([one.arguments for one in ready]))


_M_PERTURB = -6  # of glibc's mallopt: the byte that new memory is filled with


def fault_of_reference(ready: Ready) -> str:
    """Says why one device's numbers are none to compare with; "" where they are.

    They may depend on what new memory held before: the CPU backend of XLA reads memory that nothing wrote in some
    convolutions with a negative padding. Or they may turn on a rounding, as the cosine of a number of 80 digits does:
    then another order of additions is enough."""
    function = jax.jit(ready.function)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only: elsewhere memory is what it happens to be
    results = []
    try:
        for byte in (0, 1, 85, 170, 254):
            if set_option is not None:
                set_option(_M_PERTURB, byte)
            results.append(jax.device_get(function(*ready.arguments)))
    finally:
        if set_option is not None:
            set_option(_M_PERTURB, 0)
    if any(differences(ready.rounding, results[0], repeated) for repeated in results[1:]):
        return "one device alone gives other numbers when it is asked again"
    if ready.draw.dtype == "float64" and differences(
        ready.rounding, results[0], jax.device_get(function(*_rounded(ready.arguments)))
    ):
        return "one device alone gives other numbers when its inputs are off by a rounding"
    return ""


def _rounded(arguments: Any) -> Any:
    """The arguments, every second number of which is replaced by the next larger."""

    def each(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return np.where(np.arange(x.size).reshape(x.shape) % 2 == 0, x, np.nextafter(x, np.inf)).astype(x.dtype)

    return jax.tree.map(each, arguments)


def run_reference(draws: Sequence[Draw]) -> list[Outcome]:
    """Runs programs on one device alone: "right" for what comes back at all, as a program that ends the process there
    too is none."""
    outcomes = []
    for draw in draws:
        prepared = prepare(draw)
        if not isinstance(prepared, Outcome):
            on_one_device([prepared])
            prepared = Outcome(draw.number, draw.family, "right", primitives=prepared.primitives)
        outcomes.append(prepared)
    return outcomes


def _on_mesh(ready: Sequence[Ready], expected: Any) -> Any:
    if not ready:
        return []
    devices = mesh(ready[0].draw.mesh)
    placed = [tuple(_place(one, part, devices) for part in one.arguments) for one in ready]
    out = [_out_shardings(one, result, devices) for one, result in zip(ready, expected, strict=True)]
    return jax.device_get(jax.jit(_together(ready), out_shardings=out)(placed))


def _shardings(one: Ready, devices: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    specs = zip(names_of(one.case), one.draw.layouts, strict=True)
    return {name: NamedSharding(devices, PartitionSpec(*(axes or None for axes in layout))) for name, layout in specs}


def _place(one: Ready, part: dict[str, Any], devices: jax.sharding.Mesh) -> dict[str, Any]:
    shardings = _shardings(one, devices)
    return {name: jax.device_put(value, shardings[name]) for name, value in part.items()}


def _out_shardings(one: Ready, result: Any, devices: jax.sharding.Mesh) -> Any:
    free = jax.tree.map(lambda _: None, result)
    if not one.draw.pinned:
        return free
    shardings = _shardings(one, devices)
    state, results = free
    pinned = {name: shardings[name] for name in state}
    of_data = {"of_data": {name: shardings[name] for name in results["of_data"]}} if "of_data" in results else {}
    return pinned, {**results, **of_data}


def verdict(one: Ready, expected: Any, got: Any, planted: str = "") -> tuple[tuple[str, float], ...]:
    """What differs. In a narrow dtype one device's own sums can be far off: there it counts only where the mesh is
    further from the truth, which is the same program on one device in float64."""
    if one.draw.family == planted and one.draw.settings["batch"] > 1:
        got = jax.tree.map(lambda x: x * 2, got)
    wrong = differences(one.rounding, expected, got)
    if not wrong or one.draw.dtype == "float64":
        return wrong
    function = jax.jit(step_of(dataclasses.replace(one.draw, dtype="float64"), one.case))
    widen = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    truth = dict(_leaves(jax.device_get(function(*jax.tree.map(widen, one.arguments)))))
    right, value, floor = dict(_leaves(expected)), dict(_leaves(got)), _FLOOR[one.rounding]
    narrow = lambda leaf: truth[leaf].astype(right[leaf].dtype)
    excess = lambda leaf: (
        relative_error(narrow(leaf), value[leaf], floor)
        > 4 * relative_error(narrow(leaf), right[leaf], floor) + TOLERANCE[one.rounding]
    )
    return tuple((leaf, error) for leaf, error in wrong if excess(leaf))


def _leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
    return [
        (jax.tree_util.keystr(path), np.asarray(value)) for path, value in jax.tree_util.tree_leaves_with_path(tree)
    ]


def differences(rounding: str, expected: Any, got: Any) -> tuple[tuple[str, float], ...]:
    """The leaves of a result that differ from those expected by more than rounding, with their relative errors (of the
    largest value)."""
    pairs = zip(_leaves(expected), _leaves(got), strict=True)
    errors = [(leaf, relative_error(right, value, _FLOOR[rounding])) for (leaf, right), (_, value) in pairs]
    return tuple((leaf, error) for leaf, error in errors if error > TOLERANCE[rounding])


def relative_error(right: np.ndarray, value: np.ndarray, floor: float) -> float:
    """The largest difference by the largest value. Infinite where shapes or what is not finite disagree, or numbers
    that are not floating."""
    if right.shape != value.shape or right.dtype != value.dtype:
        return math.inf
    if not right.size:
        return 0.0
    if not jnp.issubdtype(right.dtype, jnp.inexact):
        return 0.0 if np.array_equal(right, value) else math.inf
    wide = np.complex128 if jnp.issubdtype(right.dtype, jnp.complexfloating) else np.float64
    right, value = right.astype(wide), value.astype(wide)
    finite = np.isfinite(right)
    if not np.array_equal(finite, np.isfinite(value)) or not np.array_equal(
        right[~finite], value[~finite], equal_nan=True
    ):
        return math.inf
    if not finite.any():
        return 0.0
    scale = max(float(np.abs(right[finite]).max()), floor)
    return float(np.abs(right[finite] - value[finite]).max()) / scale


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
