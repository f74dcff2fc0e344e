"""Finds how every value of a paired loss relates to the examples: `classify` walks a program once, nested bodies
included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from splitjax import _compat
from splitjax.lower.microbatch import example_rules_mixing  # noqa: F401  (registers its rules)
from splitjax.lower.microbatch.derivative_rules import WHY, check_rule
from splitjax.lower.microbatch.example_relation import EXAMPLES, LATER, PARTIAL, SAME, Batch, Info, Mixed, Reason, join
from splitjax.lower.microbatch.example_rules import Outcome, Question, answer, require_same_params
from splitjax.lower.microbatch.pairing import Body, Const, Node, Program, Ref
from splitjax.lower.microbatch.partial_rules import answer_partial

DERIVATIVE_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """A body with the relation of each of its values, and what was found for each of its nodes (by index)."""

    body: Body
    inputs: tuple[Info, ...]
    outputs: tuple[Info, ...]
    infos: dict[int, Info]
    found: tuple[Found, ...]

    @property
    def plain(self) -> bool:
        """Whether the part trace's own equations give a microbatch the right results: no share, whole-batch value or
        differing literal is needed inside."""
        return all(found.plain for found in self.found)

    def info(self, ref: Ref, batch: Batch) -> Info:
        return const_info(ref, batch) if isinstance(ref, Const) else self.infos[ref]


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What was found for one node. `nested`: the analyses of its bodies; `targets`: for a loop or branches, the
    relation that carried values (results) are brought to."""

    outcome: Outcome
    plain: bool
    nested: tuple[Analysis, ...] = ()
    targets: tuple[Info, ...] = ()


def const_info(const: Const, batch: Batch) -> Info:
    """A constant is known; one with an example dim is sliced."""
    info = whole_batch_info((const.whole_aval, const.part_aval), batch)
    return dataclasses.replace(info, fact=("zero",)) if const.is_zero else info


def whole_batch_info(types: tuple[Any, Any], batch: Batch) -> Info:
    """The relation of a value that is not live and is computed for the whole batch."""
    try:
        dim = batch.example_dim(types)
    except Mixed as mixed:
        return Info(False, LATER, None, False, reason=Reason("", "", str(mixed)))
    if dim is None:
        return Info(False, SAME, None, False)
    return Info(False, EXAMPLES, batch.assumed(types, dim), False)


def classify(program: Program, body: Body, inputs: Sequence[Info], batch: Batch) -> Analysis:
    """The relation of every value of a body whose inputs have the given relations."""
    return _Classifier(program, batch, {}, True).body(body, inputs)


