"""Assignments on graphs written by hand: what is sharded, by which rule, and what is said where nothing can be."""

from __future__ import annotations

import dataclasses

import pytest

from splitjax.errors import MeshError, RuleError
from splitjax.mesh import MeshShape
from splitjax.rules import Rule, RuleSet, assign, load_rules

M4 = {"data": 2, "model": 4}


def specs(found):
    return {leaf.path: leaf.spec for leaf in found.leaves}


def plans(found):
    return {leaf.path: leaf for leaf in found.leaves}


def one_rule(*shard, **fields):
    fields = {"ties": "hard", **fields}
    return RuleSet("mine", (Rule("r", shard=shard, **fields),), allow_replicated=True)


def test_splitbrain_on_vgg(vgg):
    found = assign(vgg, load_rules("splitbrain"), M4)
    spec = specs(found)
    assert spec["params/conv/kernel"] == (None,) * 4 and spec["params/norm/scale"] == (None,)
    assert spec["params/fc1/kernel"] == spec["params/fc2/kernel"] == (None, "model")
    assert spec["params/fc1/bias"] == spec["params/fc2/bias"] == ("model",)
    assert spec["params/fc3/kernel"] == ("model", None) and spec["params/fc3/bias"] == (None,)  # 10 classes: by rows
    rule = {leaf.path: leaf.rule for leaf in found.leaves}
    assert rule["params/conv/kernel"] == "conv" and rule["params/fc1/kernel"] == "dense"
    assert rule["params/fc1/bias"] == "dense (with params/fc1/kernel)"
    assert rule["params/fc3/bias"] == "dense (with params/fc3/kernel)"
    assert found.batch_axes == ("data", "model") and found.replicated_batch == "all" and found.rules == "splitbrain"
    assert spec["batch/image"] == (("data", "model"), None) and rule["batch/image"] == "batch"
    assert found.dead == ("attention", "recurrent", "expert", "embedding") and found.notes == ()


def test_leaves_and_layers_are_complete_and_in_order(vgg):
    found = assign(vgg, load_rules("splitbrain"), M4)
    assert [leaf.path for leaf in found.leaves] == [leaf.path for leaf in vgg.leaves]
    assert [layer.name for layer in found.layers] == [layer.name for layer in vgg.layers]
    fc1 = found.layers[2]
    assert (fc1.kind, fc1.rule, fc1.note) == ("dense", "dense", "")
    assert fc1.params == ("params/fc1/kernel", "params/fc1/bias") and fc1.specs == ((None, "model"), ("model",))


def test_optimizer_state_follows(vgg):
    found = assign(vgg, load_rules("splitbrain"), M4)
    plan = plans(found)
    for leaf in vgg.params:
        moment = plan[leaf.path.replace("params", "opt/mu", 1)]
        assert moment.spec == plan[leaf.path].spec and moment.rule == f"follows {leaf.path}"
        assert moment.bytes_per_device == plan[leaf.path].bytes_per_device
    assert plan["opt/mu/fc1/kernel"].bytes_per_device == 3136 * 4096
    assert plan["opt/mu/conv/bias"].bytes_per_device == 64 * 4


def test_state_that_is_not_like_its_parameter(builder):
    builder.layer("fc", "dense", kernel="in:16#i out:32#o")
    builder.leaf("opt/rows", "_:16#i", "optimizer", follows="params/fc/kernel")
    builder.leaf("opt/columns", "_:32#o", "optimizer", follows="params/fc/kernel")
    builder.leaf("opt/square", "_:32#o _:32#o", "optimizer", follows="params/fc/kernel")
    builder.layer("heads", "dense", kernel="in:16 out:2x8#p")
    builder.leaf("opt/odd", "_:2x3#p", "optimizer")
    builder.leaf("opt/count", "", "optimizer")
    builder.leaf("stats/other", "_:1024 _:1024", "statistic")
    builder.leaf("stats/mean", "_:32#o", "statistic")
    builder.leaf("key", "_:2", "input")
    plan = plans(assign(builder.graph(), one_rule({"out": "model"}), M4))
    assert plan["opt/rows"].spec == (None,) and plan["opt/columns"].spec == ("model",)
    assert plan["opt/square"].spec == ("model", None) and "already splits" in plan["opt/square"].note
    assert plan["params/heads/kernel"].spec == (None, "model") and plan["opt/odd"].spec == (None,)
    assert plan["opt/odd"].note == "dim 0 of size 6 (2 x 3) does not divide by model=4"
    assert plan["opt/count"].rule == "default" and plan["opt/count"].note == ""
    assert plan["stats/mean"].spec == ("model",) and plan["stats/mean"].rule == "follows params/fc/kernel"
    assert plan["stats/other"].rule == "default" and "follows no parameter" in plan["stats/other"].note
    assert plan["key"].rule == "input" and plan["key"].spec == (None,)


