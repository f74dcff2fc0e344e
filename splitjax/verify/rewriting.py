"""Evaluates a traced step on arrays of other sizes, in float64 if wanted, with taps at its operations.

A closed jaxpr and operands go in, results come out.

The step's jaxpr is evaluated equation by equation, each with its size and dtype parameters rewritten. Functions of Flax
modules and the like cannot be called with other widths (they check shapes, and write sizes into the program); their
jaxprs can. The result is traceable, so that everything behind the trace sees an ordinary step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.primitives.calls import CallKind, call_body, kind_of, scan_parts, while_parts
from splitjax.primitives.interpreter import RunBody, evaluate
from splitjax.primitives.walk import Site
from splitjax.step.boundary import boundary_of, value_and_grad_p
from splitjax.step.custom_rules import custom_call, jvp_of, vjp_of
from splitjax.verify.dim_classes import Misfit, Sized
from splitjax.verify.parameters import AS_TRACED, BITWISE, resized, wide, widened
from splitjax.verify.sizes import OPEN_CALLS, local_sizes
from splitjax.verify.taps import NONE, Taps


@dataclasses.dataclass(frozen=True)
class Rewriter:
    """Evaluates jaxprs, as its options say.

    - `sized`: the new shapes, or None to keep all of them.
    - `float64`: compute in 64-bit numbers throughout.
    - `constrained`: keep the step's own sharding constraints; without them it runs on a single device.
    - `microbatches`: keep the numbers of microbatches of gradient boundaries.
    - `traced_wide`: the step was traced with JAX's 64-bit numbers on, which its derivative rules may need.
    """

    sized: Sized | None
    float64: bool
    constrained: bool = True
    microbatches: bool = True
    traced_wide: bool = False

    def dtype(self, dtype: Any) -> Any:
        """Returns what a `dtype` of the traced step becomes."""
        return wide(dtype) if self.float64 else dtype

    def run(self, jaxpr: Any, operands: Sequence[Any], site: Site = (), taps: Taps = NONE) -> list[Any]:
        """Evaluates a closed `jaxpr` that stands at `site` on `operands`, with `taps` at its equations."""

        def tapped(eqn: Any, values: list[Any], here: Site, _: RunBody) -> list[Any]:
            results = self._equation(eqn, taps.read(here, eqn, values), here, taps)
            taps.write(here, eqn, results)
            return results

        held = _compat.open_jaxpr(jaxpr)[1]
        constants = [self._constant(const, number, site) for number, const in enumerate(held)]
        return evaluate(jaxpr, operands, tapped, site, literal=self._literal, constants=constants)

    def _constant(self, const: Any, number: int, site: Site) -> Any:
        if self.sized is not None and not site:
            const = const[tuple(slice(0, size) for size in self.sized.constants[number])]
        return self._as_wide(const if jnp.issubdtype(const.dtype, jax.dtypes.extended) else np.asarray(const))

    def _literal(self, atom: Any) -> Any:
        dtype = atom.aval.dtype
        return atom.val if jnp.issubdtype(dtype, jax.dtypes.extended) else np.asarray(atom.val, self.dtype(dtype))

    def _as_wide(self, value: Any) -> Any:
        dtype = self.dtype(value.dtype)
        if dtype == value.dtype:
            return value
        return value.astype(dtype) if isinstance(value, np.ndarray) else jax.lax.convert_element_type(value, dtype)

    def _shapes(self, eqn: Any, site: Site) -> list[tuple[int, ...]]:
        """Returns the shapes that an equation's results should have."""
        if self.sized is None or site not in self.sized.results:
            return [tuple(v.aval.shape) for v in eqn.outvars]
        return list(self.sized.results[site])

    def _equation(self, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
        name, kind = eqn.primitive.name, kind_of(eqn)
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(self, eqn, values, site, taps)
        body = call_body(eqn) if kind in OPEN_CALLS else None
        if body is not None:
            return self.run(body, values, (*site, 0), taps)
        if name == "sharding_constraint" and not self.constrained:
            return values
        if (
            name == "reduce_precision" and self.float64
        ):  # rounding on purpose would round two nearly equal numbers apart
            return values
        return self._primitive(eqn, values, site)

    def _primitive(self, eqn: Any, values: list[Any], site: Site) -> list[Any]:
        name = eqn.primitive.name
        old = [tuple(v.aval.shape) for v in eqn.invars], [tuple(v.aval.shape) for v in eqn.outvars]
        new = [tuple(np.shape(value)) for value in values], self._shapes(eqn, site)
        if name in AS_TRACED:
            if old[0] != new[0] or old[1] != new[1]:
                raise Misfit(site, f"{name} keeps its sizes")
            return self._as_traced(eqn, values)
        if name in BITWISE:
            return self._as_traced(eqn, values)
        changes = resized(name, eqn.params, old, new)
        if self.float64:
            changes |= widened({**eqn.params, **changes})
            changes |= {key: self._combiner(value) for key, value in eqn.params.items() if _compat.is_jaxpr(value)}
        try:
            results = _compat.bind_equation(_compat.with_params(eqn, **changes) if changes else eqn, values)
        except Exception as error:
            if not self.float64:
                raise Misfit(site, f"{name}: {error}") from error
            try:
                results = self._as_traced(eqn, values)
            except Exception:
                raise Misfit(site, f"{name}: {error}") from error
        if [tuple(np.shape(result)) for result in results] != new[1]:
            raise Misfit(site, f"{name} gives {[np.shape(result) for result in results]} instead of {new[1]}")
        return results

    def _as_traced(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Evaluates an equation in the dtypes that it was traced with."""
        narrow = [
            value if value.dtype == v.aval.dtype else jax.lax.convert_element_type(value, v.aval.dtype)
            for value, v in zip(values, eqn.invars, strict=True)
        ]
        return [self._as_wide(result) for result in _compat.bind_equation(eqn, narrow)]

    def _combiner(self, jaxpr: Any) -> Any:
        """Returns the function of scalars inside a reduction or a scatter, in the dtypes of the rewritten step."""
        inner, consts = _compat.open_jaxpr(jaxpr)
        if consts or any(v.aval.shape for v in inner.invars):
            return jaxpr
        types = [jax.ShapeDtypeStruct((), self.dtype(v.aval.dtype)) for v in inner.invars]
        closed = _compat.trace(lambda *operands: self.run(_compat.close_jaxpr(jaxpr), operands, (-1,)), *types)[0]
        return closed if hasattr(jaxpr, "consts") else _compat.open_jaxpr(closed)[0]

    def inside(self, jaxpr: Any, operands: Sequence[Any], site: Site) -> list[Any]:
        """Evaluates a closed `jaxpr` that the trace does not number, such as a derivative rule's, on `operands`.

        It takes their sizes. Raises `Misfit` at `site`, that of its call, where it does not.
        """
        try:
            sized = None if self.sized is None else local_sizes(jaxpr, [np.shape(value) for value in operands])
            return dataclasses.replace(self, sized=sized).run(jaxpr, operands)
        except Misfit as error:
            raise Misfit(site, str(error)) from error


def _scan(self: Rewriter, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
    consts, init, xs = scan_parts(eqn, values)
    length = eqn.params["length"]
    lengths = {np.shape(x)[0] for x in xs}
    lengths |= set() if self.sized is None else {shape[0] for shape in self.sized.stacked.get(site, ())}
    if len(lengths) == 1:
        (length,) = lengths
    inner_taps, extra = taps.enter_loop((*site, 0), length)

    def body(carry, x):
        mine, zeros = x
        local = inner_taps.within(zeros)
        results = self.run(eqn.params["jaxpr"], [*consts, *carry, *mine], (*site, 0), local)
        return results[: len(init)], (results[len(init) :], local.values)

    carry, (ys, seen) = jax.lax.scan(
        body,
        init,
        (xs, extra),
        length=length,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    taps.leave_loop(inner_taps, seen, length)
    return [*carry, *ys]


def _while(self: Rewriter, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
    cond_consts, body_consts, init = while_parts(eqn, values)
    return list(jax.lax.while_loop(
        lambda carry: self.run(eqn.params["cond_jaxpr"], [*cond_consts, *carry], (*site, 0))[0],
        lambda carry: self.run(eqn.params["body_jaxpr"], [*body_consts, *carry], (*site, 1)),
        init,
    ))  # fmt: skip


def _cond(self: Rewriter, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
    branch = lambda k: lambda *operands: self.run(eqn.params["branches"][k], operands, (*site, k))
    return list(jax.lax.switch(values[0], [branch(k) for k in range(len(eqn.params["branches"]))], *values[1:]))


def _remat(self: Rewriter, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
    order: list[Any] = []

    def fun(*operands):
        local = taps.within()
        results = self.run(eqn.params["jaxpr"], operands, (*site, 0), local)
        order[:] = [local]
        return results, local.values

    results, seen = jax.checkpoint(fun, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(*values)
    taps.take(order[0], seen)
    return list(results)


def _custom_rule(self: Rewriter, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
    if eqn.params.get("symbolic_zeros") and eqn.primitive.name == "custom_jvp_call":
        raise Misfit(site, "a derivative rule with symbolic zeros keeps its sizes")
    with jax.enable_x64(self.traced_wide):  # the rule as it was traced; `inside` widens it
        rule = jvp_of(eqn) if eqn.primitive.name == "custom_jvp_call" else vjp_of(eqn)
    body = lambda *operands: self.run(call_body(eqn), operands, (*site, 0))
    run = lambda jaxpr, operands: self.inside(jaxpr, operands, site)
    return list(custom_call(eqn, body, run, rule)(*values))


def _boundary(self: Rewriter, eqn: Any, values: list[Any], site: Site, taps: Taps) -> list[Any]:
    inner = taps.enter_boundary((*site, 0), boundary_of(eqn.params))
    num_results = boundary_of(eqn.params).num_aux + 1
    zeros = inner.zeros()
    locals_: list[Any] = []

    def forward(*operands):
        local = inner.within(operands[len(values) :])
        results = self.run(eqn.params["forward"], operands[: len(values)], (*site, 0), local)
        locals_[:] = [local]
        return *results, *local.values

    closed, _ = _compat.trace(forward, *values, *zeros)
    closed, captured = _compat.detach_consts(closed)
    num_captured = len(captured)
    positions = [
        *(num_captured + i for i in eqn.params["positions"]),
        *(num_captured + len(values) + k for k in range(len(zeros))),
    ]
    results = value_and_grad_p.bind(*captured, *values, *zeros, **{
        **eqn.params, "forward": closed, "positions": tuple(positions),
        "microbatches": eqn.params["microbatches"] if self.microbatches else None,
        "names": (*("captured",) * num_captured, *eqn.params["names"], *("tap",) * len(zeros)),
    })  # fmt: skip
    num_seen = len(locals_[0].values)
    gradients = results[num_results + num_seen :]
    taps.leave_boundary(
        inner, locals_[0], site, eqn, results[:num_results], results[num_results : num_results + num_seen], gradients
    )
    return [*results[:num_results], *gradients[: len(eqn.params["positions"])]]


_SPECIAL: dict[CallKind | None, Callable[..., list[Any]]] = {
    CallKind.SCAN: _scan,
    CallKind.WHILE: _while,
    CallKind.COND: _cond,
    CallKind.REMAT: _remat,
    CallKind.RULE: _custom_rule,
    CallKind.BOUNDARY: _boundary,
}
