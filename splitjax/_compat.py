"""The only place that branches on JAX's version or imports `jax.extend` (supported: jax>=0.10.2,<0.13).

From 0.11 `ClosedJaxpr` and `Jaxpr` are one class and `scan` names its operands differently; everything else in splitjax
sees jaxprs only through the functions here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
from jax import core as public_core
from jax._src import clusters, distributed, source_info_util, xla_bridge
from jax._src import config as config_internal
from jax._src import core as core_internal
from jax._src.lax import lax as lax_internal
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  # where JAX itself takes it from
from jax.extend import random as jax_random

# Offered to the rest of splitjax under these names; imported as they are, so that their types are known to its users.
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import DropVar as DropVar
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh

P = ParamSpec("P")
R = TypeVar("R")

NO_EFFECTS: frozenset[Any] = frozenset()

# Frames of these packages are machinery between a user's line and the operation it caused.
_INSTALLED = tuple(
    f"-packages/{name}/" for name in ("jax", "jaxlib", "flax", "haiku", "equinox", "optax", "chex", "jaxtyping")
)
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Of splitjax itself only the models are what a user may want to see the lines of.
_OWN_MODELS = _HERE + "models" + os.sep


def is_machinery(file_name: str) -> bool:
    """Returns whether the source file `file_name` stands between a user's line and the operation it caused."""
    if file_name.startswith("<") and not file_name.startswith("<ipython"):
        return True
    own = file_name.startswith(_HERE) and not file_name.startswith(_OWN_MODELS)
    return own or any(part in file_name for part in _INSTALLED)


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


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates `jaxpr`, with the values `consts` of its constvars, on arrays or tracers `args`. The derivative rules
    of custom_jvp and custom_vjp equations are kept."""
    inner, own = open_jaxpr(jaxpr)
    return public_core.eval_jaxpr(inner, list(consts) or list(own), *args)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan with the parameters `params` are constants and how many are carried (the rest
    are scanned over)."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def bind_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds the primitive of `eqn` to new `operands`, as JAX's own interpreter does. Returns a list."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(bound, tuple):
        subfuns, params = bound
        results = eqn.primitive.bind(*subfuns, *operands, **params)
    else:
        results = eqn.primitive.bind(*operands, **bound)
    return list(results) if eqn.primitive.multiple_results else [results]


def equation_context(eqn: Any) -> Any:
    """Returns a context manager under which a re-bound `eqn` keeps its own source line, name stack and settings, but
    for the mesh in context where there is one: inside a `shard_map` it is that of the evaluation, not the tracing."""
    stack, mesh = contextlib.ExitStack(), jax.sharding.get_abstract_mesh()
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack))
    stack.enter_context(eqn.ctx.manager)
    if not mesh.empty:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    return stack


def axes_of_size_one_are_no_types() -> Any:
    """Returns a context manager under which types of arrays name no mesh axis of size 1: every layout is the same."""
    return config_internal.remove_size_one_mesh_axis_from_type(True)


def context_mesh(eqn: Any) -> Any:
    """Returns the abstract mesh in whose context `eqn` was traced; the empty one where there was none."""
    return eqn.ctx.cur_abstract_mesh


def moved_equation(
    eqn: Any, invars: Sequence[Any], outvars: Sequence[Any], params: dict[str, Any], mesh: Any, primitive: Any = None
) -> Any:
    """Returns `eqn` with other operands, results and parameters, in the context of the abstract `mesh`, with its own
    source line and name stack. `primitive`: another operation in its place."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        context = type(eqn.ctx)()
    changes = {} if primitive is None else {"primitive": primitive, "effects": NO_EFFECTS}
    return eqn.replace(invars=list(invars), outvars=list(outvars), params=params, ctx=context, **changes)


def like_jaxpr(value: Any, changed: Any) -> Any:
    """Returns the open jaxpr `changed` as what `value` is, open or closed, with the same constants."""
    if isinstance(value, ClosedJaxpr) and ClosedJaxpr is not Jaxpr:
        return ClosedJaxpr(changed, list(value.consts))
    return changed


def source_line(eqn: Any) -> str:
    """Returns `file:line (function)` of the user's line that caused `eqn`; empty where only machinery is on record (JAX
    traces some of its own functions once and keeps the result)."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not is_machinery(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def name_stack(eqn: Any) -> str:
    """Returns the `jax.named_scope` path of `eqn`, such as `VGG/Conv_0`; empty where there is none (Flax NNX)."""
    return str(getattr(eqn.source_info, "name_stack", ""))


def argument_names(jaxpr: Any) -> tuple[str, ...]:
    """Returns the paths of a traced function's flat arguments, as the debug information of `jaxpr` has them."""
    inner, _ = open_jaxpr(jaxpr)
    return tuple(inner.debug_info.arg_names or ())


