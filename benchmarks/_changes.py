"""Draws changes of a step's layout, to hold predictions of changes against full ones."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence

from splitjax.cost import LaidOutStep, Prediction, predict_step
from splitjax.plan import LayerPlan, Spec, spec_axes
from splitjax.planning.predict import StepPrediction
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class DimPlace:
    """Names a dim of a leaf: its `path`, and which `dim` it is."""

    path: str
    dim: int


def dims_by_class(graph: Graph) -> dict[int, list[DimPlace]]:
    """Returns the dims of all state leaves by hard class: dims of one class share storage, and are split alike."""
    places: dict[int, list[DimPlace]] = collections.defaultdict(list)
    for leaf in graph.state:
        for dim, atoms in enumerate(leaf.dims):
            if atoms:
                places[graph.hard[atoms[0]]].append(DimPlace(leaf.path, dim))
    return dict(places)


def draw_change(
    prediction: Prediction, classes: Mapping[int, Sequence[DimPlace]], draws: random.Random
) -> dict[str, Spec]:
    """Draws new specs for the leaves of a layer: all dims of one of its hard classes are split over axes that divide
    them, or over none.

    **Arguments:** `prediction`: of the layout that is changed. `classes`: what `dims_by_class` says of its step.
    `draws`: where chance comes from."""
    structure, mesh = prediction.structure, prediction.setting.mesh
    graph = structure.graph
    layer = draws.choice(graph.layers)
    dims = [dim for path in layer.params for dim in graph.leaf(path).dims if dim]
    atom = draws.choice(dims)[0]
    names = mesh.present(mesh.names)
    choices = [axes for num in range(len(names) + 1) for axes in itertools.permutations(names, num)]
    axes = draws.choice([axes for axes in choices if graph.atom_sizes[atom] % mesh.size(axes) == 0])
    specs: dict[str, Spec] = {}
    for place in classes.get(graph.hard[atom], ()):
        leaf = prediction.leaves[structure.position[place.path]]
        entries = list(specs.get(leaf.path, leaf.spec)) + [None] * (len(leaf.shape) - len(leaf.spec))
        for dim, entry in enumerate(entries):
            left = tuple(axis for axis in spec_axes((entry,)) if axis not in axes)
            entries[dim] = _entry(axes if dim == place.dim else left)
        specs[leaf.path] = tuple(entries)
    return specs


def predicted_differently(delta: StepPrediction) -> list[str]:
    """Predicts a changed layout of a drafted step from the beginning, its tables found again, and returns the names of
    what `delta`, the prediction of the change, does not agree on with that."""
    full = StepPrediction.of(delta.draft.laid_out(delta.dense.leaves))
    differing = differing_fields(delta.dense, full.dense)
    names = ("found", "exchanges", "sent_in_part", "sent_by_leaf", "collectives", "memory", "syncs", "partial")
    differing += [name for name in names if getattr(delta, name) != getattr(full, name)]
    ours, theirs = (() if one.tables is None else (one.tables.tables, one.tables.reasons) for one in (delta, full))
    return differing if ours == theirs else [*differing, "tables"]


def full_prediction(prediction: Prediction, layers: Sequence[LayerPlan]) -> Prediction:
    """Predicts the step of `prediction` from the beginning, under the same layout. `layers`: of its plan."""
    setting = prediction.setting
    step = LaidOutStep(
        prediction.structure.graph,
        prediction.leaves,
        layers,
        setting.mesh,
        setting.batch_axes,
        setting.replicated_batch,
    )
    return predict_step(step, prediction.manner)


def differing_fields(delta: Prediction, full: Prediction) -> list[str]:
    """Returns the names of what two predictions of one step do not agree on; of a step they share the structure."""
    names = [field.name for field in dataclasses.fields(Prediction) if field.name != "structure"]
    return [name for name in (*names, "collectives", "memory") if getattr(delta, name) != getattr(full, name)]


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Returns the entry of a spec that splits a dim over `axes`."""
    return axes if len(axes) > 1 else axes[0] if axes else None
