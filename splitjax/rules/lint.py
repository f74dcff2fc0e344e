"""Finds what is odd about a rule set: by itself, against a traced step, and on a mesh.

A rule set goes in, with a graph and a mesh if there are any; findings come out, never exceptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from splitjax.mesh import MeshShape
from splitjax.roles import KNOWN_AXES, ROLE_NAMES, Role
from splitjax.rules.assign import LARGE_BYTES, dead_rules, idle_axes, refused_roles, unknown_axes
from splitjax.rules.decide import decide
from splitjax.rules.decisions import Decisions
from splitjax.rules.match import axes_text, first_match, glob_pattern, matches, named_params, param_kinds
from splitjax.rules.rule import LARGEST, Rule, closest
from splitjax.rules.ruleset import RuleSet
from splitjax.trace.graph import Graph

SEVERITIES: tuple[str, ...] = ("error", "warning", "info")
# Names that tracing gives to dims; `register_dims` may add others, so an unknown one is a warning.
DIM_NAMES: tuple[str, ...] = ("in", "out", "vocab", "features", "expert", "stack", "heads", "height", "width", "depth")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Describes something worth a look in a rule set.

    - `severity`: "error" (assign would raise), "warning" (probably a mistake), or "info".
    - `rule`: the name of the rule; "" for the set as a whole.
    - `message`, `remedy`: what is odd, and what to do.
    - `check`: the check that noticed it: "dead", "shadowed", "conflicting", ...
    """

    severity: str  # "error" (assign would raise), "warning" (probably a mistake), "info"
    rule: str  # name of the rule; "" for the set as a whole
    message: str
    remedy: str
    check: str = ""  # which check found it: "dead", "shadowed", "conflicting", ...


def lint(
    rules: RuleSet, graph: Graph | None = None, mesh: MeshShape | Mapping[str, int] | None = None
) -> tuple[Finding, ...]:
    """Returns all findings about a rule set, errors first.

    **Arguments:**

    - `rules`: the rule set.
    - `graph`: a traced step, or None.
    - `mesh`: a mesh's shape, or a mapping from axis to size, or None.

    Without a graph only what the rules say by themselves is checked; with a graph also what matches; with a mesh
    too what divides, ties and stays replicated. Raises nothing for a rule set that could be constructed.
    """
    findings = list(_static(rules))
    shape = MeshShape.of(mesh) if mesh is not None else None
    if graph is not None:
        findings += _matching(rules, graph, {finding.rule for finding in findings if finding.check == "shadowed"})
    unknown = unknown_axes(rules, shape) if shape is not None else []
    for rule, refusal in unknown:
        findings.append(
            Finding(
                "error",
                rule.name if rule else "",
                refusal.message,
                "add the axis to the mesh, or name another one",
                "unknown axis",
            )
        )
    if shape is not None and not unknown:
        refused = refused_roles(rules, shape)
        if refused is not None:
            findings.append(Finding("error", "", refused.message, refused.remedy or "", "roles"))
    if shape is None:
        findings += _foreign_axes(rules)
    if graph is not None and shape is not None and not unknown:
        findings += _placing(rules, graph, shape)
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _static(rules: RuleSet) -> Iterator[Finding]:
    """Yields what the rules show by themselves: shadowed rules, alternatives that never fit, dims without that name."""
    for position, rule in enumerate(rules.rules):
        for earlier in rules.rules[:position]:
            if _covers(earlier, rule):
                yield Finding(
                    "warning",
                    rule.name,
                    f"rule {earlier.name!r} ({earlier.matchers}) comes first and matches all that it matches",
                    f"move it before {earlier.name!r}, or take it out",
                    "shadowed",
                )
                break
        for alternative in rule.shard:
            axes = [axis for _, several in alternative for axis in several]
            for axis in sorted({axis for axis in axes if axes.count(axis) > 1}):
                yield Finding(
                    "error",
                    rule.name,
                    f"an alternative splits two dims over {axis!r}, which never fits",
                    "a mesh axis may split one dim of an array: use two axes, or two alternatives",
                    "conflicting",
                )
            for ref, _ in alternative:
                if isinstance(ref, str) and ref != LARGEST and ref not in DIM_NAMES:
                    yield Finding(
                        "warning",
                        rule.name,
                        f"{ref!r} is no dim name that tracing gives{closest(ref, (*DIM_NAMES, LARGEST))}",
                        f"use one of {', '.join((*DIM_NAMES, LARGEST))}, or a position",
                        "unknown dim",
                    )
    if not rules.allow_replicated and all(rule.replicates and not rule.store for rule in rules.rules):
        yield Finding(
            "warning",
            "",
            "no rule shards anything, so a mesh with an axis other than data is an error",
            "add a rule that shards, or say allow_replicated = true",
            "replicated",
        )


def _foreign_axes(rules: RuleSet) -> Iterator[Finding]:
    """Yields the axes that a mesh has to have for the rules."""
    for rule in rules.rules:
        for axis in rule.axes:
            if axis not in (*KNOWN_AXES, *ROLE_NAMES) and axis not in rules.axes:
                yield Finding(
                    "info",
                    rule.name,
                    f"{axis!r} has to be an axis of the mesh{closest(axis, (*KNOWN_AXES, *ROLE_NAMES))}",
                    f"only {' and '.join(KNOWN_AXES)} and roles ({', '.join(ROLE_NAMES)}) may be absent",
                    "unknown axis",
                )


def _covers(earlier: Rule, later: Rule) -> bool:
    """Tells whether all that the later rule matches is surely matched by the earlier one."""
    if earlier.kind is not None and (later.kind is None or not set(later.kind) <= set(earlier.kind)):
        return False
    if earlier.path not in (None, later.path) and earlier.path != "**":
        return False
    if earlier.regex not in (None, later.regex) or earlier.shape not in (None, later.shape):
        return False
    if earlier.min_size is not None and (later.min_size or 0) < earlier.min_size:
        return False
    return earlier.max_size is None or (later.max_size is not None and later.max_size <= earlier.max_size)


