"""Answers what an operation makes of the examples, by what the table says of it.

A `Question` about an operation comes in, some operand of which holds examples or is a sum over them; its `RuleOutcome`
comes out, or `Mixed` with what the operation does to the examples.
"""

from __future__ import annotations

import dataclasses

from splitjax.primitives.dims import DimMap, Label
from splitjax.primitives.example_question import SIZES, Question, RuleOutcome, mixed_params
from splitjax.primitives.example_relation import EXAMPLES, PARTIAL, ExampleDim, Fact, Info, Mixed, merge_layouts
from splitjax.primitives.linear import NOT_LINEAR
from splitjax.primitives.operation import Examples, Linear, Linearity, OperationFacts
from splitjax.primitives.table import OPERATIONS


def answer(question: Question) -> RuleOutcome | Mixed:
    """Answers `question`, in which some operand holds examples, by the rule of its operation or by its dims.

    `Mixed` where the rule says so, where nothing is known of the operation, and where the two traces have
    different parameters."""
    operation = OPERATIONS.of(question.node.name, question.params)
    if operation.examples is Examples.MIXED:
        return Mixed("splitjax does not know what this operation does to the examples")
    mixed = mixed_params(question.node, SIZES | operation.size_params)
    if mixed is not None:
        return mixed
    if isinstance(operation.examples, Examples):
        return _by_dims(question, operation)
    return operation.examples(question)


def _by_dims(q: Question, operation: OperationFacts) -> RuleOutcome | Mixed:
    """Answers by the labels of an operation's dims.

    A label of examples that results have is acted on example by example. A result without it is a sum over the
    examples if the operation is linear in the operands that hold them, and mixes them if it is not."""
    if operation.dims is None:
        return Mixed("splitjax does not know what this operation does to the examples")
    shapes_in, shapes_out = ([types[0].shape for types in side] for side in (q.types_in, q.types_out))
    dim_map = operation.dims(shapes_in, shapes_out, q.params)
    holding = [i for i, info in enumerate(q.infos) if info.layout is not None]
    label = _example_label(q, dim_map, holding)
    if isinstance(label, Mixed):
        return label
    if str(label) in operation.along:
        return Mixed("it works along the dim that holds the examples")
    layout = merge_layouts([dataclasses.replace(q.required_layout(i), dim=0) for i in holding])
    if isinstance(layout, Mixed):
        return layout
    infos = []
    for k, labels in enumerate(dim_map.outputs):
        info = _result(q, k, _positions(labels, label), layout)
        if isinstance(info, Mixed):
            return info
        infos.append(info)
    shares: frozenset[int] = frozenset()
    if any(info.kind == PARTIAL for info in infos):
        summed = _summed(q, operation.linear, holding)
        if isinstance(summed, Mixed):
            return summed
        shares = summed
        if shares and any(info.kind == EXAMPLES for info in infos):
            return Mixed("it adds to a sum over the examples what it also gives to each of them")
    return RuleOutcome(tuple(infos), shares=shares)


def _example_label(q: Question, dim_map: DimMap, holding: list[int]) -> Label | Mixed:
    """Returns the label of the dim that holds the examples, the same in all operands `holding` them.

    `Mixed` where they have different ones, or where anything else has it."""
    labels = []
    for i in holding:
        factors = dim_map.inputs[i][q.required_layout(i).dim]
        if len(factors) != 1 or str(factors[0]).startswith("_"):
            return Mixed("its dim rule does not tell what becomes of the dim that holds the examples")
        labels.append(factors[0])
    if len(set(labels)) != 1:
        return Mixed("it pairs examples with something else")
    for i, dims in enumerate(dim_map.inputs):
        if len(_positions(dims, labels[0])) != (i in holding):
            return Mixed("it pairs examples with something else by position")
    return labels[0]


def _positions(labels: tuple[tuple[Label, ...], ...], label: Label) -> list[int]:
    """Returns the dims that `label` takes part in."""
    return [d for d, factors in enumerate(labels) if label in factors]


def _result(q: Question, k: int, dims: list[int], layout: ExampleDim) -> Info | Mixed:
    """Returns the relation of result `k`, whose dims of the examples' label are `dims`; `Mixed` where its sizes say
    something else."""
    found = q.batch.example_dim(q.types_out[k])
    if isinstance(found, Mixed):
        return found
    if not dims and found is None:
        return Info(False, PARTIAL)
    if dims != [found]:
        return Mixed("its dim rule and its sizes disagree on the dim that holds the examples")
    own = q.batch.layout(q.types_out[k], layout)
    return own if isinstance(own, Mixed) else Info(False, EXAMPLES, own)


def _summed(q: Question, linear: Linear | None, holding: list[int]) -> frozenset[int] | Mixed:
    """Returns the operands of which each microbatch adds its share where an operation sums over the examples.

    `Mixed` unless it is linear in the operands `holding` them."""
    if linear is None or linear.how is Linearity.PAIRED:
        return Mixed("it combines the examples, and is not known to add them up")
    positions = linear.positions(len(q.infos))
    if not positions & set(holding) if linear.how is Linearity.EACH else not positions.issuperset(holding):
        return Mixed("it combines the examples, and is not linear in all that holds them")
    return positions - set(holding) if linear.how is Linearity.TOGETHER else frozenset()


def answer_partial(question: Question) -> RuleOutcome | Mixed:
    """Answers `question`, in which some operand is a sum over examples.

    `Mixed` unless the operation is linear in all such operands together, and mixes them with no examples."""
    operation = OPERATIONS.of(question.node.name, question.params)
    sums = [i for i, info in enumerate(question.infos) if info.kind == PARTIAL]
    if any(info.layout is not None for info in question.infos):
        return Mixed("it combines a total over the batch with single examples, as batch statistics do")
    sliced = [question.batch.sliced_dims(types) for types in question.types_out]
    for dims in sliced:
        if isinstance(dims, Mixed):
            return dims
    if any(sliced):
        return Mixed("it spreads a total over the batch to single examples, as batch statistics do")
    allowed = SIZES - {"slice_sizes", "start_indices", "limit_indices"} | operation.size_params
    mixed = mixed_params(question.node, allowed)
    shares = mixed if mixed is not None else _shares(question, operation.linear, frozenset(sums))
    if isinstance(shares, Mixed):
        return shares
    zeros = {i for i, info in enumerate(question.infos) if info.fact is Fact.ZERO}
    return RuleOutcome(tuple(Info(False, PARTIAL) for _ in question.types_out), shares=shares - zeros)


def _shares(q: Question, linear: Linear | None, sums: frozenset[int]) -> frozenset[int] | Mixed:
    """Returns the operands of which each microbatch adds its share, where the operands at `sums` are sums.

    `Mixed` for an operation that is not linear in these."""
    if linear is None:
        return Mixed(NOT_LINEAR)
    if linear.holds is not None:
        reason = linear.holds(q.params, q.types_in[0][0].dtype, q.types_out[0][0].dtype)
        if reason is not None:
            return Mixed(reason)
    count = len(q.infos)
    positions = linear.positions(count)
    if linear.how is Linearity.TOGETHER and positions >= sums:
        return positions - sums
    if linear.how is Linearity.EACH and len(sums) == 1 and positions >= sums:
        return frozenset()
    if linear.how is Linearity.PAIRED and len(sums) == count:
        return frozenset()
    return Mixed(NOT_LINEAR)
