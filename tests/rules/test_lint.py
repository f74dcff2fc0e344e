"""Findings: what each check sees, and that shipped sets and healthy models give none worth a warning."""

from __future__ import annotations

import pytest

from splitjax.rules import Rule, RuleSet, lint, load_rules

M4 = {"data": 2, "model": 4}
OUT = {"out": "model"}


def found(check, *args):
    return [(one.severity, one.rule, one.message, one.remedy) for one in lint(*args) if one.check == check]


@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "megatron", "splitbrain"])
def test_shipped_sets_are_clean(name, vgg, block, moe):
    assert lint(load_rules(name)) == ()
    for graph in (vgg, block, moe):
        assert [one for one in lint(load_rules(name), graph, M4) if one.severity != "info"] == []


def test_dead(vgg):
    path, kind, shape = (
        Rule("p", path="fc1/kernel", shard=OUT),
        Rule("k", "expert", shard=OUT),
        Rule("s", "dense", shape=(3,), shard=OUT),
    )
    rules = RuleSet("m", (path, kind, shape))
    dead = {rule: (severity, remedy) for severity, rule, _, remedy in found("dead", rules, vgg)}
    assert dead["p"] == ("warning", 'a glob is for the whole path: write path = "**/fc1/kernel"')
    assert dead["k"][0] == "info" and "conv, dense, norm" in dead["k"][1]
    assert dead["s"][0] == "warning" and "without its shape" in dead["s"][1]


def test_shadowed(vgg):
    rules = RuleSet("m", (Rule("all", shard=OUT), Rule("dense", "dense", shard=OUT)))
    assert [one[:2] for one in found("shadowed", rules)] == [("warning", "dense")]
    assert len(found("shadowed", rules, vgg, M4)) == 1  # not once more for the graph
    rules = RuleSet("m", (Rule("weights", path="**/kernel", shard=OUT), Rule("fc", regex="fc1/k", shard=OUT)))
    assert found("shadowed", rules) == []  # only the graph can tell
    assert "params/fc1/kernel" in found("shadowed", rules, vgg)[0][2]


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        (dict(kind="dense"), dict(kind=("dense", "conv")), False),
        (dict(kind=("dense", "conv")), dict(kind="dense", path="**/a"), True),
        (dict(path="**"), dict(path="**/a"), True),
        (dict(path="**/a"), dict(path="**/b"), False),
        (dict(min_size=10), dict(), False),
        (dict(min_size=10), dict(min_size=20), True),
        (dict(max_size=10), dict(), False),
        (dict(max_size=10), dict(max_size=5), True),
        (dict(shape=(None, 4)), dict(), False),
        (dict(regex="a"), dict(regex="a", kind="dense"), True),
    ],
)
def test_covers(earlier, later, expected):
    rules = RuleSet("m", (Rule("a", shard=OUT, **earlier), Rule("b", shard=OUT, **later)))
    assert bool(found("shadowed", rules)) == expected


def test_conflicting_dims():
    rules = RuleSet("m", (Rule("a", shard={"in": "model", "out": ["data", "model"]}),))
    assert [one[:2] for one in found("conflicting", rules)] == [("error", "a")]


def test_conflicting_tie(vgg):
    rules = RuleSet("m", (Rule("mine", path="**/fc2/kernel", shard=OUT), Rule("dense", "dense", shard=OUT)))
    severity, rule, message, remedy = found("conflicting", rules, vgg, M4)[0]
    assert (
        (severity, rule) == ("warning", "mine")
        and "params/fc2/kernel ties with params/fc1/kernel" in message
        and "hard" in remedy
    )


def test_non_dividing(vgg):
    rules = RuleSet("m", (Rule("dense", "dense", shard=OUT, ties="hard"),))
    assert [one[1:3] for one in found("non-dividing", rules, vgg, M4)] == [
        ("dense", "params/fc3/kernel stays replicated: out 10 does not divide by model=4")
    ]


def test_large_replicated(vgg):
    rules = RuleSet(
        "m", (Rule("keep", path="**/fc2/kernel"), Rule("one", path="**/fc1/kernel", shard=OUT, ties="hard"))
    )
    large = {rule: (severity, message) for severity, rule, message, _ in found("replicated", rules, vgg, M4)}
    assert large["keep"][0] == "info" and "64.0 MiB" in large["keep"][1]
    assert "one" not in large and "" not in large  # fc3 is under 1 MiB, fc1 is sharded
    rules = RuleSet("m", (Rule("one", path="**/fc1/kernel", shard=OUT, ties="hard"),))
    assert [one[0] for one in found("replicated", rules, vgg, M4)] == ["warning"]
    assert found("replicated", rules, vgg, {"data": 8}) == []


def test_everything_replicated(vgg):
    rules = RuleSet("m", (Rule("keep"),))
    assert found("replicated", rules)[0][0] == "warning"
    assert [one.severity for one in lint(rules, vgg, M4)][0] == "error"
    assert found("replicated", RuleSet("m", (Rule("keep"),), allow_replicated=True)) == []


def test_unknown_dims(vgg):
    assert "did you mean 'vocab'" in found("unknown dim", RuleSet("m", (Rule("a", shard={"vocabs": "model"}),)))[0][2]
    rules = RuleSet("m", (Rule("a", "dense", shard={"vocab": "model"}),))
    severity, _, message, remedy = found("unknown dim", rules, vgg)[0]
    assert severity == "warning" and "(dense) has a dim named 'vocab'" in message and "in, out" in remedy
    fallback = RuleSet("m", (Rule("a", "dense", shard=[{"vocab": "model"}, OUT]),))
    assert found("unknown dim", fallback, vgg)[0][0] == "info"
    assert found("unknown dim", RuleSet("m", (Rule("a", "dense", shard={"largest": "model"}),)), vgg) == []


def test_unknown_axes(vgg):
    rules = RuleSet("m", (Rule("a", shard={"out": "modle"}),))
    assert found("unknown axis", rules)[0][0] == "info" and "did you mean 'model'" in found("unknown axis", rules)[0][2]
    assert found("unknown axis", rules, vgg, M4)[0][:2] == ("error", "a")
    assert found("unknown axis", rules, vgg, {"modle": 2}) == []
    assert found("unknown axis", RuleSet("m", (Rule("a", shard={"out": "modle"}),), axes=("modle",))) == []


def test_errors_come_first(vgg):
    twice = Rule("twice", shard={"in": "model", "out": "model"})
    rules = RuleSet("m", (Rule("k", "expert", shard=OUT), Rule("p", path="nothing", shard=OUT), twice))
    severities = [one.severity for one in lint(rules, vgg, M4)]
    assert severities == sorted(severities, key=("error", "warning", "info").index) and set(severities) == {
        "error",
        "warning",
        "info",
    }
