"""Holds dim rules of operations that mix dims: contractions, convolutions, lookups, scatters, linear algebra.

Shapes go in and labels come out, as `dims.DimRule` says; importing the module registers them.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.primitives.dims import DimMap, Label, Labels, Params, Shape, Shapes
from splitjax.primitives.table import dim_rule

Factors = tuple[Label, ...]  # the labels of a dim
Dims = Sequence[int]
# Contracted dims of the left and the right operand, then their batch dims.
DotNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


@dim_rule("dot_general")
def dot_general(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Labels a dot of two operands, the first two of `inputs`, by `params["dimension_numbers"]`.

    The result has batch dims first, then the free dims of the left and of the right operand; contracted dims run
    along each other.
    """
    left, right, out = _dot_labels(inputs, params["dimension_numbers"])
    rest = tuple(tuple(((f"p{k}", i),) for i in range(len(s))) for k, s in enumerate(inputs[2:], 2))
    return DimMap((tuple(left), tuple(right), *rest), (tuple(out),), mixing=True)


def _dot_labels(inputs: Shapes, numbers: DotNumbers) -> tuple[list[Factors], list[Factors], list[Factors]]:
    """Labels both operands and the result of a dot: batch dims, then the left operand's free dims, then the right
    operand's."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs = {d: ("b", k) for k, d in enumerate(lhs_batch)} | {d: ("k", k) for k, d in enumerate(lhs_contract)}
    rhs = {d: ("b", k) for k, d in enumerate(rhs_batch)} | {d: ("k", k) for k, d in enumerate(rhs_contract)}
    left: list[Factors] = [(lhs.get(d, ("l", d)),) for d in range(len(inputs[0]))]
    right: list[Factors] = [(rhs.get(d, ("r", d)),) for d in range(len(inputs[1]))]
    out: list[Factors] = [(("b", k),) for k in range(len(lhs_batch))]
    out += [label for d, label in enumerate(left) if d not in lhs] + [
        label for d, label in enumerate(right) if d not in rhs
    ]
    return left, right, out


@dim_rule("ragged_dot_general")
def ragged_dot(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels a dot whose left operand has a dim in groups of given sizes: `inputs` are left, right and group sizes.

    The experts (groups) run along the group sizes; they are a dim of the right operand, or a new leading dim of
    `outputs[0]` where the ragged dim is contracted. `params["ragged_dot_dimension_numbers"]` says which dims are
    which.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    left, right, out = _dot_labels(inputs, numbers.dot_dimension_numbers)
    right = [("g",) if d in numbers.rhs_group_dimensions else label for d, label in enumerate(right)]
    # Rows that are contracted within their group keep their order; they have a label of their own kind.
    (contracted, _), _ = numbers.dot_dimension_numbers
    ragged: dict[Factors, Factors] = {left[d]: (("rows", d),) for d in numbers.lhs_ragged_dimensions if d in contracted}
    left, right = ([ragged.get(label, label) for label in side] for side in (left, right))
    experts = {(("r", d),) for d in numbers.rhs_group_dimensions}
    out = [label for label in out if label not in experts]
    if len(out) < len(outputs[0]):
        out.insert(0, ("g",))
    sizes = tuple(("g",) if d == len(inputs[2]) - 1 else (("s", d),) for d in range(len(inputs[2])))
    rest = tuple(tuple(((f"p{k}", i),) for i in range(len(s))) for k, s in enumerate(inputs[3:], 3))
    return DimMap((tuple(left), tuple(right), sizes, *rest), (tuple(out),), mixing=True)


@dim_rule("conv_general_dilated")
def convolution(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Labels a convolution of data and kernel, the two `inputs`, by `params["dimension_numbers"]` and the group counts.

    Batch, input and output features run through; spatial dims slide and do not, unless the window is a point. With
    feature groups the features are (group, input) and (group, output), and the kernel's input dim is one group's.
    With batch groups (the weight gradient of the former) it is the operand's batch that is (group, batch).
    """
    numbers = params["dimension_numbers"]
    lhs_batch, lhs_feature, *lhs_spatial = numbers.lhs_spec
    rhs_out, rhs_in, *rhs_spatial = numbers.rhs_spec
    out_batch, out_feature, *out_spatial = numbers.out_spec
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    lhs: dict[int, Factors] = {lhs_batch: ("b",), lhs_feature: ("i",)}
    rhs: dict[int, Factors] = {rhs_out: ("o",), rhs_in: ("i",)}
    out: dict[int, Factors] = {out_batch: ("b",), out_feature: ("o",)}
    for k, (d, e, f) in enumerate(zip(lhs_spatial, rhs_spatial, out_spatial, strict=True)):
        point = _is_point(inputs[1][e], params, k)
        lhs[d], rhs[e], out[f] = (f"s{k}",), (f"w{k}",), (f"s{k}" if point else f"t{k}",)
    sizes: dict[Label, int] = {}
    if groups * batch_groups > 1:
        sizes = {"g": groups * batch_groups, "o": inputs[1][rhs_out] // (groups * batch_groups)}
        rhs[rhs_out] = out[out_feature] = ("g", "o")
    if groups > 1:
        sizes["i"] = inputs[1][rhs_in]
        lhs[lhs_feature] = ("g", "i")
    if batch_groups > 1:
        sizes["b"] = inputs[0][lhs_batch] // batch_groups
        lhs[lhs_batch] = ("g", "b")
    labels = [tuple(names[d] for d in range(len(names))) for names in (lhs, rhs, out)]
    return DimMap((labels[0], labels[1]), (labels[2],), mixing=True, sizes=sizes)


def _is_point(window: int, params: Params, k: int) -> bool:
    """Tells whether spatial dim `k` of a convolution keeps every position where it is."""
    return window == params["window_strides"][k] == params["lhs_dilation"][k] == 1 and tuple(params["padding"][k]) == (
        0,
        0,
    )


@dim_rule("gather")
def gather(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels a lookup: `inputs` are operand and indices, and `params` say where dims of both stand in `outputs[0]`.

    Index dims stand where the result has no offset dim; operand dims taken whole run through; looked-up dims do not.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batching = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    operand: dict[int, Label] = {d: ("o", d) for d in range(len(inputs[0]))}
    indices: dict[int, Label] = {d: ("i", d) for d in range(len(inputs[1]))}
    for d, e in zip(batching, index_batching, strict=True):
        operand[d] = indices[e]
    window = [d for d in range(len(inputs[0])) if d not in numbers.collapsed_slice_dims and d not in batching]
    batch = iter(range(len(inputs[1]) - 1))  # the last dim of the indices is the index vector
    slots = iter(window)
    out: list[Factors] = []
    for position in range(len(outputs[0])):
        if position in numbers.offset_dims:
            d = next(slots)
            out.append((operand[d] if sizes[d] == inputs[0][d] else ("cut", d),))
        else:
            out.append((indices[next(batch)],))
    labels_operand = tuple((operand[d],) for d in range(len(inputs[0])))
    labels_indices = tuple((indices[d],) for d in range(len(inputs[1])))
    return DimMap((labels_operand, labels_indices), (tuple(out),), mixing=True)


@dim_rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Labels a scatter: `inputs` are operand, indices and updates, and `params["dimension_numbers"]` says how they
    meet.

    The result is the operand; update windows run along the operand dims they cover whole, update batch dims along
    the indices.
    """
    numbers = params["dimension_numbers"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batching = tuple(getattr(numbers, "scatter_indices_batching_dims", ()))
    operand: dict[int, Label] = {d: ("o", d) for d in range(len(inputs[0]))}
    indices: dict[int, Label] = {d: ("i", d) for d in range(len(inputs[1]))}
    for d, e in zip(batching, index_batching, strict=True):
        indices[e] = operand[d]
    window = iter([d for d in range(len(inputs[0])) if d not in numbers.inserted_window_dims and d not in batching])
    batch = iter(range(len(inputs[1]) - 1))
    updates: list[Factors] = []
    for position, size in enumerate(inputs[2]):
        if position in numbers.update_window_dims:
            d = next(window)
            updates.append((operand[d] if size == inputs[0][d] else ("cut", d),))
        else:
            updates.append((indices[next(batch)],))
    whole = tuple((operand[d],) for d in range(len(inputs[0])))
    return DimMap((whole, tuple((indices[d],) for d in range(len(inputs[1]))), tuple(updates)), (whole,), mixing=True)


@dim_rule("triangular_solve")
def triangular_solve(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels a x = b, or x a = b without `params["left_side"]`: `inputs` are a and b, `outputs` x.

    Leading dims are a stack of systems; the columns (rows) of b are independent of each other.
    """
    rank = len(inputs[1])
    free = rank - 1 if params["left_side"] else rank - 2

    def labels(tag: str) -> Labels:
        return tuple((i,) if i < rank - 2 or (i == free and tag != "a") else ((tag, i),) for i in range(rank))

    return DimMap((labels("a"), labels("b")), (labels("x"),), mixing=True)


@dim_rule("tridiagonal_solve")
def tridiagonal_solve(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `inputs` of three diagonals (..., n) and right-hand sides (..., n, m), and `outputs` like the latter."""
    lead = len(inputs[3]) - 2

    def labels(tag: str, shape: Shape) -> Labels:
        return tuple((i,) if i != lead else ((tag, i),) for i in range(len(shape)))

    return DimMap(tuple(labels(f"in{k}", s) for k, s in enumerate(inputs)), (labels("x", outputs[0]),), mixing=True)


@dim_rule(
    "cholesky",
    "qr",
    "eigh",
    "eig",
    "svd",
    "lu",
    "schur",
    "hessenberg",
    "tridiagonal",
    "householder_product",
    "lu_pivots_to_permutation",
    "symmetric_product",
    "geqrf",
)
def matrices(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `inputs` and `outputs` that are stacks of matrices: leading dims run through, the matrix itself is
    mixed."""
    lead = max(len(inputs[0]) - 2, 0)

    def labels(tag: str, shape: Shape) -> Labels:
        return tuple((i,) if i < lead and shape[i] == inputs[0][i] else ((tag, i),) for i in range(len(shape)))

    ins = tuple(labels(f"in{k}", s) for k, s in enumerate(inputs))
    return DimMap(ins, tuple(labels(f"out{k}", s) for k, s in enumerate(outputs)), mixing=True)


@dim_rule("fft")
def fourier_transform(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels the one array of `inputs` and that of `outputs`: all dims run through, but for one whose size changes (the
    last of a transform from or to real numbers).

    A transformed dim is mixed like a sorted one: each of its elements depends on all, and yet the result can lie as the
    operand does, so that a layer behind the transform is split to fit the layer before it.
    """
    labels = lambda tag, shape: tuple(
        (d,) if size == inputs[0][d] == outputs[0][d] else ((tag, d),) for d, size in enumerate(shape)
    )
    return DimMap((labels("in", inputs[0]),), (labels("out", outputs[0]),), mixing=True)
