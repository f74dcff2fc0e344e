"""Graph x RuleSet -> Plan."""

from splitjax.rules.assign import Assignment, assign
from splitjax.rules.lint import Finding, lint
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import RuleSet, available, load_rules

__all__ = ["Assignment", "Finding", "Rule", "RuleSet", "assign", "available", "lint", "load_rules"]
