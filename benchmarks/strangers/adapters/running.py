"""Run one stranger's step on one device and under the decorator, and compare the two runs."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.strangers.adapters.base import Loaded

LOSS_TOLERANCE = 1e-4  # relative, and absolute
STATE_TOLERANCE = 1e-3  # absolute; Adam turns rounding noise in a zero gradient into a step of its learning rate
NOISY_FRACTION = 0.05  # of the state's numbers that may differ by more, for that reason (biases before batch norm)


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses of every step, the final state's arrays, and what the run cost to prepare."""

    losses: list[list[np.ndarray]]
    leaves: list[np.ndarray]
    num_sharded: int
    plan_seconds: float
    first_call_seconds: float
    plan: Any = None


def single_device(loaded: Loaded, num_steps: int) -> Run:
    """Run the step under its framework's own jit on one device."""
    return _run(loaded, _jit(loaded), num_steps)


def data_parallel(loaded: Loaded, num_steps: int) -> Run:
    """Run the step under its framework's own jit with the batch sharded over all devices: the comparison's control."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated, sharded = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))

    def place(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding) if _is_array(leaf) else leaf, tree)

    def states() -> tuple:
        fresh = loaded.states()
        if loaded.frontend != "nnx":
            return place(fresh, replicated)
        from flax import nnx

        nnx.update(fresh, place(nnx.state(fresh), replicated))
        return fresh

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        positional, keywords = loaded.arguments(states, number)
        batch = loaded.options.get("batch_argnums", (1,))
        state = loaded.options.get("state_argnums", (0,))
        placed = [place(argument, sharded) if position in batch else
                  argument if position in state else place(argument, replicated)
                  for position, argument in enumerate(positional)]  # fmt: skip
        return tuple(placed), place(keywords, replicated)

    return _run(dataclasses.replace(loaded, states=states, arguments=arguments), _jit(loaded), num_steps)


def parallelized(loaded: Loaded, mesh: dict[str, int], rules: str, num_steps: int) -> Run:
    """Run the step under splitjax's decorator."""
    import splitjax

    if loaded.frontend == "nnx":
        import splitjax.nnx

        decorate = splitjax.nnx.parallelize
    elif loaded.frontend == "equinox":
        import splitjax.equinox

        decorate = splitjax.equinox.parallelize
    else:
        decorate = splitjax.parallelize
    return _run(loaded, decorate(loaded.step, mesh=mesh, rules=rules, **loaded.options), num_steps, planned=True)


def compare(reference: Run, run: Run) -> dict[str, Any]:
    """Return how far a run is from the reference, and whether that passes."""
    losses = [_distance(*pair) for pair in zip(_flat(reference.losses), _flat(run.losses), strict=True)]
    beyond = [np.abs(_float(a) - _float(b)) > STATE_TOLERANCE
              for a, b in zip(reference.leaves, run.leaves, strict=True)]  # fmt: skip
    noisy = sum(int(each.sum()) for each in beyond) / max(1, sum(each.size for each in beyond))
    loss_difference = float(max(losses, default=0.0))
    state_difference = max((float(np.max(np.abs(_float(a) - _float(b)), initial=0.0))
                            for a, b in zip(reference.leaves, run.leaves, strict=True)), default=0.0)  # fmt: skip
    reason = ""
    if not loss_difference <= LOSS_TOLERANCE:
        reason = f"losses differ by {loss_difference:.1e}"
    elif not noisy <= NOISY_FRACTION or not np.isfinite(state_difference):
        reason = f"{noisy:.1%} of the final state differ by more than {STATE_TOLERANCE}"
    return {
        "ok": not reason,
        "reason": reason,
        "loss_difference": loss_difference,
        "state_difference": state_difference,
        "noisy_fraction": noisy,
        "num_sharded": run.num_sharded,
        "num_leaves": len(run.leaves),
        "plan_seconds": round(run.plan_seconds, 2),
        "first_call_seconds": round(run.first_call_seconds, 2),
    }


