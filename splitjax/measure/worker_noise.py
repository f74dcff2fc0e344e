"""How much the gradients of a step's workers differ, layer by layer: sigma_j^2 and the squared norm of the whole, one
worker at a time on one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.compile.entry import Entry
from splitjax.measure.worker_gradients import abstract_leaves, worker_gradients
from splitjax.partial.stages import Stages


class WorkerNoise:
    """The noise of one signature of a step.

    With g_w the gradient of worker w's examples as an estimate of the whole batch's (its summand times N, or the
    gradient of its own loss where a loss is no sum over examples) and m the mean over the N workers, per layer, summed
    over its elements:

    - sigma^2 = sum_w |g_w - m|^2 / (N - 1), which is unbiased for the variance of one worker's gradient where shards
      are drawn alike;
    - |m|^2 - sigma^2 / N, unbiased for the squared norm of the expected gradient.

    Averages over batches stay unbiased. `used`: the flat arguments that gradients depend on.
    """

    def __init__(self, entry: Entry, mesh: Mesh, num_workers: int, found: Stages, place: str) -> None:
        gradients = worker_gradients(entry, mesh, num_workers, place)
        stage_of = {position: number for number, stage in enumerate(found.stages) for position in stage.operands}
        self.notes, self.num_workers, self.num_stages = gradients.notes, num_workers, len(found.stages)
        # Gradients of what holds examples (inputs of the loss) belong to no worker's sum.
        self.stages = [stage_of[one.position] for one in gradients.gradients if one.position in stage_of]
        wanted = [k for k, one in enumerate(gradients.gradients) if one.position in stage_of]
        scale = 1 if gradients.notes else num_workers  # a summand, or a gradient by itself
        shapes = [
            jax.ShapeDtypeStruct(gradients.gradients[k].tensor.shape, gradients.gradients[k].tensor.dtype)
            for k in wanted
        ]

        def add(worker: Any, carry: Any, *leaves: Any) -> Any:
            """Welford's sums, which do not cancel where noise is small beside the gradient."""
            means, squares = carry
            own = [
                jnp.asarray(one, jnp.result_type(one, jnp.float32)) * scale
                for one in (gradients.run(*leaves, worker)[k] for k in wanted)
            ]
            apart = [one - mean for one, mean in zip(own, means, strict=True)]
            means = [mean + one / (worker + 1).astype(_real(one)) for one, mean in zip(apart, means, strict=True)]
            more = [_squared(one, here - mean) for one, here, mean in zip(apart, own, means, strict=True)]
            return means, squares + self._by_stage(more)

        wide = lambda one: jnp.result_type(one.dtype, jnp.float32)
        carry = (
            [jax.ShapeDtypeStruct(one.shape, wide(one)) for one in shapes],
            jax.ShapeDtypeStruct((self.num_stages,), jnp.float32),
        )
        flat, tree = jax.tree.flatten(carry)

        def flatly(worker: Any, *values: Any) -> Any:
            return jax.tree.leaves(add(worker, jax.tree.unflatten(tree, values[: len(flat)]), *values[len(flat) :]))

        closed = _compat.trace(flatly, jax.ShapeDtypeStruct((), jnp.int32), *flat, *abstract_leaves(entry))[0]
        closed, used = _compat.drop_unused(closed, keep=1 + len(flat))
        self.used = tuple(i for i, is_used in enumerate(used[1 + len(flat) :]) if is_used)
        self._add = jax.jit(functools.partial(_compat.eval_jaxpr, closed, ()))
        self._zeros = lambda: [jnp.zeros(one.shape, one.dtype) for one in flat]
        self._norms = jax.jit(lambda means: self._by_stage([_squared(one, one) for one in means]))

    def measure(self, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(sigma^2, squared norm) by stage, of one batch. `values`: the `used` arguments."""
        carry = self._zeros()
        for worker in range(self.num_workers):
            carry = self._add(np.int32(worker), *carry, *values)
        *means, squares = carry
        noise = np.asarray(squares, np.float64) / (self.num_workers - 1)
        return noise, np.asarray(self._norms(means), np.float64) - noise / self.num_workers

    def _by_stage(self, values: Sequence[Any]) -> Any:
        sums = [jnp.zeros((), jnp.float32)] * self.num_stages
        for number, value in zip(self.stages, values, strict=True):
            sums[number] = sums[number] + value.astype(jnp.float32)
        return jnp.stack(sums)


def _squared(a: Any, b: Any) -> Any:
    """The real inner product."""
    return jnp.real(jnp.vdot(a, b))


def _real(value: Any) -> Any:
    return jnp.finfo(value.dtype).dtype
