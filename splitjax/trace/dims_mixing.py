"""Dim rules of operations that mix: contractions, convolutions, lookups, scatters, linear algebra."""

from __future__ import annotations

from splitjax.trace.dims import DimMap, rule_for


@rule_for("dot_general")
def dot_general(inputs, outputs, params):
    """Batch dims first, then the free dims of the left and of the right operand; contracted dims run along each other."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    lhs = {d: ("b", k) for k, d in enumerate(lhs_batch)} | {d: ("k", k) for k, d in enumerate(lhs_contract)}
    rhs = {d: ("b", k) for k, d in enumerate(rhs_batch)} | {d: ("k", k) for k, d in enumerate(rhs_contract)}
    left = tuple((lhs.get(d, ("l", d)),) for d in range(len(inputs[0])))
    right = tuple((rhs.get(d, ("r", d)),) for d in range(len(inputs[1])))
    out = (
        *(((("b", k)),) for k in range(len(lhs_batch))),
        *((("l", d),) for d in range(len(inputs[0])) if d not in lhs),
        *((("r", d),) for d in range(len(inputs[1])) if d not in rhs),
    )
    rest = tuple(tuple(((f"p{k}", i),) for i in range(len(s))) for k, s in enumerate(inputs[2:], 2))
    return DimMap((left, right, *rest), (out,), mixing=True)


@rule_for("ragged_dot", "ragged_dot_general")
def ragged_dot(inputs, outputs, params):
    """(m, k) x (g, k, n), rows grouped by sizes (g,): out (m, n). The expert dim g runs along the group sizes."""
    if len(inputs[0]) != 2 or len(inputs[1]) != 3 or len(outputs[0]) != 2:
        labels = [tuple(((t, i),) for i in range(len(s))) for t, s in enumerate((*inputs, *outputs))]
        return DimMap(tuple(labels[: len(inputs)]), tuple(labels[len(inputs) :]), mixing=True)
    return DimMap((((("m",)), ("k",)), (("g",), ("k",), ("n",)), (("g",),)), ((("m",), ("n",)),), mixing=True)


@rule_for("conv_general_dilated")
def convolution(inputs, outputs, params):
    """Batch, input and output features run through; spatial dims slide and do not. With feature groups the kernel's input
    dim is a part of the operand's (depthwise: operand features run along output features); a weight gradient contracts
    the batch, and may do so in batch groups."""
    numbers = params["dimension_numbers"]
    lhs_batch, lhs_feature, *lhs_spatial = numbers.lhs_spec
    rhs_out, rhs_in, *rhs_spatial = numbers.rhs_spec
    out_batch, out_feature, *out_spatial = numbers.out_spec
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    lhs = {lhs_batch: "b", lhs_feature: "i"} | {d: f"s{k}" for k, d in enumerate(lhs_spatial)}
    rhs = {rhs_out: "o", rhs_in: "i" if groups == 1 else "g"} | {d: f"w{k}" for k, d in enumerate(rhs_spatial)}
    out = {out_batch: "b", out_feature: "o"} | {d: f"t{k}" for k, d in enumerate(out_spatial)}
    if groups > 1 and inputs[0][lhs_feature] == outputs[0][out_feature] == groups:
        lhs[lhs_feature] = "o"
    if batch_groups > 1:
        lhs[lhs_batch] = "bg"
    labels = [tuple((names[d],) for d in range(len(names))) for names in (lhs, rhs, out)]
    return DimMap((labels[0], labels[1]), (labels[2],), mixing=True)


@rule_for("gather")
def gather(inputs, outputs, params):
    """Index dims stand where the result has no offset dim; operand dims taken whole run through; looked-up dims do not."""
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


@rule_for("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_mul", "scatter_min",
          "scatter_max", "scatter_sub", "scatter-sub")
def scatter(inputs, outputs, params):
    """The result is the operand; update windows run along the operand dims they cover whole, update batch dims along the
    indices."""
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


@rule_for("triangular_solve", "cholesky", "qr", "eigh", "eig", "svd", "lu", "schur", "hessenberg", "tridiagonal", "householder_product",
          "lu_pivots_to_permutation", "tridiagonal_solve", "symmetric_product", "fft", "geqrf")
def matrices(inputs, outputs, params):
    """Leading dims are a stack of matrices (of vectors for the FFT's untouched dims) and run through; the matrix is mixed."""
    touched = len(params["fft_lengths"]) if "fft_lengths" in params else 2
    lead = max(len(inputs[0]) - touched, 0)

    def labels(tag, shape):
        return tuple((i,) if i < lead and shape[i] == inputs[0][i] else ((tag, i),) for i in range(len(shape)))

    ins = tuple(labels(f"in{k}", s) for k, s in enumerate(inputs))
    return DimMap(ins, tuple(labels(f"out{k}", s) for k, s in enumerate(outputs)), mixing=True)
