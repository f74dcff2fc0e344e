"""Dim rules of operations that mix: contractions, convolutions, lookups, scatters, linear algebra."""

from __future__ import annotations

from splitjax.trace.dims import DimMap, rule_for


@rule_for("dot_general")
def dot_general(inputs, outputs, params):
    """Batch dims first, then the free dims of the left and of the right operand; contracted dims run along each
    other."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    left, right, out = _dot_labels(inputs, params["dimension_numbers"])
    rest = tuple(tuple(((f"p{k}", i),) for i in range(len(s))) for k, s in enumerate(inputs[2:], 2))
    return DimMap((tuple(left), tuple(right), *rest), (tuple(out),), mixing=True)


def _dot_labels(inputs, numbers):
    """Labels of both operands and of the result: batch dims, then the left operand's free dims, then the right
    one's."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs = {d: ("b", k) for k, d in enumerate(lhs_batch)} | {d: ("k", k) for k, d in enumerate(lhs_contract)}
    rhs = {d: ("b", k) for k, d in enumerate(rhs_batch)} | {d: ("k", k) for k, d in enumerate(rhs_contract)}
    left = [(lhs.get(d, ("l", d)),) for d in range(len(inputs[0]))]
    right = [(rhs.get(d, ("r", d)),) for d in range(len(inputs[1]))]
    out = [(("b", k),) for k in range(len(lhs_batch))]
    out += [label for d, label in enumerate(left) if d not in lhs] + [
        label for d, label in enumerate(right) if d not in rhs
    ]
    return left, right, out


@rule_for("ragged_dot_general")
def ragged_dot(inputs, outputs, params):
    """A dot whose left operand has one dim in groups of given sizes. The experts (groups) run along the group sizes;
    they are a dim of the right operand, or a new leading dim of the result where the ragged dim is contracted."""
    numbers = params["ragged_dot_dimension_numbers"]
    left, right, out = _dot_labels(inputs, numbers.dot_dimension_numbers)
    right = [("g",) if d in numbers.rhs_group_dimensions else label for d, label in enumerate(right)]
    # Rows that are contracted within their group keep their order; they have a label of their own kind.
    ragged = {left[d]: (("rows", d),) for d in numbers.lhs_ragged_dimensions if left[d][0][0] == "k"}
    left, right = ([ragged.get(label, label) for label in side] for side in (left, right))
    out = [label for label in out if not (label[0][0] == "r" and label[0][1] in numbers.rhs_group_dimensions)]
    if len(out) < len(outputs[0]):
        out.insert(0, ("g",))
    sizes = tuple(("g",) if d == len(inputs[2]) - 1 else (("s", d),) for d in range(len(inputs[2])))
    rest = tuple(tuple(((f"p{k}", i),) for i in range(len(s))) for k, s in enumerate(inputs[3:], 3))
    return DimMap((tuple(left), tuple(right), sizes, *rest), (tuple(out),), mixing=True)


@rule_for("conv_general_dilated")
def convolution(inputs, outputs, params):
    """Batch, input and output features run through; spatial dims slide and do not, unless the window is a point.

    With feature groups the features are (group, input) and (group, output), and the kernel's input dim is one group's.
    With batch groups (the weight gradient of the former) it is the operand's batch that is (group, batch)."""
    numbers = params["dimension_numbers"]
    lhs_batch, lhs_feature, *lhs_spatial = numbers.lhs_spec
    rhs_out, rhs_in, *rhs_spatial = numbers.rhs_spec
    out_batch, out_feature, *out_spatial = numbers.out_spec
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    lhs = {lhs_batch: ("b",), lhs_feature: ("i",)}
    rhs = {rhs_out: ("o",), rhs_in: ("i",)}
    out = {out_batch: ("b",), out_feature: ("o",)}
    for k, (d, e, f) in enumerate(zip(lhs_spatial, rhs_spatial, out_spatial, strict=True)):
        point = _is_point(inputs[1][e], params, k)
        lhs[d], rhs[e], out[f] = (f"s{k}",), (f"w{k}",), (f"s{k}" if point else f"t{k}",)
    sizes = {}
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


