"""What was said of arrays, as specs over axes of a mesh, and as decisions on parameters that share dims with them."""

from __future__ import annotations

import pytest

from splitjax.errors import PinError
from splitjax.mesh import MeshShape
from splitjax.rules import assign, load_rules
from splitjax.rules.pins import OPEN, Pin, Said, is_own, resolve
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import RuleSet

MESH = MeshShape.of({"data": 2, "fsdp": 2, "tensor": 4, "alone": 1})


@pytest.fixture
def block(builder):
    builder.layer("up", "dense", kernel="in:16 out:32@h", bias="_:32@h")
    builder.layer("down", "dense", kernel="in:32@h out:16@o", bias="_:16@o")
    builder.moments()
    return builder.graph()


def said(names, logical=None, path="params/up/kernel", **fields):
    return Said(path, f"the note on {path}", names, logical, **fields)


@pytest.mark.parametrize(
    ("names", "logical", "spec"),
    [
        ((None, "tensor"), None, (None, "tensor")),
        (("storage", "tensor"), None, ("fsdp", "tensor")),  # a role means its axes
        (("data", None), None, ("data", None)),  # an axis goes before the role of its name
        (("fsdp",), None, ("fsdp", None)),
        ((("data", "fsdp"), "tensor"), None, (("data", "fsdp"), "tensor")),
        ((("fsdp", "data"), "tensor"), None, (("data", "fsdp"), "tensor")),  # in the mesh's order
        ((OPEN, "tensor"), None, (OPEN, "tensor")),
        ((None, None), None, (None, None)),
        (("alone", "tensor"), None, (None, "tensor")),
        (("embed", "tensor"), None, (OPEN, "tensor")),  # a name without meaning leaves its dim to rules
        (("embed", "mlp"), (("mlp", "tensor"), ("embed", None)), (None, "tensor")),
        (("embed", "mlp"), (("mlp", "tensor"),), (None, "tensor")),  # without a rule of its own: whole, as in Flax
        (("embed", "mlp"), (("embed", "tensor"), ("mlp", "tensor"), ("mlp", "fsdp")), ("tensor", "fsdp")),
        (("embed", "mlp"), (("embed", ("data", "fsdp")), ("mlp", "tensor")), (("data", "fsdp"), "tensor")),
    ],
)
def test_names_become_axes(block, names, logical, spec):
    pins = resolve([said(names, logical)], block, MESH)
    assert pins.by_path == {"params/up/kernel": Pin(spec, "the note on params/up/kernel")}


def test_what_pins_nothing(block):
    pins = resolve([said(("embed", "mlp")), said((None,), path="params/up/bias", is_placed=True)], block, MESH)
    assert pins.by_path == {}
    (note,) = pins.notes
    assert "'embed', 'mlp'" in note and "the note on params/up/kernel" in note


@pytest.mark.parametrize("names", [("tensor", "tensor"), ("tensor", None, None), (None, ("data", "fsdp", "tensor"))])
def test_what_is_wrong_is_reported_at_the_parameter_and_not_at_its_moment(builder, names):
    builder.layer("up", "dense", kernel="in:16 out:24@h")
    builder.moments()
    graph = builder.graph()
    moment = next(leaf.path for leaf in graph.leaves if leaf.follows == "params/up/kernel")
    with pytest.raises(PinError) as caught:
        resolve([said(names, path=moment), said(names)], graph, MESH)
    assert caught.value.place == "the note on params/up/kernel"
    with pytest.raises(PinError) as caught:  # what the moment alone says is reported there
        resolve([said(names, path=moment), said((None, "tensor"))], graph, MESH)
    assert caught.value.place == f"the note on {moment}"


def test_two_that_say_the_same_are_one_and_others_are_an_error(block):
    annotated, lies = said((OPEN, "tensor")), said(("fsdp", "tensor"), is_placed=True)
    (pin,) = resolve([annotated, lies], block, MESH).by_path.values()
    assert pin.spec == ("fsdp", "tensor") and not pin.is_placed
    with pytest.raises(PinError, match=r"P\(None, 'tensor'\) by the note .*, and to P\('fsdp', 'tensor'\) by the note"):
        resolve([said((None, "tensor")), lies], block, MESH)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"names": (None, None, "tensor")}, "3 names, and the array 2 dims"),
        ({"names": ("tensor", "tensor")}, "'tensor' would split it twice"),
        ({"names": (("fsdp", "storage"), None)}, "'fsdp' would split it twice"),
        ({"names": (("data", "fsdp", "tensor"), None), "path": "params/up/bias"}, "2 names, and the array 1 dims"),
        ({"names": (("fsdp", "data"), None), "is_placed": True}, "not the mesh's order"),
    ],
)
def test_a_pin_that_cannot_be(block, fields, problem):
    with pytest.raises(PinError, match=problem):
        resolve([said(**fields)], block, MESH)


