"""Answers what an operation makes of the examples, by what the table says of it.

A `Question` about an operation comes in, some operand of which holds examples or is a sum over them; its `RuleOutcome`
comes out, or `Mixed` is raised with what the operation does to the examples.
"""

from __future__ import annotations

import dataclasses

from splitjax.primitives.dims import DimMap, Label
from splitjax.primitives.example_question import SIZES, Question, RuleOutcome, require_same_params
from splitjax.primitives.example_relation import EXAMPLES, PARTIAL, ExampleDim, Fact, Info, Mixed, merge_layouts
from splitjax.primitives.linear import NOT_LINEAR
from splitjax.primitives.operation import Examples, Linear, Linearity, OperationFacts
from splitjax.primitives.table import OPERATIONS


def answer(question: Question) -> RuleOutcome:
    """Answers `question`, in which some operand holds examples, by the rule of its operation or by its dims.

    Raises `Mixed` where the rule does, where nothing is known of the operation, and where the two traces have
    different parameters."""
    operation = OPERATIONS.of(question.node.name, question.params)
    if operation.examples is Examples.MIXED:
        raise Mixed("splitjax does not know what this operation does to the examples")
    require_same_params(question.node, SIZES | operation.size_params)
    if isinstance(operation.examples, Examples):
        return _by_dims(question, operation)
    return operation.examples(question)


def _by_dims(q: Question, operation: OperationFacts) -> RuleOutcome:
    """Answers by the labels of an operation's dims.

    A label of examples that results have is acted on example by example. A result without it is a sum over the
    examples if the operation is linear in the operands that hold them, and mixes them if it is not."""
    if operation.dims is None:
        raise Mixed("splitjax does not know what this operation does to the examples")
    shapes_in, shapes_out = ([types[0].shape for types in side] for side in (q.types_in, q.types_out))
    dim_map = operation.dims(shapes_in, shapes_out, q.params)
    holding = [i for i, info in enumerate(q.infos) if info.layout is not None]
    label = _example_label(q, dim_map, holding)
    if str(label) in operation.along:
        raise Mixed("it works along the dim that holds the examples")
    layout = merge_layouts([dataclasses.replace(q.required_layout(i), dim=0) for i in holding])
    placed = [_positions(labels, label) for labels in dim_map.outputs]
    infos = [_result(q, k, dims, layout) for k, dims in enumerate(placed)]
    shares: frozenset[int] = frozenset()
    if any(info.kind == PARTIAL for info in infos):
        shares = _summed(q, operation.linear, holding)
        if shares and any(info.kind == EXAMPLES for info in infos):
            raise Mixed("it adds to a sum over the examples what it also gives to each of them")
    return RuleOutcome(tuple(infos), shares=shares)


def _example_label(q: Question, dim_map: DimMap, holding: list[int]) -> Label:
    """Returns the label of the dim that holds the examples, the same in all operands `holding` them.

    Raises `Mixed` where they have different ones, or where anything else has it."""
    labels = []
    for i in holding:
        factors = dim_map.inputs[i][q.required_layout(i).dim]
        if len(factors) != 1 or str(factors[0]).startswith("_"):
            raise Mixed("its dim rule does not tell what becomes of the dim that holds the examples")
        labels.append(factors[0])
    if len(set(labels)) != 1:
        raise Mixed("it pairs examples with something else")
    for i, dims in enumerate(dim_map.inputs):
        if len(_positions(dims, labels[0])) != (i in holding):
            raise Mixed("it pairs examples with something else by position")
    return labels[0]


def _positions(labels: tuple[tuple[Label, ...], ...], label: Label) -> list[int]:
    """Returns the dims that `label` takes part in."""
    return [d for d, factors in enumerate(labels) if label in factors]


def _result(q: Question, k: int, dims: list[int], layout: ExampleDim) -> Info:
    """Returns the relation of result `k`, whose dims of the examples' label are `dims`."""
    found = q.batch.example_dim(q.types_out[k])
    if not dims and found is None:
        return Info(False, PARTIAL)
    if dims != [found]:
        raise Mixed("its dim rule and its sizes disagree on the dim that holds the examples")
    return Info(False, EXAMPLES, q.batch.layout(q.types_out[k], layout))


def _summed(q: Question, linear: Linear | None, holding: list[int]) -> frozenset[int]:
    """Returns the operands of which each microbatch adds its share where an operation sums over the examples.

    Raises `Mixed` unless it is linear in the operands `holding` them."""
    if linear is None or linear.how is Linearity.PAIRED:
        raise Mixed("it combines the examples, and is not known to add them up")
    positions = linear.positions(len(q.infos))
    if not positions & set(holding) if linear.how is Linearity.EACH else not positions.issuperset(holding):
        raise Mixed("it combines the examples, and is not linear in all that holds them")
    return positions - set(holding) if linear.how is Linearity.TOGETHER else frozenset()


def answer_partial(question: Question) -> RuleOutcome:
    """Answers `question`, in which some operand is a sum over examples.

    Raises `Mixed` unless the operation is linear in all such operands together, and mixes them with no examples."""
    operation = OPERATIONS.of(question.node.name, question.params)
    sums = [i for i, info in enumerate(question.infos) if info.kind == PARTIAL]
    if any(info.layout is not None for info in question.infos):
        raise Mixed("it combines a total over the batch with single examples, as batch statistics do")
    if any(question.batch.sliced_dims(types) for types in question.types_out):
        raise Mixed("it spreads a total over the batch to single examples, as batch statistics do")
    allowed = SIZES - {"slice_sizes", "start_indices", "limit_indices"} | operation.size_params
    require_same_params(question.node, allowed)
    shares = _shares(question, operation.linear, frozenset(sums))
    zeros = {i for i, info in enumerate(question.infos) if info.fact is Fact.ZERO}
    return RuleOutcome(tuple(Info(False, PARTIAL) for _ in question.types_out), shares=shares - zeros)


def _shares(q: Question, linear: Linear | None, sums: frozenset[int]) -> frozenset[int]:
    """Returns the operands of which each microbatch adds its share, where the operands at `sums` are sums.

    Raises `Mixed` for an operation that is not linear in these."""
    if linear is None:
        raise Mixed(NOT_LINEAR)
    if linear.holds is not None:
        reason = linear.holds(q.params, q.types_in[0][0].dtype, q.types_out[0][0].dtype)
        if reason is not None:
            raise Mixed(reason)
    count = len(q.infos)
    positions = linear.positions(count)
    if linear.how is Linearity.TOGETHER and positions >= sums:
        return positions - sums
    if linear.how is Linearity.EACH and len(sums) == 1 and positions >= sums:
        return frozenset()
    if linear.how is Linearity.PAIRED and len(sums) == count:
        return frozenset()
    raise Mixed(NOT_LINEAR)
