"""Lays out a step by a rule set: a traced `Graph`, a `RuleSet` and a mesh go in, a layout per argument comes out.

`rule` and `ruleset` hold and read rules, `match` says which rule speaks of a parameter, `decide` and `assign`
decide, `lint` finds mistakes, and `sharded_state` spreads optimizer state further.
"""

from splitjax.rules.assign import Assignment, assign
from splitjax.rules.lint import Finding, lint
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import RuleSet, available, load_rules, register_rules

__all__ = ["Assignment", "Finding", "Rule", "RuleSet", "assign", "available", "lint", "load_rules", "register_rules"]
