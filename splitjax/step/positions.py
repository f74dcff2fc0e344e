"""Says which arguments of a step are which, and brings calls into the order of positions.

The decorator's argument numbers and names come in, as users give them; `ArgumentRoles` come out, normalised against the
step's signature. A call's positional and keyword arguments come in; all arguments by position come out, with `Default`
in the gaps, so that everything behind it knows positions alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from splitjax.errors import StateError, TraceError

ArgumentNumbers = int | Sequence[int] | None  # as the decorator takes them: negative ones count from the end


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Default:
    """Stands for an argument that a call leaves at its default: not an array, nothing to trace, as under `jax.jit`."""


@dataclasses.dataclass(frozen=True)
class ArgumentRoles:
    """Says which arguments of a step are state, batch and static; positions are normalised (none negative).

    **Attributes:**

    - `state_argnums`, `batch_argnums`, `static_argnums`: positions of the arguments of each kind.
    - `state_outnums`: the position among the results of each state; None to find them by structure.
    - `names`: the names of the parameters by position, as far as the step's signature has them.
    - `static_defaults`: (position, default) of static arguments: a call that leaves such an argument alone is the same
      call as the one that gives the default.
    """

    state_argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    state_outnums: tuple[int, ...] | None
    names: tuple[str, ...]
    static_defaults: tuple[tuple[int, Any], ...] = ()


def make_options(
    fn: Callable[..., Any],
    state_argnums: ArgumentNumbers,
    batch_argnums: ArgumentNumbers,
    static_argnums: ArgumentNumbers,
    static_argnames: str | Sequence[str] | None,
    state_outnums: ArgumentNumbers,
) -> ArgumentRoles:
    """Normalises argument numbers against the signature of a step.

    **Arguments:** `fn`: the step. `state_argnums`, `batch_argnums`, `static_argnums`, `static_argnames`,
    `state_outnums`: as `splitjax.parallelize` takes them.

    Raises `StateError` where numbers overlap, where a name is no parameter's, and where `state_outnums` does not have
    a result per state, and for what are no numbers or names."""
    names, place = parameter_names(fn), f"parallelize({step_name(fn)})"
    static = _numbers(static_argnums, names, f"{place}, static_argnums")
    static += [_position(name, names) for name in _names(static_argnames, f"{place}, static_argnames")]
    state = _numbers(state_argnums, names, f"{place}, state_argnums")
    batch = _numbers(batch_argnums, names, f"{place}, batch_argnums")
    for first, second, what in (
        (state, batch, "state and batch"),
        (state, static, "state and static"),
        (batch, static, "batch and static"),
    ):
        if set(first) & set(second):
            raise StateError(
                f"an argument cannot be {what} at once",
                value=sorted(set(first) & set(second)),
                place=place,
                remedy="give state_argnums, batch_argnums and static_argnums distinct positions",
            )
    outnums = None if state_outnums is None else _numbers(state_outnums, (), f"{place}, state_outnums")
    if outnums is not None and len(outnums) != len(state):
        raise StateError(
            f"state_outnums names {len(outnums)} results for {len(state)} state arguments",
            value=state_outnums,
            place=place,
            remedy="give one result position per state argument",
        )
    static = sorted(set(static))
    outnums = None if outnums is None else tuple(outnums)
    return ArgumentRoles(tuple(state), tuple(batch), tuple(static), outnums, names, _defaults(fn, static, names))


def _defaults(fn: Callable[..., Any], numbers: Sequence[int], names: Sequence[str]) -> tuple[tuple[int, Any], ...]:
    """Returns (position, default) of those parameters at these positions that have a default."""
    if not numbers or not names:
        return ()
    parameters = {parameter.name: parameter for parameter in _parameters(fn)}
    named = [(number, parameters[names[number]]) for number in numbers if number < len(names)]
    return tuple((number, parameter.default) for number, parameter in named if _has_default(parameter))


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the parameters of `fn` in the order of their positions: keyword-only ones last, and of these
    the ones with a default behind the others; none for a function without a signature."""
    return tuple(parameter.name for parameter in _parameters(fn))


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of `fn` that take one argument each, in the order of their positions."""
    signature, _ = _signature(fn)
    parameters = () if signature is None else signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    # A keyword-only parameter without a default may stand behind one with: as positions they are the other way round,
    # so that `step(state, *, scale=1.0, batch)` has its batch at position 1.
    return sorted(named, key=lambda p: (p.kind is p.KEYWORD_ONLY, p.kind is p.KEYWORD_ONLY and _has_default(p)))


def _signature(fn: Callable[..., Any]) -> tuple[inspect.Signature | None, bool]:
    """Returns the signature of `fn`, None where it has none, and whether calls have to fit it. The wrapper of a
    decorator that takes `*args` and `**kwargs` has that of the function in it, and may pass on more than it takes."""
    try:
        own = inspect.signature(fn, follow_wrapped=False)
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
            return own, True
    except (TypeError, ValueError):
        own = None
    try:
        inner = inspect.signature(fn)
    except (TypeError, ValueError):
        return own, True
    return inner, own is None or own == inner


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty


def _numbers(numbers: ArgumentNumbers, names: Sequence[str], place: str) -> list[int]:
    """Returns argument numbers as a list; negative ones count from the end of `names`. Raises `StateError` for
    anything else."""
    if numbers is None:
        return []
    several = (numbers,) if isinstance(numbers, (int, np.integer)) else numbers
    if not isinstance(several, Iterable) or not all(isinstance(n, (int, np.integer)) for n in several):
        raise StateError(
            "positions of arguments are whole numbers",
            value=numbers,
            place=place,
            remedy="give a number or several, such as 0 or (0, 1), counted from 0",
        )
    return [int(n) + len(names) if n < 0 else int(n) for n in several]


def _names(names: str | Sequence[str] | None, place: str) -> Sequence[str]:
    several = () if names is None else (names,) if isinstance(names, str) else names
    if not isinstance(several, Iterable) or not all(isinstance(name, str) for name in several):
        raise StateError(
            "names of arguments are strings",
            value=names,
            place=place,
            remedy='give a name or several, such as "train" or ("train", "rate")',
        )
    return several


def _position(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise StateError(
            "static_argnames names a parameter that the step does not have",
            value=name,
            place="parallelize",
            remedy=f"name one of {', '.join(names)}",
        )
    return names.index(name)


def step_name(fn: Callable[..., Any]) -> str:
    """Returns the name of the step `fn` for messages: that of its type where it has none."""
    return getattr(fn, "__name__", type(fn).__name__)


def in_place_of(fn: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the function `call`, which calls the user's `fn`, the place of that in the source, so that JAX names it
    where it says what cannot be traced. Returns `call`."""
    inner: Any = fn
    while True:
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inspect.unwrap(inner)
        else:
            break
    if not hasattr(inner, "__code__") and callable(inner):
        inner = type(inner).__call__  # an object
    if hasattr(inner, "__code__"):
        call.__dict__["__wrapped__"] = inner
    return call


