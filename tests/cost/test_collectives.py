"""Predicted collectives against numbers computed by hand, and against SplitBrain's closed formula."""

from __future__ import annotations

import dataclasses

import pytest

from splitjax.cost import LaidOutStep, predict_collectives

ALL = ("data", "model")
COLUMN, ROW = (None, "model"), ("model", None)


def predict(net, batch_axes=ALL, replicated_batch="all", **kw):
    step = LaidOutStep(net.graph(), net.plans, net.layer_plans(), net.mesh, batch_axes, replicated_batch)
    return predict_collectives(step, **kw)


def told(collectives, *, gradients=False):
    """(op, axis, bytes, layer, phase) of activations, in order."""
    return [
        (c.op, c.axis, c.bytes, c.layer, c.why.split(":")[0])
        for c in collectives
        if gradients or "gradient" not in c.why
    ]


# ---- the formula of arXiv 2112.15317


@pytest.mark.parametrize(("groups", "k"), [(1, 2), (2, 4), (4, 2), (1, 8), (3, 4)])
def test_splitbrain_formula(net, groups, k):
    """2(N-1)/N P_conv s + 2(G-1)/G (P_dense/K) s + 2(K-1) B d s + 2 sum_l (K-1) B h_l s, h_l of the gathered
    outputs."""
    workers, per_worker, s = groups * k, 6, 4
    mesh = {axis: size for axis, size in (("data", groups), ("model", k))}
    n = net(per_worker * workers, mesh)
    c1, c2, d, h1, h2, h3 = 24, 48, 48 * 4, 96, 72, 24
    n.conv("c1", ("rgb", 3), ("c1", c1), 8)
    n.conv("c2", ("c1", c1), ("c2", c2), 4)
    n.dense("d1", ("c2.flat", d), ("h1", h1), COLUMN, ("model",))
    n.dense("d2", ("h1", h1), ("h2", h2), COLUMN, ("model",))
    n.dense("d3", ("h2", h2), ("h3", h3), COLUMN, ("model",))
    batch_axes = n.mesh.present(ALL)
    p_conv = 9 * 3 * c1 + c1 + 9 * c1 * c2 + c2
    p_dense = d * h1 + h1 + h1 * h2 + h2 + h2 * h3 + h3
    formula = (
        2 * (workers - 1) / workers * p_conv * s + 2 * (groups - 1) / groups * (p_dense / k) * s
        + 2 * (k - 1) * per_worker * d * s + 2 * (k - 1) * per_worker * (h1 + h2) * s
    )  # fmt: skip
    predicted = predict(n, batch_axes)
    assert sum(c.bytes for c in predicted) == pytest.approx(formula, abs=10)  # 10 parameters, each rounded up
    assert {c.axis for c in predicted if "gradient of c" in c.why} == {"+".join(batch_axes)}
    assert {c.axis for c in predicted if "gradient of d" in c.why} == ({"data"} if groups > 1 else set())


def test_vgg_head_by_hand(net):
    """G = 2, K = 4, B = 8: each crossing sends (K-1) B features s bytes each way."""
    n = net(64, {"data": 2, "model": 4})
    n.conv("conv", ("rgb", 3), ("c", 16), 8)
    n.dense("d1", ("flat", 128), ("h1", 256), COLUMN)
    n.dense("d2", ("h1", 256), ("h2", 64), COLUMN)
    predicted = predict(n)
    assert told(predicted) == [
        ("all_gather", "model", 3 * 8 * 128 * 4, "d1", "forward"),
        ("reduce_scatter", "model", 3 * 8 * 128 * 4, "d1", "backward"),
        ("all_gather", "model", 3 * 8 * 256 * 4, "d2", "forward"),
        ("reduce_scatter", "model", 3 * 8 * 256 * 4, "d2", "backward"),
    ]
    assert all(c.why for c in predicted)


# ---- rules one by one


