"""Accumulates gradients over microbatches without changing the numbers, with one gradient exchange.

`prepare` analyses a boundary (see `boundary.py`) that is to run in N microbatches, `loop.PreparedBoundary` evaluates
it. The forward is given twice, traced at the whole batch and at what one microbatch of one worker has
(`local_examples`). Then

1. `pairing` reads both jaxprs as one program: dims and literals that differ come from the number of examples;
2. `classify` finds how every value relates to the examples: the same for all, a slice of the batch, or a sum over it;
3. before the loop, what does not depend on differentiated operands is computed for the whole batch where it mixes
   examples or makes them (a mask's sum, random bits);
4. the loop takes the gradient of each microbatch's contribution, with the whole batch's literals and denominators. It
   runs in a `shard_map` that is manual over the axes of the workers only, so that contributions stay on their worker
   and are exchanged once, after it;
5. after it, auxiliary results that are not linear in sums over examples are computed from the totals.

A loss that is not a sum over examples up to linear operations (batch norm, in-batch contrast, a logarithm of a mean) is
a `MicrobatchError` naming the operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from splitjax.errors import Refusal
from splitjax.lower.microbatch.accumulate import Evaluator, plain_bind
from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.classify import PART, WHOLE, BodyAnalysis, classify, whole_batch_info
from splitjax.lower.microbatch.islands import Archipelago, Request, find_island, stages
from splitjax.lower.microbatch.liveness import Marked, mark
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.pairing import Const, PairedProgram, pair
from splitjax.planning.workers import Workers
from splitjax.primitives.example_relation import EXAMPLES, LATER, Batch, Info, Reason
from splitjax.step.boundary import Boundary, boundary_of


def local_examples(num_examples: int, num_microbatches: int, workers: Workers) -> int | Refusal:
    """Returns how many examples the local forward must be traced with.

    These are the examples of a microbatch on a worker (but never a single one, with which JAX may trace other
    operations).

    **Arguments:**

    - `num_examples`: those of the whole batch. `num_microbatches`: into how many parts a worker's share is cut.
    - `workers`: who share the batch.

    Returns a refusal if the batch does not divide, naming the nearest sizes that do.
    """
    num_parts = workers.num_batch_parts
    unit = num_parts * num_microbatches
    if num_examples % unit or num_examples < unit:
        below, above = num_examples // unit * unit, -(-num_examples // unit) * unit
        nearest = str(above) if below < unit else f"{below} or {above}"
        return Refusal(
            f"a batch of {num_examples} examples does not divide into {num_microbatches} microbatches on {num_parts}"
            " workers",
            value=num_examples,
            place="microbatches",
            remedy=f"use a batch of {nearest} examples, or another number of microbatches",
        )
    num_local = _run_examples(num_examples, num_microbatches, workers)
    return num_local if num_local > 1 else 2 if num_examples != 2 else 4


def traced_examples(share: int) -> int:
    """Returns the number of examples with which a forward is traced that runs with `share`."""
    return max(share, 2)


def _run_examples(num_examples: int, num_microbatches: int, workers: Workers) -> int:
    """Returns the number of examples that a worker has in a microbatch."""
    return num_examples // (num_microbatches * workers.num_workers)


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
    """Says how a boundary's batch is cut into microbatches.

    - `example_dims`: per operand the position of its example dim, or None.
    - `local_forward`: the same boundary's `forward`, traced with `local_examples(...)` examples.
    - `num_microbatches`: into how many parts a worker's share of the batch is cut.
    - `workers`: who share the batch, by default a single device. Every differentiated operand is replicated over them:
      the gradient is exchanged over them once, after the loop. Over the other axes of the batch XLA decides (it may
      exchange in every iteration).
    - `islands`: for a group of axes over which some differentiated operands are split and others are not: how the
      others' gradients are exchanged once, too.
    - `share`: the number of examples of a worker that does not have an equal part; `local_forward` is then traced with
      so many (but never with a single one).
    """

    example_dims: Sequence[int | None]
    local_forward: Any
    num_microbatches: int
    workers: Workers = Workers()
    islands: Request | None = None
    share: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Analysed:
    """Holds a boundary's forward, traced with the whole batch and with part of it, as a single `program`, with the
    numbers of examples (`batch`) and the relation of every value to the examples (`analysis`)."""

    program: PairedProgram
    batch: Batch
    analysis: BodyAnalysis


def analyse(params: dict[str, Any], loop: Accumulation) -> Analysed | Refusal | None:
    """Finds how every value of a boundary's forward relates to the examples: arguments are as for `prepare`.

    Returns None where no operand holds examples, and a refusal where the two traces are no single program, or the batch
    does not divide."""
    num_microbatches, workers, share = loop.num_microbatches, loop.workers, loop.share
    boundary = boundary_of(params)
    program = pair(boundary.forward, loop.local_forward, boundary.label)
    if isinstance(program, Refusal):
        return program
    sizes = _sizes(program, loop.example_dims, boundary)
    if sizes is None or isinstance(sizes, Refusal):
        return sizes
    run = share or _run_examples(sizes[0], num_microbatches, workers)
    expected = traced_examples(share) if share else local_examples(sizes[0], num_microbatches, workers)
    if isinstance(expected, Refusal):
        return expected
    if sizes[1] != expected:
        return Refusal(
            f"the local forward was traced with {sizes[1]} examples instead of {expected}",
            value=sizes[1],
            place=boundary.label,
            remedy="trace it with as many examples as local_examples says",
        )
    batch = Batch(*sizes, run)
    apart = boundary.microbatches not in (None, 1)
    analysis = classify(program, program.body, _operand_infos(program, boundary, batch), batch, apart)
    return Analysed(program, batch, analysis)


def prepare(params: dict[str, Any], loop: Accumulation) -> PreparedBoundary | Refusal | None:
    """Analyses a boundary that is to run in a loop over microbatches.

    Returns None where it needs no loop: no operand holds examples, or the loss does not depend on what is
    differentiated. `params`: the boundary equation's parameters, traced with the whole batch; `loop`: how its batch is
    cut.

    Returns a refusal for a loss that cannot be accumulated."""
    num_microbatches, workers, islands, share = loop.num_microbatches, loop.workers, loop.islands, loop.share
    boundary = boundary_of(params)
    analysed = analyse(params, loop)
    if analysed is None or isinstance(analysed, Refusal):
        return analysed
    program, batch, analysis = analysed.program, analysed.batch, analysed.analysis
    refusal = _no_sum(analysis, boundary, num_microbatches)
    if refusal is not None:
        return refusal
    if not analysis.outputs[0].live:
        return None
    marked = _marked(analysis, batch)
    archipelago = None
    if islands is not None:
        local, finer = pair(boundary.forward, islands.forward, boundary.label), workers.divided(islands.axes)
        if isinstance(local, Refusal):
            return local
        run = share // workers.mesh.size(islands.axes) if share else _run_examples(batch.whole, num_microbatches, finer)
        local_sizes = _sizes(local, loop.example_dims, boundary)
        if isinstance(local_sizes, Refusal):
            return local_sizes
        assert local_sizes is not None, "the same operands hold examples in every trace"
        own = Batch(*local_sizes, run)
        worker = Evaluator(local, own, Split(num_microbatches, finer), plain_bind)
        archipelago = _archipelago(islands, boundary, worker, analysis, marked)
    evaluator = Evaluator(program, batch, Split(num_microbatches, workers), plain_bind)
    return PreparedBoundary(analysis, marked, evaluator, boundary.holomorphic, archipelago)


def _archipelago(
    request: Request, boundary: Boundary, worker: Evaluator, analysis: BodyAnalysis, marked: Marked
) -> Archipelago | None:
    """Finds the islands of a loop; None where there are none. `worker`: evaluates the trace with its examples."""
    program = worker.program
    apart = boundary.microbatches not in (None, 1)
    local = classify(program, program.body, _operand_infos(program, boundary, worker.batch), worker.batch, apart)
    stage_of = stages(analysis, request.split_sites, request.whole_sites, request.leaving_sites)
    returned = {*marked.returned, *(ref for ref in analysis.body.outputs[:1] if isinstance(ref, int))}
    candidates = {
        stage: find_island(analysis, marked, stage_of, stage, returned)
        for stage in set(stage_of.values())
        if stage % 2 == 0
    }
    islands = {stage: island for stage, island in candidates.items() if island is not None}
    return Archipelago(request.axes, _marked(local, worker.batch), worker, islands, stage_of) if islands else None


def _sizes(
    program: PairedProgram, operand_example_dims: Sequence[int | None], boundary: Boundary
) -> tuple[int, int] | Refusal | None:
    """Returns the number of examples in both traces, from the operands that hold them; None if no operand does."""
    sizes = None
    for v, dim, name in zip(program.body.inputs, operand_example_dims, boundary.names, strict=True):
        if dim is None:
            continue
        whole, part = (aval.shape[dim] for aval in program.types[v])
        if whole == part:
            return Refusal(
                f"the local forward was traced with all {whole} examples of {name}",
                value=whole,
                place=boundary.label,
                remedy="trace it with as many examples as local_examples says",
            )
        if sizes is None or whole < sizes[0]:
            sizes = whole, part
    return sizes


def _operand_infos(program: PairedProgram, boundary: Boundary, batch: Batch) -> list[Info]:
    """Returns the relations of the boundary's operands: those that are differentiated are live."""
    infos = []
    for position, v in enumerate(program.body.inputs):
        info = whole_batch_info(program.types[v], batch)
        if position in boundary.positions:
            reason = info.reason and Reason("argument", "", f"{boundary.names[position]}: {info.reason.why}")
            infos.append(dataclasses.replace(info, live=True, local=True, reason=reason))
        else:
            infos.append(dataclasses.replace(info, local=info.kind == EXAMPLES))
    return infos


