"""Holds the registry of rules that say what a primitive does with the dim that holds examples, and most of the rules.

A rule sees one operation with at least one operand that holds examples (a `Question`), and answers with the relation of
every result (a `RuleOutcome`), or raises `Mixed` with what the operation does to the examples. A primitive without rule
is refused on the way to the loss, and computed for the whole batch elsewhere: never guessed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from splitjax.lower.microbatch.example_relation import (
    EXAMPLES,
    PARTIAL,
    Batch,
    ExampleDim,
    ExampleNumberColumn,
    Fact,
    Info,
    Mixed,
    Types,
    merge_layouts,
)
from splitjax.lower.microbatch.pairing import Node, differing_params


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """Describes one operation to a rule, with what is known of its operands.

    - `node`: the operation in both traces. `infos`: the relations of its operands.
    - `types_in`, `types_out`: the types of its operands and results in both traces.
    - `batch`: the numbers of examples.
    """

    node: Node
    infos: tuple[Info, ...]
    types_in: tuple[Types, ...]
    types_out: tuple[Types, ...]
    batch: Batch

    @property
    def params(self) -> dict[str, Any]:
        """The equation's parameters in the trace with the whole batch."""
        return self.node.whole.params

    def layout(self, position: int) -> ExampleDim | None:
        """Returns where the operand at `position` holds examples, None where it holds none."""
        return self.infos[position].layout

    def required_layout(self, position: int) -> ExampleDim:
        """Returns where the operand at `position` holds examples, which is known to hold some."""
        return self.infos[position].required_layout

    def shape(self, position: int) -> tuple[int, ...]:
        """Returns the shape of the operand at `position` for the whole batch."""
        return tuple(self.types_in[position][0].shape)

    def carried(self, *positions: int) -> ExampleDim:
        """Returns the common layout of the operands at `positions`, of all by default. Raises `Mixed` without such."""
        chosen = positions or range(len(self.infos))
        return merge_layouts([layout for i in chosen if (layout := self.infos[i].layout) is not None])

    def spread(self, layout: ExampleDim, fact: Fact | ExampleNumberColumn | None = None) -> RuleOutcome:
        """Answers that every result holds examples as an operand with `layout` does, in the dim where traces differ.

        `fact`: what is known of the results' numbers. Raises `Mixed` where a result has no such dim."""
        layouts = [self.batch.layout(types, layout) for types in self.types_out]
        if any(result is None for result in layouts):
            raise Mixed("it loses the dim that holds the examples")
        return RuleOutcome(tuple(Info(False, EXAMPLES, result, fact=fact) for result in layouts))

    def without_examples(self, *positions: int) -> None:
        """Raises `Mixed` if an operand at one of the `positions`, which choose entries, holds examples."""
        if any(self.infos[i].layout is not None for i in positions):
            raise Mixed("which entries it takes depends on the example")


@dataclasses.dataclass(frozen=True, eq=False)
class RuleOutcome:
    """Holds a rule's answer: the results' relations, and what a microbatch does with the operands.

    - `infos`: the relation of every result.
    - `shares`: operands that are not sums over examples but are added to such a sum: each microbatch adds its share.
    - `rows`: (operand, component) of indices that count examples; None where there are none.
    - `draws`: the operation draws random bits by position, of which a microbatch draws its own.
    """

    infos: tuple[Info, ...]
    shares: frozenset[int] = frozenset()
    rows: tuple[int, int] | None = None
    draws: bool = False


Rule = Callable[[Question], RuleOutcome]
RULES: dict[str, Rule] = {}  # by name of the primitive; filled by `rule`

# Parameters that hold sizes: a part of the batch has its own.
SIZES: frozenset[str] = frozenset(
    {
        "shape",
        "new_sizes",
        "sharding",
        "out_sharding",
        "sizes",
        "limit_indices",
        "start_indices",
        "slice_sizes",
        "length",
        "dimensions",
    }
)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a rule for the primitives called `names`, in place of what they had."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def answer(question: Question) -> RuleOutcome:
    """Answers `question`, in which some operand holds examples, by the rule of its primitive.

    Raises `Mixed` where the rule does, where there is none, and where the two traces have different parameters."""
    known = RULES.get(question.node.name)
    if known is None:
        raise Mixed("splitjax does not know what this operation does to the examples")
    require_same_params(question.node)
    return known(question)


