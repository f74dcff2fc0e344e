"""Says what operations that combine dims do with the dim that holds examples.

Products, convolutions, windows, linear algebra, lookups and scatters: their rules, which importing this module adds to
the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.primitives.example_question import Question, RuleOutcome, mixed_params
from splitjax.primitives.example_relation import (
    PARTIAL,
    ExampleDim,
    ExampleNumberColumn,
    Fact,
    Info,
    Mixed,
    merge_layouts,
)
from splitjax.primitives.table import example_rule


@example_rule("dot_general")
def _dot(q: Question) -> RuleOutcome | Mixed:
    contracting, batch = q.params["dimension_numbers"]
    left, right = q.layout(0), q.layout(1)
    if left is not None and right is not None:
        for pairs, summed in ((contracting, True), (batch, False)):
            for i, j in zip(*pairs, strict=True):
                if (left.dim, right.dim) == (i, j):
                    merged = merge_layouts([left, ExampleDim(left.dim, right.major, right.minor, right.uniform)])
                    return (
                        RuleOutcome((Info(False, PARTIAL),))
                        if summed and not isinstance(merged, Mixed)
                        else q.spread(merged)
                    )
        return Mixed("it multiplies examples with other examples")
    own = 0 if left is not None else 1
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if layout.dim in contracting[own] or layout.dim in batch[own]:
        return Mixed("it multiplies examples with something else by position")
    return q.spread(layout)


@example_rule("conv_general_dilated")
def _conv(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if q.layout(0) is None or q.layout(1) is not None:
        return Mixed("its kernel differs between examples")
    if layout.dim != q.params["dimension_numbers"].lhs_spec[0] or q.params["batch_group_count"] != 1:
        return Mixed("it convolves over the dim that holds the examples")
    return q.spread(layout)


_WINDOWS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


@example_rule(
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
    "select_and_scatter",
)
def _window(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    for name in _WINDOWS:
        if q.params.get(name) is not None and q.params[name][layout.dim] != 1:
            return Mixed("its window spans examples")
    if tuple(q.params["padding"][layout.dim]) != (0, 0):
        return Mixed("it pads the dim that holds the examples")
    return q.spread(layout)


@example_rule(
    "cholesky",
    "triangular_solve",
    "eigh",
    "eig",
    "svd",
    "qr",
    "lu",
    "householder_product",
    "tridiagonal_solve",
    "schur",
    "geqrf",
)
def _linear_algebra(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if any(info.layout is not None and layout.dim >= len(q.shape(i)) - 2 for i, info in enumerate(q.infos)):
        return Mixed("it decomposes a matrix over examples")
    return q.spread(layout)


@example_rule("fft")
def _fft(q: Question) -> RuleOutcome | Mixed:
    layout = q.carried()
    if isinstance(layout, Mixed):
        return layout
    if layout.dim >= len(q.shape(0)) - len(q.params["fft_lengths"]):
        return Mixed("it transforms along the dim that holds the examples")
    return q.spread(layout)


@example_rule("gather")
def gather(q: Question) -> RuleOutcome | Mixed:
    """Answers the question `q` about a gather: a lookup of rows, or of each example's own entries.

    `Mixed` where it takes some of the examples, or entries of other examples than the index's."""
    numbers, operand, indices = q.params["dimension_numbers"], q.layout(0), q.layout(1)
    sizes, theirs = q.params["slice_sizes"], q.node.part.params["slice_sizes"]
    if any(a != b for d, (a, b) in enumerate(zip(sizes, theirs, strict=True)) if operand is None or d != operand.dim):
        return Mixed("what it takes depends on the number of examples")
    if operand is None:
        return q.spread(q.required_layout(1))
    if indices is None:
        if operand.dim in numbers.start_index_map or sizes[operand.dim] != q.shape(0)[operand.dim]:
            return Mixed("it takes some of the examples")
        return q.spread(operand)
    rows = _own_entries(q, numbers.operand_batching_dims, numbers.start_indices_batching_dims, numbers.start_index_map)
    return _with_rows(q.spread(_common(q, 0, 1)), rows)