def trace(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Traces `fun` abstractly: the closed jaxpr, and the pytree of `ShapeDtypeStruct`s of its result."""
    return jax.make_jaxpr(fun, return_shape=True)(*args)


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


def coordination_client() -> Any | None:
    """The client of JAX's coordination service (key-value store, barriers), or None in a process that joined no run."""
    return distributed.global_state.client


def place_in_run() -> tuple[int, int]:
    """(number of this process, number of processes) in the run that it joined, (0, 1) alone. Unlike `jax.process_index`
    it starts no backend."""
    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def jaxpr_effects(closed: Any) -> Any:
    """Returns the side effects of the jaxpr `closed`, such as a debug print."""
    return closed.effects


def user_frame() -> str:
    """`file:line` of the innermost Python frame that belongs to the user; empty when there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_machinery(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def define_primitive(
    name: str, evaluate: Callable[..., list[Any]], result_types: Callable[..., tuple[list[Any], Any]]
) -> Primitive:
    """Returns a primitive `name` with several results that means `evaluate(*operands, **params)` to every
    transformation but tracing.

    `result_types(*operand_types, **params)` gives the abstract results and the effects. Derivatives, batching and
    compilation see through the primitive: they transform `evaluate`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(result_types)
    primitive.def_impl(evaluate)

    def derive(primals, tangents, **params):
        active = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_active(*values):
            operands = list(primals)
            for i, value in zip(active, values, strict=True):
                operands[i] = value
            return evaluate(*operands, **params)

        results, changes = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
        return results, [
            ad.Zero(jax.typeof(change)) if change.dtype == jax.dtypes.float0 else change for change in changes
        ]

    def batch(axis, operands, dims, **params):
        if all(dim is None for dim in dims) and not result_types(*map(jax.typeof, operands), **params)[1]:
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        mapped = jax.vmap(
            lambda *values: evaluate(*values, **params),
            in_axes=tuple(dims),
            axis_size=axis.size,
            axis_name=None if type(axis.name) is object else axis.name,  # JAX's mark for "unnamed" is a bare object
            spmd_axis_name=axis.spmd_name,
        )
        results = mapped(*operands)
        return results, [0] * len(results)

    ad.primitive_jvps[primitive] = derive
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=True))
    return primitive


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


def outside_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns `fn`, run as if no `jax.set_mesh` were around its calls: what it traces then does not depend on it."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if jax.sharding.get_abstract_mesh().empty:
            return fn(*args, **kwargs)
        # Within another trace the mesh of its devices is that trace's, and cannot be set.
        is_outermost = core_internal.trace_state_clean()
        nothing: Any = None  # which type checkers do not know to be taken
        with jax.set_mesh(nothing) if is_outermost else jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return fn(*args, **kwargs)

    return call


def rebind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds `eqn` to new `operands` under its own source line, name stack and settings, as `eval_jaxpr` does."""
    with equation_context(eqn):
        return bind_equation(eqn, operands)


def prune(eqn: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Returns the part of `eqn` that computes the results that are `used` (a flag for each): a closed jaxpr over the
    operands that these results need, and which operands those are. Literal operands count as operands."""
    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in eqn.invars
    ]
    return prune_jaxpr(close_jaxpr(trace(lambda *operands: bind_equation(eqn, operands), *types)[0]), used)


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


def with_params(eqn: Any, **changes: Any) -> Any:
    """Returns `eqn` with the parameters in `changes` changed."""
    return eqn.replace(params={**eqn.params, **changes})