def test_megatron_is_column_then_row(block):
    found = assign(block, load_rules("megatron"), M4)
    spec, rule = specs(found), {leaf.path: leaf.rule for leaf in found.leaves}
    for name in "qkv":
        assert spec[f"params/{name}/kernel"] == (None, "model") and spec[f"params/{name}/bias"] == ("model",)
    assert spec["params/o/kernel"] == ("model", None) and spec["params/o/bias"] == (None,)
    assert spec["params/fc1/kernel"] == (None, "model") and spec["params/fc1/bias"] == ("model",)
    assert spec["params/fc2/kernel"] == ("model", None) and spec["params/fc2/bias"] == (None,)
    assert spec["params/embed/table"] == ("model", None) and spec["params/ln/scale"] == (None,)
    assert rule["params/q/kernel"] == "attention" and rule["params/q/bias"] == "attention (with params/q/kernel)"
    assert rule["params/k/kernel"] == rule["params/o/kernel"] == "ties with params/q/kernel"
    assert rule["params/fc2/kernel"] == "ties with params/fc1/kernel"
    assert rule["params/fc2/bias"] == "dense (with params/fc2/kernel)"
    assert found.batch_axes == ("data",) and spec["batch/image"] == ("data", None)


def test_megatron_alternates_over_three_dense_layers(vgg):
    spec = specs(assign(vgg, load_rules("megatron"), M4))
    assert spec["params/fc1/kernel"] == (None, "model") and spec["params/fc2/kernel"] == ("model", None)
    assert spec["params/fc2/bias"] == (None,)
    assert spec["params/fc3/kernel"] == ("model", None)  # columns first would be 10 classes over 4 devices
    assert spec["params/conv/kernel"] == (None,) * 4


def test_hard_ties_do_not_cross_layers(block):
    spec = specs(assign(block, load_rules("splitbrain"), M4))
    assert spec["params/fc2/kernel"] == (None, "model") and spec["params/o/kernel"] == (None, "model")
    assert spec["params/embed/table"] == (None, "model")


def test_experts(moe):
    for name in ("splitbrain", "megatron"):
        spec = specs(assign(moe, load_rules(name), M4))
        assert spec["params/experts/w1"] == spec["params/experts/w2"] == ("model", None, None)
        assert spec["params/experts/b1"] == spec["params/experts/b2"] == ("model", None)
        assert spec["params/router/kernel"] == (None, "model")


def test_experts_that_do_not_divide(build):
    graph = build([("experts", "expert", {"w1": "expert:6@e in:64 out:256@f", "w2": "expert:6@e in:256@f out:64"})])
    spec = specs(assign(graph, load_rules("megatron"), M4))
    assert spec["params/experts/w1"] == (None, None, "model") and spec["params/experts/w2"] == (None, "model", None)


def test_one_layer_with_several_matrices(build):
    """Query and output in one layer, biases listed first: each bias follows its own matrix."""
    graph = build(
        [
            (
                "att",
                "attention",
                {
                    "q": "in:64@d out:64@h",
                    "obias": "_:64@d2",
                    "qbias": "_:64@h",
                    "okernel": "in:64@h out:64@d2",
                },
            )
        ]
    )
    plan = plans(assign(graph, load_rules("megatron"), M4))
    assert plan["params/att/okernel"].spec == ("model", None) and plan["params/att/qbias"].spec == ("model",)
    assert (
        plan["params/att/obias"].spec == (None,)
        and plan["params/att/obias"].rule == "attention (with params/att/okernel)"
    )


