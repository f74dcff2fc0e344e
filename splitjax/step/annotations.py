"""Takes the types of a user's Explicit mesh axes out of a traced step, and keeps what the user wrote with them as pins.

A jaxpr that was traced under the user's mesh comes in, in which `jax.reshard` and `out_sharding=` say where arrays are.
The same step over arrays that name no mesh comes out, with sharding constraints in their places, and the list of them
for the plan. So the rest of splitjax sees one kind of step, and XLA places what neither pins nor the plan decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.errors import TraceError
from splitjax.mesh import inside_mesh

_NOWHERE = AbstractMesh((), ())
# Parameters of operations that say where a result is. Constants often take theirs from other arrays, unasked.
_OF_RESULTS = ("out_sharding", "sharding")
_CONTEXTS = ("ctx_mesh", "context_mesh")  # parameters that are the mesh in whose context an operation was traced
_CONSTANTS = frozenset({"broadcast_in_dim", "iota", "convert_element_type"})
# Functions of JAX that say where their result is although nobody asked: `jnp.repeat`, and `jax.lax.map` in batches.
_UNASKED = frozenset({"_auto_repeat", "_scan_leaf", "_remainder_leaf"})

_CONSTRAINT = "with_sharding_constraint"
# What JAX says of an annotation that only Explicit axes take, and that names one of another type.
_NAMES_AUTO = "of type: AxisType.Auto"


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Says where a user wants an array inside a step.

    **Attributes:** `written`: how the user said so, such as `reshard`. `array`: dtype and shape. `spec`: where.
    `source`: `file:line (function)`; empty where it is not known.
    """

    written: str
    array: str
    spec: PartitionSpec
    source: str

    def __str__(self) -> str:
        return f"{self.array} to {self.spec} by {self.written}" + (f" at {self.source}" if self.source else "")


