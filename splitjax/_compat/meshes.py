"""Keeps what is traced apart from the mesh in context, and says which manual mesh axes a value varies over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
from jax import core as public_core
from jax._src import array as array_internal
from jax._src import config as config_internal
from jax._src import core as core_internal
from jax._src.lax import lax as lax_internal
from jax.sharding import AbstractMesh

from splitjax._compat.definition import define_primitive
from splitjax._compat.jaxprs import NO_EFFECTS

P = ParamSpec("P")
R = TypeVar("R")

# What almost every array is that holds values: to ask for the type itself takes a fifth of what `isinstance` takes.
CONCRETE_ARRAY: type[jax.Array] = array_internal.ArrayImpl
# Equal meshes are one object, so that asking whether there is none is cheap in every call of a step.
_NO_MESH = AbstractMesh((), ())


def axes_of_size_one_are_no_types() -> Any:
    """Returns a context manager under which types of arrays name no mesh axis of size 1: every layout is the same."""
    return config_internal.remove_size_one_mesh_axis_from_type(True)


_forget_mesh = define_primitive(
    "forget_mesh",
    lambda value: [value],
    lambda aval: ([public_core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)], NO_EFFECTS),
)


def forget_mesh(value: Any, explicit_only: bool = False) -> Any:
    """Returns `value` as an array whose type names no mesh, so that it goes with any other; its layout stays.
    `explicit_only`: leave values alone whose mesh has no axis of type Explicit. Compiles to nothing."""
    types = jax.typeof(value).sharding.mesh.axis_types
    wanted = jax.sharding.AxisType.Explicit in types if explicit_only else bool(types)
    return _forget_mesh.bind(value)[0] if wanted else value


def forget_meshes(values: Any, explicit_only: bool = False) -> Any:
    """Returns the pytree `values` with `forget_mesh` applied to each of its leaves."""
    return jax.tree.map(lambda value: forget_mesh(value, explicit_only), values)


def outside_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns `fn`, run as if no `jax.set_mesh` were around its calls: what it traces then does not depend on it."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh is _NO_MESH or mesh.empty:
            return fn(*args, **kwargs)
        # Within another trace the mesh of its devices is that trace's, and cannot be set.
        is_outermost = core_internal.trace_state_clean()
        nothing: Any = None  # which type checkers do not know to be taken
        with jax.set_mesh(nothing) if is_outermost else jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return fn(*args, **kwargs)

    return call


def varying_axes(*operands: Any) -> frozenset[str]:
    """The manual mesh axes that some of the operands vary over, as far as JAX knows (`check_vma=True`)."""
    return frozenset().union(*(jax.typeof(operand).mat.varying for operand in operands))


def vary(operand: Any, axes: frozenset[str]) -> Any:
    """Returns `operand` as a value that counts as varying over the manual mesh `axes` at least."""
    missing = tuple(sorted(axes - varying_axes(operand)))
    return jax.lax.pcast(operand, missing, to="varying") if missing else operand


def vary_all(operands: Any, axes: frozenset[str]) -> Any:
    """Returns the pytree `operands` with `vary` applied to each of its leaves."""
    return jax.tree.map(lambda operand: vary(operand, axes), operands)


def result_type(shape: Sequence[int], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result of `shape` and `dtype`: varying over the manual mesh axes that its
    `operands` vary over."""
    mat = core_internal.ManualAxisType(varying=varying_axes(*operands))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=mat)


def as_weakly_typed(array: jax.Array) -> jax.Array:
    """Returns the same `array` with a weak type, which promotes like a Python number."""
    return cast("jax.Array", lax_internal._convert_element_type(array, array.dtype, weak_type=True))
