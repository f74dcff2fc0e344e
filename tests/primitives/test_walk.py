"""A walk meets every equation once, with what stands around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax import _compat, value_and_grad
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.interpreter import evaluate, fold
from splitjax.primitives.walk import boundaries, equation_at, holds_boundary, walk

X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)


def trace(fn, *args):
    return _compat.trace(fn, *args)[0]


def nested(x):
    def step(carry, row):
        more = lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row)
        return carry + lax.scan(lambda c, _: (jnp.exp(c), None), more, None, length=5)[0], None

    total, _ = lax.scan(step, jnp.zeros(3), x)
    return jax.jit(jnp.tanh)(total)


def test_visits_know_sites_trips_and_branches():
    closed = trace(nested, X)
    visits = list(walk(closed))
    assert all(equation_at(closed, visit.site) is visit.eqn for visit in visits)
    assert [visit.site for visit in visits] == sorted(visit.site for visit in visits)
    of = {visit.eqn.primitive.name: visit for visit in visits}
    assert (of["exp"].trips, of["sin"].trips, of["tanh"].trips) == (20, 4, 1)
    assert of["sin"].is_conditional and of["cos"].is_conditional and not of["exp"].is_conditional
    assert [eqn.primitive.name for eqn in of["sin"].around] == ["scan", "cond"]
    assert of["sin"].not_inline is of["sin"].around[0] and of["tanh"].not_inline is None


def test_what_may_not_run_is_in_a_loop_that_ends_when_it_wants_to():
    closed = trace(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.exp(c), x), X)
    inside = [visit for visit in walk(closed) if visit.around]
    assert {visit.site[1] for visit in inside} == {0, 1} and all(visit.is_conditional for visit in inside)
    assert [visit.eqn.primitive.name for visit in walk(closed, enter=lambda visit: False)] == ["while"]


def test_boundaries_are_found_in_loops_and_not_in_each_other():
    loss = lambda w, x: jnp.sum((x @ w) ** 2)
    inner = lambda w: value_and_grad(loss)(w, X)[0]
    w = np.ones(3, "float32")
    closed = trace(jax.jit(lambda w: value_and_grad(inner)(w)), w)
    (visit,) = boundaries(closed)
    assert kind_of(visit.eqn) is CallKind.BOUNDARY and visit.not_inline is None and not visit.in_boundary
    assert sum(kind_of(v.eqn) is CallKind.BOUNDARY for v in walk(closed)) == 2
    looped = trace(lambda w: lax.scan(lambda c, _: (c - inner(c), None), w, None, length=2)[0], w)
    (visit,) = boundaries(looped)
    assert visit.not_inline.primitive.name == "scan" and visit.trips == 2
    assert holds_boundary(_compat.open_jaxpr(looped)[0].eqns[-1])
    assert not any(holds_boundary(visit.eqn) for visit in walk(trace(nested, X)))


def test_a_handler_takes_what_it_wants_and_leaves_the_rest():
    seen = []

    def doubled(eqn, values, site, run):
        seen.append(site)
        if eqn.primitive.name == "sin":
            return [2 * np.sin(values[0])]
        return run(eqn.params["jaxpr"], 0, values) if eqn.primitive.name in ("jit", "pjit") else None

    closed = trace(lambda x: jax.jit(lambda v: jnp.sin(v) + 1)(x) * 3, X)
    np.testing.assert_allclose(evaluate(closed, [X], doubled)[0], (2 * np.sin(X) + 1) * 3, rtol=1e-6)
    assert seen == [(0,), (0, 0, 0), (0, 0, 1), (1,)]
    seen.clear()
    evaluate(closed, [X], doubled, (7,), [(4, 2), (5,)])
    assert seen == [(7, 4, 2), (7, 4, 2, 0, 0), (7, 4, 2, 0, 1), (7, 5)]


def test_the_loop_is_over_values_of_any_kind():
    closed = trace(lambda x, y: (jnp.sin(x) + y * 2.0, y), X, X)
    depth = lambda index, eqn, operands: [1 + max(operands)] * len(eqn.outvars)
    assert fold(closed, [0, 10], depth, lambda literal: 0, ()) == [12, 10]