def require_same_params(node: Node, allowed: frozenset[str] = SIZES) -> None:
    """Raises `Mixed` if a parameter of `node` differs between the two traces, but for those named in `allowed`."""
    names = differing_params(node, allowed)
    if names:
        raise Mixed(f"its parameter {names[0]!r} depends on the number of examples")


ELEMENTWISE: str = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil"
    " clamp clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp"
    " exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt"
    " max min mul name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow pvary"
    " random_clone random_fold_in random_gamma random_unwrap random_wrap real reduce_precision"
    " regularized_incomplete_beta rem round rsqrt sharding_constraint shift_left shift_right_arithmetic"
    " shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta to_edtype"
    " from_edtype squeeze expand_dims transpose random_seed random_bits random_split"
)


@rule(*ELEMENTWISE.split())
def _elementwise(q: Question) -> RuleOutcome:
    layout, num_operands = q.carried(), len(q.infos)
    for i, info in enumerate(q.infos):
        if info.layout is not None and len(q.shape(i)) < len(q.types_out[0][0].shape) and num_operands > 1:
            raise Mixed("it pairs examples with something else by position")
    fact, own = None, q.infos[0].fact
    keeps_layout = q.node.name in ("convert_element_type", "copy", "copy_p")
    if keeps_layout or (q.node.name == "squeeze" and isinstance(own, Fact)):
        fact = own
    elif q.node.name == "lt" and own is Fact.EXAMPLE_NUMBER and q.infos[1].fact is Fact.ZERO:
        fact = Fact.FALSE
    return q.spread(layout, fact)


@rule("select_n")
def _select(q: Question) -> RuleOutcome:
    fact = q.infos[1].fact if q.infos[0].fact is Fact.FALSE else None
    return q.spread(q.carried(), fact)


@rule("optimization_barrier")
def _barrier(q: Question) -> RuleOutcome:
    return RuleOutcome(tuple(dataclasses.replace(info, live=False, fact=None) for info in q.infos))


@rule("reduce_sum")
def _sum(q: Question) -> RuleOutcome:
    layout = q.carried()
    if layout.dim in q.params["axes"]:
        return RuleOutcome((Info(False, PARTIAL),))
    return q.spread(layout)


def _spectator(*params: str) -> Rule:
    """Returns the rule of operations that work along the dims which one of the parameters called `params` names.

    Operations without any of these parameters work along the last dim."""

    def check(q: Question) -> RuleOutcome:
        layout = q.carried()
        for param in params:
            if param in q.params:
                named = q.params[param]
                dims = (named,) if isinstance(named, int) else tuple(named)
                if layout.dim in dims:
                    raise Mixed("it works along the dim that holds the examples")
                break
        else:
            if layout.dim == len(q.shape(0)) - 1:
                raise Mixed("it works along the dim that holds the examples")
        return q.spread(layout)

    return check


rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")(
    _spectator("axes")
)
rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k")(_spectator("axis"))
rule("sort")(_spectator("dimension"))
rule("approx_top_k")(_spectator("reduction_dimension"))
rule("rev")(_spectator("dimensions"))


@rule("broadcast_in_dim")
def _broadcast(q: Question) -> RuleOutcome:
    layout = q.carried()
    target = q.params["broadcast_dimensions"][layout.dim]
    if q.batch.example_dim(q.types_out[0]) != target:
        raise Mixed("it pairs examples with other examples")
    return q.spread(layout, q.infos[0].fact if isinstance(q.infos[0].fact, Fact) else None)