def test_square_recurrent_kernel_goes_by_columns(build):
    """Both dims of the kernel are in one local class: the axis lands on the columns, as in the input kernel."""
    graph = build([("lstm", "recurrent", {"ih": "in:32@x out:64@h", "hh": "in:64@h out:64@h", "b": "_:64@h"})])
    for name in ("splitbrain", "megatron"):
        spec = specs(assign(graph, load_rules(name), M4))
        assert spec["params/lstm/ih"] == spec["params/lstm/hh"] == (None, "model") and spec["params/lstm/b"] == (
            "model",
        )


def test_a_layer_with_unlinked_matrices_shards_each(build):
    graph = build([("att", "attention", {"a": "in:64 out:64", "b": "in:64 out:64"})])
    spec = specs(assign(graph, load_rules("splitbrain"), M4))
    assert spec["params/att/a"] == spec["params/att/b"] == (None, "model")


def test_fsdp(vgg):
    found = assign(vgg, load_rules("fsdp"), M4)
    plan = plans(found)
    assert plan["params/fc1/kernel"].spec == (None, ("data", "model"))  # 4096 is larger than 3136
    assert plan["params/fc1/kernel"].bytes_per_device == 3136 * 512 * 4
    assert plan["params/fc2/kernel"].spec == (("data", "model"), None)  # the first of two equal ones
    assert plan["params/fc1/bias"].spec == plan["params/fc2/bias"].spec == (("data", "model"),)
    assert plan["params/fc3/kernel"].spec == (("data", "model"), None)
    assert plan["params/conv/kernel"].spec == (None, None, None, ("data", "model"))
    assert plan["params/norm/scale"].spec == (None,) and plan["params/norm/scale"].rule == "small"
    assert found.batch_axes == ("data", "model")
    assert assign(vgg, load_rules("fsdp"), {"data": 8}).batch_axes == ("data",)


def test_fsdp_falls_back_to_fewer_devices(build):
    layers = [("a", "dense", {"kernel": "in:33 out:34"}), ("b", "dense", {"kernel": "in:35 out:36"})]
    graph = build([*layers, ("c", "dense", {"kernel": "in:48 out:48"})], batch=48)
    spec = specs(assign(graph, load_rules("fsdp"), {"data": 4, "model": 6}))
    assert spec["params/c/kernel"] == (("data", "model"), None)
    assert spec["params/b/kernel"] == (None, "data") and spec["params/a/kernel"] == (None, None)
    spec = specs(assign(build(layers, batch=33 * 2), load_rules("fsdp"), {"data": 11, "model": 2}))
    assert spec["params/a/kernel"] == ("data", None) and spec["params/b/kernel"] == (None, "model")


def test_fsdp_of_a_small_model_on_data_alone_is_an_error(build):
    with pytest.raises(RuleError, match="min_size=1024"):
        assign(build([("fc", "dense", {"kernel": "in:8 out:8"})]), load_rules("fsdp"), {"data": 8})


def test_data_parallel(vgg):
    found = assign(vgg, load_rules("data_parallel"), M4)
    assert all(entry is None for leaf in found.leaves if leaf.is_state for entry in leaf.spec)
    assert found.batch_axes == ("data", "model") and {leaf.rule for leaf in found.leaves if leaf.role == "param"} == {
        "all"
    }


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 8, "model": 1}, {"data": 1, "model": 1}])
@pytest.mark.parametrize("name", ["splitbrain", "megatron"])
def test_an_absent_axis_has_size_one(vgg, mesh, name):
    found = assign(vgg, load_rules(name), mesh)
    plan = plans(found)
    assert all(entry is None for leaf in found.leaves if leaf.is_state for entry in leaf.spec)
    assert plan["params/fc3/kernel"].rule == "dense" and plan["params/fc3/kernel"].note == ""
    assert found.batch_axes == (("data",) if mesh["data"] > 1 else ())
    assert found.notes == ()


