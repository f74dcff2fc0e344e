"""Keeps what was chosen for a step beside JAX's compiled programs, so that the next process does not search again.

A traced call and what it is chosen for come in; the file of its choice comes out, and what was read from it. There is
one only where JAX keeps programs (`jax_compilation_cache_dir`, switched off by `jax_enable_compilation_cache`). Its
name is a digest of everything that a choice depends on, the sources of splitjax and the version of JAX included: what
is kept is what a search would find, and anything else in its place is left aside.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from splitjax.auto_mesh import AutoMesh
from splitjax.choosing import Answer, Candidate, Choice, Refused, Variable
from splitjax.codec import Codec, Wording
from splitjax.compile.entry import Recipe
from splitjax.errors import PlanError, SplitjaxError
from splitjax.mesh import MeshShape, platform_of
from splitjax.plan import BlockRemat
from splitjax.roles import Role
from splitjax.rules import RuleSet
from splitjax.rules.ruleset import available, load_rules, parse_rules
from splitjax.rules.writing import write_rules
from splitjax.search import toulbar
from splitjax.step.agreement import program_text
from splitjax.step.traced import Traced

logger: logging.Logger = logging.getLogger("splitjax")

FORMAT = 5
# Of a value whose text is not the same in another process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
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


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Is an `Answer`; None as `within_bytes` stands for no limit."""

    candidate: _Candidate
    variables: tuple[Variable, ...]
    network_seconds: float
    bound_seconds: float
    solver: str
    within_bytes: float | None


