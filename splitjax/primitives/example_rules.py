"""Says what operations that keep dims or move them do with the dim that holds examples.

A rule sees one operation with at least one operand that holds examples (a `Question`), and answers with the relation of
every result (a `RuleOutcome`), or with `Mixed`: what the operation does to the examples. An operation that has
neither a rule nor a dim rule that tells is refused on the way to the loss, and computed for the whole batch elsewhere:
never guessed.
"""

from __future__ import annotations

import dataclasses
import math

from splitjax.primitives.elementwise import ELEMENTWISE
from splitjax.primitives.example_question import SIZES, ExampleRule, Question, RuleOutcome, mixed_params
from splitjax.primitives.example_relation import (
    EXAMPLES,
    PARTIAL,
    ExampleDim,
    ExampleNumberColumn,
    Fact,
    Info,
    Mixed,
)
from splitjax.primitives.table import example_rule


@example_rule(
    *ELEMENTWISE - {"select_n"},
    "bitcast_convert_type",
    "pvary",
    "random_bits",
    "random_clone",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "squeeze",
    "transpose",
)
def _elementwise(q: Question) -> RuleOutcome | Mixed:
    layout, num_operands = q.carried(), len(q.infos)
    if isinstance(layout, Mixed):
        return layout
    for i, info in enumerate(q.infos):
        if info.layout is not None and len(q.shape(i)) < len(q.types_out[0][0].shape) and num_operands > 1:
            return Mixed("it pairs examples with something else by position")
    fact, own = None, q.infos[0].fact
    keeps_layout = q.node.name in ("convert_element_type", "copy", "copy_p")
    if keeps_layout or (q.node.name == "squeeze" and isinstance(own, Fact)):
        fact = own
    elif q.node.name == "lt" and own is Fact.EXAMPLE_NUMBER and q.infos[1].fact is Fact.ZERO:
        fact = Fact.FALSE
    return q.spread(layout, fact)


@example_rule("select_n")
def _select(q: Question) -> RuleOutcome | Mixed:
    fact = q.infos[1].fact if q.infos[0].fact is Fact.FALSE else None
    return q.spread(q.carried(), fact)


@example_rule("optimization_barrier")
def _barrier(q: Question) -> RuleOutcome | Mixed:
    return RuleOutcome(tuple(dataclasses.replace(info, live=False, fact=None) for info in q.infos))


@example_rule("reduce_sum")
def _sum(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if layout.dim in q.params["axes"]:
        return RuleOutcome((Info(False, PARTIAL),))
    return q.spread(layout)


def _spectator(*params: str) -> ExampleRule:
    """Returns the rule of operations that work along the dims which one of the parameters called `params` names.

    Operations without any of these parameters work along the last dim."""

    def check(q: Question) -> RuleOutcome | Mixed:
        layout = q.carried()
        if isinstance(layout, Mixed):
            return layout
        for param in params:
            if param in q.params:
                named = q.params[param]
                dims = (named,) if isinstance(named, int) else tuple(named)
                if layout.dim in dims:
                    return Mixed("it works along the dim that holds the examples")
                break
        else:
            if layout.dim == len(q.shape(0)) - 1:
                return Mixed("it works along the dim that holds the examples")
        return q.spread(layout)

    return check


example_rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")(
    _spectator("axes")
)
example_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k")(_spectator("axis"))
example_rule("sort")(_spectator("dimension"))
example_rule("approx_top_k")(_spectator("reduction_dimension"))
example_rule("rev")(_spectator("dimensions"))