def pullback(eqn: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Returns the reverse derivative of `eqn` as a closed jaxpr: (operands that are not literals, cotangents) ->
    gradients.

    Also the operand positions that have a gradient, and the result positions that have a cotangent, both ascending.
    """
    inexact = lambda v: jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact)
    variables = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal)]
    positions = tuple(i for i in variables if inexact(eqn.invars[i]))
    results = tuple(i for i, v in enumerate(eqn.outvars) if inexact(v))
    types = lambda vs: [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in vs
    ]

    def gradients(operands, cotangents):
        values = [v.val if isinstance(v, Literal) else None for v in eqn.invars]
        for i, value in zip(variables, operands, strict=True):
            values[i] = value

        def function(*differentiated):
            merged = list(values)
            for i, value in zip(positions, differentiated, strict=True):
                merged[i] = value
            outputs = bind_equation(eqn, merged)
            return [outputs[i] for i in results]

        return jax.vjp(function, *[values[i] for i in positions])[1](cotangents)

    closed, _ = trace(gradients, types([eqn.invars[i] for i in variables]), types([eqn.outvars[i] for i in results]))
    return closed, positions, results


def has_positional_bits(eqn: Any) -> bool:
    """Returns whether `eqn`, a `random_bits`, draws each value from the key and the value's position alone, so that
    some can be drawn without the rest: one threefry key, JAX's partitionable generator (the default), and fewer than
    2^32 values."""
    if eqn.primitive.name != "random_bits" or eqn.invars[0].aval.shape != ():
        return False
    is_threefry = getattr(eqn.invars[0].aval.dtype, "_impl", None) is jax_random.threefry_prng_impl
    return is_threefry and bool(eqn.ctx.threefry_partitionable) and eqn.outvars[0].aval.size < 2**32


def positional_bits(key: Any, bit_width: int, positions: Any) -> Any:
    """Returns the values of `bit_width` bits that `random_bits` with `key` has at the given row-major `positions`
    (uint32), for equations with `has_positional_bits`."""
    first, second = jax.random.key_data(key)
    high, low = jax_random.threefry2x32_p.bind(first, second, jax.numpy.zeros_like(positions), positions)
    if bit_width == 64:
        return (high.astype("uint64") << 32) | low.astype("uint64")
    return (high ^ low).astype(f"uint{bit_width}")


def hidden_body(eqn: Any) -> Any | None:
    """Returns the closed jaxpr of an `eqn` that keeps its meaning in Python (`call_hi_primitive` of JAX 0.12, behind
    functions such as `jnp.searchsorted`); None for any other."""
    hidden = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if hidden is None or not hasattr(hidden, "expand"):
        return None
    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in eqn.invars
    ]
    return trace(
        lambda *operands: jax.tree.leaves(hidden.expand(*jax.tree.unflatten(hidden.in_tree, operands))), *types
    )[0]


@contextlib.contextmanager
def metadata_in_cache_key() -> Iterator[None]:
    """Compiles anew, or from a cache entry of the very same source lines and names: JAX's persistent cache otherwise
    returns an executable with the metadata of whatever program of the same operations was compiled first."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def serialized_modules(compiled: Any) -> list[bytes]:
    """Returns the optimised HLO modules of `compiled` (`jax.stages.Compiled`), each a serialised `HloModuleProto`."""
    return [module.as_serialized_hlo_module_proto() for module in compiled.runtime_executable().hlo_modules()]


def as_weakly_typed(array: jax.Array) -> jax.Array:
    """Returns the same `array` with a weak type, which promotes like a Python number."""
    return cast("jax.Array", lax_internal._convert_element_type(array, array.dtype, weak_type=True))


def detected_cluster() -> str | None:
    """A name for the cluster manager that JAX finds this process to be started by, such as `slurm`; None if it finds
    none."""
    present = (
        kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method and kind.is_env_present()
    )
    kind = next(present, None)
    return None if kind is None else kind.name or kind.__name__


def backend_started() -> bool:
    """Returns whether a JAX backend is running, so that it is too late to join other processes."""
    return xla_bridge.backends_are_initialized()


def coordination_service(address: str, num_processes: int, heartbeat_seconds: int) -> Any:
    """Starts the service that `jax.distributed.initialize` connects to, for `num_processes` processes, listening on
    `address` (`host:port`) in this one. A process that is silent for `heartbeat_seconds` counts as gone.

    Its processes are recoverable: one that leaves does not wait for the others, and does not take them along. Ends with
    its `shutdown()`. Raises `RuntimeError` if it cannot listen there.
    """
    # XLA says on standard error, past any log level, that this is experimental.
    with open(os.devnull, "w") as nowhere:
        before = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            return _jax.get_distributed_runtime_service(
                address, num_processes, heartbeat_timeout=heartbeat_seconds, recoverable=True
            )
        finally:
            os.dup2(before, 2)
            os.close(before)


def varying_axes(*operands: Any) -> frozenset[str]:
    """The manual mesh axes that some of the operands vary over, as far as JAX knows (`check_vma=True`)."""
    return frozenset().union(*(jax.typeof(operand).mat.varying for operand in operands))


def vary(operand: Any, axes: frozenset[str]) -> Any:
    """Returns `operand` as a value that counts as varying over the manual mesh `axes` at least."""
    missing = tuple(sorted(axes - varying_axes(operand)))
    return jax.lax.pcast(operand, missing, to="varying") if missing else operand


def result_type(shape: Sequence[int], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result of `shape` and `dtype`: varying over the manual mesh axes that its
    `operands` vary over."""
    mat = core_internal.ManualAxisType(varying=varying_axes(*operands))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=mat)
