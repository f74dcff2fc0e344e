"""Writes what was chosen for a step as a document, and reads it again: for the file that the next process of this step
reads, and for the other processes of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from splitjax.choosing import Answer, Candidate, Choice, CompiledFigures, Refused, Variable
from splitjax.codec import Codec, Wording
from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import BlockRemat
from splitjax.roles import Role
from splitjax.rules import RuleSet
from splitjax.rules.ruleset import parse_rules
from splitjax.rules.writing import write_rules

FORMAT = 6
Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Is a `Candidate`: `rules` by their number in the document."""

    rules: int
    mesh: Axes
    seconds: float
    state_bytes: int
    peak_bytes: int
    bound_bytes: int | None
    program_seconds: float | None
    shards_state: bool
    microbatches: int
    remat: tuple[BlockRemat, ...]
    compiled: CompiledFigures | None


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Is an `Answer`; None as `within_bytes` stands for no limit."""

    candidate: _Candidate
    variables: tuple[Variable, ...]
    network_seconds: float
    bound_seconds: float
    solver: str
    clock_struck: bool
    within_bytes: float | None


@dataclasses.dataclass(frozen=True)
class _Refused:
    rules: str
    mesh: Axes
    why: str


@dataclasses.dataclass(frozen=True)
class ChoiceDocument:
    """Is a `Choice`, with the `rules` of its candidates as TOML, and the `key` of what it was chosen for."""

    key: str
    rules: tuple[str, ...]
    best: _Candidate
    candidates: tuple[_Candidate, ...]
    answers: tuple[_Answer, ...]
    refused: tuple[_Refused, ...]
    meshes: tuple[Axes, ...]
    dropped: tuple[Axes, ...]
    passed_over: tuple[Axes, ...]
    given: str
    also: tuple[str, ...]
    crossings: tuple[tuple[Axes, tuple[str, ...]], ...]


JSON: Codec[ChoiceDocument] = Codec(
    ChoiceDocument, PlanError, Wording.of_result("a kept choice", "choice"), format=FORMAT, finite=True
)


def document_of(choice: Choice, key: str) -> ChoiceDocument:
    """Returns the document of a `choice` that was made for what `key` is a digest of."""
    sets: list[RuleSet] = []

    def candidate(each: Candidate) -> _Candidate:
        if each.rules not in sets:
            sets.append(each.rules)
        return _Candidate(
            sets.index(each.rules), each.mesh.axes, each.seconds, each.state_bytes, each.peak_bytes, each.bound_bytes,
            each.program_seconds, each.shards_state, each.microbatches, each.remat, each.compiled,
        )  # fmt: skip

    def answer(each: Answer) -> _Answer:
        within = None if math.isinf(each.within_bytes) else each.within_bytes
        return _Answer(
            candidate(each.candidate), each.variables, each.network_seconds, each.bound_seconds, each.solver,
            each.clock_struck, within,
        )  # fmt: skip

    axes = lambda meshes: tuple(mesh.axes for mesh in meshes)
    best, candidates = candidate(choice.best), tuple(map(candidate, choice.candidates))
    answers = tuple(map(answer, choice.answers))
    return ChoiceDocument(
        key,
        tuple(map(write_rules, sets)),
        best,
        candidates,
        answers,
        tuple(_Refused(each.rules, each.mesh.axes, each.why) for each in choice.refused),
        axes(choice.meshes),
        axes(choice.dropped),
        axes(choice.passed_over),
        choice.given,
        choice.also,
        tuple((mesh.axes, slow) for mesh, slow in choice.crossings),
    )


def choice_of(document: ChoiceDocument, roles: Mapping[str, Role], budget_bytes: float) -> Choice:
    """Returns the choice that a `document` holds.

    **Arguments:** `roles`: what the user said that mesh axes are for. `budget_bytes`: of a device; infinity without
    one.

    Raises `RuleError`, `MeshError` and `IndexError` for a document that `document_of` did not write."""
    rules = [parse_rules(text, "kept.toml") for text in document.rules]
    mesh = lambda axes: MeshShape(axes).with_roles(roles)
    candidate = lambda each: Candidate(
        rules[each.rules], mesh(each.mesh), each.seconds, each.state_bytes, each.peak_bytes, each.bound_bytes,
        each.program_seconds, each.shards_state, each.microbatches, each.remat, each.compiled,
    )  # fmt: skip
    return Choice(
        candidate(document.best),
        tuple(map(candidate, document.candidates)),
        tuple(
            Answer(
                candidate(each.candidate), each.variables, each.network_seconds, each.bound_seconds, each.solver,
                each.clock_struck, math.inf if each.within_bytes is None else each.within_bytes,
            )
            for each in document.answers
        ),
        tuple(Refused(each.rules, mesh(each.mesh), each.why) for each in document.refused),
        tuple(map(mesh, document.meshes)),
        tuple(map(mesh, document.dropped)),
        tuple(map(mesh, document.passed_over)),
        budget_bytes,
        document.given,
        document.also,
        tuple((mesh(axes), slow) for axes, slow in document.crossings),
    )  # fmt: skip
