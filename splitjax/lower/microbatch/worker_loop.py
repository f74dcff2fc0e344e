"""Runs the loop of one worker: differentiates the contribution of each of its microbatches and adds the gradients up.

An analysed boundary comes in with what crosses into the loop (`places.WorkerLoops`); the worker's sums and rows come
out. Nothing is exchanged in here, so that workers' sums can be exchanged once, behind the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.lower.microbatch.accumulate import LOOP, Env, Evaluator
from splitjax.lower.microbatch.batch_split import LoopPosition, Split
from splitjax.lower.microbatch.classify import PART, WHOLE, BodyAnalysis
from splitjax.lower.microbatch.convolutions import with_cpu_layouts
from splitjax.lower.microbatch.islands import Archipelago
from splitjax.lower.microbatch.liveness import Marked
from splitjax.mesh import platform_of
from splitjax.primitives.example_relation import PARTIAL, Info


class AnalysedBoundary(Protocol):
    """Describes what a loop reads of an analysed boundary (`loop.PreparedBoundary`)."""

    @property
    def analysis(self) -> BodyAnalysis:
        """The forward with the relations of its values."""
        ...

    @property
    def marked(self) -> Marked:
        """The values of it that have to be computed."""
        ...

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of its equations."""
        ...

    @property
    def holomorphic(self) -> bool:
        """Tells whether it is differentiated as a holomorphic function, as in `jax.grad`."""
        ...

    @property
    def islands(self) -> Archipelago | None:
        """The islands of replicated layers, if the loop has any."""
        ...

    @property
    def split(self) -> Split:
        """The way in which the batch is cut into microbatches."""
        ...

    def info(self, v: int) -> Info:
        """Returns the relation of the value `v` to the examples."""
        ...


