"""What one place contributes: the gradients of its microbatches' contributions, added up in a loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.lower.microbatch.accumulate import LOOP, Env
from splitjax.lower.microbatch.batch_split import Slot
from splitjax.lower.microbatch.convolutions import with_cpu_layouts
from splitjax.lower.microbatch.example_relation import PARTIAL
from splitjax.lower.microbatch.liveness import PART, WHOLE


@dataclasses.dataclass(frozen=True, eq=False)
class Contribution:
    """The loop of one place: gradients of the microbatches' contributions, added up."""

    job: Any  # `loop.Job`
    same: Sequence[int]  # differentiated operands that are the same for all microbatches
    on_islands: Sequence[int]  # those that islands read, as copies
    sliced: Sequence[int]  # differentiated operands that hold examples
    shared: Sequence[int]
    cuts: Sequence[int]
    summed: Sequence[int]
    stacked: Sequence[int]
    fetches: Mapping[int, Any]
    chosen: frozenset[int] | None = None  # the operands that this place differentiates; None: all

    def accumulate(
        self,
        params: tuple[list[Any], list[Any]],
        constants: list[Any],
        scanned: list[Any],
        ahead: list[Any],
        places: dict[str, Any],
    ) -> Any:
        """Sums over the microbatches, and the rows of `stacked`, `sliced` and fetched operands. What is fetched comes
        one microbatch ahead; the last one stands behind the loop, so that nothing is fetched in vain."""
        count, zeros = self.job.split.num_microbatches, self.zeros()
        numbers = jnp.arange(count, dtype=jnp.int32)
        run = functools.partial(self.microbatch, params, constants, places)
        mesh = self.job.split.mesh
        if count > 1 and mesh is not None and mesh.devices.flat[0].platform == "cpu":
            run = with_cpu_layouts(run)
        # XLA's CPU compiler makes convolutions slow that it meets in a loop, if only of one turn
        if not self.fetches and count == 1:
            totals, rows, _ = run(zeros, numbers[0], [cut[0] for cut in scanned], [])
            rows, grad_rows = jax.tree.map(lambda one: one[None], rows)
            return totals, (rows, grad_rows, [])
        if not self.fetches:
            totals, (rows, grad_rows) = lax.scan(
                lambda totals, inputs: run(totals, *inputs, [])[:2], zeros, (numbers, scanned), length=count
            )
            return totals, (rows, grad_rows, [])
        fetch = lambda number: [one.fetch(cut, number) for one, cut in zip(self.fetches.values(), ahead, strict=True)]

        def step(carry, inputs):
            totals, fetched_rows, here = carry
            coming = fetch(inputs[0] + 1)
            totals, rows, cotangents = run(totals, *inputs, here)
            return (totals, self.added(fetched_rows, cotangents, inputs[0]), coming), rows

        start = (
            zeros,
            [one.zeros(cut) for one, cut in zip(self.fetches.values(), ahead, strict=True)],
            fetch(numbers[0]),
        )
        (totals, fetched_rows, here), rows = lax.scan(
            step, start, (numbers[:-1], [cut[:-1] for cut in scanned]), length=count - 1
        )
        totals, last, cotangents = run(totals, numbers[-1], [cut[-1] for cut in scanned], here)
        rows = jax.tree.map(lambda some, one: jnp.concatenate([some, one[None]]), rows, last)
        return totals, (*rows, self.added(fetched_rows, cotangents, numbers[-1]))

    def microbatch(
        self,
        params: tuple[list[Any], list[Any]],
        constants: list[Any],
        places: dict[str, Any],
        totals: Any,
        number: Any,
        slices: list[Any],
        fetched: list[Any],
    ) -> Any:
        """One microbatch: new totals, its rows, and the cotangents of what was fetched for it."""
        split, job = self.job.split, self.job
        parts = {v: split.part(cut, job.info(v).layout) for v, cut in zip(self.cuts, slices, strict=True)}
        own = [parts.pop(v) for v in self.sliced]
        (value, (sums, rows)), (grads, grad_rows, cotangents) = self.differentiated(
            (params, own, fetched), constants, parts, Slot(number, places)
        )
        totals = jax.tree.map(lambda total, one: total + one.astype(total.dtype), totals, (value, sums, *grads))
        return totals, (self.unjoined(rows, self.stacked), self.unjoined(grad_rows, self.sliced)), cotangents

    def differentiated(self, operands: Any, *rest: Any) -> Any:
        """Value, what comes besides, and gradients; those of operands that are not chosen are zero, and nothing is
        computed for them."""
        leaves, tree = jax.tree.flatten(operands)
        (_, copies), _, fetched = operands
        values = [
            *self.same,
            *(v for v, one in zip(self.on_islands, copies, strict=True) for _ in jax.tree.leaves(one)),
            *self.sliced,
        ]
        values += [v for v, one in zip(self.fetches, fetched, strict=True) for _ in jax.tree.leaves(one)]
        live = [k for k, v in enumerate(values) if self.chosen is None or v in self.chosen]

        def evaluate(some: list[Any]) -> Any:
            every = list(leaves)
            for k, leaf in zip(live, some, strict=True):
                every[k] = leaf
            return self.evaluate(jax.tree.unflatten(tree, every), *rest)

        found, grads = jax.value_and_grad(evaluate, has_aux=True, holomorphic=self.job.holomorphic)(
            [leaves[k] for k in live]
        )
        every = [jnp.zeros_like(leaf) for leaf in leaves]
        for k, grad in zip(live, grads, strict=True):
            every[k] = grad
        return found, jax.tree.unflatten(tree, every)

    def zeros(self) -> Any:
        type_of = self.job.evaluator.program.type_of
        loss = self.job.analysis.body.outputs[0]
        zeros = lambda values: [_zero(type_of(v)[0]) for v in values]
        copies = [self.job.islands.copies(zero) for zero in zeros(self.on_islands)] if self.job.islands else []
        return _zero(type_of(loss)[0]), zeros(self.summed), zeros(self.same), copies

    def added(self, rows: list[Any], cotangents: list[Any], number: Any) -> list[Any]:
        return [
            one.add(row, cotangent, number)
            for one, row, cotangent in zip(self.fetches.values(), rows, cotangents, strict=True)
        ]

    def unjoined(self, rows: list[Any], values: Sequence[int]) -> list[Any]:
        split, job = self.job.split, self.job
        types = job.evaluator.program.types
        return [
            split.uncut_local(row, job.info(v).layout, types[v][0].shape[job.info(v).layout.dim])
            for v, row in zip(values, rows, strict=True)
        ]

    def evaluate(self, differentiated: Any, constants: list[Any], parts: dict[int, Any], slot: Slot) -> Any:
        """One microbatch's contribution to the loss, and what the loop returns besides."""
        (params, copies), slices, fetched = differentiated
        evaluator, analysis = self.job.evaluator, self.job.analysis
        env: Env = {
            (v, PART): value
            for v, value in (
                *zip(self.same, params, strict=True),
                *zip(self.sliced, slices, strict=True),
                *parts.items(),
            )
        }
        env.update({(v, PART): one.part(value) for (v, one), value in zip(self.fetches.items(), fetched, strict=True)})
        env.update({(v, WHOLE): value for v, value in zip(self.shared, constants, strict=True)})
        if self.job.islands:
            self.job.islands.evaluate(
                evaluator, self.job.marked, env, dict(zip(self.on_islands, copies, strict=True)), slot
            )
        else:
            evaluator.run(self.job.marked, env, LOOP, slot)
        loss = analysis.body.outputs[0]
        value = evaluator.use(analysis, loss, env, slot, share=analysis.outputs[0].kind != PARTIAL)
        return value, ([env[v, PART] for v in self.summed], [env[v, PART] for v in self.stacked])


def _zero(aval: Any) -> Any:
    """An accumulator: at least float32, so that half-precision contributions do not lose digits."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        dtype = jnp.dtype(jnp.float32)
    return jnp.zeros(aval.shape, dtype)
