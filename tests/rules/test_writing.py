"""Rule sets written as TOML and read again."""

from __future__ import annotations

import pytest

from splitjax.rules import Rule, RuleSet, load_rules
from splitjax.rules.ruleset import available, parse_rules
from splitjax.rules.writing import write_rules

ODD = RuleSet(
    'a "set" \\ of\x7f odd\nthings',
    (
        Rule("by position", shape=(None, 4, ...), shard=[{-1: "tensor", 0: ("data", "storage")}, {}], max_size=9),
        Rule("kinds", kind=("dense", "conv"), regex=r"^(?:a\.b|c\d)$", store=("data",), ties="hard"),
        Rule("whole", path="**", shard=[{}]),
    ),
    replicated_batch=("data", "storage"),
    allow_replicated=True,
    axes=("data",),
)


@pytest.mark.parametrize("rules", [*available(), ODD], ids=str)
def test_what_is_written_is_read(rules):
    rules = load_rules(rules)
    assert parse_rules(write_rules(rules), "rules.toml") == rules
