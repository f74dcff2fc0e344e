"""Gradient accumulation over microbatches that never changes the numbers, with one gradient exchange.

`expand_microbatches` evaluates a boundary (see `gradient.py`) in N microbatches. The forward is given twice, traced at
the whole batch and at what one microbatch of one worker has (`local_examples`). Then

1. `pairing` reads both jaxprs as one program: dims and literals that differ come from the number of examples;
2. `classify` finds how every value relates to the examples: the same for all, a slice of the batch, or a sum over it;
3. before the loop, what does not depend on differentiated operands is computed for the whole batch where it mixes
   examples or makes them (a mask's sum, random bits);
4. the loop takes the gradient of each microbatch's contribution, with the whole batch's literals and denominators. It
   runs in a `shard_map` that is manual over `manual_axes` only, so that contributions stay on their worker and are
   exchanged once, after it;
5. after it, auxiliary results that are not linear in sums over examples are computed from the totals.

A loss that is not a sum over examples up to linear operations (batch norm, in-batch contrast, a logarithm of a mean) is
a `MicrobatchError` naming the operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from splitjax.errors import MicrobatchError
from splitjax.lower.gradient import boundary_of, expand
from splitjax.lower.microbatch.accumulate import Bind, Evaluator, plain_bind
from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.classify import Analysis, classify, whole_batch_info
from splitjax.lower.microbatch.example_relation import EXAMPLES, LATER, Batch, Info, Reason
from splitjax.lower.microbatch.islands import Archipelago, Request, find_island, stages
from splitjax.lower.microbatch.liveness import PART, WHOLE, Marked, mark
from splitjax.lower.microbatch.loop import Job, MakeFetch
from splitjax.lower.microbatch.pairing import Const, Program, pair
from splitjax.lower.microbatch.places import Runner
from splitjax.mesh import MeshShape


def local_examples(
    num_examples: int, num_microbatches: int, batch_axes: Sequence[str], mesh: Any, manual_axes: Sequence[str] = ()
) -> int:
    """How many examples the local forward must be traced with: those of one microbatch on one place of the manual axes
    (but never one: with a single example JAX may trace other operations).

    `batch_axes`: the mesh axes over which the example dim is split, major first; `manual_axes`: those of them that are
    passed to `expand_microbatches` as such. Raises `MicrobatchError` if the batch does not divide, naming the nearest
    sizes that do.
    """
    shape = MeshShape.of(mesh) if mesh is not None else None
    num_workers = 1 if shape is None else shape.size(tuple(batch_axes))
    unit = num_workers * num_microbatches
    if num_examples % unit or num_examples < unit:
        below, above = num_examples // unit * unit, -(-num_examples // unit) * unit
        nearest = str(above) if below < unit else f"{below} or {above}"
        raise MicrobatchError(
            f"a batch of {num_examples} examples does not divide into {num_microbatches} microbatches on {num_workers}"
            " workers",
            value=num_examples,
            place="microbatches",
            remedy=f"use a batch of {nearest} examples, or another number of microbatches",
        )
    num_local = _run_examples(num_examples, num_microbatches, mesh, manual_axes)
    return num_local if num_local > 1 else 2 if num_examples != 2 else 4


def traced_examples(share: int) -> int:
    """With how many examples a forward is traced that runs with `share`."""
    return max(share, 2)


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
    islands: Request | None = None,
    runner: Runner | None = None,
) -> list[Any]:
    """Evaluates a boundary in microbatches; the same results, in the same order, as `gradient.expand`. Call it under
    `jax.jit`.

    **Arguments:**

    - `params`: the boundary equation's parameters, traced with the whole batch; `operands`: its operands.
    - `operand_example_dims`: per operand the position of its example dim, or None.
    - `local_forward`: the same boundary's `forward`, traced with `local_examples(...)` examples.
    - `batch_axes`: mesh axes over which the example dim is split, major first.
    - `manual_axes`: those of the batch axes over which every differentiated operand is replicated: over them the
      gradient is exchanged once, after the loop. Over the others XLA decides (it may exchange in every iteration).
    - `bind(eqn, operands, site) -> results`: evaluates one equation, for example with sharding constraints; inside the
      loop only constraints over axes that are not manual are possible. `site` is as in `trace.flatten`, within the
      forward.
    - `eval_forward`: as `gradient.expand`'s, for a boundary that needs no loop (one microbatch without manual axes, no
      examples).
    - `fetches`: for operands (by position) whose slices are brought in one microbatch ahead, how.
    - `islands`: for a group of axes over which some differentiated operands are split and others are not: how the
      others' gradients are exchanged once, too.
    - `runner`: how the loops of the places along the manual axes run, if not all alike.
    - `known_whole_over`: batch axes over which slices that are not differentiated (labels) are wanted whole, as split
      layers see them.

    Raises `MicrobatchError` for a loss that cannot be accumulated.
    """
    job = None
    if num_microbatches > 1 or manual_axes:
        job = prepare(
            params,
            operand_example_dims,
            local_forward,
            num_microbatches,
            batch_axes,
            mesh,
            manual_axes=manual_axes,
            bind=bind,
            islands=islands,
        )
    if job is None:
        return expand(params, operands, eval_forward)
    return job.results(operands, params["positions"], fetches or {}, known_whole_over, runner)


def prepare(
    params: dict[str, Any],
    operand_example_dims: Sequence[int | None],
    local_forward: Any,
    num_microbatches: int,
    batch_axes: Sequence[str],
    mesh: Mesh | None,
    *,
    manual_axes: Sequence[str] = (),
    bind: Bind | None = None,
    islands: Request | None = None,
    share: int | None = None,
) -> Job | None:
    """A boundary analysed for `expand_microbatches`, whose arguments these are; None where it needs no loop: no operand
    holds examples, or the loss does not depend on what is differentiated. Raises `MicrobatchError`.

    `share`: the examples of a worker that does not have an equal part; `local_forward` is then traced with so many (but
    never with one)."""
    boundary = boundary_of(params)
    program = pair(boundary.forward, local_forward, boundary.label)
    sizes = _sizes(program, operand_example_dims, boundary)
    if sizes is None:
        return None
    run = share or _run_examples(sizes[0], num_microbatches, mesh, manual_axes)
    expected = (
        traced_examples(share) if share else local_examples(sizes[0], num_microbatches, batch_axes, mesh, manual_axes)
    )
    if sizes[1] != expected:
        raise MicrobatchError(
            f"the local forward was traced with {sizes[1]} examples instead of {expected}",
            value=sizes[1],
            place=boundary.label,
            remedy="trace it with as many examples as local_examples says",
        )
    batch = Batch(*sizes, run)
    split = _split(num_microbatches, batch_axes, manual_axes, mesh)
    analysis = classify(program, program.body, _operand_infos(program, boundary, batch), batch)
    _require_sum(analysis, boundary, num_microbatches, batch)
    if not analysis.outputs[0].live:
        return None
    marked = _marked(analysis, batch)
    found = None
    if islands is not None:
        local, manual = pair(boundary.forward, islands.forward, boundary.label), (*manual_axes, *islands.axes)
        run = (
            share // MeshShape.of(mesh).size(tuple(islands.axes))
            if share
            else _run_examples(sizes[0], num_microbatches, mesh, manual)
        )
        own = Batch(*_sizes(local, operand_example_dims, boundary), run)
        worker = Evaluator(local, own, _split(num_microbatches, batch_axes, manual, mesh), islands.bind)
        found = _archipelago(islands, boundary, worker, analysis, marked)
    return Job(analysis, marked, Evaluator(program, batch, split, bind or plain_bind), boundary.holomorphic, found)


def _archipelago(
    request: Request, boundary: Any, worker: Evaluator, analysis: Analysis, marked: Marked
) -> Archipelago | None:
    """The islands of a loop; None where there are none. `worker`: evaluates the trace with one worker's examples."""
    program = worker.program
    local = classify(program, program.body, _operand_infos(program, boundary, worker.batch), worker.batch)
    stage_of = stages(analysis, request.split_sites, request.whole_sites)
    returned = {*marked.returned, *(ref for ref in analysis.body.outputs[:1] if isinstance(ref, int))}
    found = {
        stage: find_island(analysis, marked, stage_of, stage, returned)
        for stage in set(stage_of.values())
        if stage % 2 == 0
    }
    islands = {stage: island for stage, island in found.items() if island is not None}
    return (
        Archipelago(request.axes, request.where, _marked(local, worker.batch), worker, islands, stage_of)
        if islands
        else None
    )


