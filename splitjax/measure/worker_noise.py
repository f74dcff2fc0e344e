"""Measures how much the gradients of a step's workers differ, layer by layer.

A built step, a number of workers and the stages of its boundary come in; for every stage j, sigma_j^2 and the squared
norm of the expected gradient come out, from one worker at a time on one device. Depths of partial backpropagation are
chosen by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry
from splitjax.measure.worker_gradients import abstract_leaves, worker_gradients
from splitjax.partial.stages import BackpropStages

Sums = tuple[list[jax.Array], jax.Array]  # by gradient the mean of workers so far; by stage the sum of squares


class WorkerNoise:
    """Measures the noise of a signature of a step.

    With g_w the gradient of worker w's examples as an estimate of the whole batch's (its summand times N, or the
    gradient of its own loss where a loss is no sum over examples) and m the mean over the N workers, per layer, summed
    over its elements:

    - sigma^2 = sum_w |g_w - m|^2 / (N - 1), which is unbiased for the variance of one worker's gradient where shards
      are drawn alike;
    - |m|^2 - sigma^2 / N, unbiased for the squared norm of the expected gradient.

    Averages over batches stay unbiased.

    **Attributes:**

    - `num_workers`: N. `num_stages`: the number of stages.
    - `stage_numbers`: by gradient that counts, the stage that it belongs to.
    - `used`: the flat arguments that gradients depend on.
    - `notes`: in which way the gradients are not summands of the global gradient.
    """

    notes: tuple[str, ...]
    num_workers: int
    num_stages: int
    stage_numbers: list[int]
    used: tuple[int, ...]

    def __init__(self, entry: CompiledEntry, mesh: Mesh, num_workers: int, stages: BackpropStages, place: str) -> None:
        """Traces the measurement.

        **Arguments:** `entry`: the step. `mesh`: its devices. `num_workers`: among how many workers the batch is
        divided, without remainder. `stages`: the stages of its boundary. `place`: where errors say that they are.

        Raises what `worker_gradients` raises."""
        of_worker = worker_gradients(entry, mesh, num_workers, place)
        stage_of = {position: number for number, stage in enumerate(stages.stages) for position in stage.operands}
        self.notes, self.num_workers, self.num_stages = of_worker.notes, num_workers, len(stages.stages)
        # Gradients of what holds examples (inputs of the loss) belong to no worker's sum.
        wanted = [k for k, gradient in enumerate(of_worker.gradients) if gradient.position in stage_of]
        counted = [of_worker.gradients[k] for k in wanted]
        self.stage_numbers = [stage_of[gradient.position] for gradient in counted]
        scale = 1 if of_worker.notes else num_workers  # a gradient by itself, or a summand
        shapes = [jax.ShapeDtypeStruct(gradient.tensor.shape, gradient.tensor.dtype) for gradient in counted]

        def add(worker: jax.Array, carry: Sums, *leaves: Any) -> Sums:
            """Adds a worker to Welford's sums, which do not cancel where noise is small beside the gradient."""
            means, squares = carry
            own = [
                jnp.asarray(value, jnp.result_type(value, jnp.float32)) * scale
                for value in (of_worker.run(*leaves, worker)[k] for k in wanted)
            ]
            apart = [value - mean for value, mean in zip(own, means, strict=True)]
            means = [mean + gap / (worker + 1).astype(_real(gap)) for gap, mean in zip(apart, means, strict=True)]
            more = [_squared(gap, value - mean) for gap, value, mean in zip(apart, own, means, strict=True)]
            return means, squares + self._by_stage(more)

        wide = lambda shape: jnp.result_type(shape.dtype, jnp.float32)
        carry = (
            [jax.ShapeDtypeStruct(shape.shape, wide(shape)) for shape in shapes],
            jax.ShapeDtypeStruct((self.num_stages,), jnp.float32),
        )
        flat, tree = jax.tree.flatten(carry)

        def flatly(worker: jax.Array, *values: Any) -> list[jax.Array]:
            return jax.tree.leaves(add(worker, jax.tree.unflatten(tree, values[: len(flat)]), *values[len(flat) :]))

        closed = _compat.trace(flatly, jax.ShapeDtypeStruct((), jnp.int32), *flat, *abstract_leaves(entry))[0]
        closed, used = _compat.drop_unused(closed, keep=1 + len(flat))
        self.used = tuple(i for i, is_used in enumerate(used[1 + len(flat) :]) if is_used)
        self._add = jax.jit(_compat.named_evaluator(closed, "noise_of_a_worker"))
        self._zeros = lambda: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in flat]
        self._norms = jax.jit(lambda means: self._by_stage([_squared(mean, mean) for mean in means]))

    def measure(self, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Returns sigma^2 and the squared norm of a batch, by stage: f64[num_stages] each. `values`: the `used`
        arguments, on the device."""
        carry = self._zeros()
        for worker in range(self.num_workers):
            carry = self._add(np.int32(worker), *carry, *values)
        *means, squares = carry
        noise = np.asarray(squares, np.float64) / (self.num_workers - 1)
        return noise, np.asarray(self._norms(means), np.float64) - noise / self.num_workers

    def _by_stage(self, values: Sequence[jax.Array]) -> jax.Array:
        """Adds a figure per gradient up to a figure per stage, f32[num_stages]."""
        sums = [jnp.zeros((), jnp.float32)] * self.num_stages
        for number, value in zip(self.stage_numbers, values, strict=True):
            sums[number] = sums[number] + value.astype(jnp.float32)
        return jnp.stack(sums)


def _squared(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the real inner product of two arrays of one shape."""
    return jnp.real(jnp.vdot(a, b))


def _real(value: jax.Array) -> np.dtype:
    """Returns the real dtype of an array's precision."""
    return jnp.finfo(value.dtype).dtype