def test_axes_of_size_one_leave_a_tuple(flat):
    rules = one_rule({"out": ["data", "model"]}, ties="hard")
    assert specs(assign(flat, rules, {"data": 1, "model": 2}))["params/w1/w"] == (None, "model")
    assert specs(assign(flat, rules, {"data": 2, "model": 2}))["params/w1/w"] == (None, ("data", "model"))
    twice = one_rule({"in": "data", "out": ["data", "model"]})
    assert specs(assign(flat, twice, {"data": 1, "model": 2}))["params/w1/w"] == (None, "model")
    found = plans(assign(flat, twice, {"data": 2, "model": 2}))["params/w1/w"]
    assert found.spec == (None, None) and "data would split both in and out" in found.note


def test_reasons_of_a_misfit(build):
    graph = build([("fc", "dense", {"kernel": "in:6 out:10@h", "bias": "_:10@h"})])
    found = assign(graph, one_rule({"out": "model"}, {"vocab": "model"}), {"model": 4})
    kernel, bias = plans(found)["params/fc/kernel"], plans(found)["params/fc/bias"]
    assert kernel.rule == "r" and kernel.note == "out 10 does not divide by model=4; no dim named 'vocab'"
    assert bias.rule == "r (with params/fc/kernel)" and bias.note == ""
    assert found.notes == (f"params/fc/kernel: {kernel.note}",) and found.layers[0].note == kernel.note


def test_atoms_have_to_divide(build):
    graph = build(
        [("qkv", "attention", {"kernel": "in:64 out:3x16"}), ("heads", "attention", {"kernel": "in:64 out:2x16"})]
    )
    plan = plans(assign(graph, one_rule({"out": "model"}), {"model": 4}))
    assert plan["params/qkv/kernel"].spec == (None, None)
    assert plan["params/qkv/kernel"].note == "out 48 (3 x 16) does not divide by model=4"
    assert plan["params/heads/kernel"].spec == (None, "model")


def test_replicating_rule_overrides_ties(build):
    layers = [("a", "dense", {"w": "in:8 out:16@h", "b": "_:16@h"}), ("b", "dense", {"w": "in:16@h out:8"})]
    keep = Rule("keep", path="params/b/*")
    dense = Rule("dense", shard={"out": "model"})
    plan = plans(assign(build(layers), RuleSet("m", (keep, dense)), {"model": 4}))
    assert plan["params/b/w"].spec == (None, None) and plan["params/b/w"].rule == "keep"
    keep_bias = Rule("keep", path="params/a/b")
    plan = plans(assign(build(layers), RuleSet("m", (keep_bias, dense)), {"model": 4}))
    assert plan["params/a/b"].spec == (None,) and plan["params/a/w"].spec == (None, "model")


def test_a_tie_stands_against_an_explicit_rule_and_hard_keeps_it_away(build):
    layers = [("a", "dense", {"w": "in:8 out:16@h"}), ("b", "dense", {"w": "in:16@h out:8"})]
    dense = Rule("dense", path="params/a/*", shard={"out": "model"})
    found = assign(
        build(layers), RuleSet("m", (Rule("mine", path="params/b/*", shard={"out": "model"}), dense)), {"model": 4}
    )
    tied = plans(found)["params/b/w"]
    assert tied.spec == ("model", None) and tied.rule == "ties with params/a/w"
    assert "rule 'mine' gives way: model already splits in" in tied.note and len(found.notes) == 1
    found = assign(
        build(layers),
        RuleSet("m", (Rule("mine", path="params/b/*", shard={"out": "model"}, ties="hard"), dense)),
        {"model": 4},
    )
    assert plans(found)["params/b/w"].spec == (None, "model") and plans(found)["params/b/w"].rule == "mine"


def test_a_tie_and_a_second_axis(build):
    layers = [("a", "dense", {"w": "in:8 out:16@h"}), ("b", "dense", {"w": "in:16@h out:8"})]
    both = [{"out": "model", "in": "data"}, {"in": "model", "out": "data"}]
    plan = plans(assign(build(layers), RuleSet("m", (Rule("d", shard=both),)), {"data": 2, "model": 4}))
    assert plan["params/a/w"].spec == ("data", "model") and plan["params/b/w"].spec == ("model", "data")
    assert plan["params/b/w"].rule == "d (ties with params/a/w)"


