"""The JSON of a `Plan`: one entry a line on the way out, strict on the way in.

A pinned plan is edited by hand and outlives versions, so reading trusts nothing: what `splitjax.codec` finds by the
types of the fields, and here a spec that names an axis the mesh lacks or does not divide, a layer that contradicts its
leaf, each is a `PlanError` with the key path (`leaves[3].spec[1]`).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NoReturn, TypeVar

from splitjax._plan_parts import Collective, LeafPlan, Memory, PlanParts, Spec, spec_axes
from splitjax._plan_purpose import Purpose
from splitjax.codec import Called, Codec, Form, Wording, fields_of, similar, without_nones
from splitjax.errors import MeshError, PlanError
from splitjax.mesh import MeshShape
from splitjax.roles import read_roles

FORMAT = 1

PlanT = TypeVar("PlanT", bound=PlanParts)

_Axes = tuple[Annotated[tuple[str, int], Called("a list of a name and a size")], ...]


def _read_mesh(codec: Codec[Any], value: Any, place: str) -> MeshShape:
    # An axis of which the user said a role has it as its third entry.
    with_role = [axis for axis in value if isinstance(axis, list) and len(axis) == 3] if isinstance(value, list) else []
    pairs = [axis[:2] if axis in with_role else axis for axis in value] if with_role else value
    axes = codec.hinted(_Axes, pairs, place)
    if len({name for name, _ in axes}) < len(axes):
        codec.fail("a mesh axis stands twice", value, place, "give every axis its own name")
    try:
        return MeshShape.of(dict(axes)).with_roles(read_roles({axis: role for axis, _, role in with_role}, place))
    except MeshError as error:
        codec.fail(error.message, error.value, place, error.remedy or "")


def _write_mesh(mesh: MeshShape) -> tuple[tuple[Any, ...], ...]:
    said = dict(mesh.said)
    return tuple((axis, size, *((said[axis],) if axis in said else ())) for axis, size in mesh.axes)


# A mesh is the list of its axes: [["data", 2], ["model", 4]]; with its role, where the user said one.
MESH_FORM: Form[MeshShape] = Form(_write_mesh, _read_mesh)


def _write_collective(collective: Collective) -> dict[str, Any]:
    fields = fields_of(collective)
    purpose = fields.pop("purpose")
    told = purpose == Purpose.told(purpose.words)
    return {**fields, "why": collective.why, **({} if told else {"purpose": purpose})}


def _read_collective(codec: Codec[Any], values: Any, place: str) -> Collective:
    known = codec.object(Collective, values, place)
    if "why" not in known:
        codec.fail(codec.wording.missing(Collective), "why", f"{place}.why", "add 'why': what it is for, in words")
    words = codec.hinted(str, known.pop("why"), f"{place}.why")
    if "purpose" in known:
        return Collective(**codec.arguments(Collective, known, place))
    # Plans of versions before have the sentence alone: it is kept as it is, for nothing may be read out of a sentence.
    fields = codec.arguments(Collective, known, place, without=("purpose",))
    return Collective(**fields, purpose=Purpose.told(words))


def _write_purpose(purpose: Purpose) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(Purpose)}
    return {name: value for name, value in fields_of(purpose).items() if value != defaults[name]}


def _read_purpose(codec: Codec[Any], values: Any, place: str) -> Purpose:
    purpose = Purpose(**codec.arguments(Purpose, values, place))
    if lacking := purpose.lacking:
        codec.fail(f"a collective of the kind {purpose.kind!s} has a {lacking}", None, f"{place}.{lacking}")
    return purpose


def _write_memory(memory: Memory) -> dict[str, Any]:
    fields = fields_of(memory)
    simulated = {name: fields.pop(name) for name in ("bound_bytes", "at_peak")}
    return fields if memory.bound_bytes is None else {**fields, **simulated}


# A leaf without padding, whose examples lead, is written as it was before there was either.
LEAF_FORM: Form[LeafPlan] = without_nones("logical", "example_dim")
# Without a bound it is written as it was before there were bounds.
MEMORY_FORM: Form[Memory] = Form(_write_memory)
# The sentence `why` is written for who reads the text; what counts on the way in is the purpose. A collective of
# which only the sentence is known is written as it was read.
COLLECTIVE_FORM: Form[Collective] = Form(_write_collective, _read_collective)
PURPOSE_FORM: Form[Purpose] = Form(_write_purpose, _read_purpose)


def codec_of(kind: type[PlanT]) -> Codec[PlanT]:
    """Returns what writes and reads plans; `kind` is the dataclass that is made of the parts, `splitjax.plan.Plan`."""
    return Codec(
        kind,
        PlanError,
        Wording(
            "a plan",
            "pass what `plan.to_json()` returned; for a file use `Plan.load(path)`",
            remake="make the plan anew with this version of splitjax: `step.plan(...).save(path)`",
        ),
        format=FORMAT,
        forms={
            LeafPlan: LEAF_FORM,
            MeshShape: MESH_FORM,
            Memory: MEMORY_FORM,
            Collective: COLLECTIVE_FORM,
            Purpose: PURPOSE_FORM,
        },
        entries=("leaves", "layers", "constraints", "collectives", "syncs", "boundaries", "warnings", "remat"),
        unless_empty=("boundaries", "compute", "warnings", "remat", "saved"),
        finite=True,
        check=check,
    )


def check(plan: PlanParts) -> None:
    """Raises `PlanError` for what types alone do not say: names agree between the parts of the `plan`, and specs fit
    mesh and shapes."""
    leaves: dict[str, LeafPlan] = {}
    for i, leaf in enumerate(plan.leaves):
        place = f"leaves[{i}]"
        if leaf.path in leaves:
            _fail("two leaves have the same path", leaf.path, f"{place}.path", "keep one of the two")
        leaves[leaf.path] = leaf
        _check_spec(leaf, leaf.spec, plan.mesh, f"{place}.spec")
        if leaf.example_dim is not None and leaf.example_dim >= len(leaf.shape):
            _fail(
                f"the dim of examples is none of {len(leaf.shape)} dims",
                leaf.example_dim,
                f"{place}.example_dim",
                "give one of its dims, or leave it out for the first",
            )
        if leaf.gradient is not None:
            _check_spec(leaf, leaf.gradient, plan.mesh, f"{place}.gradient")
    for i, axis in enumerate(plan.batch_axes):
        _axis_size(axis, plan.mesh, f"batch_axes[{i}]")
    for i, constraint in enumerate(plan.constraints):
        for axis in spec_axes(constraint.spec):
            _axis_size(axis, plan.mesh, f"constraints[{i}].spec")
    if plan.partial is not None:
        num_segments = len(plan.partial.segments)
        for i, first in enumerate(plan.partial.first):
            if first >= num_segments:
                _fail(
                    "a depth begins behind the last segment",
                    first,
                    f"partial.first[{i}]",
                    f"give 0 to {num_segments - 1}",
                )
    for i, layer in enumerate(plan.layers):
        if len(layer.params) != len(layer.specs):
            _fail(
                "a layer needs one spec per parameter",
                layer.specs,
                f"layers[{i}].specs",
                f"give {len(layer.params)} specs",
            )
        for j, (path, spec) in enumerate(zip(layer.params, layer.specs, strict=True)):
            if path not in leaves:
                _fail(
                    "a layer names a parameter that is no leaf of the plan",
                    path,
                    f"layers[{i}].params[{j}]",
                    similar(path, leaves),
                )
            if spec != leaves[path].spec:
                _fail(
                    f"the layer's spec of {path!r} is not that of its leaf, {leaves[path].spec}",
                    spec,
                    f"layers[{i}].specs[{j}]",
                    "change a spec in both places, under `leaves` and under `layers`",
                )


def _check_spec(leaf: LeafPlan, spec: Spec, mesh: MeshShape, place: str) -> None:
    if len(spec) > len(leaf.shape):
        _fail(
            f"the spec has {len(spec)} entries for {len(leaf.shape)} dims",
            spec,
            place,
            "give at most one entry per dim",
        )
    axes = spec_axes(spec)
    if len(set(axes)) < len(axes):
        _fail("a spec uses a mesh axis twice", spec, place, "shard one dim only over that axis")
    for d, entry in enumerate(spec):
        if entry == "?" or (isinstance(entry, tuple) and "?" in entry):
            _fail("only constraints may leave a dim open", entry, f"{place}[{d}]", "give null or an axis")
        size = 1
        for axis in spec_axes((entry,)):
            size *= _axis_size(axis, mesh, f"{place}[{d}]")
        if leaf.shape[d] % size:
            message = f"dim {d} of {leaf.path!r}, {leaf.shape[d]}, does not divide by {size}"
            _fail(message, entry, f"{place}[{d}]", "give null, or another axis")


def _axis_size(axis: str, mesh: MeshShape, place: str) -> int:
    try:
        return mesh.size(axis)
    except MeshError as error:
        raise PlanError(
            error.message, value=axis, place=place, remedy=f"name one of {', '.join(mesh.names)}"
        ) from error


def _fail(message: str, value: Any, place: str, remedy: str) -> NoReturn:
    raise PlanError(message, value=value, place=place, remedy=remedy)