def has_explicit(mesh: Mesh | AbstractMesh | None) -> bool:
    """Returns whether some axis of `mesh` is of type Explicit."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def names_auto(error: Exception, mesh: Mesh | AbstractMesh, place: str) -> TraceError | None:
    """Returns the typed error for what JAX says, `error`, where `jax.reshard` or `out_sharding=` names an axis of type
    Auto; None for any other error.

    **Arguments:** `mesh`: under whose axes the function was traced. `place`: what was traced, for the message."""
    if _NAMES_AUTO not in str(error):
        return None
    return TraceError(
        "jax.reshard and out_sharding= say where an array is along mesh axes of type Explicit, and here they name one"
        f" of type Auto: {' '.join(str(error).split())[:400]}",
        value={name: str(kind) for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)},
        place=place,
        remedy=(
            "give a mesh whose axes are Explicit, mesh=jax.make_mesh(sizes, names), or write"
            " jax.lax.with_sharding_constraint(x, PartitionSpec(...)) in their place, which Auto axes take"
        ),
    )


def refused_types(error: Exception, mesh: Mesh | AbstractMesh, place: str, does_under_auto: bool) -> TraceError:
    """Returns the typed error for what JAX says, `error`, of a step that is traced under the Explicit axes of `mesh`.

    **Arguments:** `place`: what was traced, for the message. `does_under_auto`: whether the step could be traced under
    Auto axes."""
    if (refused := names_auto(error, mesh, place)) is not None:
        return refused
    remedy = (
        "say where that array is, with jax.reshard or out_sharding=, or choose rules whose layout fits the step's"
        " annotations"
    )
    if does_under_auto:
        remedy += (
            "; or give the mesh Auto axes, which do for sharding constraints: jax.make_mesh(sizes, names,"
            " axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        )
    return TraceError(
        f"the step cannot be traced under the Explicit axes of its mesh: {' '.join(str(error).split())[:600]}",
        value=type(error).__name__,
        place=place,
        remedy=remedy,
    )


def is_fit_for_auto(closed: _compat.ClosedJaxpr) -> bool:
    """Returns whether a step that was traced under Auto axes, `closed`, has no annotations but sharding constraints."""
    return all(annotation.written == _CONSTRAINT for annotation in untyped(closed, pins=False)[1])


def typed_leaf(leaf: jax.ShapeDtypeStruct, mesh: Mesh | AbstractMesh, spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Returns an argument as a step under `mesh` sees it: `leaf` with those parts of `spec` that are Explicit axes."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    entries = [_only(entry, explicit) for entry in spec]
    where = NamedSharding(mesh.abstract_mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=leaf.weak_type)


def untyped(closed: _compat.ClosedJaxpr, pins: bool = True) -> tuple[_compat.ClosedJaxpr, tuple[Annotation, ...]]:
    """Takes the types of mesh axes out of a jaxpr.

    **Arguments:** `closed`: traced under a mesh with Explicit axes. `pins`: whether annotations become sharding
    constraints; they are left away where the jaxpr was traced before the layout of its arguments was known, because
    JAX derives further ones from that.

    Returns the closed jaxpr, and the annotations that the user wrote, each once."""
    untyping = _Untyping(pins)
    return untyping.jaxpr(closed), tuple(dict.fromkeys(untyping.annotations))


def constraints_in(closed: _compat.ClosedJaxpr) -> tuple[Annotation, ...]:
    """Returns the sharding constraints that a user wrote into a step, traced without Explicit axes: `closed`."""
    return tuple(dict.fromkeys(_constraints(closed)))


def _constraints(jaxpr: Any) -> list[Annotation]:
    written = []
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding):
            written.append(_annotation(eqn, _CONSTRAINT, eqn.params["sharding"].spec))
        for value in eqn.params.values():
            inner = value if isinstance(value, (tuple, list)) else (value,)
            written += [found for each in inner if _compat.is_jaxpr(each) for found in _constraints(each)]
    return written


class _Untyping:
    """Rewrites jaxprs, each once, and collects the annotations in them."""

    def __init__(self, pins: bool) -> None:
        self.pins = pins
        self.annotations: list[Annotation] = []
        # By identity, and whether it is part of a derivative: the jaxpr, kept alive, and what became of it.
        self._done: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._is_derived = False

    def jaxpr(self, value: Any) -> Any:
        """Returns the jaxpr `value`, open or closed as it is, without types."""
        key = id(value), self._is_derived
        if key not in self._done:
            inner, _ = _compat.open_jaxpr(value)
            env: dict[Any, Any] = {}
            invars, constvars = ([_renamed(v, env) for v in vs] for vs in (inner.invars, inner.constvars))
            eqns = [new for eqn in inner.eqns for new in self._equation(eqn, env)]
            outvars = [_read(v, env) for v in inner.outvars]
            self._done[key] = value, _compat.changed_jaxpr(value, constvars, invars, eqns, outvars)
        return self._done[key][1]

    def _equation(self, eqn: Any, env: dict[Any, Any]) -> list[Any]:
        """Returns the equations that `eqn` becomes; `env`: typed variable -> its own, which grows."""
        name, params = eqn.primitive.name, eqn.params
        operands = [_read(v, env) for v in eqn.invars]
        if name == "reshard":
            where = params["dst_sharding"]
            of_jax = eqn.outvars[0].aval.ndim == 0 or not has_explicit(where.mesh)  # its own derivatives; `auto_axes`
            if of_jax or _is_unasked(eqn, where.spec):
                env[eqn.outvars[0]] = operands[0]
                return []
            self.annotations += self._written(eqn, "jax.reshard", where.spec)
            if not self.pins:
                env[eqn.outvars[0]] = operands[0]
                return []
            return [_constraint(eqn, operands[0], _renamed(eqn.outvars[0], env), where)]
        outside, self._is_derived = self._is_derived, self._is_derived or _is_derivative(eqn)
        changed = {key: self._param(value) for key, value in params.items()}
        self._is_derived = outside
        changed |= {key: _untyped_mesh(params[key]) for key in _CONTEXTS if key in params}
        if name == "sharding_constraint":
            where = params["sharding"]
            if isinstance(where, NamedSharding):
                self.annotations += self._written(eqn, _CONSTRAINT, where.spec)
                changed["sharding"] = _joined(where, eqn.invars[0].aval)
            wanted = None
        else:
            wanted = next((params[key] for key in _OF_RESULTS if isinstance(params.get(key), NamedSharding)), None)
            changed |= {key: None for key in _OF_RESULTS if isinstance(params.get(key), NamedSharding)}
        if wanted is None or len(eqn.outvars) != 1 or eqn.outvars[0].aval.ndim == 0:
            outvars = [_renamed(v, env) for v in eqn.outvars]
            return [_compat.moved_equation(eqn, operands, outvars, changed, _mesh_left(eqn))]
        if name not in _CONSTANTS or any(wanted.spec):
            self.annotations += self._written(eqn, "out_sharding=", wanted.spec)
        out = _renamed(eqn.outvars[0], env)
        if not self.pins:
            return [_compat.moved_equation(eqn, operands, [out], changed, _mesh_left(eqn))]
        before = _compat.new_variable(out)
        made = _compat.moved_equation(eqn, operands, [before], changed, _mesh_left(eqn))
        return [made, _constraint(eqn, before, out, wanted)]

    def _written(self, eqn: Any, how: str, spec: PartitionSpec) -> list[Annotation]:
        """Returns the annotation, if a user wrote it: derivatives have some that JAX derives."""
        return [] if self._is_derived or _is_derivative(eqn) else [_annotation(eqn, how, spec)]

    def _param(self, value: Any) -> Any:
        """Returns a parameter of an equation without types of axes."""
        if _compat.is_jaxpr(value):
            return self.jaxpr(value)
        if isinstance(value, (tuple, list)) and any(
            _compat.is_jaxpr(each) or isinstance(each, NamedSharding) for each in value
        ):
            return type(value)(self._param(each) for each in value)
        if isinstance(value, NamedSharding):
            return NamedSharding(inside_mesh(value.mesh), value.spec)
        return inside_mesh(value) if isinstance(value, (Mesh, AbstractMesh)) else value


def _renamed(variable: Any, env: dict[Any, Any]) -> Any:
    """Returns the variable without types that stands for `variable`, and notes it in `env`."""
    aval = variable.aval
    mesh = getattr(getattr(aval, "sharding", None), "mesh", _NOWHERE)
    if not mesh.empty:
        if AxisType.Manual not in mesh.axis_types:
            aval = ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        elif has_explicit(mesh):  # within a shard_map over some of the axes
            aval = aval.update(sharding=NamedSharding(inside_mesh(mesh), PartitionSpec(*(None,) * aval.ndim)))
    is_dropped = isinstance(variable, _compat.DropVar)
    env[variable] = (_compat.DropVar if is_dropped else _compat.Var)(aval)
    return env[variable]


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, _compat.Literal) else env[atom]


def _mesh_left(eqn: Any) -> AbstractMesh:
    """Returns the mesh in whose context `eqn` is bound without types: that of a `shard_map` around it, or none."""
    return _untyped_mesh(_compat.context_mesh(eqn))


def _untyped_mesh(mesh: AbstractMesh) -> AbstractMesh:
    return inside_mesh(mesh) if AxisType.Manual in mesh.axis_types else _NOWHERE


def _constraint(eqn: Any, operand: Any, result: Any, where: NamedSharding) -> Any:
    """Returns the equation that pins `operand` as `result` to where `eqn` says, `where`. Axes that are not Explicit
    stay open: in each dim XLA may split further over them."""
    inside = inside_mesh(where.mesh)
    pin = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(inside, where.spec))
    shape = jax.ShapeDtypeStruct(result.aval.shape, result.aval.dtype)
    (made,) = _compat.open_jaxpr(_compat.trace(pin, shape)[0])[0].eqns
    some_open = any(kind != AxisType.Explicit for kind in where.mesh.axis_types)
    changes = {"unconstrained_dims": frozenset(range(result.aval.ndim))} if some_open else {}
    return _compat.moved_equation(
        eqn, [operand], [result], {**made.params, **changes}, _mesh_left(eqn), primitive=made.primitive
    )


def _joined(where: NamedSharding, aval: Any) -> NamedSharding:
    """Returns a constraint over Auto axes together with the Explicit axes that the array's type, `aval`, has."""
    of_type = tuple(aval.sharding.spec) + (None,) * (aval.ndim - len(aval.sharding.spec))
    asked = tuple(where.spec) + (None,) * (aval.ndim - len(where.spec))
    entries = []
    for typed, entry in zip(of_type, asked, strict=True):
        axes = [*_axes(typed), *(axis for axis in _axes(entry) if axis not in _axes(typed))]
        is_open = entry is PartitionSpec.UNCONSTRAINED
        entries.append(entry if is_open else tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return NamedSharding(inside_mesh(where.mesh), PartitionSpec(*entries))


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the axes of an entry of a `PartitionSpec`."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _only(entry: Any, axes: set[str]) -> Any:
    """Returns an entry of a plan's spec with those of its axes that are in `axes`."""
    kept = tuple(axis for axis in _axes(None if entry == "?" else entry) if axis in axes)
    return kept if len(kept) > 1 else kept[0] if kept else None


def _is_unasked(eqn: Any, spec: PartitionSpec) -> bool:
    """Returns whether JAX itself has put the whole result of one of its functions to where its operand is, whole too,
    as `jnp.repeat` does under Explicit axes when no `out_sharding=` is given."""
    return not any(spec) and _compat.is_within_jax(eqn, _UNASKED)


def _is_derivative(eqn: Any) -> bool:
    """Returns whether `eqn` is part of a backward pass. Operations within its loops and calls do not tell."""
    return "transpose(" in _compat.name_stack(eqn)


def _annotation(eqn: Any, how: str, spec: PartitionSpec) -> Annotation:
    aval = eqn.outvars[0].aval
    array = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    return Annotation(how, array, spec, _compat.source_line(eqn))