@example_rule("broadcast_in_dim")
def _broadcast(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    target, found = q.params["broadcast_dimensions"][layout.dim], q.batch.example_dim(q.types_out[0])
    if isinstance(found, Mixed):
        return found
    if found != target:
        return Mixed("it pairs examples with other examples")
    return q.spread(layout, q.infos[0].fact if isinstance(q.infos[0].fact, Fact) else None)


@example_rule("reshape")
def _reshape(q: Question) -> RuleOutcome | Mixed:
    if q.params.get("dimensions") is not None:
        return Mixed("it reorders dims while it reshapes")
    layout, old = q.carried(), q.shape(0)
    new = tuple(q.types_out[0][0].shape)
    dim = q.batch.example_dim(q.types_out[0])
    if isinstance(layout, Mixed):
        return layout
    if isinstance(dim, Mixed):
        return dim
    if dim is None:
        return Mixed("it reshapes the dim that holds the examples")
    # Row-major order is kept: what varies slower than the example index stays before it, what varies faster behind it.
    before, behind = math.prod(new[:dim]), math.prod(new[dim + 1 :])
    slower, faster = math.prod(old[: layout.dim]) * layout.major, layout.minor * math.prod(old[layout.dim + 1 :])
    if slower % before or faster % behind:
        return Mixed("it splits or regroups the dim that holds the examples")
    major, minor = slower // before, faster // behind
    # A dim merged with others varies within an example, so that its layout matters.
    result = ExampleDim(dim, major, minor, layout.uniform and major <= layout.major and minor <= layout.minor)
    own = q.infos[0].fact
    keeps = isinstance(own, Fact) and (own is not Fact.EXAMPLE_NUMBER or result.major == result.minor == 1)
    return RuleOutcome((Info(False, EXAMPLES, result, fact=own if keeps else None),))


@example_rule("concatenate")
def _concatenate(q: Question) -> RuleOutcome | Mixed:
    dim = q.params["dimension"]
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if dim != layout.dim:
        rank = len(q.types_out[0][0].shape)
        fact, offset = None, 0
        for i, info in enumerate(q.infos):
            # One column of an index array: the numbers of the examples themselves.
            if dim == rank - 1 and info.fact is Fact.EXAMPLE_NUMBER and q.shape(i)[dim] == 1:
                fact = ExampleNumberColumn(offset)
            offset += q.shape(i)[dim]
        return q.spread(layout, fact)
    layouts = [info.layout for info in q.infos if info.layout is not None]
    if len(layouts) < len(q.infos) or any(joined.minor != layout.minor for joined in layouts):
        return Mixed("it joins arrays along the dim that holds the examples")
    return q.spread(dataclasses.replace(layout, major=sum(joined.major for joined in layouts), uniform=False))


@example_rule("stack", "unstack")
def _stack(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, ExampleDim) and q.node.name == "unstack" and q.params.get("axis", 0) == layout.dim:
        return Mixed("it takes the examples apart")
    return q.spread(layout)


@example_rule("tile")
def _tile(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    return q.spread(dataclasses.replace(layout, major=layout.major * q.params["reps"][layout.dim]))


@example_rule("slice")
def _slice(q: Question) -> RuleOutcome | Mixed:
    layout, ours, theirs = q.carried(), q.node.whole.params, q.node.part.params
    if isinstance(layout, Mixed):
        return layout
    dim, strides = layout.dim, q.params["strides"]
    for d in range(len(q.shape(0))):
        if d != dim and any(p[key][d] != ours[key][d] for p in (theirs,) for key in ("start_indices", "limit_indices")):
            return Mixed("what it takes depends on the number of examples")
    unit, step = q.batch.whole * layout.minor, 1 if strides is None else strides[dim]
    start, limit = ours["start_indices"][dim], ours["limit_indices"][dim]
    if step != 1 or start % unit or limit % unit:
        return Mixed("it takes some of the examples")
    if theirs["start_indices"][dim] * q.batch.whole != start * q.batch.part:
        return Mixed("it takes some of the examples")
    return q.spread(dataclasses.replace(layout, major=(limit - start) // unit))


@example_rule("split")
def _split(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if q.params["axis"] != layout.dim:
        return mixed_params(q.node, SIZES - {"sizes"}) or q.spread(layout)
    unit = q.batch.whole * layout.minor
    infos = []
    for size, types in zip(q.params["sizes"], q.types_out, strict=True):
        if size % unit:
            return Mixed("it takes some of the examples")
        part = q.batch.layout(types, dataclasses.replace(layout, major=size // unit))
        if isinstance(part, Mixed):
            return part
        infos.append(Info(False, EXAMPLES, part))
    return RuleOutcome(tuple(infos))


@example_rule("dynamic_slice")
def _dynamic_slice(q: Question) -> RuleOutcome | Mixed:
    layout = q.choosing_examples(*range(1, len(q.infos))) or q.carried(0)
    if isinstance(layout, Mixed):
        return layout
    if q.params["slice_sizes"][layout.dim] != q.shape(0)[layout.dim]:
        return Mixed("it takes some of the examples")
    return q.spread(layout)


@example_rule("dynamic_update_slice")
def _dynamic_update_slice(q: Question) -> RuleOutcome | Mixed:
    layout = q.choosing_examples(*range(2, len(q.infos))) or q.carried(0, 1)
    if isinstance(layout, Mixed):
        return layout
    if q.layout(0) is None or q.layout(1) is None or q.shape(0)[layout.dim] != q.shape(1)[layout.dim]:
        return Mixed("it writes some of the examples")
    return q.spread(layout)


@example_rule("pad")
def _pad(q: Question) -> RuleOutcome | Mixed:
    layout = q.choosing_examples(1) or q.carried(0)
    if isinstance(layout, Mixed):
        return layout
    if tuple(q.params["padding_config"][layout.dim]) != (0, 0, 0):
        return Mixed("it pads the dim that holds the examples")
    return q.spread(layout)