def traced_as(fn: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the function `call`, which takes the arguments of the user's `fn` and calls it, also their names. Returns
    `call`."""
    try:
        call.__dict__["__signature__"] = inspect.signature(fn)
    except (TypeError, ValueError):  # JAX then names arguments by their positions
        pass
    return in_place_of(fn, call)


def keyword_only(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the keyword-only parameters of `fn`, in the order of their positions."""
    return tuple(parameter.name for parameter in _parameters(fn) if parameter.kind is parameter.KEYWORD_ONLY)


def positional(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns all arguments of a call of `fn` by position: those of `kwargs` behind or between `args` where their
    parameters stand, `Default` in the gaps, keyword-only ones last.

    Raises `TypeError` as a plain call would, and `TraceError` for a step that takes `**kwargs`."""
    keywords = keyword_only(fn)
    if not kwargs and not keywords:
        return args
    signature, is_exact = _signature(fn)
    if signature is None:
        raise TraceError(
            "arguments given by name need a step with a signature",
            value=sorted(kwargs),
            place=f"call of {step_name(fn)}",
            remedy="pass them by position",
        )
    bound = (signature.bind if is_exact else signature.bind_partial)(*args, **kwargs)
    places: list[Any] = []
    for parameter in signature.parameters.values():
        given = bound.arguments.get(parameter.name, Default())
        if parameter.kind is parameter.VAR_KEYWORD and not isinstance(given, Default):
            raise TraceError(
                "a parallel step cannot take **kwargs: its arguments need positions",
                value=sorted(given),
                place=f"call of {step_name(fn)}",
                remedy="name them as parameters of the step, or close over them",
            )
        if parameter.kind is parameter.VAR_POSITIONAL:
            places += () if isinstance(given, Default) else given
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            places.append(given)
    while not keywords and places and isinstance(places[-1], Default):
        places.pop()
    return (*places, *(bound.arguments.get(name, Default()) for name in keywords))


def call_with(fn: Callable[..., Any], keywords: Sequence[str], args: Sequence[Any]) -> Any:
    """Calls `fn` with arguments that `positional` made and returns its result. `args`: the arguments, of which the last
    are those of the keyword-only parameters named `keywords`."""
    count = len(args) - len(keywords)
    named = dict(zip(keywords, args[count:], strict=True))
    gap = next((n for n, arg in enumerate(args[:count]) if isinstance(arg, Default)), count)
    if gap < count:
        named |= zip(parameter_names(fn)[gap:count], args[gap:count], strict=True)
    return fn(*args[:gap], **{name: arg for name, arg in named.items() if not isinstance(arg, Default)})


def with_static_defaults(options: ArgumentRoles, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments `args` of a call, with the default, as `options` has it, of every static argument that the
    call leaves alone."""
    for number, value in options.static_defaults:
        if number == len(args) or (number < len(args) and isinstance(args[number], Default)):
            args = (*args[:number], value, *args[number + 1 :])
    return args


def with_states(
    fn: Callable[..., Any], state_argnums: Sequence[int], states: Sequence[Any], example: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns the whole argument list of the step `fn`: `states` at the positions `state_argnums`, and the arguments of
    `example` between them, in order. These are all others, where parameters with a default may be left out; `Default`
    stands for those.

    Raises `StateError` for an example that is no tuple, or has too few arguments."""
    if isinstance(example, dict) or not isinstance(example, (tuple, list)):
        raise StateError(
            "example is the tuple of all non-state arguments",
            value=type(example).__name__,
            place="example=",
            remedy="write example=(batch,), with arrays or ShapeDtypeStructs",
        )
    by_number, parameters = dict(zip(state_argnums, states, strict=True)), _parameters(fn)
    others, is_exact = [p for n, p in enumerate(parameters) if n not in by_number], _signature(fn)[1]
    needed = [p.name for p in others if not _has_default(p)]
    if len(example) < len(needed) and not is_exact:  # a decorator adds the others
        parameters, needed = parameters[: len(states) + len(example)], []
    if len(example) < len(needed):
        raise StateError(
            f"the example has {len(example)} arguments, and the step needs {len(needed)} besides its state:"
            f" {', '.join(needed)}",
            value=len(example),
            place="example=",
            remedy=f"write example=({', '.join(needed)}{',' * (len(needed) == 1)})",
        )
    count = len(states) + len(example)
    if not parameters and max(state_argnums, default=0) >= count:
        raise StateError(
            f"the example has {len(example)} arguments, too few to reach state argument {max(state_argnums)}",
            value=len(example),
            place="example=",
            remedy="give all non-state arguments of the step, in order",
        )
    rest, spare = list(reversed(example)), len(example) - len(needed)
    places: list[Any] = []
    for number, parameter in enumerate(parameters):
        if number in by_number:
            places.append(by_number[number])
        elif _has_default(parameter) and not spare:
            places.append(Default())
        else:
            spare -= _has_default(parameter)
            places.append(rest.pop())
    while not keyword_only(fn) and places and isinstance(places[-1], Default):
        places.pop()
    while rest or max(by_number, default=0) >= len(places):  # of a step with *args, or without a signature
        places.append(by_number[len(places)] if len(places) in by_number else rest.pop())
    return tuple(places)
