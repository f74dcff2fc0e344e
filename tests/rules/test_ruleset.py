"""Rule sets from TOML: shipped names, paths, and mistakes with file, rule and key."""

from __future__ import annotations

import pathlib

import pytest

from splitjax.errors import RuleError, UnavailableError
from splitjax.rules import Rule, RuleSet, available, load_rules, register_rules
from splitjax.rules import ruleset as module

SHIPPED = ("data_parallel", "embedding_owner", "fsdp", "megatron", "splitbrain", "splitbrain_fsdp", "transformer")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_say_where_they_come_from(name):
    rules = load_rules(name)
    assert rules.name == name and rules.description and rules.source
    assert all(rule.source for rule in rules.rules)


def test_shipped_values():
    assert tuple(available()) == SHIPPED
    splitbrain, megatron, fsdp = load_rules("splitbrain"), load_rules("megatron"), load_rules("fsdp")
    assert (splitbrain.replicated_batch, megatron.replicated_batch, fsdp.replicated_batch) == ("all", "data", "all")
    assert {rule.ties for rule in splitbrain.rules if rule.shard} == {"hard"}
    assert load_rules("data_parallel").allow_replicated and fsdp.axes == ("data",)
    assert [name for name in SHIPPED if load_rules(name).sync != "dense"] == ["embedding_owner"]


def test_found_inside_an_installed_package_first(tmp_path, monkeypatch):
    folder = tmp_path / "_sharding_rules"
    folder.mkdir()
    (folder / "mine.toml").write_text('[[rule]]\nname = "a"\n')
    monkeypatch.setattr(module.importlib.resources, "files", lambda package: tmp_path)
    assert load_rules("mine").rules == (Rule("a"),)
    with pytest.raises(RuleError, match="no rule set 'splitbrain'"):
        load_rules("splitbrain")


def test_a_rule_set_is_taken_as_it_is():
    rules = RuleSet("mine", (Rule("a"),))
    assert load_rules(rules) is rules


def test_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'replicated_batch = "data"\naxes = ["expert"]\n[[rule]]\nname = "a"\nkind = ["dense", "expert"]\npath ='
        ' "**/kernel"\nregex = "fc"\nshape = ["...", 8]\nmin_size = 1\nmax_size = 99\nshard = [{ out = "model", "0" ='
        ' "expert" }, { largest = ["data", "model"] }]\nties = "hard"\nsource = "here"\n[[rule]]\nname = "b"\n'
    )
    expected = RuleSet(
        "mine",
        (
            Rule(
                "a",
                ("dense", "expert"),
                "**/kernel",
                "fc",
                (..., 8),
                1,
                99,
                ({"out": "model", 0: "expert"}, {"largest": ("data", "model")}),
                "hard",
                "here",
            ),
            Rule("b"),
        ),
        replicated_batch="data",
        axes=("expert",),
    )
    assert load_rules(file) == expected == load_rules(str(file))


def test_unknown_names_list_what_there_is():
    with pytest.raises(RuleError, match="did you mean 'megatron'") as caught:
        load_rules("megatrn")
    assert all(name in str(caught.value) for name in SHIPPED)
    with pytest.raises(RuleError, match="is a name, a path"):
        load_rules(3)
    for missing in ("missing.toml", "folder/missing", pathlib.Path("missing")):
        with pytest.raises(RuleError, match="cannot be read"):
            load_rules(missing)


def test_auto_is_no_rule_set():
    with pytest.raises(UnavailableError, match="chosen for a step"):
        load_rules("auto")


@pytest.mark.parametrize(
    ("text", "words", "place"),
    [
        ("a = [", "not valid TOML", "mine.toml"),
        ("\n\nx = = 1\n", "not valid TOML", "line 3"),
        ("rules = []\n", "did you mean 'rule'", "key 'rules'"),
        ("rule = 3\n", "rules are tables", "key 'rule'"),
        ('replicated_batch = "none"\n', "one of all, data", "key 'replicated_batch'"),
        ("allow_replicated = 1\n", "true or false", "key 'allow_replicated'"),
        ("axes = 3\n", "list of mesh axis names", "key 'axes'"),
        ('[[rule]]\nkind = "dense"\n', "has no name", "mine.toml:1, rule 1"),
        (
            '[[rule]]\nname = "a"\n\n[[rule]]\nname = "b"\nkinds = "dense"\n',
            "did you mean 'kind'",
            "mine.toml:4, rule 2 ('b'), key 'kinds'",
        ),
        ('[[rule]]\nname = "a"\nkind = "convolution"\n', "no layer kind", "mine.toml:1, rule 1 ('a'), key 'kind'"),
        ('[[rule]]\nname = "a"\nregex = "("\n', "invalid", "key 'regex'"),
        ('[[rule]]\nname = "a"\nshard = [{ out = 4 }]\n', "name or a list of names", "key 'shard'"),
        ('[[rule]]\nname = "a"\nshape = 4\n', "list of sizes", "key 'shape'"),
        ('[[rule]]\nname = "a"\nmin_size = 1.5\n', "number of elements", "key 'min_size'"),
        ('[[rule]]\nname = "a"\n[[rule]]\nname = "a"\n', "one name", "mine.toml:3, rule 2 ('a'), key 'name'"),
        ('rule = [{ name = "a", ties = "no" }]\n', "ties is one of", "mine.toml, rule 1 ('a'), key 'ties'"),
    ],
)
def test_mistakes_name_file_rule_and_key(tmp_path, text, words, place):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(RuleError, match=words) as caught:
        load_rules(file)
    message = str(caught.value)
    assert place in message and str(file) in message and "remedy:" in message


def test_a_registered_set_is_taken_by_its_name_and_a_reference_by_its_module(tmp_path, monkeypatch):
    rules = RuleSet("registered by a test", (Rule("a"),))
    try:
        assert register_rules(rules) is rules and load_rules("registered by a test") is rules
        register_rules(RuleSet("registered by a test", (Rule("a"),)))  # the same again
        with pytest.raises(RuleError, match="there is a rule set of this name"):
            register_rules(RuleSet("registered by a test", (Rule("b"),)))
        with pytest.raises(RuleError, match="did you mean 'registered by a test'"):
            load_rules("registered by a tess")
    finally:
        module.RULE_SETS.remove("registered by a test")
    for given, words in ((RuleSet("fsdp"), "splitjax has a rule set"), ("fsdp", "is a splitjax.RuleSet")):
        with pytest.raises(RuleError, match=words):
            register_rules(given)
    text = 'import splitjax\nMINE = splitjax.RuleSet("mine", (splitjax.Rule("a"),))\nNUMBER = 3\n'
    (tmp_path / "strange_rules.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_rules("strange_rules:MINE") == RuleSet("mine", (Rule("a"),))
    for reference, words in (("strange_rules:NUMBER", "names int"), ("strange_rules:MIME", "did you mean 'MINE'")):
        with pytest.raises(RuleError, match=words):
            load_rules(reference)
