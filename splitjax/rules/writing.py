"""Writes a rule set as the TOML that `ruleset.parse_rules` reads: what a search chose can be kept in a file, and read
and changed there."""

from __future__ import annotations

import dataclasses
import json

from splitjax.rules.rule import Alternative, Rule
from splitjax.rules.ruleset import RuleSet


def write_rules(rules: RuleSet) -> str:
    """Returns `rules` as TOML: what is as the schema has it without being said is left out."""
    lines = [f"name = {_text(rules.name)}", *_entries(rules, ("name", "rules"))]
    for rule in rules.rules:
        lines += ["", "[[rule]]", f"name = {_text(rule.name)}", *_entries(rule, ("name", "shard", "shape"))]
        if rule.shape is not None:
            sizes = ("..." if size is ... else "*" if size is None else size for size in rule.shape)
            lines.append(f"shape = {_value(tuple(sizes))}")
        lines.append(f"shard = [{', '.join(map(_alternative, rule.shard))}]")
    return "\n".join(lines) + "\n"


def _entries(value: RuleSet | Rule, left_out: tuple[str, ...]) -> list[str]:
    """Returns a line for each field that differs from its default."""
    found = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.name not in left_out)
    return [f"{field.name} = {_value(held)}" for field, held in found if held != field.default]


def _alternative(alternative: Alternative) -> str:
    return "{ " + ", ".join(f"{_text(str(ref))} = {_value(axes)}" for ref, axes in alternative) + " }"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else _text(value)


def _text(value: object) -> str:
    """Returns text as a basic string of TOML, which escapes as JSON does, and the character 127 besides."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
