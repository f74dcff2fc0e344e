"""Sharding constraints of a traced step, changed at a line."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.step.stopping import LineChange, constraints_near, with_line_change

P = PartitionSpec


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def looped(x):
    where = NamedSharding(make_mesh(), P(None, "model"))

    def body(carry, _):
        made = jnp.cos(carry)
        pinned = jax.lax.with_sharding_constraint(made, where)
        return jnp.sin(pinned), None

    return jnp.sum(jax.lax.scan(body, x, None, length=2)[0])


def line_of(text):
    """`file:line` of the line of `looped` that has `text`."""
    lines, first = inspect.getsourcelines(looped)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if text in line)}"


def traced():
    return _compat.trace(looped, jax.ShapeDtypeStruct((8, 16), jnp.float32))[0]


def constraints(jaxpr):
    """The specs of all constraints in a jaxpr, in order."""
    found = []
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "sharding_constraint":
            found.append(eqn.params["sharding"].spec)
        for value in eqn.params.values():
            found += constraints(value) if _compat.is_jaxpr(value) else []
    return found


def test_a_constraint_is_found_by_its_line_and_by_its_neighbours():
    closed = traced()
    own = line_of("with_sharding_constraint")
    for text in ("with_sharding_constraint", "jnp.cos", "jnp.sin"):
        (found,) = constraints_near(closed, line_of(text), (4, 16))
        assert found.startswith(own)
    assert constraints_near(closed, line_of("jnp.sum"), (4, 16)) == ()
    assert constraints_near(closed, own, (3, 16)) == ()  # no part of such an array
    assert constraints_near(closed, own, (8, 16, 1)) == ()


def test_a_stop_and_none_within_a_loop():
    closed = traced()
    (source,) = constraints_near(closed, line_of("with_sharding_constraint"), (8, 16))
    stopped = with_line_change(closed, LineChange(source, (8, 16), P("data", "model")))
    assert constraints(stopped) == [P("data", "model"), P(None, "model")]
    freed = with_line_change(closed, LineChange(source, (8, 16)))
    assert constraints(freed) == [] and constraints(closed) == [P(None, "model")]
    x = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)
    values = [jax.jit(lambda x, j=j: _compat.eval_jaxpr(j, (), x))(x)[0] for j in (closed, stopped, freed)]
    np.testing.assert_allclose(values, values[0], rtol=1e-6)


def test_another_line_changes_nothing():
    closed = traced()
    assert with_line_change(closed, LineChange("elsewhere.py:1 (f)", (8, 16))) is closed


def test_a_move_between_two_constraints_is_the_second_ones():
    mesh = make_mesh()

    def chained(x):
        first = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(mesh, P(("data", "model"), None)))
        second = jax.lax.with_sharding_constraint(first, NamedSharding(mesh, P(None, "model")))
        return jnp.sin(second)

    closed = _compat.trace(chained, jax.ShapeDtypeStruct((8, 16), jnp.float32))[0]
    line = inspect.getsourcelines(chained)[1] + 1
    lines = [f"{__file__}:{number}" for number in (line, line + 1)]
    parts = (1, 16), (8, 4)
    for named in lines:
        (found,) = constraints_near(closed, named, (8, 16), parts)
        assert found.startswith(lines[1])
    # Another move has begun before the first, or goes on behind the second.
    (found,) = constraints_near(closed, lines[0], (8, 16), ((4, 16), (8, 4)))
    assert found.startswith(lines[0])


def test_a_move_of_dims_that_do_not_divide():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def chained(x):
        first = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(mesh, P("data")))
        return jax.lax.with_sharding_constraint(first, NamedSharding(mesh, P(P.UNCONSTRAINED, "model")))

    closed = _compat.trace(chained, jax.ShapeDtypeStruct((6, 8), jnp.float32))[0]
    line = inspect.getsourcelines(chained)[1] + 1
    (found,) = constraints_near(closed, f"{__file__}:{line}", (6, 8), ((2, 8), (6, 4)))
    assert found.startswith(f"{__file__}:{line + 1}")
