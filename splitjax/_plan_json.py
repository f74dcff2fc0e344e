"""The JSON of a `Plan`: one entry a line on the way out, strict on the way in.

A pinned plan is edited by hand and outlives versions, so reading trusts nothing: a misspelt key, a missing or repeated
one, a value of another type, a spec that names an axis the mesh lacks or does not divide, a layer that contradicts its
leaf, each is a `PlanError` with the key path (`leaves[3].spec[1]`). Keys whose dataclass field has a default may be
left out.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np

from splitjax._plan_parts import (
    Collective,
    Constraint,
    LayerPlan,
    LeafPlan,
    Memory,
    PartialPlan,
    PlanParts,
    SegmentPlan,
    Spec,
    SyncPlan,
    spec_axes,
)
from splitjax.errors import MeshError, PlanError
from splitjax.mesh import MeshShape

FORMAT = 1

PlanT = TypeVar("PlanT", bound=PlanParts)
Reader = Callable[[Any, str], Any]  # (JSON value, key path) -> checked value
_REMAKE = "make the plan anew with this version of splitjax: `step.plan(...).save(path)`"


def dump(plan: PlanParts) -> str:
    """Writes `plan` as ASCII JSON text; entries of lists of objects stand one a line, keys in the order of the
    dataclasses."""
    fields = {"format": FORMAT, **dataclasses.asdict(plan), "mesh": plan.mesh.axes}
    lines = []
    for name, value in fields.items():
        if isinstance(value, tuple) and value and isinstance(value[0], dict):
            entries = ",\n".join(f"    {_compact(entry)}" for entry in value)
            lines.append(f'  "{name}": [\n{entries}\n  ]')
        else:
            lines.append(f'  "{name}": {_compact(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    def plain(number: Any) -> int:
        if isinstance(number, np.integer):  # sizes computed with numpy
            return int(number)
        raise TypeError(f"a plan cannot hold {number!r}")

    return json.dumps(value, default=plain, allow_nan=False)


def parse(kind: type[PlanT], text: str, origin: str) -> PlanT:
    """Reads a plan from JSON text.

    **Arguments:**

    - `kind`: the dataclass that is made of the parts, `splitjax.plan.Plan`.
    - `text`: what `dump` wrote, possibly edited by hand.
    - `origin`: the file it came from, or "", shown in errors.

    **Raises:** `PlanError` with the key path of the first problem."""
    try:
        return _parse(kind, text)
    except PlanError as error:
        place = f"{origin}: {error.place}" if origin and error.place else origin or error.place
        raise PlanError(error.message, value=error.value, place=place, remedy=error.remedy) from error.__cause__


def _parse(kind: type[PlanT], text: str) -> PlanT:
    if not isinstance(text, str):
        _fail(
            "a plan's JSON is a string",
            text,
            "plan",
            "pass what `plan.to_json()` returned; for a file use `Plan.load(path)`",
        )
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        # not only JSONDecodeError: a number of thousands of digits is a ValueError
        where = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "plan"
        raise PlanError(
            f"the plan is not JSON: {getattr(error, 'msg', error)}",
            value=text[:80],
            place=where,
            remedy="pass what `plan.to_json()` returned; for a file use `Plan.load(path)`",
        ) from error
    if not isinstance(data, dict) or "format" not in data:
        _fail(
            "this JSON is not a plan",
            data,
            "format",
            'a plan is an object with a "format" number: see `plan.to_json()`',
        )
    number = data.pop("format")
    if type(number) is not int or number != FORMAT:
        _fail(f"this version of splitjax reads plans of format {FORMAT}", number, "format", _REMAKE)
    plan = _object(kind, _PLAN)(data, "")
    _check(plan)
    return plan


def parse_sync(value: Any, place: str) -> SyncPlan:
    """Reads an entry of `Plan.syncs` from `value`, what `dataclasses.asdict` made of it. Raises `PlanError`, whose
    place begins with `place`."""
    return _object(SyncPlan, _SYNC)(value, place)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        _fail("a key stands twice in one object of the plan", repeated, repeated, "keep one of the two")
    return result


def _check(plan: PlanParts) -> None:
    """What types alone do not say: names agree between the parts of the plan, and specs fit mesh and shapes."""
    leaves: dict[str, LeafPlan] = {}
    for i, leaf in enumerate(plan.leaves):
        place = f"leaves[{i}]"
        if leaf.path in leaves:
            _fail("two leaves have the same path", leaf.path, f"{place}.path", "keep one of the two")
        leaves[leaf.path] = leaf
        _check_spec(leaf, leaf.spec, plan.mesh, f"{place}.spec")
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
                    _similar(path, leaves),
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


def _similar(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {', '.join(map(repr, close))}?" if close else f"use one of {', '.join(list(known)[:12])}"


def _typed(kind: type, words: str) -> Reader:
    def read(value: Any, place: str) -> Any:
        if type(value) is not kind:  # exactly: JSON's true is a Python int
            _fail(f"the plan needs {words} here", value, place, f"give {words}, or {_REMAKE}")
        return value

    return read


def _count(value: Any, place: str) -> int:
    if _whole(value, place) < 0:
        _fail("sizes are not negative", value, place, "give 0 or more")
    return value


def _number(value: Any, place: str) -> float:
    if type(value) not in (int, float):
        _fail("the plan needs a number here", value, place, f"give a number, or {_REMAKE}")
    return float(value)


def _list(entry: Reader) -> Reader:
    def read(value: Any, place: str) -> tuple[Any, ...]:
        items = _array(value, place)
        return tuple(entry(item, f"{place}[{i}]") for i, item in enumerate(items))

    return read


def _choice(*options: str) -> Reader:
    def read(value: Any, place: str) -> str:
        if value not in options:
            _fail(f"the plan needs one of {', '.join(options)} here", value, place, _similar(str(value), options))
        return value

    return read


def _spec_entry(value: Any, place: str) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        _fail(
            "a spec's entry is null, an axis, or a list of axes",
            value,
            place,
            'write null, "model" or ["data", "model"]',
        )
    return _list(_text)(value, place)


def _mesh(value: Any, place: str) -> MeshShape:
    axes = _list(_list(lambda item, where: item))(value, place)
    for i, axis in enumerate(axes):
        if len(axis) != 2 or not isinstance(axis[0], str):
            _fail("a mesh axis is a name and a size", axis, f"{place}[{i}]", 'write [["data", 2], ["model", 4]]')
    if len({name for name, _ in axes}) < len(axes):
        _fail("a mesh axis stands twice", value, place, "give every axis its own name")
    try:
        return MeshShape.of(dict(axes))
    except MeshError as error:
        raise PlanError(error.message, value=error.value, place=place, remedy=error.remedy) from error


def _object(kind: type, readers: Mapping[str, Reader]) -> Reader:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert fields.keys() == readers.keys(), "every field of the dataclass needs its reader"

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            _fail("the plan needs an object here", value, place, _REMAKE)
        dot = f"{place}." if place else ""
        for name in value:
            if name not in fields:
                _fail("the plan has an unknown key", name, f"{dot}{name}", _similar(name, fields))
        for name, field in fields.items():
            if (
                name not in value
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                _fail("the plan lacks a key", name, f"{dot}{name}", f"add {name!r}, or {_REMAKE}")
        return kind(**{name: readers[name](item, f"{dot}{name}") for name, item in value.items()})

    return read


def _mapping(entry: Reader) -> Reader:
    def read(value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            _fail("the plan needs an object here", value, place, "give an object, such as {}")
        return {name: entry(item, f"{place}.{name}") for name, item in value.items()}

    return read


def _plain(value: Any, place: str) -> Any:
    """An option's value: null, a flag, a number, a string, or a list of these."""
    if isinstance(value, list):
        return [_plain(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        _fail("an option is a number, a string, true, false, null, or a list of these", value, place, _REMAKE)
    return value


def _sizes(value: Any, place: str) -> Any:
    return list(_list(_count)(value, place)) if isinstance(value, list) else _count(value, place)


_text, _whole = _typed(str, "a string"), _typed(int, "a whole number")
_flag, _array = _typed(bool, "true or false"), _typed(list, "a list")
_spec = _list(_spec_entry)
_LEAF = {
    "path": _text,
    "shape": _list(_count),
    "dtype": _text,
    "role": _text,
    "is_state": _flag,
    "spec": _spec,
    "rule": _text,
    "note": _text,
    "bytes_per_device": _count,
    "gradient": lambda value, place: None if value is None else _spec(value, place),
}
_LAYER = {"name": _text, "kind": _text, "params": _list(_text), "specs": _list(_spec), "rule": _text, "note": _text}
_MEMORY = {"state_bytes": _count, "activation_bytes": _count, "peak_bytes": _count}
_COLLECTIVE = {"op": _text, "axis": _text, "bytes": _count, "layer": _text, "why": _text}
_CONSTRAINT = {"site": _list(_count), "operand": _whole, "spec": _spec, "layer": _text, "why": _text}
_SYNC = {
    "param": _text,
    "scheme": _text,
    "axis": _text,
    "rows": _count,
    "bytes": _count,
    "dense_bytes": _count,
    "why": _text,
    "lazy": _flag,
    "options": _mapping(_plain),
    "capacities": _mapping(_sizes),
}
_SEGMENT = {
    "layers": _list(_text),
    "contributors": _count,
    "backward": _number,
    "num_bytes": _count,
    "summed_bytes": _count,
    "handed_bytes": _count,
}
_PARTIAL = {
    "assignment": _choice("spatial", "temporal"),
    "estimator": _choice("count", "mean"),
    "rotate": _flag,
    "warmup_steps": _count,
    "execution": _choice("branch", "program"),
    "rebalance": _flag,
    "statistics": _choice("global", "local"),
    "axis": _text,
    "first": _list(_count),
    "device_time": _number,
    "times": _choice("predicted", "measured"),
    "segments": _list(_object(SegmentPlan, _SEGMENT)),
    "examples": _list(_count),
}
_PLAN = {
    "mesh": _mesh,
    "rules": _text,
    "replicated_batch": _choice("all", "data"),
    "batch_axes": _list(_text),
    "leaves": _list(_object(LeafPlan, _LEAF)),
    "layers": _list(_object(LayerPlan, _LAYER)),
    "constraints": _list(_object(Constraint, _CONSTRAINT)),
    "gathered": _list(_text),
    "memory": _object(Memory, _MEMORY),
    "collectives": _list(_object(Collective, _COLLECTIVE)),
    "notes": _list(_text),
    "group_comm": _choice("gather", "turns", "modulo"),
    "syncs": _list(_object(SyncPlan, _SYNC)),
    "partial": lambda value, place: None if value is None else _object(PartialPlan, _PARTIAL)(value, place),
}
