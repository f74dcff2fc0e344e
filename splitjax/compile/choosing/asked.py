"""Names by a digest what is to be chosen for: all that a choice depends on, the sources of splitjax and the version of
JAX included. Processes that are asked for the same have the same digest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from splitjax.auto_mesh import AutoMesh
from splitjax.compile.entry import Recipe
from splitjax.mesh import platform_of
from splitjax.rules.ruleset import available, load_rules
from splitjax.rules.writing import write_rules
from splitjax.search import toulbar
from splitjax.step.agreement import program_text
from splitjax.step.traced import Traced

# Of a value whose text is not the same in another process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """Is a question for a choice.

    **Attributes:** `recipe`: the step. `mesh`: its mesh, or what is asked for in its place. `traced`: the call.
    `devices`: what there is to choose for, as text.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh | AutoMesh
    traced: Traced
    devices: str

    @property
    def has_text(self) -> bool:
        """Whether all of it has a text that is the same in another process."""
        return not any(_ADDRESS.search(part) for part in self._parts)

    @property
    def digest(self) -> str:
        """A digest of all of it."""
        calibration = self.recipe.calibration
        return _digest((*self._parts, "" if calibration is None else calibration.to_json()))

    @property
    def digest_for_all(self) -> str:
        """A digest of all that the processes of a run have alike: without what each of them measured of the machine,
        and without addresses."""
        measured = str(self.recipe.calibration is not None)
        return _digest((*(_ADDRESS.sub("", part) for part in self._parts), measured))

    @functools.cached_property
    def _parts(self) -> tuple[str, ...]:
        return (
            _sources(),
            jax.__version__,
            self.devices,
            str(toulbar.is_installed()),
            _mesh_text(self.mesh),
            *_said(self.recipe),
            *_traced(self.traced),
            *_shipped(),
        )


def _digest(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


@functools.cache
def _sources() -> str:
    """Returns a digest of the sources of splitjax: a choice of another version is never read."""
    root, digest = pathlib.Path(__file__).resolve().parents[2], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _mesh_text(asked: Mesh | AbstractMesh | AutoMesh) -> str:
    if isinstance(asked, AutoMesh):
        return repr(asked)
    types = getattr(asked, "axis_types", ())
    return f"{dict(asked.shape)} {types} {platform_of(asked)}"


def _said(recipe: Recipe) -> Iterator[str]:
    """Yields what the decorator was told, as far as a choice depends on it, but for a calibration."""
    yield write_rules(recipe.rules)
    yield repr((recipe.donate, recipe.unknown, recipe.returns_state, recipe.group_comm))
    yield repr((recipe.shard_state, recipe.chooses_state, recipe.microbatches, recipe.chooses_microbatches))
    yield repr((recipe.remat, recipe.chooses_remat, recipe.compile_best))
    yield repr((recipe.sync, recipe.backprop, recipe.uneven, sorted(recipe.roles.items()), recipe.memory_budget_bytes))
    yield repr(recipe.target)


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
