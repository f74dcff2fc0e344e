"""Finds how every value of a paired loss relates to the examples.

`classify` walks a `PairedProgram` once, nested bodies included, and asks the rules of `primitives.example_answers`
about each operation. What comes out, a `BodyAnalysis`, tells the evaluators which values a microbatch
can compute for itself, and a refusal which operation mixes examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from splitjax import _compat
from splitjax.lower.microbatch.apart import not_apart
from splitjax.lower.microbatch.derivative_rules import WHY, check_rule
from splitjax.lower.microbatch.pairing import Body, Const, Node, PairedProgram, Ref
from splitjax.primitives.example_answers import answer, answer_partial
from splitjax.primitives.example_question import Question, RuleOutcome, mixed_params
from splitjax.primitives.example_relation import (
    EXAMPLES,
    LATER,
    PARTIAL,
    SAME,
    Batch,
    Fact,
    Info,
    Mixed,
    Reason,
    Types,
    join_all,
    mixed_later,
    shift_all,
)

WHOLE, PART = "whole", "part"  # the forms that a value has: for the whole batch, and for one microbatch
_MADE_OF_SHARED = "it makes values for single examples out of something shared"


@dataclasses.dataclass(frozen=True, eq=False)
class BodyAnalysis:
    """Holds the relation of each value of a body, and what is known of each of its nodes.

    - `body`: the operations. `inputs`, `outputs`: the relations of its inputs and results.
    - `infos`: the relation of every value, by its number.
    - `by_node`: what is known of each node, by its index in `body.nodes`.
    """

    body: Body
    inputs: tuple[Info, ...]
    outputs: tuple[Info, ...]
    infos: dict[int, Info]
    by_node: tuple[NodeAnalysis, ...]

    @property
    def plain(self) -> bool:
        """Tells whether the part trace's own equations give a microbatch the right results.

        Then no share, whole-batch value or differing literal is needed inside."""
        return all(node_analysis.plain for node_analysis in self.by_node)

    def info(self, ref: Ref, batch: Batch) -> Info:
        """Returns the relation of `ref`, a value of the body or a constant, whose type `batch` explains."""
        return const_info(ref, batch) if isinstance(ref, Const) else self.infos[ref]


@dataclasses.dataclass(frozen=True, eq=False)
class NodeAnalysis:
    """Holds what is known of one node.

    - `outcome`: the relations of its results, and what a microbatch does with its operands.
    - `plain`: the part trace's own equation gives a microbatch the right results.
    - `nested`: the analyses of its bodies.
    - `targets`: for a loop or branches, the relation that carried values (results) are brought to.
    - `operands`: the relations of its operands; `forms`: the form, `PART` or `WHOLE`, in which a microbatch uses each.
    - `rebuilt`: it is run by evaluating its bodies one equation at a time, else as the part trace's equation.
    """

    outcome: RuleOutcome
    plain: bool
    nested: tuple[BodyAnalysis, ...] = ()
    targets: tuple[Info, ...] = ()
    operands: tuple[Info, ...] = ()
    forms: tuple[str, ...] = ()
    rebuilt: bool = False


def used_form(info: Info) -> str:
    """Returns the form, `PART` or `WHOLE`, in which a microbatch uses a value with the relation `info`."""
    return PART if info.live or info.kind == EXAMPLES else WHOLE


def _is_rebuilt(node: Node, analysed: NodeAnalysis) -> bool:
    """Tells whether a microbatch evaluates the bodies of `node`, of which `analysed` is known."""
    if not analysed.nested or node.runs_as_it_is:
        return False
    return node.name != "scan" or bool(analysed.targets) or node.whole.params["length"] == node.part.params["length"]


def const_info(const: Const, batch: Batch) -> Info:
    """Returns the relation of `const`: it is known, and sliced if it has as many entries along a dim as `batch` has."""
    info = whole_batch_info((const.whole_aval, const.part_aval), batch)
    return dataclasses.replace(info, fact=Fact.ZERO) if const.is_zero else info


def whole_batch_info(types: Types, batch: Batch) -> Info:
    """Returns the relation of a value of `types` that is not live and is computed for the whole `batch`."""
    dim = batch.example_dim(types)
    if isinstance(dim, Mixed):
        return Info(False, LATER, None, False, reason=_reason(dim, "", ""))
    if dim is None:
        return Info(False, SAME, None, False)
    return Info(False, EXAMPLES, batch.assumed(types, dim), False)


def _reason(mixed: Mixed, primitive: str, source: str) -> Reason:
    """Returns why a value is `LATER` that `primitive`, at the user's line `source`, makes of mixed examples."""
    return mixed.why if isinstance(mixed.why, Reason) else Reason(primitive, source, mixed.why)