def is_finite(arrays: list[np.ndarray]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def moved(loaded: Loaded, run: Run) -> bool:
    """Return whether the run's final state differs from a fresh one: whether the step trains at all."""
    fresh = [_host(leaf) for leaf in _arrays(loaded, loaded.states())]
    pairs = zip(fresh, run.leaves, strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs if np.issubdtype(a.dtype, np.floating))


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the work's result, or why there is none: the error's type and first line."""
    try:
        return work()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "ok": False,
            "reason": f"{type(error).__name__}: {lines[0][:300]}",
            "detail": "\n".join(lines[:12])[:2000],
            "at": f"{where.filename.rsplit('/site-packages/')[-1]}:{where.lineno}",
            "traceback": "".join(traceback.format_exception(error))[-6000:],
        }


def _run(loaded: Loaded, step: Callable, num_steps: int, *, planned: bool = False) -> Run:
    states = loaded.states()
    plan, plan_seconds, first_call_seconds, losses = None, 0.0, 0.0, []
    for number in range(num_steps):
        positional, keywords = loaded.arguments(states, number)
        start = time.perf_counter()
        if planned and number == 0:
            plan = step.plan(*positional, **keywords)
            plan_seconds = time.perf_counter() - start
            start = time.perf_counter()
        outputs = step(*positional, **keywords)
        states, loss = loaded.results(outputs, states)
        if number == 0:
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)])
            first_call_seconds = time.perf_counter() - start
        losses.append(_losses(loaded, loss, states))
    arrays = _arrays(loaded, states)
    num_sharded = sum(
        "model" in str(getattr(leaf.sharding, "spec", "")) for leaf in arrays if isinstance(leaf, jax.Array)
    )
    return Run(losses, [_host(leaf) for leaf in arrays], num_sharded, plan_seconds, first_call_seconds, plan)


def _jit(loaded: Loaded) -> Callable:
    static = {name: loaded.options[name] for name in ("static_argnums", "static_argnames") if name in loaded.options}
    if loaded.frontend == "nnx":
        from flax import nnx

        return nnx.jit(loaded.step, **static)
    if loaded.frontend == "equinox":
        import equinox

        return equinox.filter_jit(loaded.step)
    return jax.jit(loaded.step, **static)


def _losses(loaded: Loaded, loss: Any, states: tuple) -> list[np.ndarray]:
    """Return every floating-point array among the losses; a probe sees the states on one device."""
    if loaded.probe is not None:
        loss = loaded.probe(_on_one_device(loaded, states))
    arrays = [_host(leaf) for leaf in jax.tree.leaves(loss) if _is_array(leaf)]
    return [array for array in arrays if np.issubdtype(array.dtype, np.floating)]


def _on_one_device(loaded: Loaded, states: tuple) -> tuple:
    device = jax.devices()[0]

    def move(leaf: Any) -> Any:
        return jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf

    if loaded.frontend != "nnx":
        return jax.tree.map(move, states)
    from flax import nnx

    graph, values = nnx.split(states)
    return nnx.merge(graph, jax.tree.map(move, values))


def _arrays(loaded: Loaded, states: tuple) -> list[Any]:
    if loaded.frontend == "nnx":
        from flax import nnx

        states = nnx.state(states)
    return [leaf for leaf in jax.tree.leaves(states) if _is_array(leaf)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(jax.device_get(leaf))


def _float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _flat(losses: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [array for step in losses for array in step]


def _distance(reference: np.ndarray, value: np.ndarray) -> float:
    """Return the largest difference, relative to values above one and absolute below; infinite where shapes differ."""
    if reference.shape != value.shape:
        return float("inf")
    difference = np.abs(_float(reference) - _float(value)) / np.maximum(1.0, np.abs(_float(reference)))
    worst = float(np.max(difference, initial=0.0))
    same_infinities = np.array_equal(np.isfinite(reference), np.isfinite(value))
    return float("inf") if not same_infinities else worst