@dataclasses.dataclass(frozen=True)
class _Refused:
    rules: str
    mesh: Axes
    why: str


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Is what a file holds: a `Choice`, with the `rules` of its candidates as TOML, and the digest that it is for."""

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


_JSON: Codec[_Kept] = Codec(_Kept, PlanError, Wording.of_result("a kept choice", "choice"), format=FORMAT, finite=True)


@dataclasses.dataclass(frozen=True)
class KeptChoice:
    """Is where the choice for a call is kept. `path`: its file, which need not be there. `key`: the digest of what it
    depends on. `roles`, `budget_bytes`: of the step."""

    path: pathlib.Path
    key: str
    roles: Mapping[str, Role]
    budget_bytes: float

    @classmethod
    def of(
        cls, recipe: Recipe, asked: Mesh | AbstractMesh | AutoMesh, traced: Traced, devices: str
    ) -> KeptChoice | None:
        """Returns where the choice for a traced call is kept; None where nothing is kept, or it depends on what has no
        text.

        **Arguments:** `recipe`: the step. `asked`: its mesh, or what is asked for. `traced`: the call. `devices`: what
        there is to choose for."""
        flags: Any = jax.config  # most of whose flags type checkers do not know
        folder = flags.jax_compilation_cache_dir
        if not folder or not flags.jax_enable_compilation_cache:
            return None
        digest = hashlib.sha256()
        for part in (
            _sources(),
            jax.__version__,
            devices,
            str(toulbar.is_installed()),
            _asked(asked),
            *_said(recipe),
            *_traced(traced),
            *_shipped(),
        ):
            if _ADDRESS.search(part):
                return None
            digest.update(part.encode() + b"\0")
        key = digest.hexdigest()
        return cls(pathlib.Path(folder) / f"splitjax-choice-{key}.json", key, recipe.roles, recipe.memory_budget_bytes)

    def read(self) -> Choice | None:
        """Returns the kept choice; None where there is none, or it cannot be read."""
        if not self.path.exists():
            return None
        try:
            found = _JSON.load(self.path)
            if found.key == self.key:
                return self._choice(found)
            logger.warning("splitjax: the kept choice %s is another step's: it is made anew", self.path)
        except (SplitjaxError, IndexError) as error:
            logger.warning("splitjax: the kept choice %s cannot be read (%s): it is made anew", self.path, error)
        return None

    def write(self, choice: Choice) -> None:
        """Keeps a `choice`. What the clock decided is not kept, nor what would be read as another one; a folder that
        cannot be written is no error."""
        if choice.clock_struck:
            return
        try:
            document = _document(choice, self.key)
            if self._choice(document) != choice:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _JSON.save(document, self.path)
        except (SplitjaxError, OSError) as error:
            logger.debug("splitjax: a choice is not kept: %s", error)

    def _choice(self, document: _Kept) -> Choice:
        rules = [parse_rules(text, "kept.toml") for text in document.rules]
        mesh = lambda axes: MeshShape(axes).with_roles(self.roles)
        candidate = lambda each: Candidate(
            rules[each.rules], mesh(each.mesh), each.seconds, each.state_bytes, each.peak_bytes, each.bound_bytes,
            each.program_seconds, each.shards_state, each.microbatches, each.remat,
        )  # fmt: skip
        return Choice(
            candidate(document.best),
            tuple(map(candidate, document.candidates)),
            tuple(
                Answer(
                    candidate(each.candidate), each.variables, each.network_seconds, each.bound_seconds, each.solver,
                    False, math.inf if each.within_bytes is None else each.within_bytes,
                )
                for each in document.answers
            ),
            tuple(Refused(each.rules, mesh(each.mesh), each.why) for each in document.refused),
            tuple(map(mesh, document.meshes)),
            tuple(map(mesh, document.dropped)),
            tuple(map(mesh, document.passed_over)),
            self.budget_bytes,
            document.given,
            document.also,
            tuple((mesh(axes), slow) for axes, slow in document.crossings),
        )  # fmt: skip


def _document(choice: Choice, key: str) -> _Kept:
    sets: list[RuleSet] = []

    def candidate(each: Candidate) -> _Candidate:
        if each.rules not in sets:
            sets.append(each.rules)
        return _Candidate(
            sets.index(each.rules), each.mesh.axes, each.seconds, each.state_bytes, each.peak_bytes, each.bound_bytes,
            each.program_seconds, each.shards_state, each.microbatches, each.remat,
        )  # fmt: skip

    def answer(each: Answer) -> _Answer:
        within = None if math.isinf(each.within_bytes) else each.within_bytes
        return _Answer(
            candidate(each.candidate), each.variables, each.network_seconds, each.bound_seconds, each.solver, within
        )

    axes = lambda meshes: tuple(mesh.axes for mesh in meshes)
    best, candidates = candidate(choice.best), tuple(map(candidate, choice.candidates))
    answers = tuple(map(answer, choice.answers))
    return _Kept(
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


@functools.cache
def _sources() -> str:
    """Returns a digest of the sources of splitjax: a choice of another version is never read."""
    root, digest = pathlib.Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _asked(asked: Mesh | AbstractMesh | AutoMesh) -> str:
    if isinstance(asked, AutoMesh):
        return repr(asked)
    types = getattr(asked, "axis_types", ())
    return f"{dict(asked.shape)} {types} {platform_of(asked)}"


def _said(recipe: Recipe) -> Iterator[str]:
    """Yields what the decorator was told, as far as a choice depends on it."""
    yield write_rules(recipe.rules)
    yield repr((recipe.donate, recipe.unknown, recipe.returns_state, recipe.group_comm))
    yield repr((recipe.shard_state, recipe.chooses_state, recipe.microbatches, recipe.chooses_microbatches))
    yield repr((recipe.remat, recipe.chooses_remat))
    yield repr((recipe.sync, recipe.backprop, recipe.uneven, sorted(recipe.roles.items()), recipe.memory_budget_bytes))
    yield repr(recipe.target)
    yield "" if recipe.calibration is None else recipe.calibration.to_json()


def _traced(traced: Traced) -> Iterator[str]:
    graph = traced.graph
    yield program_text(traced.jaxpr)
    # What registered operations say of themselves is in the graph, and not in the program.
    yield repr((graph.leaves, graph.layers, graph.uses, graph.num_examples, graph.flops, graph.activation_bytes))
    yield repr((graph.atom_sizes, graph.hard, graph.local, graph.soft, sorted(graph.example_atoms)))
    yield repr((graph.reductions, graph.picks, graph.tables, graph.joined))
    yield repr((traced.said, traced.annotations, sorted(traced.matched.items())))


def _shipped() -> Sequence[str]:
    """Returns all rule sets that are compared, those of other packages among them."""
    return [write_rules(load_rules(name)) for name in available()]