def classify(
    program: PairedProgram, body: Body, inputs: Sequence[Info], batch: Batch, apart: bool = False
) -> BodyAnalysis:
    """Finds the relation of every value of `body`, a part of `program`, whose inputs have the relations `inputs`.

    `batch` holds the numbers of examples. `apart`: the user asked for microbatches, so that what is marked by
    `splitjax.per_microbatch` is taken over each by itself. Operations that mix examples make their results `LATER`.
    """
    return _Classifier(program, batch, {}, True, apart).body(body, inputs)


@dataclasses.dataclass(frozen=True)
class _Classifier:
    """Walks a program; lives for one call of `classify`.

    `checked` remembers what came out for derivative rules that were checked; `check_rules` is False inside of one.
    `apart`: as for `classify`."""

    program: PairedProgram
    batch: Batch
    checked: dict[Any, Mixed | None]
    check_rules: bool
    apart: bool

    def body(self, body: Body, inputs: Sequence[Info]) -> BodyAnalysis:
        """Analyses a body whose inputs have the relations `inputs`."""
        infos = dict(zip(body.inputs, inputs, strict=True))
        by_node = []
        for node in body.nodes:
            operands = tuple(
                const_info(ref, self.batch) if isinstance(ref, Const) else infos[ref] for ref in node.inputs
            )
            known = self.node(node, operands)
            forms, rebuilt = tuple(map(used_form, operands)), _is_rebuilt(node, known)
            by_node.append(dataclasses.replace(known, operands=operands, forms=forms, rebuilt=rebuilt))
            infos.update(zip(node.outputs, by_node[-1].outcome.infos, strict=True))
        outputs = tuple(const_info(ref, self.batch) if isinstance(ref, Const) else infos[ref] for ref in body.outputs)
        return BodyAnalysis(body, tuple(inputs), outputs, infos, tuple(by_node))

    def rule(self, node: Node, infos: tuple[Info, ...], results: tuple[Info, ...]) -> Mixed | None:
        """Checks the own derivative rule of the function that `node` calls, once; `Mixed` if it mixes examples.

        `infos`, `results`: the relations of its operands and results."""
        if not self.check_rules or not any(info.live for info in infos):
            return None
        key = id(node), infos
        if key not in self.checked:
            self.checked[key] = check_rule(
                node,
                infos,
                results,
                lambda program, known: _Classifier(program, self.batch, {}, False, self.apart).body(
                    program.body, known
                ),
            )
        return self.checked[key]

    def node(self, node: Node, infos: tuple[Info, ...]) -> NodeAnalysis:
        """Analyses one operation whose operands have the relations `infos`.

        Where slices cannot reproduce it, its live results are known later only, and its other results are computed for
        the whole batch."""
        live = any(info.live for info in infos)
        types = tuple(self.program.types[v] for v in node.outputs)
        answered = self.answer(node, infos, types)
        if isinstance(answered, Mixed):
            mixed = tuple(self.mixing(live, result, node, answered) for result in types)
            return NodeAnalysis(RuleOutcome(mixed), False)
        results = []
        for info, result in zip(answered.outcome.infos, types, strict=True):
            keeps = (answered.nested and not node.runs_as_it_is) or answered.outcome.averaged
            own = info.live if keeps else live
            if own or info.kind in (SAME, EXAMPLES):
                results.append(dataclasses.replace(info, live=own))
            else:  # known for the whole batch beforehand: no need to add up contributions
                results.append(whole_batch_info(result, self.batch))
        known = not live and any(a.kind != b.kind for a, b in zip(results, answered.outcome.infos, strict=True))
        outcome = dataclasses.replace(answered.outcome, infos=tuple(results))
        return dataclasses.replace(answered, outcome=outcome, plain=answered.plain and not known)

    def mixing(self, live: bool, types: Types, node: Node, mixed: Mixed) -> Info:
        """Returns the relation of a result, of `types`, of a node that mixes examples as `mixed` says."""
        if not live:
            return whole_batch_info(types, self.batch)
        return Info(True, LATER, reason=_reason(mixed, node.name, node.source))

    def answer(self, node: Node, infos: tuple[Info, ...], types: tuple[Types, ...]) -> NodeAnalysis | Mixed:
        """Analyses one operation by the rule that is responsible; `Mixed` where it mixes examples.

        `infos`: the relations of its operands; `types`: the types of its results."""
        for info in sorted(infos, key=lambda info: not info.live):
            if info.kind == LATER:
                assert info.reason is not None, "a value that is known later has a reason"
                return Mixed(info.reason if info.live else info.reason.why)
        if node.bodies:
            return self.nested(node, infos, types)
        if node.per_microbatch:
            return self.taken_apart(node, infos)
        question = Question(node, infos, self.program.types_of(node.inputs), types, self.batch)
        if any(info.kind == PARTIAL for info in infos):
            outcome = answer_partial(question)
        elif any(info.layout is not None for info in infos):
            outcome = answer(question)
        else:
            outcome = self.without_examples(question)
        if isinstance(outcome, Mixed):
            return outcome
        exact = not any(
            isinstance(ref, Const) and (ref.differs or info.layout is not None)
            for ref, info in zip(node.inputs, infos, strict=True)
        )
        plain = (
            exact
            and not outcome.shares
            and outcome.rows is None
            and not outcome.draws
            and all(info.local for info in outcome.infos)
        )
        return NodeAnalysis(outcome, plain)

    def without_examples(self, q: Question) -> RuleOutcome | Mixed:
        """Answers for an operation without an operand that holds examples.

        Neither does a result, unless it is made with the number of examples as a size: `Mixed` if that is not known."""
        dims = [self.batch.example_dim(types) for types in q.types_out]
        for dim in dims:
            if isinstance(dim, Mixed):
                return dim
        if all(dim is None for dim in dims):
            mixed = mixed_params(q.node, frozenset({"sharding", "out_sharding"}))
            if mixed is not None:
                return mixed
            fact = q.infos[0].fact if q.node.name in ("broadcast_in_dim", "convert_element_type") else None
            return RuleOutcome(tuple(Info(False, fact=fact) for _ in dims))
        dim, types = dims[0], q.types_out[0]
        if not isinstance(dim, int):
            return Mixed(_MADE_OF_SHARED)
        if _compat.has_positional_bits(q.node.whole):
            return RuleOutcome((Info(False, EXAMPLES, self.batch.assumed(types, dim)),), draws=True)
        if q.node.name == "broadcast_in_dim":
            return RuleOutcome(
                (Info(False, EXAMPLES, self.batch.assumed(types, dim, uniform=True), fact=q.infos[0].fact),)
            )
        if q.node.name == "iota":
            if dim != q.params["dimension"]:
                return RuleOutcome((Info(False, EXAMPLES, self.batch.assumed(types, dim, uniform=True)),))
            counts = Fact.EXAMPLE_NUMBER if types[0].shape == (self.batch.whole,) else None
            return RuleOutcome((Info(False, EXAMPLES, self.batch.assumed(types, dim), False, counts),))
        return Mixed(_MADE_OF_SHARED)

    def taken_apart(self, node: Node, infos: tuple[Info, ...]) -> NodeAnalysis | Mixed:
        """Analyses a call that each microbatch evaluates on its own examples. Its results are means over microbatches,
        each of which contributes its share. `infos`: the relations of its operands."""
        refused = not_apart(self.program, self.batch, self.apart, node, infos)
        if refused is not None:
            return Mixed(refused)
        return NodeAnalysis(RuleOutcome(tuple(Info(True, PARTIAL) for _ in node.outputs), averaged=True), False)

    # Operations with bodies.

    def nested(self, node: Node, infos: tuple[Info, ...], types: tuple[Types, ...]) -> NodeAnalysis | Mixed:
        """Analyses an operation with bodies: arguments as for `answer`."""
        if node.name == "scan":
            return self.scan(node, infos, types)
        if node.name == "cond":
            return self.cond(node, infos)
        analysis = self.body(node.bodies[0], infos)
        refused = mixed_later(analysis.outputs)
        if refused is not None:
            return refused
        if node.runs_as_it_is:
            # It must run as it is, for its derivative rule is fixed.
            if not analysis.plain or any(info.kind == PARTIAL for info in infos):
                return Mixed(WHY)
            if not self.batch.is_exact and any(info.kind == PARTIAL for info in analysis.outputs):
                return Mixed("its own derivative rule sums over examples, which needs two of them in a microbatch")
            refused = self.rule(node, infos, analysis.outputs)
            if refused is not None:
                return refused
        return NodeAnalysis(RuleOutcome(analysis.outputs), analysis.plain, (analysis,))

    def cond(self, node: Node, infos: tuple[Info, ...]) -> NodeAnalysis | Mixed:
        """Analyses a conditional whose operands have the relations `infos`; its branches' relations are joined."""
        if infos[0].kind != SAME:
            return Mixed("which branch is taken depends on the examples")
        branches = tuple(self.body(body, infos[1:]) for body in node.bodies)
        targets = branches[0].outputs
        for branch in branches[1:]:
            joined = join_all(targets, branch.outputs)
            if isinstance(joined, Mixed):
                return joined
            targets = joined
        targets = tuple(dataclasses.replace(target, live=target.live or infos[0].live, fact=None) for target in targets)
        refused = mixed_later(targets)
        if refused is not None:
            return refused
        plain = all(
            b.plain and all(a.kind == t.kind for a, t in zip(b.outputs, targets, strict=True)) for b in branches
        )
        return NodeAnalysis(RuleOutcome(targets), plain, branches, targets)

    def scan(self, node: Node, infos: tuple[Info, ...], types: tuple[Types, ...]) -> NodeAnalysis | Mixed:
        """Analyses a loop: its body again and again, until what is carried has the same relations before and after."""
        num_consts, num_carry = _compat.scan_counts(node.whole.params)
        refused = mixed_params(node)
        if refused is not None:
            return refused
        if node.whole.params["length"] != node.part.params["length"]:
            return self.map_over_examples(node, infos, types, num_carry)
        consts, carry = infos[:num_consts], infos[num_consts : num_consts + num_carry]
        scanned = shift_all(infos[num_consts + num_carry :], -1)
        if isinstance(scanned, Mixed):
            return scanned
        carry = tuple(dataclasses.replace(info, fact=None) for info in carry)
        analysis = self.body(node.bodies[0], (*consts, *carry, *scanned))
        for _ in range(4 * max(num_carry, 1)):
            joined = join_all(carry, analysis.outputs[:num_carry])
            if isinstance(joined, Mixed):
                return joined
            joined = tuple(dataclasses.replace(info, fact=None) for info in joined)
            if joined == carry:
                break
            carry = joined
            analysis = self.body(node.bodies[0], (*consts, *carry, *scanned))
        stacked = shift_all(analysis.outputs[num_carry:], 1)
        if isinstance(stacked, Mixed):
            return stacked
        refused = mixed_later((*carry, *stacked))
        if refused is not None:
            return refused
        before = infos[num_consts : num_consts + num_carry]
        plain = analysis.plain and all(
            a.kind == b.kind == c.kind for a, b, c in zip(before, carry, analysis.outputs[:num_carry], strict=True)
        )
        return NodeAnalysis(RuleOutcome((*carry, *stacked)), plain, (analysis,), carry)

    def map_over_examples(
        self, node: Node, infos: tuple[Info, ...], types: tuple[Types, ...], num_carry: int
    ) -> NodeAnalysis | Mixed:
        """Analyses a loop over the batch, such as `lax.map`: one example an iteration, nothing carried.

        `num_carry`: the number of values that the loop carries. `Mixed` for any other loop over examples."""
        inner = [self.program.types[v] for v in node.bodies[0].inputs]
        num_consts = len(infos) - sum(1 for a, b in zip(infos, inner, strict=True) if a.layout is not None)
        if num_carry or any(self.batch.sliced_dims(value) for value in inner):
            return Mixed("it goes through the examples one after the other, carrying values along")
        if any(info.layout.dim for info in infos[num_consts:] if info.layout is not None) or any(
            i.kind == PARTIAL for i in infos
        ):
            return Mixed("it goes through the examples one after the other")
        live = any(info.live for info in infos)
        inside = tuple(Info(info.live) for info in infos)
        analysis = self.body(node.bodies[0], inside)
        if not _same_everywhere(analysis, self.program, self.batch):
            return Mixed("it goes through the examples one after the other, and depends on their number")
        results = []
        for result in types:
            layout = self.batch.layout(result, infos[-1].layout)
            if isinstance(layout, Mixed):
                return layout
            results.append(Info(live, EXAMPLES, layout))
        return NodeAnalysis(RuleOutcome(tuple(results)), True, (analysis,), ())


def _same_everywhere(analysis: BodyAnalysis, program: PairedProgram, batch: Batch) -> bool:
    """Tells whether both traces of a body are the same computation."""
    for node, node_analysis in zip(analysis.body.nodes, analysis.by_node, strict=True):
        if any(isinstance(ref, Const) and ref.differs for ref in node.inputs) or not node_analysis.plain:
            return False
        if any(batch.sliced_dims(program.types[v]) for v in node.outputs):
            return False
    return True