@dataclasses.dataclass(frozen=True)
class _Classifier:
    """Walks a program; `checked` remembers derivative rules that were checked, and lives for one call of `classify`."""

    program: Program
    batch: Batch
    checked: dict[Any, Mixed | None]
    check_rules: bool

    def body(self, body: Body, inputs: Sequence[Info]) -> Analysis:
        infos = dict(zip(body.inputs, inputs, strict=True))
        found = []
        for node in body.nodes:
            operands = tuple(
                const_info(ref, self.batch) if isinstance(ref, Const) else infos[ref] for ref in node.inputs
            )
            one = self.node(node, operands)
            found.append(one)
            infos.update(zip(node.outputs, one.outcome.infos, strict=True))
        outputs = tuple(const_info(ref, self.batch) if isinstance(ref, Const) else infos[ref] for ref in body.outputs)
        return Analysis(body, tuple(inputs), outputs, infos, tuple(found))

    def rule(self, node: Node, infos: tuple[Info, ...], results: tuple[Info, ...]) -> None:
        """Checks a function's own derivative rule, once."""
        if not self.check_rules or not any(info.live for info in infos):
            return
        key = id(node), infos
        if key not in self.checked:
            try:
                check_rule(
                    node,
                    infos,
                    results,
                    lambda program, known: _Classifier(program, self.batch, {}, False).body(program.body, known),
                )
                self.checked[key] = None
            except Mixed as mixed:
                self.checked[key] = mixed
        if self.checked[key] is not None:
            raise self.checked[key]

    def node(self, node: Node, infos: tuple[Info, ...]) -> Found:
        """What one operation does; where slices cannot reproduce it, its live results are known later only, and the
        others are computed for the whole batch."""
        live = any(info.live for info in infos)
        types = tuple(self.program.types[v] for v in node.outputs)
        try:
            found = self.answer(node, infos, types)
        except Mixed as mixed:
            return Found(Outcome(tuple(self.fallback(live, one, node, infos, mixed) for one in types)), False)
        results = []
        for info, one in zip(found.outcome.infos, types, strict=True):
            own = info.live if found.nested and node.name not in DERIVATIVE_RULES else live
            if own or info.kind in (SAME, EXAMPLES):
                results.append(dataclasses.replace(info, live=own))
            else:  # known for the whole batch beforehand: no need to add up contributions
                results.append(whole_batch_info(one, self.batch))
        known = not live and any(a.kind != b.kind for a, b in zip(results, found.outcome.infos, strict=True))
        outcome = dataclasses.replace(found.outcome, infos=tuple(results))
        return dataclasses.replace(found, outcome=outcome, plain=found.plain and not known)

    def fallback(self, live: bool, types: tuple[Any, Any], node: Node, infos: tuple[Info, ...], mixed: Mixed) -> Info:
        if not live:
            return whole_batch_info(types, self.batch)
        reason = mixed.args[0] if isinstance(mixed.args[0], Reason) else Reason(node.name, node.source, str(mixed))
        return Info(True, LATER, reason=reason)

    def answer(self, node: Node, infos: tuple[Info, ...], types: tuple[tuple[Any, Any], ...]) -> Found:
        for info in sorted(infos, key=lambda info: not info.live):
            if info.kind == LATER:
                raise Mixed(info.reason if info.live else info.reason.why)
        if node.bodies:
            return self.nested(node, infos, types)
        question = Question(node, infos, tuple(self.program.type_of(ref) for ref in node.inputs), types, self.batch)
        if any(info.kind == PARTIAL for info in infos):
            outcome = answer_partial(question)
        elif any(info.layout is not None for info in infos):
            outcome = answer(question)
        else:
            outcome = self.without_examples(question)
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
        return Found(outcome, plain)

    def without_examples(self, q: Question) -> Outcome:
        """No operand holds examples: neither does a result, unless it is made with their number as a size."""
        dims = [self.batch.example_dim(types) for types in q.types_out]
        if all(dim is None for dim in dims):
            require_same_params(q.node, frozenset({"sharding", "out_sharding"}))
            fact = q.infos[0].fact if q.node.name in ("broadcast_in_dim", "convert_element_type") else None
            return Outcome(tuple(Info(False, fact=fact) for _ in dims))
        (dim,), (types,) = dims[:1], q.types_out[:1]
        if _compat.has_positional_bits(q.node.whole):
            return Outcome((Info(False, EXAMPLES, self.batch.assumed(types, dim)),), draws=True)
        if q.node.name == "broadcast_in_dim":
            return Outcome((Info(False, EXAMPLES, self.batch.assumed(types, dim, uniform=True), fact=q.infos[0].fact),))
        if q.node.name == "iota":
            if dim != q.params["dimension"]:
                return Outcome((Info(False, EXAMPLES, self.batch.assumed(types, dim, uniform=True)),))
            counts = ("row",) if types[0].shape == (self.batch.whole,) else None
            return Outcome((Info(False, EXAMPLES, self.batch.assumed(types, dim), False, counts),))
        raise Mixed("it makes values for single examples out of something shared")

    # Operations with bodies.

    def nested(self, node: Node, infos: tuple[Info, ...], types: tuple[tuple[Any, Any], ...]) -> Found:
        if node.name == "scan":
            return self.scan(node, infos, types)
        if node.name == "cond":
            return self.cond(node, infos)
        analysis = self.body(node.bodies[0], infos)
        _refuse_later(analysis.outputs)
        if node.name in DERIVATIVE_RULES:
            # It must run as it is, for its derivative rule is fixed.
            if not analysis.plain or any(info.kind == PARTIAL for info in infos):
                raise Mixed(WHY)
            if not self.batch.is_exact and any(info.kind == PARTIAL for info in analysis.outputs):
                raise Mixed("its own derivative rule sums over examples, which needs two of them in a microbatch")
            self.rule(node, infos, analysis.outputs)
        return Found(Outcome(analysis.outputs), analysis.plain, (analysis,))

    def cond(self, node: Node, infos: tuple[Info, ...]) -> Found:
        if infos[0].kind != SAME:
            raise Mixed("which branch is taken depends on the examples")
        branches = tuple(self.body(body, infos[1:]) for body in node.bodies)
        targets = branches[0].outputs
        for branch in branches[1:]:
            targets = tuple(join(a, b) for a, b in zip(targets, branch.outputs, strict=True))
        targets = tuple(dataclasses.replace(one, live=one.live or infos[0].live, fact=None) for one in targets)
        _refuse_later(targets)
        plain = all(
            b.plain and all(a.kind == t.kind for a, t in zip(b.outputs, targets, strict=True)) for b in branches
        )
        return Found(Outcome(targets), plain, branches, targets)

    def scan(self, node: Node, infos: tuple[Info, ...], types: tuple[tuple[Any, Any], ...]) -> Found:
        num_consts, num_carry = _compat.scan_counts(node.whole.params)
        require_same_params(node)
        if node.whole.params["length"] != node.part.params["length"]:
            return self.map_over_examples(node, infos, types, num_carry)
        consts, carry = infos[:num_consts], infos[num_consts : num_consts + num_carry]
        scanned = tuple(_shift(info, -1) for info in infos[num_consts + num_carry :])
        carry = tuple(dataclasses.replace(info, fact=None) for info in carry)
        for _ in range(4 * max(num_carry, 1) + 1):
            analysis = self.body(node.bodies[0], (*consts, *carry, *scanned))
            joined = tuple(
                dataclasses.replace(join(a, b), fact=None)
                for a, b in zip(carry, analysis.outputs[:num_carry], strict=True)
            )
            if joined == carry:
                break
            carry = joined
        stacked = tuple(_shift(info, 1) for info in analysis.outputs[num_carry:])
        _refuse_later((*carry, *stacked))
        before = infos[num_consts : num_consts + num_carry]
        plain = analysis.plain and all(
            a.kind == b.kind == c.kind for a, b, c in zip(before, carry, analysis.outputs[:num_carry], strict=True)
        )
        return Found(Outcome((*carry, *stacked)), plain, (analysis,), carry)

    def map_over_examples(
        self, node: Node, infos: tuple[Info, ...], types: tuple[tuple[Any, Any], ...], num_carry: int
    ) -> Found:
        """`lax.map` over the batch: one example an iteration, nothing carried."""
        inner = [self.program.types[v] for v in node.bodies[0].inputs]
        num_consts = len(infos) - sum(1 for a, b in zip(infos, inner, strict=True) if a.layout is not None)
        if num_carry or any(self.batch.sliced_dims(one) for one in inner):
            raise Mixed("it goes through the examples one after the other, carrying values along")
        if any(info.layout.dim for info in infos[num_consts:] if info.layout is not None) or any(
            i.kind == PARTIAL for i in infos
        ):
            raise Mixed("it goes through the examples one after the other")
        live = any(info.live for info in infos)
        inside = tuple(Info(info.live) for info in infos)
        analysis = self.body(node.bodies[0], inside)
        if not _same_everywhere(analysis, self.program, self.batch):
            raise Mixed("it goes through the examples one after the other, and depends on their number")
        layouts = [self.batch.layout(one, infos[-1].layout) for one in types]
        return Found(Outcome(tuple(Info(live, EXAMPLES, layout) for layout in layouts)), True, (analysis,), ())


def _same_everywhere(analysis: Analysis, program: Program, batch: Batch) -> bool:
    """Whether both traces of a body are the same computation."""
    for node, found in zip(analysis.body.nodes, analysis.found, strict=True):
        if any(isinstance(ref, Const) and ref.differs for ref in node.inputs) or not found.plain:
            return False
        if any(batch.sliced_dims(program.types[v]) for v in node.outputs):
            return False
    return True


def _refuse_later(infos: Sequence[Info]) -> None:
    for info in infos:
        if info.kind == LATER and info.live:
            raise Mixed(info.reason)


def _shift(info: Info, by: int) -> Info:
    """The relation of a scanned operand's slice (-1) or of stacked results (+1)."""
    if info.layout is None:
        return dataclasses.replace(info, fact=None)
    if info.layout.dim + by < 0:
        raise Mixed("it goes through the examples one after the other")
    return dataclasses.replace(info, layout=dataclasses.replace(info.layout, dim=info.layout.dim + by), fact=None)
