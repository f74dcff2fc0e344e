"""Evaluates calls, loops and branches with padded operands: each keeps its operands and results, one array for one
array, and its body is traced again at their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from splitjax import _compat
from splitjax.primitives.calls import CallKind, call_body, kind_of, scan_parts, while_parts
from splitjax.primitives.interpreter import RunBody
from splitjax.primitives.walk import Site
from splitjax.step.custom_rules import custom_call, jvp_of, vjp_of
from splitjax.step.padding.values import Padded, Sizes, array_of, fitted, padded, sizes_of
from splitjax.step.per_microbatch import is_per_microbatch

# What an array is like: its shape as the program has it, its padded dims, what stands in the padding.
Kind = tuple[tuple[int, ...], Sizes, float | None]


class Rewriting(Protocol):
    """Names what calls ask of the rewriting that they are part of."""

    @property
    def carried(self) -> Mapping[Site, Sequence[Sizes]]:
        """By loop, and which of its bodies goes on: of each carried value, the dims that are to be padded."""
        ...

    def differentiated(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Evaluates what JAX takes the derivative of later."""
        ...

    def alone(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr that is no part of the step, such as a rule."""
        ...


def call(rewriting: Rewriting, eqn: Any, values: list[Any], site: Site, run: RunBody, wanted: Any) -> list[Any] | None:
    """Returns the results of a call, a loop or a branch; None where it needs the operands as the program has them.

    **Arguments:** `rewriting`: what it is part of. `eqn`, `values`, `site`, `run`: as of an interpreter's handler.
    `wanted`: per result the dims that are to be padded."""
    kind, body = kind_of(eqn), call_body(eqn)
    marked = is_per_microbatch(eqn)
    if kind is CallKind.INLINE and body is not None and not marked:
        return run(body, 0, values)
    if (kind is CallKind.REMAT or marked) and body is not None:
        made, kinds = _traced(lambda given: run(body, 0, given), _types(values, eqn.invars), values)
        return _bound(_compat.with_params(eqn, jaxpr=_like(body, made)), values, kinds)
    if kind is CallKind.RULE and body is not None:
        return _with_rule(rewriting, eqn, values, lambda given: run(body, 0, given))
    if kind is CallKind.SCAN:
        return _scan(rewriting, eqn, values, site, run)
    if kind is CallKind.WHILE:
        return _while(rewriting, eqn, values, site, run)
    if kind is CallKind.COND:
        return _cond(eqn, values, run, wanted)
    if kind is CallKind.BOUNDARY:
        return _boundary(rewriting, eqn, values, run)
    return None


def _traced(
    evaluate: Callable[[list[Any]], list[Any]], types: Sequence[jax.ShapeDtypeStruct], like: Sequence[Any]
) -> tuple[Any, list[Kind]]:
    """Traces an evaluation of a body again: its closed jaxpr, and what its results are like. `types`: of the arrays
    behind its operands. `like`: values with the padding that the operands have."""
    kinds: list[Kind] = []

    def run(*arrays: Any) -> list[Any]:
        results = evaluate([_as(array, kind_of_value(value, array)) for array, value in zip(arrays, like, strict=True)])
        kinds[:] = [kind_of_value(result, result) for result in results]
        return [array_of(result) for result in results]

    closed, consts = _compat.detach_consts(_compat.trace(run, *types)[0])
    assert not consts, "what is traced again closes over nothing"
    return closed, kinds


def kind_of_value(value: Any, array: Any) -> Kind:
    """Returns what `value` is like, which stands for `array`."""
    if isinstance(value, Padded):
        return value.shape, value.sizes, value.fill
    return tuple(jax.typeof(array).shape), {}, None


def _as(array: Any, kind: Kind) -> Any:
    shape, sizes, fill = kind
    return padded(array, shape, sizes, fill)


def _types(values: Sequence[Any], variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Describes the arrays behind operands: like the variables of the program, at their own sizes."""
    types = []
    for value, variable in zip(values, variables, strict=True):
        aval, weak = variable.aval, bool(getattr(variable.aval, "weak_type", False))
        shape = array_of(value).shape if isinstance(value, Padded) else aval.shape
        types.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak))
    return types


def _like(body: Any, closed: Any) -> Any:
    """Returns a closed jaxpr without constants as what `body` is, open or closed."""
    if isinstance(body, _compat.ClosedJaxpr):
        return closed
    return _compat.open_jaxpr(closed)[0]