def test_data_parallel_sends_gradients_alone(net):
    n = net(64, {"data": 8})
    n.dense("d1", ("x", 16), ("h", 32))
    n.dense("d2", ("h", 32), ("y", 8))
    predicted = predict(n, ("data",))
    assert [(c.op, c.axis, c.bytes, c.layer) for c in predicted] == [
        ("all_reduce", "data", 2 * 7 * 16 * 32 * 4 // 8, "d1"),
        ("all_reduce", "data", 2 * 7 * 32 * 8 * 4 // 8, "d2"),
    ]


def test_one_device_sends_nothing(net):
    n = net(64, {"data": 1, "model": 1})
    n.dense("d1", ("x", 16), ("h", 32), COLUMN)
    assert predict(n, ()) == predict(n) == ()


def test_column_then_row(net):
    """Megatron: the batch over data only; one all-reduce each way. 64 examples in 2 shards."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("embed", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 128), COLUMN)
    n.dense("down", ("h", 128), ("e2", 32), ROW)
    n.dense("head", ("e2", 32), ("y", 10))
    predicted = predict(n, ("data",), "data")
    assert told(predicted) == [
        ("all_reduce", "model", 2 * 3 * 32 * 32 * 4 // 4, "up", "backward"),
        ("all_reduce", "model", 2 * 3 * 32 * 32 * 4 // 4, "down", "forward"),
    ]
    grads = {c.layer: (c.op, c.axis, c.bytes) for c in predicted if "gradient" in c.why}
    assert grads["up"] == ("all_reduce", "data", 32 * 128 * 4 // 4)  # 2(G-1)/G of the shard
    assert grads["head"] == ("all_reduce", "data", 32 * 10 * 4)


def test_no_cotangent_below_the_first_layer(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("up", ("x", 32), ("h", 128), COLUMN)
    n.dense("down", ("h", 128), ("y", 32), ROW)
    assert told(predict(n, ("data",), "data")) == [("all_reduce", "model", 2 * 3 * 32 * 32 * 4 // 4, "down", "forward")]
    ops = [c[0] for c in told(predict(n))]
    assert ops == ["all_gather", "all_reduce"]  # the batch enters the group; the last output is summed where it is used


def test_column_then_column_gathers_features(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 128), COLUMN)
    n.dense("up2", ("h", 128), ("z", 64), COLUMN)
    whole = 32 * 128 * 4
    assert told(predict(n, ("data",), "data"))[1:] == [
        ("all_gather", "model", 3 * whole // 4, "up2", "forward"),
        ("reduce_scatter", "model", 3 * whole // 4, "up2", "backward"),
    ]


def test_row_then_column_within_the_group(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("down", ("e", 32), ("h", 128), ROW)
    n.dense("up", ("h", 128), ("z", 64), COLUMN)
    share = 8 * 32 * 4
    assert told(predict(n)) == [
        ("all_to_all", "model", 3 * share // 4, "down", "forward"),
        ("all_to_all", "model", 3 * share // 4, "down", "backward"),
        ("all_reduce", "model", 2 * 3 * 32 * 128 * 4 // 4, "down", "forward"),
        ("all_reduce", "model", 2 * 3 * 32 * 128 * 4 // 4, "up", "backward"),
    ]
    inside = told(predict(n, ("data",), "data"))
    assert inside[0] == ("all_gather", "model", 3 * 32 * 32 * 4 // 4, "down", "backward")


@pytest.mark.parametrize("replicated_batch", ["all", "data"])
def test_leaving_for_a_replicated_layer(net, replicated_batch):
    def build(spec, width):
        n = net(64, {"data": 2, "model": 4})
        n.dense("first", ("x", 16), ("e", 32))
        n.dense("split", ("e", 32), ("h", width), spec)
        n.dense("head", ("h", width), ("y", 10))
        axes = ALL if replicated_batch == "all" else ("data",)
        return [c for c in told(predict(n, axes, replicated_batch)) if c[3] == "split"]

    share, group = 8 * 128 * 4, 32 * 128 * 4
    column, row = build(COLUMN, 128)[-2:], build(ROW, 128)[-2:]
    if replicated_batch == "all":
        assert column == [("all_to_all", "model", 3 * share // 4, "split", p) for p in ("forward", "backward")]
        assert row == [
            ("reduce_scatter", "model", 3 * group // 4, "split", "forward"),
            ("all_gather", "model", 3 * group // 4, "split", "backward"),
        ]
    else:
        assert column[-1] == ("all_gather", "model", 3 * group // 4, "split", "forward")
        assert row[-1] == ("all_reduce", "model", 2 * 3 * group // 4, "split", "forward")


def test_fully_sharded(net):
    """Gather forward, gather backward, reduce-scatter the gradient: (n-1)/n of the whole each; the bias is all-reduced.
    The first layer's input has no cotangent, so that its weight is not gathered again."""
    n = net(64, {"data": 8})
    n.dense("d1", ("x", 16), ("h", 32), ("data", None), ())
    n.dense("d2", ("h", 32), ("z", 64), ("data", None))
    predicted = predict(n, ("data",), "data")
    first, second = 7 * 16 * 32 * 4 // 8, 7 * 32 * 64 * 4 // 8
    assert [(c.op, c.axis, c.bytes) for c in predicted] == [
        ("all_gather", "data", first), ("reduce_scatter", "data", first), ("all_reduce", "data", 2 * 7 * 32 * 4 // 8),
        ("all_gather", "data", second), ("all_gather", "data", second), ("reduce_scatter", "data", second),
    ]  # fmt: skip
    assert [c.why.split(":")[0] for c in predicted if c.op == "all_gather"] == ["forward", "forward", "backward"]
    assert predict(n, ("data",), "all") == predicted  # over `data` weights are stored, whatever the layout of batches


def test_fully_sharded_over_the_whole_mesh(net):
    """A weight over data and model whose batch is over both is gathered whole, along one dim after the other, as its
    gradient is cut; no activation moves."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("d1", ("x", 16), ("h", 32), (ALL, None))
    n.dense("d2", ("h", 32), ("z", 64), ("model", "data"))
    predicted = predict(n)
    first, second = 7 * 16 * 32 * 4 // 8, 32 * 64 * 4
    gathers = [("all_gather", "model", 3 * second // 8), ("all_gather", "data", second // 2)]
    assert [(c.op, c.axis, c.bytes) for c in predicted] == [
        ("all_gather", "data+model", first), ("reduce_scatter", "data+model", first), *gathers, *gathers,
        ("reduce_scatter", "model", 3 * second // 4), ("reduce_scatter", "data", second // 8),
    ]  # fmt: skip


def test_fully_sharded_and_split(net):
    """A weight over (data, model): stored over data, used split over model; gradient of the quarter that a device
    uses."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 128), ("data", "model"))
    predicted = [c for c in predict(n, ("data",), "data") if c.layer == "up" and c.axis == "data"]
    assert [(c.op, c.bytes) for c in predicted] == [("all_gather", 32 * 128 * 4 // 4 // 2)] * 2 + [
        ("reduce_scatter", 32 * 128 * 4 // 4 // 2)
    ]
    assert ("all_reduce", "model", 2 * 3 * 32 * 32 * 4 // 4, "up", "backward") in told(predict(n, ("data",), "data"))


def test_split_optimizer_state(net):
    """ZeRO-1: a reduce-scatter and an all-gather take the place of the all-reduce, and send as much."""
    n = net(64, {"data": 4, "model": 2})
    n.dense("d", ("x", 16), ("h", 32))
    plain = predict(n)
    n.leaf("opt/mu", ("x", "h"), (16, 32), ("data", None), role="optimizer", follows="d/kernel")
    predicted = predict(n)
    assert [(c.op, c.axis) for c in predicted] == [
        ("reduce_scatter", "data"),
        ("all_gather", "data"),
        ("all_reduce", "model"),
    ]
    assert sum(c.bytes for c in predicted) == sum(c.bytes for c in plain)


def test_shared_input_is_gathered_once(net):
    """q, k and v read one value; `o` reads v's output, over the same heads."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    for name in "qkv":
        n.dense(name, ("e", 32), ("heads", 64), COLUMN)
    n.dense("o", ("heads", 64), ("e2", 32), ROW)
    assert [(c[0], c[3]) for c in told(predict(n, ("data",), "data"))] == [("all_reduce", "q"), ("all_reduce", "o")]


def test_square_chain_is_no_shared_input(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 32), ("a", 32))
    n.dense("d1", ("a", 32), ("b", 32), COLUMN)
    n.dense("d2", ("b", 32), ("c", 32), COLUMN)
    assert [c[3] for c in told(predict(n))] == ["d1", "d1", "d2", "d2"]


def test_square_chain_of_one_class_is_no_shared_input(net):
    """Where the dims of two layers are all in one class (tied storage), the second still reads what the first
    writes."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 32), ("a", 32))
    n.dense("d1", ("a", 32), ("a", 32), COLUMN)
    n.dense("d2", ("a", 32), ("a", 32), COLUMN)
    assert [c[3] for c in told(predict(n))] == ["d1", "d1", "d2", "d2"]


def test_one_weight_used_twice_reads_two_values(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("tower", ("e", 32), ("h", 128), COLUMN)
    once = predict(n)
    n.use("tower", "tower/kernel", {"batch": 64, "e": 32}, {"batch": 64, "h": 128})
    assert len(told(predict(n))) == 2 * len(told(once))


@pytest.mark.parametrize(("spec", "phase"), [(COLUMN, "backward"), (ROW, "forward")])
def test_recurrent_square_kernel_goes_by_names(net, spec, phase):
    """In h @ W both dims of W are in h's class: the names say which one is contracted. 10 trips."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("h", 32))
    n.dense("cell", ("h", 32), ("h", 32), spec, trips=10)
    ops = told(predict(n, ("data",), "data"))
    assert ("all_reduce", "model", 10 * 2 * 3 * 32 * 32 * 4 // 4, "cell", phase) in ops


def test_transposed_use_goes_by_classes(net):
    """A tied decoder, h @ W.T: what the encoder calls `out` is contracted here, so column-split there is row-split
    here."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("tied", ("e", 32), ("h", 128), COLUMN)
    n.use("tied", "tied/kernel", {"batch": 64, "h": 128}, {"batch": 64, "e": 32})
    assert [(c[0], c[4]) for c in told(predict(n, ("data",), "data"))] == [
        ("all_reduce", "backward"),
        ("all_reduce", "forward"),
    ]


@pytest.mark.parametrize(
    ("replicated_batch", "expected"), [("data", ["all_reduce"]), ("all", ["reduce_scatter", "all_gather"])]
)
def test_vocab_split_lookup(net, replicated_batch, expected):
    """Each device looks up the rows that it has; the results are summed. Ids are not counted."""
    n = net(64, {"data": 2, "model": 4})
    n.leaf("emb/table", ("vocab", "e"), (1000, 32), ("model", None), dim_names=("vocab", "features"))
    n.use(
        "emb",
        "emb/table",
        {"batch": 64, "t": 8},
        {"batch": 64, "t": 8, "e": 32},
        primitive="gather",
        data_dtype="int32",
    )
    n.dense("head", ("e", 32), ("y", 10))
    axes = ALL if replicated_batch == "all" else ("data",)
    predicted = [c for c in told(predict(n, axes, replicated_batch)) if c[3] == "emb"]
    assert [c[0] for c in predicted] == expected
    assert sum(c[2] for c in predicted) == 2 * 3 * (32 * 8 * 32 * 4) // 4


def test_tied_logits(net):
    """The table's features are contracted and its rows are the free dim, whatever the lookup called them."""
    n = net(64, {"data": 2, "model": 4})
    n.leaf("emb/table", ("vocab", "e"), (1000, 32), ("model", None), dim_names=("vocab", "features"))
    n.use("emb", "emb/table", {"batch": 64}, {"batch": 64, "e": 32}, primitive="gather", data_dtype="int32")
    n.use("emb", "emb/table", {"batch": 64, "e": 32}, {"batch": 64, "vocab": 1000})
    activations = told(predict(n, ("data",), "data"))
    # The lookup sums its rows; the logits stay split, and the cotangent of their input is summed over their columns.
    assert [(c[0], c[2], c[4]) for c in activations] == [
        ("all_reduce", 2 * 3 * 32 * 32 * 4 // 4, "forward"), ("all_reduce", 2 * 3 * 32 * 32 * 4 // 4, "backward"),
    ]  # fmt: skip


def test_experts_exchange_tokens(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.leaf("moe/up", ("expert", "e", "f"), (8, 32, 64), ("model", None, None), dim_names=("expert", "in", "out"))
    n.leaf("moe/down", ("expert", "f", "g"), (8, 64, 32), ("model", None, None), dim_names=("expert", "in", "out"))
    n.use("moe", "moe/up", {"expert": 8, "batch": 64, "e": 32}, {"expert": 8, "batch": 64, "f": 64})
    n.use("moe", "moe/down", {"expert": 8, "batch": 64, "f": 64}, {"expert": 8, "batch": 64, "g": 32})
    share = 8 * 64 * 32 * 4 // 8
    assert (
        told(predict(n))
        == [("all_to_all", "model", 3 * share // 4, "moe", phase) for phase in ("forward", "backward")] * 2
    )


def test_ragged_experts(net):
    """In a ragged dot neither tokens nor results have the expert dim: its name says what it is."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.leaf("moe/up", ("expert", "e", "f"), (8, 32, 64), ("model", None, None), dim_names=("expert", "in", "out"))
    n.use("moe", "moe/up", {"batch": 64, "e": 32}, {"batch": 64, "f": 64}, primitive="ragged_dot")
    assert [c[0] for c in told(predict(n))] == ["all_to_all"] * 4


def test_experts_over_the_data_axis_are_not_gathered(net):
    n = net(64, {"data": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.leaf("moe/up", ("expert", "e", "f"), (8, 32, 64), ("data", None, None), dim_names=("expert", "in", "out"))
    n.use("moe", "moe/up", {"expert": 8, "batch": 64, "e": 32}, {"expert": 8, "batch": 64, "f": 64})
    predicted = predict(n, ("data",), "data")
    assert {c.op for c in predicted if c.layer == "moe"} == {"all_to_all"}


def test_dtypes_and_unbatched_data(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 128), COLUMN, data_dtype="bfloat16")
    assert told(predict(n, ("data",), "data")) == [("all_reduce", "model", 2 * 3 * 32 * 32 * 2 // 4, "up", "backward")]
    graph = dataclasses.replace(n.graph(), example_atoms=frozenset())  # nothing is an example: every device sees it all
    (up,) = told(predict_collectives(LaidOutStep(graph, n.plans, n.layer_plans(), n.mesh, ("data",), "data")))
    assert up[2] == 2 * 3 * 64 * 32 * 2 // 4


def test_evaluation_has_no_backward_pass(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32), ("data", None))
    n.dense("up", ("e", 32), ("h", 128), COLUMN)
    n.dense("down", ("h", 128), ("y", 32), COLUMN)
    full, forward = predict(n), predict(n, backward=False)
    assert forward and set(forward) < set(full)
    assert all(c.why.startswith("forward") for c in forward)


def test_uses_of_a_traced_backward_pass_are_passed_over(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 128), COLUMN)
    before = predict(n)
    n.use("up", "up/kernel", {"batch": 64, "h": 128}, {"batch": 64, "e": 32}, backward=True)
    assert predict(n) == before


def test_layer_names_come_from_the_plan(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.leaf("loose/scale", ("e",), (32,))
    layers = (dataclasses.replace(n.layer_plans()[0], name="renamed"),)
    predicted = predict_collectives(LaidOutStep(n.graph(), n.plans, layers, n.mesh, ALL, "all"))
    assert [c.layer for c in predicted] == ["renamed", "loose"]
