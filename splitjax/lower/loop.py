"""The loop over microbatches: gradients of their contributions, added up, with what is fetched ahead and what islands keep unsummed.

See `microbatch.py` for what happens before and after.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.lower.accumulate import AFTER, BEFORE, LOOP, Env, Evaluator
from splitjax.lower.classify import Analysis
from splitjax.lower.islands import Archipelago
from splitjax.lower.needs import PART, WHOLE, Marked
from splitjax.lower.relation import EXAMPLES, PARTIAL, Info, Layout
from splitjax.lower.slices import Slot, Split
from splitjax.lower.truncation import Truncation

# (how the batch is cut, where the operand's examples are, the size of that dim) -> `fetch.Modulo` or `fetch.Turns`.
MakeFetch = Callable[[Split, Layout, int], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One boundary, analysed and ready to be evaluated."""

    analysis: Analysis
    marked: Marked
    evaluator: Evaluator
    holomorphic: bool
    islands: Archipelago | None
    truncation: Truncation | None = None  # workers differentiate to different depths

    @property
    def split(self) -> Split:
        return self.evaluator.split

    def info(self, v: int) -> Info:
        return self.analysis.infos[v]

    def results(
        self, operands: Sequence[Any], positions: Sequence[int], fetches: Mapping[int, MakeFetch], known_whole_over: Sequence[str]
    ) -> list[Any]:
        """Value, aux leaves, gradients. Arguments as for `expand_microbatches`."""
        env: Env = {(v, WHOLE): value for v, value in zip(self.analysis.body.inputs, operands, strict=True)}
        self.evaluator.run(self.marked, env, BEFORE)
        differentiated = [self.analysis.body.inputs[p] for p in positions]
        value, totals, grads = self.loop(env, differentiated, self.fetches(fetches), known_whole_over)
        env.update({(v, WHOLE): total for v, total in zip(self.marked.returned, totals, strict=True)})
        self.evaluator.run(self.marked, env, AFTER)
        types = self.evaluator.program.type_of
        loss, *aux = self.analysis.body.outputs
        leaves = [self.evaluator.read(self.analysis, ref, WHOLE, env, None) for ref in aux]
        return [
            value.astype(types(loss)[0].dtype), *(jnp.asarray(leaf) for leaf in leaves),
            *(grad.astype(types(v)[0].dtype) for v, grad in zip(differentiated, grads, strict=True)),
        ]

    def summands(self, operands: Sequence[Any], positions: Sequence[int], number: Any) -> dict[int, Any]:
        """One microbatch's contribution to the gradient, by position of the differentiated operand; not of operands that hold
        examples. For a job without manual axes and islands."""
        inputs = self.analysis.body.inputs
        env: Env = {(v, WHOLE): value for v, value in zip(inputs, operands, strict=True)}
        self.evaluator.run(self.marked, env, BEFORE)
        differentiated = {inputs[p]: p for p in positions}
        sliced = [v for v in differentiated if self.info(v).kind == EXAMPLES]
        same = [v for v in differentiated if v not in sliced]
        shared = sorted({v for v, form in self.marked.loop if form == WHOLE} - set(differentiated))
        parts = [v for v, form in self.marked.loop if form == PART and (v, WHOLE) in env and self.info(v).kind == EXAMPLES]
        cuts = sorted({*parts, *sliced})
        slices = [self.split.cut(env[v, WHOLE], self.info(v).layout)[number] for v in cuts]
        contribution = _Contribution(self, same, (), sliced, shared, cuts, (), (), {})
        params, constants = [env[v, WHOLE] for v in same], [env[v, WHOLE] for v in shared]
        totals, _, _ = contribution.microbatch((params, []), constants, {}, contribution.zeros(), number, slices, [])
        return {differentiated[v]: summand for v, summand in zip(same, totals[2], strict=True)}

    def fetches(self, makers: Mapping[int, MakeFetch]) -> dict[int, Any]:
        """By value number, those of the operands that the loop reads."""
        inputs, types = self.analysis.body.inputs, self.evaluator.program.types
        read = {v for v, _ in self.marked.needed}
        chosen = {inputs[p]: make for p, make in makers.items() if inputs[p] in read and self.info(inputs[p]).kind == EXAMPLES}
        return {v: make(self.split, self.info(v).layout, types[v][0].shape[self.info(v).layout.dim]) for v, make in chosen.items()}

    def loop(
        self, env: Env, differentiated: Sequence[int], fetches: dict[int, Any], known_whole_over: Sequence[str]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Runs the microbatches: the loss, the returned values for the whole batch, and the gradients."""
        split, fetched = self.split, list(fetches)
        sliced = [v for v in differentiated if self.info(v).kind == EXAMPLES and v not in fetches]
        # What crosses into the loop: slices for each microbatch, and values that are the same for all.
        cuts = sorted(v for v, form in self.marked.loop if form == PART and (v, WHOLE) in env and self.info(v).kind == EXAMPLES)
        cuts = sorted({*cuts, *sliced} - set(fetches))
        shared = sorted({v for v, form in self.marked.loop if form == WHOLE} - set(differentiated))
        same = [v for v in differentiated if v not in sliced and v not in fetches]
        on_islands = list(self.islands.params) if self.islands else []
        if self.islands:
            outside = self.islands.read_outside(self.analysis)
            same = [v for v in same if v in outside or v not in on_islands]
        # What only split layers and the loss read is wanted as they see it (labels).
        whole_over = self.islands.axes if self.islands else known_whole_over
        worked = {v for v in cuts if self.info(v).live} | (self.islands.inputs if self.islands else set())
        returned = list(self.marked.returned)
        stacked = [v for v in returned if self.info(v).kind == EXAMPLES]
        summed = [v for v in returned if self.info(v).kind == PARTIAL]
        manual = [(name, size) for name, size in split.axes if name in split.manual]

        truncation, inputs_at = self.truncation, {v: p for p, v in enumerate(self.analysis.body.inputs)}

        def run(params, island_params, constants, scanned, ahead, places, turn):
            slot_places = {name: place[0] for (name, _), place in zip(manual, places, strict=True)}
            copies = [self.islands.copies(value) for value in island_params] if self.islands else []

            def accumulate(live: frozenset[int] | None) -> Any:
                chosen = None if live is None else frozenset(v for v, p in inputs_at.items() if p in live)
                contribution = _Contribution(self, same, on_islands, sliced, shared, cuts, summed, stacked, fetches, chosen)
                return contribution.accumulate((params, copies), constants, scanned, ahead, slot_places)

            if truncation is None:
                (*totals, unsummed), rows = accumulate(None)
                totals = lax.psum(totals, tuple(name for name, _ in manual)) if manual else totals
            else:
                (*totals, unsummed), rows = truncation.branched(slot_places, turn, accumulate)
                grads = truncation.total(totals[-1], [inputs_at[v] for v in same], turn)
                totals = [*lax.psum(totals[:-1], tuple(name for name, _ in manual)), grads]
            if manual:
                unsummed = [one[None] for one in unsummed]
            return totals, unsummed, rows

        inputs = (
            [env[v, WHOLE] for v in same], [env[v, WHOLE] for v in on_islands], [env[v, WHOLE] for v in shared],
            [split.cut(env[v, WHOLE], self.info(v).layout, () if v in worked else whole_over) for v in cuts],
            [one.cut(env[v, WHOLE]) for v, one in fetches.items()],
            [jnp.arange(size, dtype=jnp.int32) for _, size in manual], jnp.zeros((), jnp.int32) if truncation is None else truncation.turn,
        )
        if manual:
            run = self.in_shard_map(run, inputs, cuts, fetched, (stacked, sliced, fetched))
        (value, sums, grads), unsummed, (rows, grad_rows, fetched_rows) = run(*inputs)
        whole = {v: total for v, total in zip(summed, sums, strict=True)}
        whole |= {v: self.joined(row, v) for v, row in zip(stacked, rows, strict=True)}
        by_operand = dict(zip(same, grads, strict=True)) | {v: self.joined(row, v) for v, row in zip(sliced, grad_rows, strict=True)}
        if self.islands:
            exchanged = self.islands.total(unsummed, [name for name, _ in manual])
            if truncation is not None:
                exchanged = [truncation.scaled(one, inputs_at[v]) for v, one in zip(on_islands, exchanged, strict=True)]
            by_operand |= {v: by_operand[v] + one if v in by_operand else one for v, one in zip(on_islands, exchanged, strict=True)}
        by_operand |= {v: one.join(row) for (v, one), row in zip(fetches.items(), fetched_rows, strict=True)}
        if truncation is not None:
            by_operand |= {v: truncation.scaled(by_operand[v], inputs_at[v]) for v in sliced}
        return value, [whole[v] for v in returned], [by_operand[v] for v in differentiated]

    def joined(self, rows: Any, v: int) -> Any:
        layout = self.info(v).layout
        return self.split.join(rows, layout, self.evaluator.program.types[v][0].shape[layout.dim])

    def in_shard_map(self, run: Any, inputs: Any, cuts: Sequence[int], fetched: Sequence[int], results: Sequence[Sequence[int]]) -> Any:
        """The loop as a `shard_map` over the manual axes: parameters replicated, slices and per-example results split."""
        replicated, split = PartitionSpec(), self.split
        spec = lambda v: split.cut_spec(len(self.evaluator.program.types[v][0].shape), self.info(v).layout)
        names = [name for name, _ in split.axes if name in split.manual]
        in_specs = (
            [replicated] * len(inputs[0]), [replicated] * len(inputs[1]), [replicated] * len(inputs[2]), [spec(v) for v in cuts],
            [spec(v) for v in fetched], [PartitionSpec(name) for name in names], replicated,
        )
        out_specs = (replicated, PartitionSpec(tuple(names)), tuple([spec(v) for v in group] for group in results))
        # check_vma=False: the body was traced outside, without the marks; the one psum is explicit.
        return jax.shard_map(
            run, mesh=split.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(names), check_vma=False
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Contribution:
    """The loop of one place: gradients of the microbatches' contributions, added up."""

    job: Job
    same: Sequence[int]  # differentiated operands that are the same for all microbatches
    on_islands: Sequence[int]  # those that islands read, as copies
    sliced: Sequence[int]  # differentiated operands that hold examples
    shared: Sequence[int]
    cuts: Sequence[int]
    summed: Sequence[int]
    stacked: Sequence[int]
    fetches: Mapping[int, Any]
    chosen: frozenset[int] | None = None  # the operands that this place differentiates; None: all

    def accumulate(self, params: tuple[list[Any], list[Any]], constants: list[Any], scanned: list[Any], ahead: list[Any], places: dict[str, Any]) -> Any:
        """Sums over the microbatches, and the rows of `stacked`, `sliced` and fetched operands. What is fetched comes one microbatch
        ahead; the last one stands behind the loop, so that nothing is fetched in vain."""
        count, zeros = self.job.split.num_microbatches, self.zeros()
        numbers = jnp.arange(count, dtype=jnp.int32)
        run = functools.partial(self.microbatch, params, constants, places)
        if not self.fetches:
            totals, (rows, grad_rows) = lax.scan(lambda totals, inputs: run(totals, *inputs, [])[:2], zeros, (numbers, scanned), length=count)
            return totals, (rows, grad_rows, [])
        fetch = lambda number: [one.fetch(cut, number) for one, cut in zip(self.fetches.values(), ahead, strict=True)]

        def step(carry, inputs):
            totals, fetched_rows, here = carry
            coming = fetch(inputs[0] + 1)
            totals, rows, cotangents = run(totals, *inputs, here)
            return (totals, self.added(fetched_rows, cotangents, inputs[0]), coming), rows

        start = zeros, [one.zeros(cut) for one, cut in zip(self.fetches.values(), ahead, strict=True)], fetch(numbers[0])
        (totals, fetched_rows, here), rows = lax.scan(step, start, (numbers[:-1], [cut[:-1] for cut in scanned]), length=count - 1)
        totals, last, cotangents = run(totals, numbers[-1], [cut[-1] for cut in scanned], here)
        rows = jax.tree.map(lambda some, one: jnp.concatenate([some, one[None]]), rows, last)
        return totals, (*rows, self.added(fetched_rows, cotangents, numbers[-1]))

    def microbatch(
        self, params: tuple[list[Any], list[Any]], constants: list[Any], places: dict[str, Any], totals: Any, number: Any, slices: list[Any],
        fetched: list[Any],
    ) -> Any:
        """One microbatch: new totals, its rows, and the cotangents of what was fetched for it."""
        split, job = self.job.split, self.job
        parts = {v: split.part(cut, job.info(v).layout) for v, cut in zip(self.cuts, slices, strict=True)}
        own = [parts.pop(v) for v in self.sliced]
        (value, (sums, rows)), (grads, grad_rows, cotangents) = self.differentiated((params, own, fetched), constants, parts, Slot(number, places))
        totals = jax.tree.map(lambda total, one: total + one.astype(total.dtype), totals, (value, sums, *grads))
        return totals, (self.unjoined(rows, self.stacked), self.unjoined(grad_rows, self.sliced)), cotangents

    def differentiated(self, operands: Any, *rest: Any) -> Any:
        """Value, what comes besides, and gradients; those of operands that are not chosen are zero, and nothing is computed for them."""
        leaves, tree = jax.tree.flatten(operands)
        (_, copies), _, fetched = operands
        values = [*self.same, *(v for v, one in zip(self.on_islands, copies, strict=True) for _ in jax.tree.leaves(one)), *self.sliced]
        values += [v for v, one in zip(self.fetches, fetched, strict=True) for _ in jax.tree.leaves(one)]
        live = [k for k, v in enumerate(values) if self.chosen is None or v in self.chosen]

        def evaluate(some: list[Any]) -> Any:
            every = list(leaves)
            for k, leaf in zip(live, some, strict=True):
                every[k] = leaf
            return self.evaluate(jax.tree.unflatten(tree, every), *rest)

        found, grads = jax.value_and_grad(evaluate, has_aux=True, holomorphic=self.job.holomorphic)([leaves[k] for k in live])
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
        return [one.add(row, cotangent, number) for one, row, cotangent in zip(self.fetches.values(), rows, cotangents, strict=True)]

    def unjoined(self, rows: list[Any], values: Sequence[int]) -> list[Any]:
        split, job = self.job.split, self.job
        types = job.evaluator.program.types
        return [
            split.uncut_local(row, job.info(v).layout, types[v][0].shape[job.info(v).layout.dim]) for v, row in zip(values, rows, strict=True)
        ]

    def evaluate(self, differentiated: Any, constants: list[Any], parts: dict[int, Any], slot: Slot) -> Any:
        """One microbatch's contribution to the loss, and what the loop returns besides."""
        (params, copies), slices, fetched = differentiated
        evaluator, analysis = self.job.evaluator, self.job.analysis
        env: Env = {(v, PART): value for v, value in (*zip(self.same, params, strict=True), *zip(self.sliced, slices, strict=True), *parts.items())}
        env.update({(v, PART): one.part(value) for (v, one), value in zip(self.fetches.items(), fetched, strict=True)})
        env.update({(v, WHOLE): value for v, value in zip(self.shared, constants, strict=True)})
        if self.job.islands:
            self.job.islands.evaluate(evaluator, self.job.marked, env, dict(zip(self.on_islands, copies, strict=True)), slot)
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