def _bound(eqn: Any, values: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    results = _compat.bind_equation(eqn, [array_of(value) for value in values])
    return [_as(result, kind) for result, kind in zip(results, kinds, strict=True)]


def _with_rule(
    rewriting: Rewriting, eqn: Any, values: list[Any], evaluate: Callable[[list[Any]], list[Any]]
) -> list[Any] | None:
    """Evaluates a function with a derivative rule of its own, and rewrites the rule."""
    kinds = [kind_of_value(value, value) for value in values]
    results: list[Kind] = []

    def body(*arrays: Any) -> list[Any]:
        made = rewriting.differentiated(lambda: evaluate(_as_each(arrays, kinds)))
        results[:] = [kind_of_value(result, result) for result in made]
        return [array_of(result) for result in made]

    if "jvp" in eqn.primitive.name:
        positions, forward = jvp_of(eqn)
        given = [*kinds, *(_changing(kinds[i]) for i in positions)]

        def push(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
            made = rewriting.alone(jaxpr, _as_each(arrays, given))
            return _as_arrays(made, [*results, *(results[k] for k in forward.results)])

        made = custom_call(eqn, body, push, (positions, forward))(*map(array_of, values))
    elif "vjp" in eqn.primitive.name:
        rule, residuals = vjp_of(eqn), []

        def pull(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
            if jaxpr is not rule.forward:
                cotangents = [_changing(results[k]) for k in rule.results]
                made = rewriting.alone(jaxpr, _as_each(arrays, [*residuals, *cotangents]))
                return _as_arrays(made, [kinds[i] for i in rule.positions])
            made = rewriting.alone(jaxpr, _as_each(arrays, kinds))
            count = len(eqn.outvars)
            residuals[:] = [kind_of_value(value, value) for value in made[count:]]
            return [*_as_arrays(made[:count], results), *map(array_of, made[count:])]

        made = custom_call(eqn, body, pull, rule)(*map(array_of, values))
    else:
        return None
    return _as_each(made, results)


def _changing(kind: Kind) -> Kind:
    """Returns what a tangent, or a cotangent, of such a value is like: nothing is known of its padding."""
    return kind[0], kind[1], None


def _as_each(arrays: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    return [_as(array, kind) for array, kind in zip(arrays, kinds, strict=True)]


def _as_arrays(made: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    """Returns the arrays behind values, with the dims padded that `kinds` have."""
    return [array_of(fitted(value, shape, sizes)) for value, (shape, sizes, _) in zip(made, kinds, strict=True)]


def _scan(rewriting: Rewriting, eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any]:
    consts, init, xs = scan_parts(eqn, values)
    _, carry_variables, _ = scan_parts(eqn, eqn.invars)
    body = eqn.params["jaxpr"]
    init = _entering(init, carry_variables, rewriting.carried.get((*site, 0), ()))
    xs = [_without_first(x, variable) for x, variable in zip(xs, eqn.invars[len(values) - len(xs) :], strict=True)]
    slices = [_sliced(x) for x in xs]
    inner = _compat.open_jaxpr(body)[0].invars
    count = len(consts)

    def traced(carry: Sequence[Any]) -> tuple[Any, list[Kind]]:
        like = [*consts, *carry, *slices]
        types = _types([*consts, *carry, *slices], inner)
        return _traced(lambda given: _returning(run(body, 0, given), carry), types, like)

    made, kinds = traced(init)
    carry = _settled(init, kinds)
    if carry is not init:
        made, kinds = traced(carry)
    assert count + len(carry) + len(slices) == len(values)
    stacked = [_stacked(kind, variable) for kind, variable in zip(kinds[len(carry) :], eqn.outvars[len(carry) :])]
    results = [kind_of_value(value, value) for value in carry]
    return _bound(_compat.with_params(eqn, jaxpr=_like(body, made)), [*consts, *init, *xs], [*results, *stacked])


def _entering(init: Sequence[Any], variables: Sequence[Any], wanted: Sequence[Sizes]) -> list[Any]:
    """Returns what enters a loop with the dims padded that its carried values have padded."""
    out = []
    for number, (value, variable) in enumerate(zip(init, variables, strict=True)):
        sizes = {**(wanted[number] if number < len(wanted) else {}), **sizes_of(value)}
        out.append(fitted(value, tuple(variable.aval.shape), sizes) if sizes else value)
    return out


def _returning(results: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    """Returns the results of a loop's body with the padding of what it was given."""
    fits = [
        fitted(value, like.shape if isinstance(like, Padded) else tuple(jax.typeof(like).shape), sizes_of(like))
        if sizes_of(value) or sizes_of(like)
        else value
        for value, like in zip(results, carry, strict=False)
    ]
    return [*fits, *results[len(fits) :]]


def _settled(carry: list[Any], kinds: Sequence[Kind]) -> list[Any]:
    """Returns carried values that say of their padding what holds in every turn; `carry` itself, if they do."""
    out, is_changed = [], False
    for value, (_, _, fill) in zip(carry, kinds, strict=False):
        if isinstance(value, Padded) and value.fill is not None and value.fill != fill:
            value, is_changed = Padded(value.value, value.shape, value.sizes, None), True
        out.append(value)
    return out if is_changed else carry


def _without_first(value: Any, variable: Any) -> Any:
    """Returns what a scan takes turn by turn, with as many turns as the program has."""
    sizes = {dim: size for dim, size in sizes_of(value).items() if dim}
    return fitted(value, tuple(variable.aval.shape), sizes) if sizes_of(value) else value


def _sliced(value: Any) -> Any:
    """Returns what a turn of a scan has of a value, as far as its padding goes."""
    if not isinstance(value, Padded):
        return value
    array = jax.eval_shape(lambda x: x[0], value.value)
    return Padded(array, value.shape[1:], {dim - 1: size for dim, size in value.sizes.items()}, value.fill)


def _stacked(kind: Kind, variable: Any) -> Kind:
    shape, sizes, fill = kind
    return (variable.aval.shape[0], *shape), {dim + 1: size for dim, size in sizes.items()}, fill


def _while(rewriting: Rewriting, eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any]:
    tests, consts, init = while_parts(eqn, values)
    variables = while_parts(eqn, eqn.invars)
    init = _entering(init, variables.carry, rewriting.carried.get((*site, 1), ()))
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    inner = [_compat.open_jaxpr(each)[0].invars for each in (condition, body)]

    def traced(carry: Sequence[Any]) -> tuple[Any, list[Kind]]:
        like = [*consts, *carry]
        return _traced(lambda given: _returning(run(body, 1, given), carry), _types(like, inner[1]), like)

    made, kinds = traced(init)
    carry = _settled(init, kinds)
    if carry is not init:
        made, kinds = traced(carry)
    like = [*tests, *carry]
    tested, _ = _traced(lambda given: run(condition, 0, given), _types(like, inner[0]), like)
    changed = _compat.with_params(eqn, cond_jaxpr=_like(condition, tested), body_jaxpr=_like(body, made))
    return _bound(changed, [*tests, *consts, *init], [kind_of_value(value, value) for value in carry])


def _cond(eqn: Any, values: list[Any], run: RunBody, wanted: Sequence[Sizes]) -> list[Any]:
    branches, operands = eqn.params["branches"], values[1:]
    types = _types(operands, eqn.invars[1:])
    sizes = [dict(each) for each in wanted]

    def traced(number: int, body: Any, is_fitted: bool) -> tuple[Any, list[Kind]]:
        def evaluate(given: list[Any]) -> list[Any]:
            results = run(body, number, given)
            if not is_fitted:
                return results
            shapes = [tuple(variable.aval.shape) for variable in eqn.outvars]
            return [fitted(*each) for each in zip(results, shapes, sizes, strict=True)]

        return _traced(evaluate, types, operands)

    for number, body in enumerate(branches):
        for known, (_, own, _) in zip(sizes, traced(number, body, is_fitted=False)[1], strict=True):
            known.update(own)
    made = [traced(number, body, is_fitted=True) for number, body in enumerate(branches)]
    kinds = [
        (first[0], first[1], first[2] if len({kind[2] for kind in each}) == 1 else None)
        for each in zip(*(kinds for _, kinds in made), strict=True)
        for first in each[:1]
    ]
    changed = tuple(_like(body, closed) for body, (closed, _) in zip(branches, made, strict=True))
    return _bound(_compat.with_params(eqn, branches=changed), values, kinds)


def _boundary(rewriting: Rewriting, eqn: Any, values: list[Any], run: RunBody) -> list[Any]:
    forward, positions = eqn.params["forward"], eqn.params["positions"]
    evaluate = lambda given: rewriting.differentiated(lambda: run(forward, 0, given))
    made, kinds = _traced(evaluate, _types(values, eqn.invars), values)
    # Whatever leads from the padding to the value was taken out of it: the derivative there is zero.
    gradients = [(shape, sizes, 0.0) for shape, sizes, _ in (kind_of_value(values[i], values[i]) for i in positions)]
    return _bound(_compat.with_params(eqn, forward=made), values, [*kinds, *gradients])
