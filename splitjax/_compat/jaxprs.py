"""Reads and builds jaxprs: from JAX 0.11 `ClosedJaxpr` and `Jaxpr` are one class, and this file is the only one that
knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core as public_core
from jax._src import api_util

# Offered to the rest of splitjax under these names; imported as they are, so that their types are known to its users.
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import DropVar as DropVar
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.interpreters import partial_eval

NO_EFFECTS: frozenset[Any] = frozenset()
JAXPR_TYPES: tuple[type, ...] = (Jaxpr, ClosedJaxpr)  # of jaxprs among the parameters of an equation


def is_jaxpr(value: Any) -> bool:
    """Returns whether `value`, a parameter of an equation, is a jaxpr, open or closed."""
    return isinstance(value, JAXPR_TYPES)


def open_jaxpr(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the open jaxpr of `value` (with `constvars`, `invars`, `eqns`, `outvars`) and the values of its
    constvars."""
    if hasattr(value, "consts"):
        inner = value.jaxpr if hasattr(value, "jaxpr") else value
        return inner, tuple(value.consts)
    return value, ()


def close_jaxpr(jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    """Returns the closed form of the open `jaxpr`, with the values `consts` of its constvars; the identity where JAX
    has only one class."""
    if ClosedJaxpr is Jaxpr:
        return jaxpr
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, list(consts))


def like_jaxpr(value: Any, changed: Any) -> Any:
    """Returns the open jaxpr `changed` as what `value` is, open or closed, with the same constants."""
    if isinstance(value, ClosedJaxpr) and ClosedJaxpr is not Jaxpr:
        return ClosedJaxpr(changed, list(value.consts))
    return changed


def changed_jaxpr(
    value: Any, constvars: Sequence[Any], invars: Sequence[Any], eqns: Sequence[Any], outvars: Sequence[Any]
) -> Any:
    """Returns `value`, an open or closed jaxpr, with other variables for its constants and inputs, other equations and
    other results; its constants are the same."""
    inner, consts = open_jaxpr(value)
    kept = {"consts": consts} if ClosedJaxpr is Jaxpr else {}  # or they would be taken for inputs
    return like_jaxpr(value, inner.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars, **kept))


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates `jaxpr`, with the values `consts` of its constvars, on arrays or tracers `args`. The derivative rules
    of custom_jvp and custom_vjp equations are kept."""
    inner, own = open_jaxpr(jaxpr)
    return public_core.eval_jaxpr(inner, list(consts) or list(own), *args)


def named_evaluator(jaxpr: Any, name: str) -> Callable[..., list[Any]]:
    """Returns a function called `name` that evaluates the closed `jaxpr`, for `jax.jit`: who waits while it is compiled
    is told this name."""

    def run(*args: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, (), *args)

    run.__name__ = run.__qualname__ = name
    return run


def argument_names(jaxpr: Any) -> tuple[str, ...]:
    """Returns the paths of a traced function's flat arguments, as the debug information of `jaxpr` has them."""
    inner, _ = open_jaxpr(jaxpr)
    return tuple(inner.debug_info.arg_names or ())


def function_name(jaxpr: Any) -> str:
    """Returns the name of the function that was traced to `jaxpr`, as its debug information has it."""
    return open_jaxpr(jaxpr)[0].debug_info.func_name


def function_file(jaxpr: Any) -> str:
    """Returns the file of the function that was traced to `jaxpr`, as its debug information has it; empty for none."""
    _, _, place = open_jaxpr(jaxpr)[0].debug_info.func_src_info.partition(" at ")
    return place.rpartition(":")[0]


def with_argument_names(fun: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Lets JAX call the arrays that `fun` is called with, in order, by these `names` where it says what cannot be
    traced. Returns `fun`."""
    debug = api_util.debug_info("jit", fun, (), {})._replace(arg_names=tuple(names))
    api_util.save_wrapped_fun_debug_info(fun, debug)
    return fun


def trace(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Traces `fun` abstractly, called with `args` and `kwargs`: the closed jaxpr, and the pytree of
    `ShapeDtypeStruct`s of its result."""
    return jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)


def detach_consts(closed: Any) -> tuple[Any, list[Any]]:
    """Returns the jaxpr `closed` without constants, and the constants as its first operands: `closed(*args)` =
    `result(*consts, *args)`."""
    consts = list(closed.consts)
    if not consts:
        return closed, consts
    if ClosedJaxpr is Jaxpr:
        return closed.with_consts(()), consts
    inner = closed.jaxpr
    names = inner.debug_info.arg_names
    debug = inner.debug_info._replace(arg_names=None if names is None else ("",) * len(consts) + tuple(names))
    return ClosedJaxpr(
        inner.replace(constvars=(), invars=[*inner.constvars, *inner.invars], debug_info=debug), ()
    ), consts


def build_jaxpr(
    like: Any, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], consts: Sequence[tuple[Any, Any]]
) -> Any:
    """Returns a closed jaxpr with the inputs `invars`, the equations `eqns`, the results `outvars` and the debug
    information of the jaxpr `like`. `consts`: pairs (variable, value)."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    debug = open_jaxpr(like)[0].debug_info._replace(arg_names=None, result_paths=None)
    variables, values = [v for v, _ in consts], [value for _, value in consts]
    if ClosedJaxpr is Jaxpr:
        with_values: Any = Jaxpr  # whichever JAX is installed: type checkers know one of the two signatures
        return with_values(variables, list(invars), list(outvars), list(eqns), effects, debug, consts=values)
    return ClosedJaxpr(Jaxpr(variables, list(invars), list(outvars), list(eqns), effects, debug), values)


def new_variable(like: Any) -> Any:
    """Returns a fresh variable of the type of the variable `like`."""
    return Var(like.aval)


def variable_of(aval: Any) -> Any:
    """Returns a fresh variable of the type `aval`: an abstract value or a `ShapeDtypeStruct`."""
    if not isinstance(aval, jax.ShapeDtypeStruct):
        return Var(aval)
    return Var(public_core.ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type)))


def is_abstract(value: Any) -> bool:
    """Returns whether `value` is a tracer that stands for an unknown array (not a derivative tracer around a concrete
    one)."""
    return isinstance(value, public_core.Tracer) and value.to_concrete_value() is None


def jaxpr_effects(closed: Any) -> Any:
    """Returns the side effects of the jaxpr `closed`, such as a debug print."""
    return closed.effects


def drop_unused(closed: Any, keep: int = 0) -> tuple[Any, list[bool]]:
    """Returns the jaxpr `closed` without operations and inputs that no result needs, and which inputs are left; the
    first `keep` always are."""
    inner, consts = open_jaxpr(closed)
    kept, used = partial_eval.dce_jaxpr(
        inner, [True] * len(inner.outvars), [i < keep for i in range(len(inner.invars))]
    )
    return close_jaxpr(kept, consts), list(used)


def prune_jaxpr(closed: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Returns the part of the jaxpr `closed` that computes the results that are `used` (a flag for each), over the
    operands that it needs, and which operands those are."""
    inner, consts = open_jaxpr(closed)
    kept, used_inputs = partial_eval.dce_jaxpr(inner, list(used))
    return close_jaxpr(kept, consts), list(used_inputs)


def become(lowered: Any, other: Any) -> None:
    """Gives `lowered`, an object of a class that extends `jax.stages.Lowered`, what `other` holds, which JAX made: its
    class has a constructor for the compiler's own objects alone."""
    for slot in type(other).__slots__:
        setattr(lowered, slot, getattr(other, slot))
