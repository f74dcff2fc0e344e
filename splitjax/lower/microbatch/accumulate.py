"""Evaluates an analysed loss: parts inside the loop over microbatches, wholes before and after it.

A `Marked` body comes in with the values of its inputs, and the values that it needs come out in the same dictionary, by
value number and form. Equations are evaluated one by one, since a microbatch wants some of them changed: a share of
what is added to a sum, its own slice of a constant, its own random bits among those of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from splitjax import _compat
from splitjax.lower.microbatch.batch_split import LoopPosition, Split
from splitjax.lower.microbatch.classify import PART, WHOLE, BodyAnalysis, NodeAnalysis, used_form
from splitjax.lower.microbatch.liveness import Marked
from splitjax.lower.microbatch.pairing import Const, Node, PairedProgram, Ref, resized
from splitjax.primitives.example_relation import PARTIAL, Batch, Info

BEFORE, LOOP, AFTER, INSIDE = "before", "loop", "after", "inside"
Env = dict[tuple[int, str], Any]  # (value number, form) -> array
# (equation, operands, site) -> results: how one equation is evaluated. The site is as in `primitives.walk`, within the
# forward.
Bind = Callable[[Any, Sequence[Any], tuple[int, ...]], Sequence[Any]]


def plain_bind(eqn: Any, operands: Sequence[Any], site: tuple[int, ...]) -> Sequence[Any]:
    """Evaluates the equation `eqn` on its `operands` as it is, wherever its `site`; returns its results."""
    return _compat.rebind(eqn, operands)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates marked bodies. All methods are functions of their arguments; `env` dictionaries are filled in place.

    - `program`: the paired traces. `batch`: the numbers of examples. `split`: how the batch is cut.
    - `bind(eqn, operands, site) -> results`: evaluates an equation.

    Arguments that many methods have: `marked`: the body with what is needed of it; `analysis`: its analysis; `index`,
    `node`: an operation of it; `analysed`: what is known of that; `env`: the values so far; `slot`: the microbatch and
    the worker, None outside of the loop.
    """

    program: PairedProgram
    batch: Batch
    split: Split
    bind: Bind

    def run(
        self,
        marked: Marked,
        env: Env,
        stage: str,
        slot: LoopPosition | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """Computes what is needed of the body `marked` and not yet in `env`.

        - `stage`: at the top, which of the three parts of the step, `BEFORE`, `LOOP` or `AFTER`; `INSIDE` for nested
          bodies, where known values are computed on the spot.
        - `slot`: the microbatch and the worker, in `LOOP` and `INSIDE`.
        - `only`: the nodes to run, by index; None for all.
        """
        analysis = marked.analysis
        for index, node in enumerate(analysis.body.nodes):
            if only is not None and index not in only:
                continue
            if stage != LOOP:
                self.whole(marked, index, node, env, stage)
            if stage not in (LOOP, INSIDE):
                continue
            assert slot is not None, f"stage {stage!r} is evaluated for a microbatch"
            wanted = [v for v in node.outputs if (v, PART) in marked.needed and (v, PART) not in env]
            rest = []
            for v in wanted:
                info = analysis.infos[v]
                if info.live or info.local:
                    rest.append(v)
                elif (v, WHOLE) in env:
                    env[v, PART] = self.split.take(env[v, WHOLE], info.required_layout, slot)
            if rest:
                results = self.part(marked, index, node, env, slot)
                env.update({(v, PART): value for v, value in zip(node.outputs, results, strict=True) if v in rest})

    # Values for the whole batch.

    def whole(self, marked: Marked, index: int, node: Node, env: Env, stage: str) -> None:
        """Computes the results of `node`, number `index` of `marked`, that are needed whole in `stage`, into `env`."""
        analysis = marked.analysis
        some_live = any(info.live for info in analysis.by_node[index].operands)
        now = stage == INSIDE or (stage == AFTER) == some_live
        if index in marked.effects and now and stage != INSIDE:
            self.bind(node.whole, [self.read(analysis, ref, WHOLE, env, None) for ref in node.inputs], node.site)
            return
        wanted = [v for v in node.outputs if (v, WHOLE) in marked.needed and (v, WHOLE) not in env]
        if index in marked.pruned and stage in (BEFORE, INSIDE):
            closed, used, known = marked.pruned[index]
            operands = [
                self.read(analysis, ref, WHOLE, env, None)
                for ref, is_used in zip(node.inputs, used, strict=True)
                if is_used
            ]
            values = iter(_compat.eval_jaxpr(closed, (), *operands))
            env.update({(v, WHOLE): next(values) for v, is_known in zip(node.outputs, known, strict=True) if is_known})
            return
        wanted = [v for v in wanted if not (analysis.infos[v].live and stage != AFTER)]
        if not wanted or not now:
            return
        operands = [self.read(analysis, ref, WHOLE, env, None) for ref in node.inputs]
        values = self.bind(node.whole, operands, node.site)
        env.update({(v, WHOLE): value for v, value in zip(node.outputs, values, strict=True) if v in wanted})

    def read(self, analysis: BodyAnalysis, ref: Ref, form: str, env: Env, slot: LoopPosition | None) -> Any:
        """Returns the value or constant `ref` of `analysis` in a `form`: from `env`, or a constant cut for `slot`."""
        if not isinstance(ref, Const):
            return env[ref, form]
        if form == WHOLE:
            return ref.whole
        assert slot is not None, "a constant is cut for a microbatch only"
        return self.split.take(ref.whole, analysis.info(ref, self.batch).required_layout, slot)

    # Values for one microbatch.

    def use(self, analysis: BodyAnalysis, ref: Ref, env: Env, slot: LoopPosition, share: bool = False) -> Any:
        """Returns `ref`, a value of `analysis` in `env`, as the microbatch of `slot` uses it.

        With `share`: the microbatch's share of it, as it is added to a sum over microbatches."""
        value = self.read(analysis, ref, used_form(analysis.info(ref, self.batch)), env, slot)
        return self.share(value, ref, slot) if share else value

    def share(self, value: Any, ref: Ref, slot: LoopPosition) -> Any:
        """Returns the share of the microbatch of `slot` in `value`, what `ref` is, as it is added to a sum."""
        value = jnp.asarray(value, self.program.type_of(ref)[0].dtype)
        if jnp.issubdtype(value.dtype, jnp.inexact):
            return value / jnp.asarray(self.split.num_contributions, value.dtype)
        return jnp.where(slot.is_first(), value, jnp.zeros_like(value))

    def bring(self, analysis: BodyAnalysis, ref: Ref, target: Info, env: Env, slot: LoopPosition) -> Any:
        """Returns `ref`, a value of `analysis` in `env`, in the relation `target` that a loop or a branch expects.

        For the microbatch of `slot`."""
        share = target.kind == PARTIAL and analysis.info(ref, self.batch).kind != PARTIAL
        return self.use(analysis, ref, env, slot, share)

    def part(self, marked: Marked, index: int, node: Node, env: Env, slot: LoopPosition) -> Sequence[Any]:
        """Returns the results of `node`, number `index` of `marked`, for the microbatch of `slot`, from `env`."""
        analysis, analysed = marked.analysis, marked.analysis.by_node[index]
        if analysed.rebuilt:
            if node.name == "scan":
                return self.scan(marked, index, node, analysed, env, slot)
            if node.name == "cond":
                return self.cond(marked, index, node, analysed, env, slot)
            return self.remat(marked, index, node, env, slot)
        outcome = analysed.outcome
        operands = [
            self.read(analysis, ref, form, env, slot) for ref, form in zip(node.inputs, analysed.forms, strict=True)
        ]
        for i in outcome.shares:
            operands[i] = self.share(operands[i], node.inputs[i], slot)
        if outcome.draws:
            return [self.draw(node, operands[0], outcome.infos[0], slot)]
        if node.name == "sharding_constraint":
            return operands  # written for the whole batch; layouts inside the loop are the plan's business
        if outcome.rows is not None:
            position, component = outcome.rows
            operands[position] = _own_numbers(operands[position], component, analysed.operands[position])
        if outcome.averaged:
            return [
                self.share(value, v, slot)
                for value, v in zip(self.bind(node.part, operands, node.site), node.outputs, strict=True)
            ]
        if self.batch.is_exact:
            return self.bind(node.part, operands, node.site)
        if node.runs_as_it_is:
            return self.repeated(node, analysed, operands)
        return self.bind(resized(node, self.batch.resize), operands, node.site)

    def draw(self, node: Node, key: Any, info: Info, slot: LoopPosition) -> Any:
        """Returns the random bits of the microbatch of `slot` among those that `node` draws for the whole batch.

        `key`: the random key; `info`: the relation of the bits."""
        shape, layout = node.whole.outvars[0].aval.shape, info.required_layout
        numbers = self.split.take(
            jnp.arange(shape[layout.dim], dtype=jnp.uint32), dataclasses.replace(layout, dim=0), slot
        )
        positions = jnp.zeros((), jnp.uint32)
        for dim, size in enumerate(shape):
            own = numbers if dim == layout.dim else jnp.arange(size, dtype=jnp.uint32)
            positions = positions[..., None] * jnp.uint32(size) + own
        return _compat.positional_bits(key, node.whole.params["bit_width"], positions)

    def repeated(self, node: Node, analysed: NodeAnalysis, operands: list[Any]) -> Sequence[Any]:
        """Returns the results of a function with its own derivative rule for a microbatch of a single example.

        Such a function exists at the sizes of the traces only: it is run on the example repeated, and the first result
        is kept. `node`: its call, of which `analysed` is known; `operands`: of the example.
        """
        repeated = [
            self.split.resize(value, info.layout, self.batch.run, self.batch.part)
            for value, info in zip(operands, analysed.operands, strict=True)
        ]
        results = self.bind(node.part, repeated, node.site)
        return [
            self.split.resize(value, info.layout, self.batch.part, self.batch.run)
            for value, info in zip(results, analysed.outcome.infos, strict=True)
        ]

    def inputs(
        self,
        analysis: BodyAnalysis,
        marked: Marked,
        operands: Sequence[Ref],
        targets: Sequence[Info],
        env: Env,
        slot: LoopPosition,
    ) -> list[Any]:
        """Returns the values of the needed inputs of a nested body, in the order of `marked.inputs`.

        `operands`: what the body's inputs are in the surrounding body, whose `analysis` and values `env` are given;
        `targets`: the relations that its inputs are brought to, for the microbatch of `slot`."""
        values = []
        for position, form in marked.inputs:
            ref = operands[position]
            values.append(
                self.read(analysis, ref, WHOLE, env, slot)
                if form == WHOLE
                else self.bring(analysis, ref, targets[position], env, slot)
            )
        return values

    def body(self, marked: Marked, values: Sequence[Any], slot: LoopPosition) -> Env:
        """Evaluates the nested body `marked` on the `values` of its needed inputs, for the microbatch of `slot`."""
        env: Env = {
            (marked.analysis.body.inputs[p], form): value
            for (p, form), value in zip(marked.inputs, values, strict=True)
        }
        self.run(marked, env, INSIDE, slot)
        return env

    def results(
        self, inner: BodyAnalysis, wanted: Sequence[int], targets: Sequence[Info], env: Env, slot: LoopPosition
    ) -> list[Any]:
        """Returns the results of the body of `inner` at the positions `wanted`, each in its relation of `targets`.

        `env`: the values of that body for the microbatch of `slot`."""
        return [self.bring(inner, inner.body.outputs[k], targets[k], env, slot) for k in wanted]

    def remat(self, marked: Marked, index: int, node: Node, env: Env, slot: LoopPosition) -> Sequence[Any]:
        """Returns the results of `node`, a rematerialised function, rebuilt around its body.

        `marked`, `index`, `env`, `slot`: as for `part`."""
        (inner,) = marked.nested[index]
        wanted = inner.returned

        def run(values, where):
            return self.results(inner.analysis, wanted, inner.analysis.outputs, self.body(inner, values, where), where)

        params = node.part.params
        checkpointed = jax.checkpoint(run, prevent_cse=params.get("prevent_cse", True), policy=params.get("policy"))
        values = self.inputs(marked.analysis, inner, node.inputs, inner.analysis.inputs, env, slot)
        return _place(checkpointed(values, slot), wanted, len(node.outputs))

    def cond(
        self, marked: Marked, index: int, node: Node, analysed: NodeAnalysis, env: Env, slot: LoopPosition
    ) -> Sequence[Any]:
        """Returns the results of `node`, a conditional, rebuilt around its branches.

        `marked`, `index`, `env`, `slot`: as for `part`; `analysed`: what is known of the node."""
        wanted = marked.nested[index][0].returned
        every = sorted({need for inner in marked.nested[index] for need in inner.inputs})

        def branch(inner):
            def run(values, where):
                chosen = [value for need, value in zip(every, values, strict=True) if need in inner.inputs]
                return self.results(inner.analysis, wanted, analysed.targets, self.body(inner, chosen, where), where)

            return run

        first = marked.nested[index][0]
        values = self.inputs(
            marked.analysis,
            dataclasses.replace(first, inputs=tuple(every)),
            node.inputs[1:],
            first.analysis.inputs,
            env,
            slot,
        )
        choice = self.read(marked.analysis, node.inputs[0], analysed.forms[0], env, slot)
        return _place(
            lax.switch(choice, [branch(inner) for inner in marked.nested[index]], values, slot),
            wanted,
            len(node.outputs),
        )

    def scan(
        self, marked: Marked, index: int, node: Node, analysed: NodeAnalysis, env: Env, slot: LoopPosition
    ) -> Sequence[Any]:
        """Returns the results of `node`, a loop, rebuilt around its body.

        `marked`, `index`, `env`, `slot`: as for `part`; `analysed`: what is known of the node."""
        (inner,), analysis, params = marked.nested[index], marked.analysis, node.part.params
        num_consts, num_carry = _compat.scan_counts(node.whole.params)
        targets = (
            *inner.analysis.inputs[:num_consts],
            *analysed.targets,
            *inner.analysis.inputs[num_consts + num_carry :],
        )
        outputs = (*analysed.targets, *inner.analysis.outputs[num_carry:])
        stacked = [k for k in inner.returned if k >= num_carry]
        carried = sorted(
            {(p - num_consts, form) for p, form in inner.inputs if num_consts <= p < num_consts + num_carry}
            | {(k, used_form(analysed.targets[k])) for k in inner.returned if k < num_carry}
        )
        consts = [(p, form) for p, form in inner.inputs if p < num_consts]
        scanned = [(p, form) for p, form in inner.inputs if p >= num_consts + num_carry]
        fetch = lambda needs: self.inputs(
            analysis, dataclasses.replace(inner, inputs=tuple(needs)), node.inputs, targets, env, slot
        )
        shared = fetch(consts)
        start = [
            jnp.asarray(value, self.program.types[inner.analysis.body.inputs[num_consts + k]][0].dtype)
            if isinstance(value, (int, float, complex))
            else value
            for (k, _), value in zip(carried, fetch([(num_consts + k, form) for k, form in carried]), strict=True)
        ]

        def step(carry, slices):
            at_hand = dict(zip(consts, shared, strict=True)) | {
                (num_consts + k, form): v for (k, form), v in zip(carried, carry, strict=True)
            }
            at_hand |= dict(zip(scanned, slices, strict=True))
            inside = self.body(inner, [at_hand[need] for need in inner.inputs], slot)
            after = [
                self.read(inner.analysis, inner.analysis.body.outputs[k], WHOLE, inside, slot)
                if form == WHOLE
                else self.bring(inner.analysis, inner.analysis.body.outputs[k], analysed.targets[k], inside, slot)
                for k, form in carried
            ]
            after = [
                jnp.asarray(new, old.dtype) if not hasattr(new, "dtype") else new
                for new, old in zip(after, carry, strict=True)
            ]
            return after, self.results(inner.analysis, stacked, outputs, inside, slot)

        extra = {"_split_transpose": params["_split_transpose"]} if params.get("_split_transpose") else {}
        final, rows = lax.scan(
            step,
            start,
            fetch(scanned),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            **extra,
        )
        values = {
            k: value for (k, form), value in zip(carried, final, strict=True) if form == used_form(analysed.targets[k])
        }
        values.update(zip(stacked, rows, strict=True))
        return [values.get(k) for k in range(len(node.outputs))]


def _place(values: Sequence[Any], positions: Sequence[int], count: int) -> list[Any]:
    """Returns a list of `count` entries with the values at their positions, None elsewhere."""
    placed: list[Any] = [None] * count
    for position, value in zip(positions, values, strict=True):
        placed[position] = value
    return placed


def _own_numbers(indices: Any, component: int, info: Info) -> Any:
    """Returns indices whose given component counts examples, counting the microbatch's own examples instead."""
    own = lax.broadcasted_iota(indices.dtype, indices.shape, info.required_layout.dim)
    column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where(column == component, own, indices)