@example_rule("splitjax_lookup")
def _lookup(q: Question) -> RuleOutcome | Mixed:
    """Answers about a lookup of `planning.tables.lookups`: as for the gather that it stands for; what is added to its
    rows, operand 2, holds the examples where they do."""
    outcome = gather(dataclasses.replace(q, infos=q.infos[:2]))
    if isinstance(outcome, Mixed):
        return outcome
    if outcome.infos[0].layout != q.infos[2].layout:
        return Mixed("its rows and what is added to them hold examples in different places")
    return outcome


def _common(q: Question, *positions: int) -> ExampleDim | Mixed:
    """Returns the layout on which operands agree, whatever dim holds the examples in each; `Mixed` without such."""
    return merge_layouts([dataclasses.replace(q.required_layout(i), dim=0) for i in positions])


def _own_entries(
    q: Question, batching: Sequence[int], index_batching: Sequence[int], index_map: Sequence[int]
) -> tuple[int, int] | None | Mixed:
    """Checks that every example indexes its own entries only, and returns `Mixed` otherwise.

    Returns None where a batching dim holds the examples; (operand, component) where that component of the indices, the
    operand at that position, counts the examples. The dims are those that the primitive's dimension numbers name."""
    operand, indices = q.required_layout(0), q.required_layout(1)
    common = _common(q, 0, 1)
    if isinstance(common, Mixed):
        return common
    if operand.dim in batching:
        if index_batching[tuple(batching).index(operand.dim)] != indices.dim:
            return Mixed("it takes entries of other examples")
        return None
    if operand.dim not in index_map or operand.major != 1 or operand.minor != 1:
        return Mixed("it takes entries of other examples")
    component = tuple(index_map).index(operand.dim)
    fact = q.infos[1].fact
    counts = fact == ExampleNumberColumn(component) or (
        fact is Fact.EXAMPLE_NUMBER and q.shape(1)[-1] == 1 and component == 0
    )
    if not counts or indices.dim == len(q.shape(1)) - 1:
        return Mixed("it takes entries of other examples")
    return 1, component


def _with_rows(outcome: RuleOutcome | Mixed, rows: tuple[int, int] | None | Mixed) -> RuleOutcome | Mixed:
    """Returns `outcome` with the indices `rows` that count examples, as `_own_entries` found them."""
    if isinstance(rows, Mixed):
        return rows
    return outcome if isinstance(outcome, Mixed) else RuleOutcome(outcome.infos, rows=rows)


@example_rule(
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter-mul",
    "scatter_mul",
    "scatter-min",
    "scatter_min",
    "scatter-max",
    "scatter_max",
    "scatter-sub",
    "scatter_sub",
)
def _scatter(q: Question) -> RuleOutcome | Mixed:
    mixed = mixed_params(q.node)
    if mixed is not None:
        return mixed
    numbers, operand, indices, updates = q.params["dimension_numbers"], q.layout(0), q.layout(1), q.layout(2)
    if operand is None:
        if updates is None or q.node.name not in ("scatter-add", "scatter_add"):
            return Mixed("single examples write into something shared")
        # Contributions of examples are added up; what they are added to counts once.
        return RuleOutcome((Info(False, PARTIAL),), shares=frozenset({0}))
    if indices is None:
        window = [
            d
            for d in range(len(q.shape(0)))
            if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
        ]
        full = operand.dim in window and operand.dim not in numbers.scatter_dims_to_operand_dims
        if (
            not full
            or updates is None
            or q.shape(2)[numbers.update_window_dims[window.index(operand.dim)]] != q.shape(0)[operand.dim]
        ):
            return Mixed("it writes some of the examples")
        return q.spread(_common(q, 0, 2))
    if updates is None:
        return Mixed("it writes some of the examples")
    rows = _own_entries(
        q, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, numbers.scatter_dims_to_operand_dims
    )
    return _with_rows(q.spread(_common(q, 0, 1, 2)), rows)