class OperandFetch(Protocol):
    """Brings the slices of an operand that holds examples in, one microbatch ahead (see `turns/fetch.py`)."""

    def cut(self, value: Any, /) -> Any:
        """Returns the operand `value` cut into microbatches, as it crosses into the loop."""
        ...

    def zeros(self, cut: Any, /) -> Any:
        """Returns the rows into which cotangents are added, for a `cut` operand."""
        ...

    def fetch(self, cut: Any, number: Any, /) -> Any:
        """Returns what microbatch `number` (i32[]) needs of the `cut` operand: differentiable values."""
        ...

    def part(self, fetched: Any, /) -> Any:
        """Returns the microbatch's part of the operand, from what was `fetched` for it."""
        ...

    def add(self, rows: Any, cotangent: Any, number: Any, /) -> Any:
        """Returns `rows` with the `cotangent` of what was fetched for microbatch `number` put into them."""
        ...

    def join(self, rows: Any, /) -> Any:
        """Returns the operand's cotangent from the `rows` of all microbatches."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Contribution:
    """Runs the loop of one worker: adds up the gradients of its microbatches' contributions.

    Values are named by number, as in the boundary's analysis:

    - `same`: differentiated operands that are the same for all microbatches; `on_islands`: those that islands read, as
      copies; `sliced`: differentiated operands that hold examples.
    - `shared`: values that the loop reads whole; `cuts`: values that it reads in slices, `sliced` among them.
    - `summed`: returned values that are sums over examples; `stacked`: returned values that hold examples.
    - `fetches`: by operand how its slices are brought in one microbatch ahead.
    - `chosen`: the operands that this worker differentiates; None for all.

    `job` is the analysed boundary.
    """

    job: AnalysedBoundary
    same: Sequence[int]
    on_islands: Sequence[int]
    sliced: Sequence[int]
    shared: Sequence[int]
    cuts: Sequence[int]
    summed: Sequence[int]
    stacked: Sequence[int]
    fetches: Mapping[int, OperandFetch]
    chosen: frozenset[int] | None = None

    def accumulate(
        self,
        params: tuple[list[Any], list[Any]],
        constants: list[Any],
        scanned: list[Any],
        ahead: list[Any],
        places: dict[str, Any],
    ) -> Any:
        """Returns the sums over the microbatches, and the rows of `stacked`, `sliced` and fetched operands.

        What is fetched comes one microbatch ahead; the last microbatch stands behind the loop, so that nothing is
        fetched in vain.

        **Arguments:**

        - `params`: the values of `same`, and copies of those of `on_islands`.
        - `constants`: the values of `shared`. `scanned`: those of `cuts`, microbatches leading.
        - `ahead`: the cut operands of `fetches`.
        - `places`: by manual axis the worker's position along it (i32[]).
        """
        count, zeros = self.job.split.num_microbatches, self.zeros()
        numbers = jnp.arange(count, dtype=jnp.int32)
        run = functools.partial(self.microbatch, params, constants, places)
        mesh = self.job.split.mesh
        if count > 1 and mesh is not None and platform_of(mesh) == "cpu":
            run = with_cpu_layouts(run)
        # XLA's CPU compiler makes convolutions slow that it meets in a loop, if only of one turn
        if not self.fetches and count == 1:
            totals, rows, _ = run(zeros, numbers[0], [cut[0] for cut in scanned], [])
            rows, grad_rows = jax.tree.map(lambda row: row[None], rows)
            return totals, (rows, grad_rows, [])
        if not self.fetches:
            totals, (rows, grad_rows) = lax.scan(
                lambda totals, inputs: run(totals, inputs[0], inputs[1], [])[:2],
                zeros,
                (numbers, scanned),
                length=count,
            )
            return totals, (rows, grad_rows, [])
        fetches = [*self.fetches.values()]
        fetch = lambda number: [operand.fetch(cut, number) for operand, cut in zip(fetches, ahead, strict=True)]

        def step(carry, inputs):
            totals, fetched_rows, here = carry
            coming = fetch(inputs[0] + 1)
            totals, rows, cotangents = run(totals, inputs[0], inputs[1], here)
            return (totals, self.added(fetched_rows, cotangents, inputs[0]), coming), rows

        start = (
            zeros,
            [operand.zeros(cut) for operand, cut in zip(fetches, ahead, strict=True)],
            fetch(numbers[0]),
        )
        (totals, fetched_rows, here), rows = lax.scan(
            step, start, (numbers[:-1], [cut[:-1] for cut in scanned]), length=count - 1
        )
        totals, last, cotangents = run(totals, numbers[-1], [cut[-1] for cut in scanned], here)
        rows = jax.tree.map(lambda before, row: jnp.concatenate([before, row[None]]), rows, last)
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
        """Returns, for a microbatch, new totals, its rows, and the cotangents of what was fetched for it.

        - `params`, `constants`, `places`: as for `accumulate`.
        - `totals`: the sums so far, as `zeros` begins them.
        - `number`: that of the microbatch (i32[]). `slices`, `fetched`: its slices of `cuts`, and what was fetched.
        """
        split, job = self.job.split, self.job
        parts = {v: split.part(cut, job.info(v).required_layout) for v, cut in zip(self.cuts, slices, strict=True)}
        own = [parts.pop(v) for v in self.sliced]
        (value, (sums, rows)), (grads, grad_rows, cotangents) = self.differentiated(
            (params, own, fetched), constants, parts, LoopPosition(number, places)
        )
        totals = jax.tree.map(lambda total, part: total + part.astype(total.dtype), totals, (value, sums, *grads))
        return totals, (self.unjoined(rows, self.stacked), self.unjoined(grad_rows, self.sliced)), cotangents

    def differentiated(self, operands: Any, *rest: Any) -> Any:
        """Evaluates a microbatch and differentiates it: ((value, what comes besides), gradients).

        `operands`: what is differentiated, as `evaluate` takes it, and `rest` its further arguments. Gradients of
        operands that are not chosen are zero, and nothing is computed for them."""
        leaves, tree = jax.tree.flatten(operands)
        (_, copies), _, fetched = operands
        values = [
            *self.same,
            *(v for v, copy in zip(self.on_islands, copies, strict=True) for _ in jax.tree.leaves(copy)),
            *self.sliced,
        ]
        values += [v for v, value in zip(self.fetches, fetched, strict=True) for _ in jax.tree.leaves(value)]
        live = [k for k, v in enumerate(values) if self.chosen is None or v in self.chosen]

        def evaluate(some: list[Any]) -> Any:
            every = list(leaves)
            for k, leaf in zip(live, some, strict=True):
                every[k] = leaf
            return self.evaluate(jax.tree.unflatten(tree, every), *rest)

        results, grads = jax.value_and_grad(evaluate, has_aux=True, holomorphic=self.job.holomorphic)(
            [leaves[k] for k in live]
        )
        every = [jnp.zeros_like(leaf) for leaf in leaves]
        for k, grad in zip(live, grads, strict=True):
            every[k] = grad
        return results, jax.tree.unflatten(tree, every)

    def zeros(self) -> Any:
        """Returns the totals before the first microbatch: of the loss, of `summed`, of `same` and of island copies."""
        type_of = self.job.evaluator.program.type_of
        loss = self.job.analysis.body.outputs[0]
        zeros = lambda values: [_zero(type_of(v)[0]) for v in values]
        copies = [self.job.islands.copies(zero) for zero in zeros(self.on_islands)] if self.job.islands else []
        return _zero(type_of(loss)[0]), zeros(self.summed), zeros(self.same), copies

    def added(self, rows: list[Any], cotangents: list[Any], number: Any) -> list[Any]:
        """Returns the `rows` of fetched operands with the `cotangents` of microbatch `number` put into them."""
        return [
            fetch.add(row, cotangent, number)
            for fetch, row, cotangent in zip(self.fetches.values(), rows, cotangents, strict=True)
        ]

    def unjoined(self, rows: list[Any], values: Sequence[int]) -> list[Any]:
        """Returns a microbatch's `rows` of the given `values` with their example dims taken apart, to be stacked."""
        types = self.job.evaluator.program.types
        layouts = [self.job.info(v).required_layout for v in values]
        return [
            self.job.split.uncut_local(row, layout, types[v][0].shape[layout.dim])
            for v, layout, row in zip(values, layouts, rows, strict=True)
        ]

    def evaluate(self, differentiated: Any, constants: list[Any], parts: dict[int, Any], slot: LoopPosition) -> Any:
        """Returns a microbatch's contribution to the loss, and what the loop returns besides.

        - `differentiated`: ((parameters, copies for islands), slices, what was fetched).
        - `constants`: the values of `shared`. `parts`: by number the slices that are not differentiated.
        - `slot`: the microbatch and the worker.
        """
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
        env.update(
            {(v, PART): fetch.part(value) for (v, fetch), value in zip(self.fetches.items(), fetched, strict=True)}
        )
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
    """Returns an accumulator: at least float32, so that half-precision contributions do not lose digits."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        dtype = jnp.dtype(jnp.float32)
    return jnp.zeros(aval.shape, dtype)
