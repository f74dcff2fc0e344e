"""Which steps are compared under which rule set, on which mesh, with which type of axes.

A cell is one such combination. Those that are run are a pairwise cover of all that fit together: every step meets every
rule set, every mesh and both types of axes, and every rule set meets every mesh that it knows with both types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.modern.cover import pairwise
from benchmarks.modern.steps.case import ModernStep
from splitjax.roles import ROLE_BY_NAME, Role
from splitjax.rules import available, load_rules

# Of eight devices. `replica` is another name for `data`, and `model` for `tensor`.
MESHES: Mapping[str, Mapping[str, int]] = {
    "data=2 x tensor=4": {"data": 2, "tensor": 4},
    "fsdp=4 x tensor=2": {"fsdp": 4, "tensor": 2},
    "replica=2 x fsdp=4": {"replica": 2, "fsdp": 4},
    "data=2 x fsdp=2 x tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
    "replica=2 x data=2 x model=2": {"replica": 2, "data": 2, "model": 2},
    "data=2 x expert=4": {"data": 2, "expert": 4},
    "fsdp=2 x expert=2 x tensor=2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
AXIS_TYPES = ("Explicit", "Auto")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step under a rule set, on a mesh of `MESHES`, with axes of one of `AXIS_TYPES`."""

    step: str
    rules: str
    mesh: str
    axes: str

    @property
    def layout(self) -> str:
        """The cell without its step."""
        return f"{self.rules}, {self.mesh}, {self.axes}"


def rule_sets() -> tuple[str, ...]:
    """Returns the names of all rule sets that splitjax ships."""
    return tuple(available())


def knows(rules: str, mesh: str) -> bool:
    """Tells whether a rule set has a use for every axis of a mesh: one of its rules names the axis's role, or the axis
    has examples of its own, or the set keeps everything whole on purpose."""
    known = load_rules(rules)
    if known.allow_replicated:
        return True
    named = {axis for rule in known.rules for axis in rule.axes} | {str(Role.DATA)}
    return all(str(ROLE_BY_NAME[axis]) in named for axis in MESHES[mesh])


def fits(step: ModernStep, mesh: str) -> bool:
    """Tells whether a step has what the mesh's axes are for: experts, and as many as an axis can divide."""
    sizes = [size for axis, size in MESHES[mesh].items() if ROLE_BY_NAME[axis] == Role.EXPERT]
    return all(step.num_experts and step.num_experts % size == 0 for size in sizes)


def combinations(steps: Iterable[ModernStep]) -> Iterator[Cell]:
    """Yields every cell of `steps` that fits together."""
    known = {(rules, mesh) for rules in rule_sets() for mesh in MESHES if knows(rules, mesh)}
    for step in steps:
        for rules in rule_sets():
            for mesh in MESHES:
                if (rules, mesh) in known and fits(step, mesh):
                    for axes in AXIS_TYPES:
                        yield Cell(step.name, rules, mesh, axes)


def covering(steps: Iterable[ModernStep]) -> tuple[Cell, ...]:
    """Returns a pairwise cover of the cells of `steps`, those of a step together."""
    return tuple(Cell(*row) for row in pairwise([dataclasses.astuple(cell) for cell in combinations(steps)]))
