"""Rules by themselves: validation, path globs, shapes, dim references, even splits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitjax.errors import RuleError
from splitjax.rules import Rule, RuleSet
from splitjax.rules.match import candidates, divides, first_match, glob_pattern, matches, named_params, shape_matches
from splitjax.trace.graph import Leaf


def leaf(path="params/fc/kernel", shape=(4, 8), names=("in", "out")):
    return Leaf(0, path, shape, "float32", "param", True, tuple((i,) for i in range(len(shape))), names)


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("params/*/kernel", "params/fc/kernel", True),
        ("params/*/kernel", "params/a/b/kernel", False),
        ("params/**/kernel", "params/a/b/kernel", True),
        ("params/**/kernel", "params/kernel", True),
        ("**/kernel", "kernel", True),
        ("**/kernel", "params/mykernel", False),
        ("**", "params/fc/kernel", True),
        ("*", "params/fc", False),
        ("**/fc[12]/*", "params/fc2/bias", True),
        ("**/fc[!12]/*", "params/fc2/bias", False),
        ("**/fc?/bias", "params/fc2/bias", True),
        ("a[!b]c", "a/c", False),
        ("a.c", "abc", False),
        ("params/layers/0/w[", "params/layers/0/w[", True),
        ("**/Dense", "params/dense", False),
    ],
)
def test_glob(glob, path, expected):
    assert (glob_pattern(glob).fullmatch(path) is not None) == expected


@pytest.mark.parametrize(
    ("pattern", "shape", "expected"),
    [
        ((None, 8), (4, 8), True),
        ((None, 8), (4, 9), False),
        ((None, 8), (1, 4, 8), False),
        ((..., 8), (1, 4, 8), True),
        ((..., 8), (8,), True),
        ((4, ..., 8), (8,), False),
        ((4, ...), (4, 1, 1), True),
        ((), (), True),
        ((...,), (), True),
    ],
)
def test_shape_pattern(pattern, shape, expected):
    assert shape_matches(pattern, shape) == expected


def test_every_matcher_has_to_hold():
    rule = Rule("r", kind=("dense", "conv"), path="**/kernel", regex=r"fc\b", shape=(None, 8), min_size=32, max_size=32)
    assert matches(rule, leaf(), "dense") and matches(rule, leaf(), "conv")
    assert not matches(rule, leaf(), "norm")
    assert not matches(rule, leaf("params/fc/bias"), "dense")
    assert not matches(rule, leaf("params/fc1/kernel"), "dense")
    assert not matches(rule, leaf(shape=(8, 4)), "dense")
    assert not matches(dataclasses.replace(rule, min_size=33, max_size=None), leaf(), "dense")
    assert not matches(dataclasses.replace(rule, min_size=None, max_size=31), leaf(), "dense")


def test_first_match_wins():
    rules = (Rule("bias", path="**/bias"), Rule("all"))
    assert first_match(rules, leaf("params/fc/bias"), "dense").name == "bias"
    assert first_match(rules, leaf(), "dense").name == "all"
    assert first_match(rules[:1], leaf(), "dense") is None


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("out", [1]),
        ("vocab", []),
        (-1, [1]),
        (1, [1]),
        (2, []),
        (-3, []),
        ("largest", [1, 0]),
    ],
)
def test_candidates(ref, expected):
    assert candidates(leaf(), ref) == expected


@pytest.mark.parametrize(
    ("sizes", "num", "expected"),
    [
        ((10,), 4, False),
        ((12,), 4, True),
        ((), 1, True),
        ((), 2, False),
        ((2, 6), 4, True),  # all of the first atom, and half of the second
        ((4, 8, 3), 8, True),
        ((4, 8, 3), 96, True),
        ((4, 8, 3), 6, False),
        ((3, 8), 4, False),  # 24 divides by 4, but not on the boundaries of its atoms
        ((6, 4), 3, True),
        ((6, 4), 4, False),
    ],
)
def test_divides(sizes, num, expected):
    assert divides(sizes, num) == expected


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 24))
def test_divides_means_equal_contiguous_parts(sizes, num):
    total = 1
    for size in sizes:
        total *= size
    if divides(sizes, num):
        assert total % num == 0
    if num > 1 and sizes and sizes[0] % num == 0:
        assert divides(sizes, num)


def test_shard_is_normalised_and_hashable():
    rule = Rule("r", kind="dense", shard={"out": "model", "-2": ["data", "model"]}, shape=["*", "...", 4])
    assert rule.shard == ((("out", ("model",)), (-2, ("data", "model"))),)
    assert rule.kind == ("dense",) and rule.shape == (None, ..., 4) and rule.axes == ("model", "data")
    assert rule.per_array and not Rule("r", shard={"out": "model"}).per_array
    assert dataclasses.replace(rule) == rule and hash(rule) == hash(dataclasses.replace(rule))
    assert Rule("r", shard=[]).replicates and Rule("r", shard={}).replicates and Rule("r", shard=[{}]).replicates
    assert not Rule("r", shard=[{"out": "model"}, {}]).replicates
    assert rule.matchers == "kind=dense, shape=(*, ..., 4)"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kind", "dens", "did you mean 'dense'"),
        ("kind", ["dense", 3], "list of them"),
        ("kind", [], "list of them"),
        ("path", "", "pattern"),
        ("path", 3, "pattern"),
        ("regex", "a(", "regular expression is invalid"),
        ("shape", "4", "list of sizes"),
        ("shape", ["a"], "entry of shape"),
        ("shape", [True], "entry of shape"),
        ("shape", ["...", "..."], "one ellipsis"),
        ("min_size", "1", "number of elements"),
        ("min_size", True, "number of elements"),
        ("max_size", -1, "number of elements"),
        ("shard", "model", "mapping from dims"),
        ("shard", ["out"], "an alternative is a mapping"),
        ("shard", [{"out": 4}], "name or a list of names"),
        ("shard", [{"out": []}], "name or a list of names"),
        ("shard", [{"out": ["model", "model"]}], "one axis twice"),
        ("shard", [{1.5: "model"}], "a dim is a name"),
        ("shard", [{}, {"out": "model"}], "never apply"),
        ("ties", "soft", "ties is one of"),
        ("source", 3, "source is text"),
        ("name", "", "needs a name"),
        ("name", "default", "where no rule decided"),
    ],
)
def test_mistakes_name_the_key(key, value, words):
    with pytest.raises(RuleError, match=words) as caught:
        Rule(**{"name": "mine", key: value})
    assert f"key '{key}'" in str(caught.value) and "remedy:" in str(caught.value)


def test_contradictory_sizes():
    with pytest.raises(RuleError, match="matches nothing"):
        Rule("r", min_size=10, max_size=9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rules": (Rule("a"), Rule("a"))}, "one name"),
        ({"rules": ({"name": "a"},)}, "sequence of splitjax.Rule"),
        ({"rules": Rule("a")}, "sequence of splitjax.Rule"),
        ({"replicated_batch": "model"}, "one of all, data"),
        ({"allow_replicated": 1}, "true or false"),
        ({"axes": "data"}, "list of mesh axis names"),
        ({"saved": "tensor"}, "list of mesh axes and roles"),
        ({"name": ""}, "needs a name"),
        ({"description": None}, "is text"),
    ],
)
def test_rule_set_mistakes(fields, words):
    with pytest.raises(RuleError, match=words):
        RuleSet(**{"name": "mine", **fields})


def test_a_layer_names_all_of_its_dims(build):
    graph = build(
        [("lstm", "recurrent", {"hh": "in:8@h out:8@h", "ih": "in:4 out:8@h", "b": "_:8@h", "other": "_:3@x"})]
    )
    names = {path.rpartition("/")[2]: leaf.dim_names for path, leaf in named_params(graph).items()}
    assert names == {"hh": ("in", "out"), "ih": ("in", "out"), "b": ("out",), "other": (None,)}