def specs(found):
    return {leaf.path: leaf.spec for leaf in found.leaves}


def test_a_pin_spreads_like_a_rule_and_what_it_stores_does_not(block):
    rules, mesh = load_rules("megatron"), MeshShape.of({"data": 2, "tensor": 4})
    pins = {"params/up/kernel": Pin(("data", "tensor"), "the note")}
    found = assign(block, rules, mesh, pins)
    spec = specs(found)
    assert spec["params/up/kernel"] == spec["opt/mu/up/kernel"] == ("data", "tensor")
    assert spec["params/up/bias"] == ("tensor",) and spec["params/down/kernel"][0] == "tensor"
    stored = assign(block, rules, mesh, {"params/up/kernel": Pin((None, "data"), "the note")})
    assert specs(stored)["params/up/kernel"] == (None, "data")
    assert specs(stored)["params/up/bias"] == (None,)
    rule = {leaf.path: leaf.rule for leaf in stored.leaves}
    assert rule["params/up/kernel"] == "pinned by the note"
    (note,) = [note for note in stored.notes if note.startswith("params/up/kernel")]
    assert "P(None, 'data'); rule 'dense' of 'megatron' would put it to" in note


def test_arrays_that_lie_where_rules_put_them_are_no_reason(block):
    lies = {"params/up/kernel": Pin((None, "tensor"), "an array", is_placed=True)}
    mesh = MeshShape.of({"data": 2, "tensor": 4})
    by_rules = assign(block, load_rules("megatron"), mesh)
    assert assign(block, load_rules("megatron"), mesh, lies) == by_rules
    elsewhere = {"params/up/kernel": Pin(("tensor", None), "an array", is_placed=True)}
    assert specs(assign(block, load_rules("megatron"), mesh, elsewhere))["params/up/kernel"] == ("tensor", None)


def test_parameters_that_share_storage_are_pinned_alike(builder):
    builder.layer("a", "dense", kernel="in:16#i out:32#t")
    builder.layer("b", "dense", kernel="in:32#t out:16#o")
    builder.layer("c", "dense", kernel="in:6#c out:32#t")
    graph, rules, mesh = builder.graph(), load_rules("megatron"), MeshShape.of({"data": 2, "tensor": 4})
    first, second = Pin((None, "tensor"), "one"), Pin(("tensor", None), "another")
    found = assign(graph, rules, mesh, {"params/a/kernel": first, "params/b/kernel": second})
    assert specs(found)["params/b/kernel"] == ("tensor", None)
    with pytest.raises(PinError, match=r"params/b/kernel .* another .*, and params/a/kernel, .* pinned by one"):
        assign(graph, rules, mesh, {"params/a/kernel": first, "params/b/kernel": Pin((None, "tensor"), "another")})
    with pytest.raises(PinError, match=r"tensor would split both"):
        both = {"params/a/kernel": first, "params/c/kernel": Pin(("tensor", OPEN), "another")}
        assign(graph, rules, MeshShape.of({"data": 2, "tensor": 2}), both)


def test_shipped_sets_give_way_and_own_ones_do_not(block):
    assert not is_own(load_rules("megatron"))
    rule = Rule("columns", kind="dense", shard=[{"out": "tensor"}])
    own = RuleSet("mine", (rule,), allow_replicated=True)
    assert is_own(own) and is_own(RuleSet("megatron", (rule,)))
    pins = {"params/up/kernel": Pin(("fsdp", None), "the note")}
    with pytest.raises(PinError, match=r"the note to P\('fsdp'\), and rule 'columns' of your rule set 'mine' puts it"):
        assign(block, own, MESH, pins)
    # A rule that matches and finds nothing that divides says nothing.
    odd = RuleSet("odd", (Rule("by five", path="**", shard=[{"none": "tensor"}]),), allow_replicated=True)
    assert specs(assign(block, odd, MESH, pins))["params/up/kernel"] == ("fsdp", None)