def _matching(rules: RuleSet, graph: Graph, covered: set[str]) -> Iterator[Finding]:
    """Yields rules that match nothing, or only what earlier ones take, and dim names that what they match does not
    have."""
    kinds = param_kinds(graph)
    params = named_params(graph).values()
    first = {leaf.path: first_match(rules.rules, leaf, kinds[leaf.path]) for leaf in params}
    for rule in rules.rules:
        leaves = [leaf for leaf in params if matches(rule, leaf, kinds[leaf.path])]
        if not leaves:
            # A set for many models has rules for kinds that this one lacks; a pattern was written for this one.
            severity = "warning" if rule.is_explicit or rule.shape is not None else "info"
            yield Finding(
                severity, rule.name, f"matches no parameter ({rule.matchers})", _why_dead(rule, graph, kinds), "dead"
            )
            continue
        mine = [leaf for leaf in leaves if first[leaf.path] is rule]
        if not mine and rule.name not in covered:
            earlier = first[leaves[0].path]
            yield Finding(
                "warning",
                rule.name,
                f"matches {leaves[0].path}, and rule {earlier.name if earlier else ''!r} always comes first",
                "move it up, or take it out",
                "shadowed",
            )
        names = {name for leaf in mine for name in leaf.dim_names if name}
        wanted = [
            ref for alternative in rule.shard for ref, _ in alternative if isinstance(ref, str) and ref != LARGEST
        ]
        for ref in dict.fromkeys(wanted):
            if mine and ref not in names:
                there = ", ".join(sorted({kinds[leaf.path] for leaf in mine}))
                yield Finding(
                    "info" if set(wanted) & names else "warning",
                    rule.name,
                    f"no parameter that it decides ({there}) has a dim named {ref!r}{closest(ref, sorted(names))}",
                    f"their dims are {', '.join(sorted(names)) or 'without names: use positions'}",
                    "unknown dim",
                )


def _why_dead(rule: Rule, graph: Graph, kinds: dict[str, str]) -> str:
    """Says what to do about a rule without a match: the one matcher that excludes everything, or the nearest
    pattern."""
    if rule.path is not None and not any(glob_pattern(rule.path).fullmatch(path) for path in kinds):
        if any(glob_pattern("**/" + rule.path).fullmatch(path) for path in kinds):
            return f'a glob is for the whole path: write path = "**/{rule.path}"'
        return (
            "parameter paths here look like"
            f" {next(iter(kinds), 'nothing: there are none')}{closest(rule.path, list(kinds))}"
        )
    if rule.kind is not None and not set(rule.kind) & set(kinds.values()):
        return (
            f"the kinds here are {', '.join(sorted(set(kinds.values()))) or 'none'}: take the rule out if the set is"
            " for this model only"
        )
    for key in ("regex", "shape", "min_size", "max_size"):
        if getattr(rule, key) is not None:
            relaxed = dataclasses.replace(rule, **{key: None})
            if any(matches(relaxed, leaf, kinds[leaf.path]) for leaf in graph.params):
                return f"without its {key} it would match: correct {key} = {getattr(rule, key)!r}"
    return "correct its matchers, or take it out"


def _placing(rules: RuleSet, graph: Graph, mesh: MeshShape) -> Iterator[Finding]:
    """Yields what the decisions on this mesh show: misfits, outvoted rules, large parameters on every device, idle
    axes."""
    decisions = decide(graph, rules, mesh)
    by_name = {rule.name: rule for rule in rules.rules}
    for decision in decisions.params.values():
        if decision.problem == "misfit":
            yield Finding(
                "warning",
                decision.matched or "",
                f"{decision.path} stays replicated: {decision.note}",
                "choose a mesh axis that divides one of its dims, pad the dim, or add an alternative",
                "non-dividing",
            )
        if decision.problem == "conflict":
            yield Finding(
                "warning",
                decision.matched or "",
                f"{decision.path} {decision.rule}, and {decision.note}",
                'let the rule agree with the tie; ties = "hard" keeps away what comes from another layer, though not'
                " from shared storage",
                "conflicting",
            )
    yield from _large(by_name, graph, mesh, decisions)
    for axis in idle_axes(graph, rules, mesh, decisions):
        dead = dead_rules(rules, decisions)
        yield Finding(
            "error",
            "",
            f"every parameter stays whole over {axes_text(mesh, (axis,))}"
            + (f"; dead: {', '.join(dead)}" if dead else ""),
            f"add a rule that shards over {axis!r}, or take the axis out of the mesh",
            "replicated",
        )


def _large(by_name: dict[str, Rule], graph: Graph, mesh: MeshShape, decisions: Decisions) -> Iterator[Finding]:
    """Yields the large parameters that every device of an axis for tensors holds whole."""
    axes = mesh.present(mesh.roles.having(Role.TENSOR))
    if not axes:
        return
    for leaf in graph.params:
        decision = decisions.params[leaf.path]
        if leaf.num_bytes <= LARGE_BYTES or any(set(axes) & set(own) for own in decision.axes):
            continue
        rule = by_name.get(decision.matched or "")
        on_purpose = rule is not None and rule.replicates
        yield Finding(
            "info" if on_purpose else "warning",
            decision.matched or "",
            f"{leaf.path} ({leaf.num_bytes / 2**20:.1f} MiB, {decision.kind}) is on each of the"
            f" {axes_text(mesh, axes)} devices",
            "it is replicated on purpose" if on_purpose else "add a rule or an alternative that fits it",
            "replicated",
        )
