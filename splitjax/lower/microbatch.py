"""Gradient accumulation over microbatches that never changes the numbers, with one gradient exchange.

`expand_microbatches` evaluates a boundary (see `gradient.py`) in N microbatches. The forward is given twice, traced at the whole
batch and at what one microbatch of one worker has (`local_examples`). Then

1. `pairing` reads both jaxprs as one program: dims and literals that differ come from the number of examples;
2. `classify` finds how every value relates to the examples: the same for all, a slice of the batch, or a sum over it;
3. before the loop, what does not depend on differentiated operands is computed for the whole batch where it mixes examples or
   makes them (a mask's sum, random bits);
4. the loop takes the gradient of each microbatch's contribution, with the whole batch's literals and denominators. It runs in a
   `shard_map` that is manual over `manual_axes` only, so that contributions stay on their worker and are exchanged once, after it;
5. after it, auxiliary results that are not linear in sums over examples are computed from the totals.

A loss that is not a sum over examples up to linear operations (batch norm, in-batch contrast, a logarithm of a mean) is a
`MicrobatchError` naming the operation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from splitjax.errors import MicrobatchError
from splitjax.lower.accumulate import AFTER, BEFORE, LOOP, Bind, Env, Evaluator, plain_bind
from splitjax.lower.classify import Analysis, classify, whole_batch_info
from splitjax.lower.gradient import boundary_of, expand
from splitjax.lower.needs import PART, WHOLE, Marked, mark
from splitjax.lower.pairing import Const, Program, pair
from splitjax.lower.relation import EXAMPLES, LATER, PARTIAL, Batch, Info, Layout, Reason
from splitjax.lower.slices import Slot, Split
from splitjax.mesh import MeshShape

# (how the batch is cut, where the operand's examples are, the size of that dim) -> `fetch.Modulo` or `fetch.Turns`.
MakeFetch = Callable[[Split, Layout, int], Any]


def local_examples(
    num_examples: int, num_microbatches: int, batch_axes: Sequence[str], mesh: Any, manual_axes: Sequence[str] = ()
) -> int:
    """How many examples the local forward must be traced with: those of one microbatch on one place of the manual axes (but
    never one: with a single example JAX may trace other operations).

    `batch_axes`: the mesh axes over which the example dim is split, major first; `manual_axes`: those of them that are passed to
    `expand_microbatches` as such. Raises `MicrobatchError` if the batch does not divide, naming the nearest sizes that do.
    """
    shape = MeshShape.of(mesh) if mesh is not None else None
    num_workers = 1 if shape is None else shape.size(tuple(batch_axes))
    unit = num_workers * num_microbatches
    if num_examples % unit or num_examples < unit:
        below, above = num_examples // unit * unit, -(-num_examples // unit) * unit
        nearest = str(above) if below < unit else f"{below} or {above}"
        raise MicrobatchError(
            f"a batch of {num_examples} examples does not divide into {num_microbatches} microbatches on {num_workers} workers",
            value=num_examples, place="microbatches",
            remedy=f"use a batch of {nearest} examples, or another number of microbatches",
        )
    num_local = _run_examples(num_examples, num_microbatches, mesh, manual_axes)
    return num_local if num_local > 1 else 2 if num_examples != 2 else 4


def _run_examples(num_examples: int, num_microbatches: int, mesh: Any, manual_axes: Sequence[str]) -> int:
    return num_examples // (num_microbatches * (1 if mesh is None else MeshShape.of(mesh).size(tuple(manual_axes))))


def expand_microbatches(
    params: dict[str, Any],
    operands: Sequence[Any],
    operand_example_dims: Sequence[int | None],
    local_forward: Any,
    num_microbatches: int,
    batch_axes: Sequence[str],
    mesh: Mesh | None,
    *,
    manual_axes: Sequence[str] = (),
    bind: Bind | None = None,
    eval_forward: Callable[[Any, Sequence[Any]], Sequence[Any]] | None = None,
    fetches: Mapping[int, MakeFetch] | None = None,
    known_whole_over: Sequence[str] = (),
) -> list[Any]:
    """Evaluates a boundary in microbatches; the same results, in the same order, as `gradient.expand`. Call it under `jax.jit`.

    **Arguments:**

    - `params`: the boundary equation's parameters, traced with the whole batch; `operands`: its operands.
    - `operand_example_dims`: per operand the position of its example dim, or None.
    - `local_forward`: the same boundary's `forward`, traced with `local_examples(...)` examples.
    - `batch_axes`: mesh axes over which the example dim is split, major first.
    - `manual_axes`: those of the batch axes over which every differentiated operand is replicated: over them the gradient is
      exchanged once, after the loop. Over the others XLA decides (it may exchange in every iteration).
    - `bind(eqn, operands, site) -> results`: evaluates one equation, for example with sharding constraints; inside the loop
      only constraints over axes that are not manual are possible. `site` is as in `trace.flatten`, within the forward.
    - `eval_forward`: as `gradient.expand`'s, for a boundary that needs no loop (one microbatch, no examples).
    - `fetches`: for operands (by position) whose slices are brought in one microbatch ahead, how.
    - `known_whole_over`: batch axes over which slices that are not differentiated (labels) are wanted whole, as split layers see them.

    Raises `MicrobatchError` for a loss that cannot be accumulated.
    """
    job = None
    if num_microbatches > 1:
        job = prepare(params, operand_example_dims, local_forward, num_microbatches, batch_axes, mesh, manual_axes=manual_axes, bind=bind)
    if job is None:
        return expand(params, operands, eval_forward)
    return job.results(operands, params["positions"], fetches or {}, known_whole_over)


def prepare(
    params: dict[str, Any], operand_example_dims: Sequence[int | None], local_forward: Any, num_microbatches: int,
    batch_axes: Sequence[str], mesh: Mesh | None, *, manual_axes: Sequence[str] = (), bind: Bind | None = None,
) -> Job | None:
    """A boundary analysed for `expand_microbatches`, whose arguments these are; None where it needs no loop: no operand holds
    examples, or the loss does not depend on what is differentiated. Raises `MicrobatchError`."""
    boundary = boundary_of(params)
    program = pair(boundary.forward, local_forward, boundary.label)
    sizes = _sizes(program, operand_example_dims, boundary)
    if sizes is None:
        return None
    expected = local_examples(sizes[0], num_microbatches, batch_axes, mesh, manual_axes)
    if sizes[1] != expected:
        raise MicrobatchError(
            f"the local forward was traced with {sizes[1]} examples instead of {expected}", value=sizes[1], place=boundary.label,
            remedy="trace it with as many examples as local_examples says",
        )
    batch = Batch(*sizes, _run_examples(sizes[0], num_microbatches, mesh, manual_axes))
    split = _split(num_microbatches, batch_axes, manual_axes, mesh)
    analysis = classify(program, program.body, _operand_infos(program, boundary, batch), batch)
    _require_sum(analysis, boundary, num_microbatches, batch)
    if not analysis.outputs[0].live:
        return None
    return Job(analysis, _marked(analysis, batch), Evaluator(program, batch, split, bind or plain_bind), boundary.holomorphic)


def _sizes(program: Program, operand_example_dims: Sequence[int | None], boundary: Any) -> tuple[int, int] | None:
    """The number of examples in both traces, from the operands that hold them; None if no operand does."""
    found = None
    for v, dim, name in zip(program.body.inputs, operand_example_dims, boundary.names, strict=True):
        if dim is None:
            continue
        whole, part = (one.shape[dim] for one in program.types[v])
        if whole == part:
            raise MicrobatchError(
                f"the local forward was traced with all {whole} examples of {name}", value=whole, place=boundary.label,
                remedy="trace it with as many examples as local_examples says",
            )
        if found is None or whole < found[0]:
            found = whole, part
    return found


def _split(num_microbatches: int, batch_axes: Sequence[str], manual_axes: Sequence[str], mesh: Mesh | None) -> Split:
    shape = None if mesh is None else MeshShape.of(mesh)
    axes = () if shape is None else tuple((name, shape.size(name)) for name in shape.present(tuple(batch_axes)))
    return Split(num_microbatches, axes, frozenset(manual_axes) & {name for name, _ in axes}, mesh)


def _operand_infos(program: Program, boundary: Any, batch: Batch) -> list[Info]:
    infos = []
    for position, v in enumerate(program.body.inputs):
        info = whole_batch_info(program.types[v], batch)
        if position in boundary.positions:
            reason = info.reason and Reason("argument", "", f"{boundary.names[position]}: {info.reason.why}")
            infos.append(dataclasses.replace(info, live=True, local=True, reason=reason))
        else:
            infos.append(dataclasses.replace(info, local=info.kind == EXAMPLES))
    return infos


def _require_sum(analysis: Analysis, boundary: Any, num_microbatches: int, batch: Batch) -> None:
    """Raises `MicrobatchError` unless the loss is a sum of contributions of examples."""
    info = analysis.outputs[0]
    if info.kind in (LATER, EXAMPLES) and info.live:
        reason = info.reason or Reason("result", "", "it belongs to a single example")
        raise MicrobatchError(
            f"{boundary.label}: the loss cannot be accumulated over {num_microbatches} microbatches, because of {reason.primitive}: "
            f"{reason.why}",
            value=reason.primitive, place=reason.source or boundary.label,
            remedy="make the loss a sum or mean over examples of values that each depend on one example (a norm over features "
            "instead of batch norm; move functions of totals into aux), or use microbatches=None",
        )


def _marked(analysis: Analysis, batch: Batch) -> Marked:
    """What has to be computed: the loss as contributions, and every auxiliary result for the whole batch."""
    loss, *aux = analysis.body.outputs
    wants = [(loss, PART)] + [(ref, WHOLE) for ref in aux]
    return mark(analysis, [(ref, form) for ref, form in wants if not isinstance(ref, Const)], batch, top=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One boundary, analysed and ready to be evaluated."""

    analysis: Analysis
    marked: Marked
    evaluator: Evaluator
    holomorphic: bool

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
        returned = list(self.marked.returned)
        stacked = [v for v in returned if self.info(v).kind == EXAMPLES]
        summed = [v for v in returned if self.info(v).kind == PARTIAL]
        manual = [(name, size) for name, size in split.axes if name in split.manual]

        def run(params, constants, scanned, ahead, places):
            slot_places = {name: place[0] for (name, _), place in zip(manual, places, strict=True)}
            contribution = _Contribution(self, same, sliced, shared, cuts, summed, stacked, fetches)
            totals, rows = contribution.accumulate(params, constants, scanned, ahead, slot_places)
            if manual:
                totals = lax.psum(totals, tuple(name for name, _ in manual))
            return totals, rows

        inputs = (
            [env[v, WHOLE] for v in same], [env[v, WHOLE] for v in shared],
            [split.cut(env[v, WHOLE], self.info(v).layout, () if self.info(v).live else known_whole_over) for v in cuts],
            [one.cut(env[v, WHOLE]) for v, one in fetches.items()],
            [jnp.arange(size, dtype=jnp.int32) for _, size in manual],
        )
        if manual:
            run = self.in_shard_map(run, inputs, cuts, fetched, (stacked, sliced, fetched))
        (value, sums, grads), (rows, grad_rows, fetched_rows) = run(*inputs)
        whole = {v: total for v, total in zip(summed, sums, strict=True)}
        whole |= {v: self.joined(row, v) for v, row in zip(stacked, rows, strict=True)}
        by_operand = dict(zip(same, grads, strict=True)) | {v: self.joined(row, v) for v, row in zip(sliced, grad_rows, strict=True)}
        by_operand |= {v: one.join(row) for (v, one), row in zip(fetches.items(), fetched_rows, strict=True)}
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
            [replicated] * len(inputs[0]), [replicated] * len(inputs[1]), [spec(v) for v in cuts],
            [spec(v) for v in fetched], [PartitionSpec(name) for name in names],
        )
        out_specs = (replicated, tuple([spec(v) for v in group] for group in results))
        # check_vma=False: the body was traced outside, without the marks; the one psum is explicit.
        return jax.shard_map(
            run, mesh=split.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(names), check_vma=False
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Contribution:
    """The loop of one place: gradients of the microbatches' contributions, added up."""

    job: Job
    same: Sequence[int]  # differentiated operands that are the same for all microbatches
    sliced: Sequence[int]  # differentiated operands that hold examples
    shared: Sequence[int]
    cuts: Sequence[int]
    summed: Sequence[int]
    stacked: Sequence[int]
    fetches: Mapping[int, Any]

    def accumulate(self, params: list[Any], constants: list[Any], scanned: list[Any], ahead: list[Any], places: dict[str, Any]) -> Any:
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

    def microbatch(self, params: list[Any], constants: list[Any], places: dict[str, Any], totals: Any, number: Any, slices: list[Any], fetched: list[Any]) -> Any:
        """One microbatch: new totals, its rows, and the cotangents of what was fetched for it."""
        split, job = self.job.split, self.job
        parts = {v: split.part(cut, job.info(v).layout) for v, cut in zip(self.cuts, slices, strict=True)}
        differentiate = jax.value_and_grad(self.evaluate, has_aux=True, holomorphic=job.holomorphic)
        own = [parts.pop(v) for v in self.sliced]
        (value, (sums, rows)), (grads, grad_rows, cotangents) = differentiate((params, own, fetched), constants, parts, Slot(number, places))
        totals = jax.tree.map(lambda total, one: total + one.astype(total.dtype), totals, (value, sums, grads))
        return totals, (self.unjoined(rows, self.stacked), self.unjoined(grad_rows, self.sliced)), cotangents

    def zeros(self) -> Any:
        type_of = self.job.evaluator.program.type_of
        loss = self.job.analysis.body.outputs[0]
        return _zero(type_of(loss)[0]), [_zero(type_of(v)[0]) for v in self.summed], [_zero(type_of(v)[0]) for v in self.same]

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
        params, slices, fetched = differentiated
        evaluator, analysis = self.job.evaluator, self.job.analysis
        env: Env = {(v, PART): value for v, value in (*zip(self.same, params, strict=True), *zip(self.sliced, slices, strict=True), *parts.items())}
        env.update({(v, PART): one.part(value) for (v, one), value in zip(self.fetches.items(), fetched, strict=True)})
        env.update({(v, WHOLE): value for v, value in zip(self.shared, constants, strict=True)})
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


def manual_axes(batch_axes: Sequence[str], mesh: Any, differentiated_specs: Sequence[Any]) -> tuple[str, ...]:
    """The batch axes over which no differentiated operand is sharded: over them the gradient can be exchanged once.

    `differentiated_specs`: one `PartitionSpec` (or tuple of entries) per differentiated operand.
    """
    used: set[str] = set()
    for spec in differentiated_specs:
        for entry in spec or ():
            used.update((entry,) if isinstance(entry, str) else (entry or ()))
    return tuple(axis for axis in MeshShape.of(mesh).present(tuple(batch_axes)) if axis not in used)