def _is_point(window, params, k) -> bool:
    """Whether spatial dim `k` of a convolution keeps every position where it is."""
    return window == params["window_strides"][k] == params["lhs_dilation"][k] == 1 and tuple(params["padding"][k]) == (
        0,
        0,
    )


@rule_for("gather")
def gather(inputs, outputs, params):
    """Index dims stand where the result has no offset dim; operand dims taken whole run through; looked-up dims do
    not."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batching = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    operand = {d: ("o", d) for d in range(len(inputs[0]))}
    indices = {d: ("i", d) for d in range(len(inputs[1]))}
    for d, e in zip(batching, index_batching, strict=True):
        operand[d] = indices[e]
    window = [d for d in range(len(inputs[0])) if d not in numbers.collapsed_slice_dims and d not in batching]
    batch = iter(range(len(inputs[1]) - 1))  # the last dim of the indices is the index vector
    slots = iter(window)
    out = []
    for position in range(len(outputs[0])):
        if position in numbers.offset_dims:
            d = next(slots)
            out.append((operand[d] if sizes[d] == inputs[0][d] else ("cut", d),))
        else:
            out.append((indices[next(batch)],))
    labels_operand = tuple((operand[d],) for d in range(len(inputs[0])))
    labels_indices = tuple((indices[d],) for d in range(len(inputs[1])))
    return DimMap((labels_operand, labels_indices), (tuple(out),), mixing=True)


@rule_for("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(inputs, outputs, params):
    """The result is the operand; update windows run along the operand dims they cover whole, update batch dims along
    the indices."""
    numbers = params["dimension_numbers"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batching = tuple(getattr(numbers, "scatter_indices_batching_dims", ()))
    operand = {d: ("o", d) for d in range(len(inputs[0]))}
    indices = {d: ("i", d) for d in range(len(inputs[1]))}
    for d, e in zip(batching, index_batching, strict=True):
        indices[e] = operand[d]
    window = iter([d for d in range(len(inputs[0])) if d not in numbers.inserted_window_dims and d not in batching])
    batch = iter(range(len(inputs[1]) - 1))
    updates = []
    for position, size in enumerate(inputs[2]):
        if position in numbers.update_window_dims:
            d = next(window)
            updates.append((operand[d] if size == inputs[0][d] else ("cut", d),))
        else:
            updates.append((indices[next(batch)],))
    whole = tuple((operand[d],) for d in range(len(inputs[0])))
    return DimMap((whole, tuple((indices[d],) for d in range(len(inputs[1]))), tuple(updates)), (whole,), mixing=True)


@rule_for("triangular_solve")
def triangular_solve(inputs, outputs, params):
    """a x = b, or x a = b: leading dims are a stack of systems, the columns (rows) of b are independent of each
    other."""
    rank = len(inputs[1])
    free = rank - 1 if params["left_side"] else rank - 2

    def labels(tag, shape):
        return tuple((i,) if i < rank - 2 or (i == free and tag != "a") else ((tag, i),) for i in range(rank))

    return DimMap((labels("a", inputs[0]), labels("b", inputs[1])), (labels("x", outputs[0]),), mixing=True)


@rule_for("tridiagonal_solve")
def tridiagonal_solve(inputs, outputs, params):
    """Three diagonals (..., n) and right-hand sides (..., n, m)."""
    lead = len(inputs[3]) - 2

    def labels(tag, shape):
        return tuple((i,) if i != lead else ((tag, i),) for i in range(len(shape)))

    return DimMap(tuple(labels(f"in{k}", s) for k, s in enumerate(inputs)), (labels("x", outputs[0]),), mixing=True)


@rule_for(
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
    "fft",
    "geqrf",
)
def matrices(inputs, outputs, params):
    """Leading dims are a stack of matrices (of vectors for the FFT's untouched dims) and run through; the matrix is
    mixed."""
    touched = len(params["fft_lengths"]) if "fft_lengths" in params else 2
    lead = max(len(inputs[0]) - touched, 0)

    def labels(tag, shape):
        return tuple((i,) if i < lead and shape[i] == inputs[0][i] else ((tag, i),) for i in range(len(shape)))

    ins = tuple(labels(f"in{k}", s) for k, s in enumerate(inputs))
    return DimMap(ins, tuple(labels(f"out{k}", s) for k, s in enumerate(outputs)), mixing=True)
