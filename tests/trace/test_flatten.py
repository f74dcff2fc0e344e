"""Calls are seen through, loops stand for all their iterations, and sites lead back to equations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from splitjax import _compat
from splitjax.lower.gradient import value_and_grad
from splitjax.primitives.calls import call_body
from splitjax.trace.flatten import BACKWARD, FORWARD, derivative_phase, flatten
from tests.trace.helpers import check, graph_of, zeros
from tests.trace.models import traced

X = zeros(4, 3)


def flat_of(fn, *args):
    return flatten(_compat.trace(fn, *args)[0])


def names(flat) -> list[str]:
    return [op.primitive for op in flat.ops]


def equation_at(jaxpr, site):
    """The equation that a site names."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqn = inner.eqns[site[0]]
    if len(site) == 1:
        return eqn
    bodies = (
        eqn.params["branches"]
        if "branches" in eqn.params
        else (
            [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
            if "cond_jaxpr" in eqn.params
            else [eqn.params["forward"]]
            if "forward" in eqn.params
            else [call_body(eqn) if call_body(eqn) is not None else eqn.params["jaxpr"]]
        )
    )
    return equation_at(bodies[site[1]], site[2:])


@jax.custom_vjp
def custom_square(x):
    return x * x


custom_square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


@jax.custom_jvp
def custom_cube(x):
    return x * x * x


custom_cube.defjvp(lambda p, t: (custom_cube(*p), 3 * p[0] ** 2 * t[0]))
CALLS = {
    "jit": (jax.jit(lambda x: x * x), True),
    "nested jit": (jax.jit(lambda x: jax.jit(lambda y: y * y)(x)), True),
    "remat": (jax.checkpoint(lambda x: x * x), True),
    "custom_jvp": (custom_cube, False),
    "custom_vjp": (custom_square, False),
    "remat of custom_vjp in jit": (jax.jit(jax.checkpoint(custom_square)), False),
    "composite": (lax.composite(lambda x: x * x, name="my.square"), False),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_seen_through(name):
    fn, editable = CALLS[name]
    flat = flat_of(fn, X)
    assert set(names(flat)) == {"mul"} or set(names(flat)) == {"integer_pow"} or set(names(flat)) == {"square"}
    first = flat.ops[0]
    # What is only handed through keeps its number: the operand is the step's own argument.
    assert set(first.inputs) == {flat.inputs[0]}
    assert flat.ops[-1].outputs == flat.outputs
    assert all(op.editable == editable for op in flat.ops)
    assert flat.constants == () and flat.carried == ()


def test_sites_lead_back_to_equations():
    """From the outermost jaxpr inwards: equation, body, equation, ..."""

    def step(p, x):
        def loss(p):
            y = jax.jit(lambda p, x: jnp.sin(x) * p)(p, x)
            y, ys = lax.scan(lambda c, x: (c * jnp.cos(x), jnp.tanh(c)), y[0], y)
            y = lax.cond(y.sum() > 0, lambda y: jnp.exp(y), lambda y: jnp.log(y), y)
            return (
                y * lax.while_loop(lambda y: y.sum() < 3, lambda y: jax.checkpoint(jnp.sinh)(y), y)
            ).sum() + ys.sum()

        return value_and_grad(loss)(p)

    closed = _compat.trace(step, X, X)[0]
    flat = flatten(closed)
    real = [op for op in flat.ops if not op.primitive.startswith("_")]
    assert {"sin", "cos", "tanh", "exp", "log", "sinh", "lt"} <= {op.primitive for op in real}
    for op in real:
        assert equation_at(closed, op.site) is op.eqn, op.site
    assert len({op.site for op in real}) == len(real)


def test_boundary():
    def step(p, x):
        (value, aux), grads = value_and_grad(lambda p: ((p["w"] * x).sum(), p["b"] * 2), has_aux=True)(p)
        return value, aux, grads

    flat = flat_of(step, {"b": zeros(3), "w": X}, X)
    assert flat.num_boundaries == 1
    b, w, x = flat.inputs
    assert flat.differentiated == {b, w}
    gradients = [op for op in flat.ops if op.primitive == "_gradient"]
    assert [op.inputs[0] for op in gradients] == [b, w]
    assert [op.outputs[0] for op in gradients] == list(flat.outputs[-2:])
    value = flat.outputs[0]
    assert all(op.inputs[1] == value for op in gradients)
    (product,) = (op for op in flat.ops if op.primitive == "mul" and w in op.inputs)
    assert product.inside and product.inputs == (w, x)
    assert not gradients[0].inside


def test_scan():
    def step(w, xs):
        def body(carry, x):
            h, count = carry
            h = jnp.tanh(h @ w + x)
            return (h, count + 1), h * 2

        return lax.scan(body, (jnp.zeros(3), 0), xs)

    flat = flat_of(step, zeros(3, 3), zeros(7, 3))
    (dot,) = (op for op in flat.ops if op.primitive == "dot_general")
    assert dot.trips == 7 and len(dot.loops) == 1
    assert dot.inputs[1] == flat.inputs[0], "a constant of the loop keeps its number"
    kinds = names(flat)
    assert kinds.count("_carry_in") == 2 and kinds.count("_scan_in") == 1 and kinds.count("_scan_out") == 1
    assert {loop for loop, _ in flat.carried} == set(dot.loops)
    (entering,) = (op for op in flat.ops if op.primitive == "_scan_in")
    (leaving,) = (op for op in flat.ops if op.primitive == "_scan_out")
    assert flat.shapes[entering.outputs[0]] == (3,) and flat.shapes[leaving.outputs[0]] == (7, 3)
    (index,) = (op for op in flat.ops if op.primitive == "_scan_index")
    assert index.inputs == (flat.inputs[1], leaving.outputs[0])


def test_nested_scans_multiply():
    def step(x):
        inner = lambda c, _: (jnp.sin(c), None)  # noqa: E731
        outer = lambda c, _: (lax.scan(inner, c, None, length=5)[0], None)  # noqa: E731
        return lax.scan(outer, x, None, length=3)[0]

    (sine,) = (op for op in flat_of(step, X).ops if op.primitive == "sin")
    assert sine.trips == 15 and len(sine.loops) == 2


def test_a_scan_that_changes_nothing_hands_nothing_back():
    flat = flat_of(lambda x, xs: lax.scan(lambda c, x: (c, x + c), x, xs), zeros(3), zeros(5, 3))
    assert "_carry_back" not in names(flat)


def test_while_and_cond():
    def step(x, y):
        x = lax.while_loop(lambda c: c.sum() < 1, lambda c: c + y, x)
        return lax.switch(0, [lambda v: v, jnp.sin, jnp.cos], x)

    flat = flat_of(step, X, X)
    kinds = names(flat)
    assert kinds.count("_carry_in") == 1 and kinds.count("_carry_back") == 1
    (branch,) = (op for op in flat.ops if op.primitive == "_branch")
    assert len(branch.inputs) == 3 and branch.outputs == flat.outputs
    (added,) = (op for op in flat.ops if op.primitive == "add")
    assert flat.inputs[1] in added.inputs and added.site[1] == 1, "the body of a while loop is its second jaxpr"


def test_constants_are_no_arguments():
    closed_over = jnp.arange(3.0)
    flat = flat_of(lambda x: x + closed_over + jax.jit(lambda y: y * closed_over)(x), X)
    assert len(flat.inputs) == 1 and len(flat.constants) >= 1
    assert not set(flat.constants) & set(flat.inputs)


def test_phases():
    """Inside a call, an equation belongs to the pass of the call."""

    def loss(w, x):
        y = jax.jit(lambda x: jnp.tanh(x @ w))(x)
        y, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), y, None, length=2)
        return jax.checkpoint(lambda y: (y @ w).sum())(y)

    flat = flat_of(lambda w, x: jax.value_and_grad(loss)(w, x), zeros(3, 3), X)
    phases = [op.phase for op in flat.ops if op.primitive == "dot_general"]
    assert set(phases) == {FORWARD, BACKWARD}
    assert phases.count(FORWARD) == 3 and phases == sorted(phases, reverse=True)
    flat = flat_of(lambda w, x: value_and_grad(loss)(w, x), zeros(3, 3), X)
    assert {op.phase for op in flat.ops} == {""}


@pytest.mark.parametrize(
    "stack, phase",
    [
        ("", ""),
        ("Model/Dense_0", ""),
        ("jvp(Model)/Dense_0", FORWARD),
        ("transpose(jvp(Model))/Dense_0", BACKWARD),
        ("vmap(transpose(jvp()))", BACKWARD),
        ("jvp(vmap(transpose(jvp())))", FORWARD),
        ("outer/transpose(jvp())", BACKWARD),
        ("jit(transpose)/jvp()", FORWARD),
    ],
)
def test_the_outermost_derivative_counts(stack, phase):
    assert derivative_phase(stack) == phase


def test_uses_have_sites_that_lowering_can_reach():
    for gradient in ("boundary", "plain"):
        graph = traced("linen_remat_stack", gradient)
        assert all(use.editable for use in graph.uses if not use.backward)

    @functools.partial(jax.custom_vjp)
    def dense(x, w):
        return x @ w

    dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))
    graph = check(graph_of(lambda s, b: (s, dense(b["x"], s["w"]).sum()), {"w": zeros(3, 5)}, {"x": X}))
    assert [use.editable for use in graph.uses] == [False]