def test_parameters_without_a_rule_take_ties_and_are_whole_otherwise(build):
    layers = [
        ("a", "dense", {"w": "in:8 out:16@h", "b": "_:16@h"}),
        ("b", "other", {"w": "in:16@h out:8"}),
        ("c", "other", {"w": "in:5 out:8"}),
    ]
    plan = plans(assign(build(layers), RuleSet("m", (Rule("d", path="**/a/w", shard={"out": "model"}),)), {"model": 4}))
    assert plan["params/a/b"].spec == ("model",) and plan["params/a/b"].rule == "d (with params/a/w)"
    assert plan["params/b/w"].spec == ("model", None) and plan["params/b/w"].rule == "ties with params/a/w"
    assert plan["params/c/w"].spec == (None, None) and plan["params/c/w"].rule == "default"


def test_shared_storage_agrees(build):
    """A head tied to the table by storage: it has the table's axis, although its own rule would take columns."""
    layers = [
        ("embed", "embedding", {"table": "vocab:100#v features:64#f"}),
        ("head", "dense", {"kernel": "in:64#f out:100#v"}),
    ]
    plan = plans(assign(build(layers), load_rules("splitbrain"), M4))
    assert plan["params/embed/table"].spec == (None, "model") and plan["params/head/kernel"].spec == ("model", None)
    assert plan["params/head/kernel"].rule == "ties with params/embed/table"


def test_shared_storage_has_to_fit_everywhere(build):
    """The square array would be split twice, so its partner stays whole on that dim and takes the next alternative."""
    layers = [("a", "dense", {"w": "in:8 out:16#t"}), ("b", "dense", {"w": "in:16#t out:16#t"})]
    plan = plans(
        assign(build(layers), RuleSet("m", (Rule("d", shard=[{"out": "model"}, {"in": "model"}]),)), {"model": 4})
    )
    assert plan["params/a/w"].spec == ("model", None)
    assert plan["params/b/w"].spec == (None, None) and "stays whole, as in params/a/w" in plan["params/b/w"].note


def test_a_parameter_of_two_layers_is_decided_once(builder):
    builder.layer("embed", "embedding", table="vocab:100 features:64")
    builder.layer("fc", "dense", kernel="in:64 out:64")
    graph = builder.graph()
    tied = dataclasses.replace(graph.layers[0], name="attend", kind="dense")
    found = assign(dataclasses.replace(graph, layers=(*graph.layers, tied)), load_rules("splitbrain"), M4)
    assert found.layers[-1].specs == ((None, "model"),) and found.layers[-1].rule == "embedding"


def test_an_own_rule_outranks_the_weight(build):
    """By path, or by replicating; a rule of another size alone does not."""
    graph = build([("fc", "dense", {"w": "in:8 out:16@h", "b": "_:16@h"})])
    dense = Rule("dense", "dense", shard={"out": "model"})
    by_path = Rule("mine", path="**/b", shard={"out": "data"})
    bias = plans(assign(graph, RuleSet("m", (by_path, dense)), M4))["params/fc/b"]
    assert (bias.spec, bias.rule) == (("data",), "mine")
    whole = Rule("mine", "dense", max_size=16)
    bias = plans(assign(graph, RuleSet("m", (whole, dense)), M4))["params/fc/b"]
    assert (bias.spec, bias.rule) == ((None,), "mine")
    by_size = Rule("mine", "dense", max_size=16, shard={"out": "data"})
    bias = plans(assign(graph, RuleSet("m", (by_size, dense)), M4))["params/fc/b"]
    assert (bias.spec, bias.rule) == (("model",), "dense (with params/fc/w)")


def test_rules_of_sizes_decide_every_array_by_itself(build):
    graph = build([("att", "attention", {"q": "in:32 out:64@h", "o": "in:64@h out:128"})])
    plan = plans(assign(graph, load_rules("fsdp"), M4))
    assert plan["params/att/q"].spec == plan["params/att/o"].spec == (None, ("data", "model"))
    assert plan["params/att/o"].rule == "shard"