def _sizes(program: Program, operand_example_dims: Sequence[int | None], boundary: Any) -> tuple[int, int] | None:
    """The number of examples in both traces, from the operands that hold them; None if no operand does."""
    found = None
    for v, dim, name in zip(program.body.inputs, operand_example_dims, boundary.names, strict=True):
        if dim is None:
            continue
        whole, part = (one.shape[dim] for one in program.types[v])
        if whole == part:
            raise MicrobatchError(
                f"the local forward was traced with all {whole} examples of {name}",
                value=whole,
                place=boundary.label,
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
            f"{boundary.label}: the loss cannot be accumulated over {num_microbatches} microbatches, because of"
            f" {reason.primitive}: {reason.why}",
            value=reason.primitive,
            place=reason.source or boundary.label,
            remedy=(
                "make the loss a sum or mean over examples of values that each depend on one example (a norm over"
                " features instead of batch norm; move functions of totals into aux), or use microbatches=None"
            ),
        )


def _marked(analysis: Analysis, batch: Batch) -> Marked:
    """What has to be computed: the loss as contributions, and every auxiliary result for the whole batch."""
    loss, *aux = analysis.body.outputs
    wants = [(loss, PART)] + [(ref, WHOLE) for ref in aux]
    return mark(analysis, [(ref, form) for ref, form in wants if not isinstance(ref, Const)], batch, top=True)


def manual_axes(batch_axes: Sequence[str], mesh: Any, differentiated_specs: Sequence[Any]) -> tuple[str, ...]:
    """The batch axes over which no differentiated operand is sharded: over them the gradient can be exchanged once.

    `differentiated_specs`: one `PartitionSpec` (or tuple of entries) per differentiated operand.
    """
    used: set[str] = set()
    for spec in differentiated_specs:
        for entry in spec or ():
            used.update((entry,) if isinstance(entry, str) else (entry or ()))
    return tuple(axis for axis in MeshShape.of(mesh).present(tuple(batch_axes)) if axis not in used)
