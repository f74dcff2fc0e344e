"""Training runs of a case: on one device as it is, on one device with its sums in other orders, and under a rule
set."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import splitjax
from benchmarks.curves.cases import Case, Dtype
from benchmarks.curves.reorder import draw_orders, reorderable
from splitjax.models import make_step

MESH = {"data": 2, "model": 4}
WRONG = 1.1


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run came to: the loss of every step, [steps], and parameters and batch statistics by path after the
    last."""

    losses: np.ndarray
    arrays: dict[str, np.ndarray]
    seconds: float = 0.0
    num_sharded: int = 0  # of the parameters


class Training:
    """A case in one dtype: every run begins with the same numbers, which `seed` decides, as it does the batches. What
    runs on one device is compiled once for all seeds."""

    def __init__(self, case: Case, dtype: Dtype, num_steps: int, folder: pathlib.Path | None):
        self.case, self.dtype, self.num_steps, self.folder = case, dtype, num_steps, folder
        self.spec, self.optimizer = case.spec(dtype), case.optimizer(num_steps)
        init_fn, step, _ = make_step(self.spec, self.optimizer)
        self._init, self._step = jax.jit(init_fn), jax.jit(step)
        self.start(0)
        reordered, self._lengths = reorderable(step, self.state, self.batches[0])
        self._reordered = jax.jit(reordered)

    def start(self, seed: int) -> None:
        """Draws batches and the first state."""
        self.batches = self.case.batches(self.num_steps, seed, self.folder)
        # Flax begins batch statistics in float32 whatever the model's dtype, and a first step would change them.
        self.state = jax.tree.map(
            lambda leaf: leaf.astype(self.dtype.params) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
            self._init(jax.random.key(seed)),
        )

    def one_device(self) -> Run:
        """By `jax.jit`."""
        return _run(self._step, self.state, self.batches)

    def reordered(self, number: int) -> Run:
        """On one device, with its sums in the orders of this number."""
        orders = jax.device_put(draw_orders(self._lengths, number))
        return _run(lambda state, batch: self._reordered(orders, state, batch), self.state, self.batches)

    def wrong(self) -> Run:
        """On one device, with every update of the parameters a tenth too large: what a comparison has to notice."""
        step = make_step(self.spec, optax.chain(self.optimizer, optax.scale(WRONG)))[1]
        return _run(jax.jit(step), {**self.state, "opt": (self.state["opt"], optax.EmptyState())}, self.batches)

    def under(self, rules: str) -> Run:
        """Under a rule set on `MESH`, by the decorated step, called once for each batch."""
        step = make_step(self.spec, self.optimizer, value_and_grad=splitjax.value_and_grad)[1]
        step = splitjax.parallelize(step, rules=rules, mesh=MESH)
        return _run(step, step.place(self.state, example=(self.batches[0],)), self.batches)


def _run(step: Callable[..., Any], state: Any, batches: list[Any]) -> Run:
    started, losses = time.perf_counter(), []
    state = jax.tree.map(jnp.copy, state)  # a decorated step consumes what it is given
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(np.asarray(metrics["loss"], np.float64))
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            {part: state[part] for part in ("params", "batch_stats") if part in state}
        )
    }
    num_sharded = sum(not leaf.sharding.is_fully_replicated for leaf in arrays.values())
    values = {path: np.asarray(leaf, np.float64) for path, leaf in arrays.items()}
    return Run(np.stack(losses), values, time.perf_counter() - started, num_sharded)