def test_positions_and_empty_last_alternative(build):
    graph = build([("a", "dense", {"w": "_:8 _:6"}), ("b", "dense", {"w": "_:8 _:7"})])
    plan = plans(assign(graph, one_rule({-1: "model"}, {}), {"model": 2}))
    assert plan["params/a/w"].spec == (None, "model")
    assert plan["params/b/w"].spec == (None, None) and plan["params/b/w"].rule == "r" and plan["params/b/w"].note == ""


def test_an_unlinked_vector_is_noted_on_itself_only(build):
    graph = build([("lstm", "recurrent", {"hh": "in:8 out:8", "b": "_:8", "other": "_:8 _:8"})])
    found = assign(graph, load_rules("splitbrain"), M4)
    assert plans(found)["params/lstm/b"].note == "no dim named 'out'; no dim named 'in'"
    assert found.notes == ("params/lstm/other: no dim named 'out'; no dim named 'in'",)


def test_reasons_of_positions_and_sizes(build):
    graph = build([("fc", "dense", {"kernel": "in:6 out:10", "bias": "out:10"})])
    plan = plans(assign(graph, one_rule({5: "model"}, {-1: "model"}, {"largest": "model"}), {"model": 4}))
    assert (
        plan["params/fc/kernel"].note
        == "no dim 5; out 10 does not divide by model=4; no open dim of (6, 10) divides by model=4"
    )


def test_a_rule_set_that_does_nothing_is_an_error(flat, vgg):
    with pytest.raises(RuleError) as caught:
        assign(flat, RuleSet("mine", (Rule("conv", "conv", shard={"out": "model"}), Rule("rest"))), M4)
    message = str(caught.value)
    assert "params/w1/w (16, 32) (dense)" in message and "rule 'conv' (kind=conv): matches none of them" in message
    assert "rule 'rest' (everything): replicates 2 parameters on purpose" in message and "model=4" in message
    with pytest.raises(RuleError, match="does not divide by model=7"):
        assign(flat, RuleSet("mine", (Rule("d", shard={"out": "model"}),)), {"model": 7})
    with pytest.raises(RuleError, match="does not name 'expert'"):
        assign(vgg, load_rules("splitbrain"), {"model": 2, "expert": 2})
    with pytest.raises(RuleError, match="no rules"):
        assign(flat, RuleSet("mine"), M4)
    found = assign(flat, RuleSet("mine", allow_replicated=True), M4)
    assert {leaf.rule for leaf in found.leaves if leaf.role == "param"} == {"default"}


def test_unknown_axes(flat):
    with pytest.raises(MeshError, match="no axis 'x'") as caught:
        assign(flat, RuleSet("mine", (Rule("d", shard={"out": "x"}),)), M4)
    assert "rule set 'mine', rule 'd'" in str(caught.value)
    found = assign(flat, RuleSet("mine", (Rule("d", shard={"out": "tensor"}),)), MeshShape.of({"data": 2, "tensor": 2}))
    assert specs(found)["params/w1/w"] == (None, "tensor") and specs(found)["params/w2/w"] == ("tensor", None)
    with pytest.raises(MeshError, match="no axis 'x'"):
        assign(flat, RuleSet("mine", (Rule("d", shard={"out": "model"}),), axes=("x",)), M4)


def test_batch_that_does_not_divide(build):
    layers = [("fc", "dense", {"kernel": "in:8 out:8"})]
    found = assign(build(layers, batch=30), load_rules("splitbrain"), M4)
    assert found.batch_axes == ("data",) and any(
        "30 examples do not divide by data x model=8" in n for n in found.notes
    )
    assert [leaf.spec[0] for leaf in found.leaves if leaf.role == "batch"] == ["data"]
    assert assign(build(layers, batch=12), load_rules("splitbrain"), M4).batch_axes == ("model",)
    odd = assign(build(layers, batch=5), load_rules("splitbrain"), M4)
    assert odd.batch_axes == () and any("no axis" in note for note in odd.notes)
    megatron = assign(build(layers, batch=30), load_rules("megatron"), M4)
    assert megatron.batch_axes == ("data",) and not megatron.notes


def test_a_step_without_parameters(builder):
    assert assign(builder.graph(), load_rules("splitbrain"), M4).notes == (
        "the step has no parameters, so no rule applies",
    )