def _no_sum(analysis: BodyAnalysis, boundary: Boundary, num_microbatches: int) -> Refusal | None:
    """Returns the refusal of a loss that is no sum of contributions of examples; None for one that is."""
    info = analysis.outputs[0]
    if info.kind in (LATER, EXAMPLES) and info.live:
        reason = info.reason or Reason("result", "", "it belongs to a single example")
        return Refusal(
            f"{boundary.label}: the loss cannot be accumulated over {num_microbatches} microbatches, because of"
            f" {reason.primitive}: {reason.why}",
            value=reason.primitive,
            place=reason.source or boundary.label,
            remedy=reason.remedy
            or (
                "make the loss a sum or mean over examples of values that each depend on one example (a norm over"
                " features instead of batch norm; move functions of totals into aux), take a balance loss over each"
                " microbatch (splitjax.per_microbatch), or use microbatches=None"
            ),
        )
    return None


def _marked(analysis: BodyAnalysis, batch: Batch) -> Marked:
    """Marks what has to be computed: the loss as contributions, and every auxiliary result for the whole batch."""
    loss, *aux = analysis.body.outputs
    wants = [(loss, PART)] + [(ref, WHOLE) for ref in aux]
    return mark(analysis, [(ref, form) for ref, form in wants if not isinstance(ref, Const)], batch, top=True)