@rule("reshape")
def _reshape(q: Question) -> RuleOutcome:
    if q.params.get("dimensions") is not None:
        raise Mixed("it reorders dims while it reshapes")
    layout, old = q.carried(), q.shape(0)
    new = tuple(q.types_out[0][0].shape)
    dim = q.batch.example_dim(q.types_out[0])
    if dim is None:
        raise Mixed("it reshapes the dim that holds the examples")
    # Row-major order is kept: what varies slower than the example index stays before it, what varies faster behind it.
    before, behind = math.prod(new[:dim]), math.prod(new[dim + 1 :])
    slower, faster = math.prod(old[: layout.dim]) * layout.major, layout.minor * math.prod(old[layout.dim + 1 :])
    if slower % before or faster % behind:
        raise Mixed("it splits or regroups the dim that holds the examples")
    major, minor = slower // before, faster // behind
    # A dim merged with others varies within an example, so that its layout matters.
    result = ExampleDim(dim, major, minor, layout.uniform and major <= layout.major and minor <= layout.minor)
    own = q.infos[0].fact
    keeps = isinstance(own, Fact) and (own is not Fact.EXAMPLE_NUMBER or result.major == result.minor == 1)
    return RuleOutcome((Info(False, EXAMPLES, result, fact=own if keeps else None),))


@rule("concatenate")
def _concatenate(q: Question) -> RuleOutcome:
    dim = q.params["dimension"]
    layout = q.carried()
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
        raise Mixed("it joins arrays along the dim that holds the examples")
    return q.spread(dataclasses.replace(layout, major=sum(joined.major for joined in layouts), uniform=False))


@rule("stack", "unstack")
def _stack(q: Question) -> RuleOutcome:
    if q.node.name == "unstack" and q.params.get("axis", 0) == q.carried().dim:
        raise Mixed("it takes the examples apart")
    return q.spread(q.carried())


@rule("tile")
def _tile(q: Question) -> RuleOutcome:
    layout = q.carried()
    return q.spread(dataclasses.replace(layout, major=layout.major * q.params["reps"][layout.dim]))


@rule("slice")
def _slice(q: Question) -> RuleOutcome:
    layout, ours, theirs = q.carried(), q.node.whole.params, q.node.part.params
    dim, strides = layout.dim, q.params["strides"]
    for d in range(len(q.shape(0))):
        if d != dim and any(p[key][d] != ours[key][d] for p in (theirs,) for key in ("start_indices", "limit_indices")):
            raise Mixed("what it takes depends on the number of examples")
    unit, step = q.batch.whole * layout.minor, 1 if strides is None else strides[dim]
    start, limit = ours["start_indices"][dim], ours["limit_indices"][dim]
    if step != 1 or start % unit or limit % unit:
        raise Mixed("it takes some of the examples")
    if theirs["start_indices"][dim] * q.batch.whole != start * q.batch.part:
        raise Mixed("it takes some of the examples")
    return q.spread(dataclasses.replace(layout, major=(limit - start) // unit))


@rule("split")
def _split(q: Question) -> RuleOutcome:
    layout = q.carried()
    if q.params["axis"] != layout.dim:
        require_same_params(q.node, SIZES - {"sizes"})
        return q.spread(layout)
    unit = q.batch.whole * layout.minor
    infos = []
    for size, types in zip(q.params["sizes"], q.types_out, strict=True):
        if size % unit:
            raise Mixed("it takes some of the examples")
        infos.append(Info(False, EXAMPLES, q.batch.layout(types, dataclasses.replace(layout, major=size // unit))))
    return RuleOutcome(tuple(infos))


@rule("dynamic_slice")
def _dynamic_slice(q: Question) -> RuleOutcome:
    layout = q.carried(0)
    q.without_examples(*range(1, len(q.infos)))
    if q.params["slice_sizes"][layout.dim] != q.shape(0)[layout.dim]:
        raise Mixed("it takes some of the examples")
    return q.spread(layout)


@rule("dynamic_update_slice")
def _dynamic_update_slice(q: Question) -> RuleOutcome:
    q.without_examples(*range(2, len(q.infos)))
    layout = q.carried(0, 1)
    if q.layout(0) is None or q.layout(1) is None or q.shape(0)[layout.dim] != q.shape(1)[layout.dim]:
        raise Mixed("it writes some of the examples")
    return q.spread(layout)


@rule("pad")
def _pad(q: Question) -> RuleOutcome:
    layout = q.carried(0)
    q.without_examples(1)
    if tuple(q.params["padding_config"][layout.dim]) != (0, 0, 0):
        raise Mixed("it pads the dim that holds the examples")
    return q.spread(layout)
