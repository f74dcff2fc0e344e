"""Every call of JAX is in one table, and all rooms act on what it says."""

from __future__ import annotations

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import splitjax
from splitjax import _compat
from splitjax.lower.microbatch.convolutions import with_cpu_layouts
from splitjax.lower.microbatch.pairing import pair
from splitjax.lower.products.interpret import evaluate
from splitjax.lower.turns.cut import flatten_calls
from splitjax.mesh import make_mesh
from splitjax.planning.sites.layout import SiteLayout, StepLayout
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.calls import CallKind, call_body, inline_body, kind_of, names, num_trips
from splitjax.primitives.walk import bodies
from splitjax.trace.flatten import flatten

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
W = np.linspace(0, 1, 6, dtype="float32").reshape(3, 2)


def product(x, w):
    return jnp.tanh(x @ w)


def renamed(closed, name):
    """A traced program whose `jit` calls are calls of the primitive `name`, as other releases and libraries have
    them."""
    inner, consts = _compat.open_jaxpr(closed)
    primitive = _compat.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, call_jaxpr: _compat.eval_jaxpr(call_jaxpr, (), *operands))
    eqns = [
        eqn.replace(primitive=primitive, params={"call_jaxpr": eqn.params["jaxpr"]})
        if eqn.primitive.name in ("jit", "pjit")
        else eqn
        for eqn in inner.eqns
    ]
    return _compat.build_jaxpr(
        closed, inner.invars, inner.outvars, eqns, list(zip(inner.constvars, consts, strict=True))
    )


CALLS = ("closed_call", "core_call", "core_closed_call", "call", "xla_call", "eval_jaxpr")


@pytest.mark.parametrize("name", CALLS)
def test_every_inlined_call_is_one_to_all_rooms(name):
    plain = _compat.trace(lambda x, w: jax.jit(product)(x, w) + 1, X, W)[0]
    closed = renamed(plain, name)
    (call, _) = _compat.open_jaxpr(closed)[0].eqns
    assert kind_of(call) is CallKind.INLINE and inline_body(call) is call_body(call) is bodies(call)[0]
    # The trace goes into it, and lowering may edit what it finds there.
    assert all(op.editable for op in flatten(closed).ops)
    assert [op.primitive for op in flatten(closed).ops] == [op.primitive for op in flatten(plain).ops]
    # The step is evaluated with a constraint inside it.
    layout = StepLayout(MeshContext(make_mesh({"data": 1})), SiteLayout(inside=frozenset({(0,)})))
    expected = product(X, W) + 1
    np.testing.assert_allclose(evaluate(layout, closed, [X, W])[0], expected, rtol=1e-6)
    # Microbatches see the operations inside it.
    assert [node.name for node in pair(closed, closed, "loss").body.nodes] == ["dot_general", "tanh", "add"]
    # A cut of the forward counts the equations behind it.
    assert [eqn.primitive.name for eqn in flatten_calls(closed).eqns] == ["dot_general", "tanh", "add"]


def test_fixed_calls_are_neither_edited_nor_inlined():
    scaled = lambda factor, x: jax.custom_derivatives.linear_call(lambda f, v: f * v, lambda f, v: f * v, factor, x)
    closed = _compat.trace(lambda x: scaled(2.0 * x, x), X)[0]
    eqn = next(eqn for eqn in _compat.open_jaxpr(closed)[0].eqns if eqn.primitive.name == "linear_call")
    assert kind_of(eqn) is CallKind.FIXED and inline_body(eqn) is None
    assert [op.editable for op in flatten(closed).ops] == [True, False]


def test_loops_say_how_often_their_bodies_run():
    def loops(x):
        scanned = lax.scan(lambda c, _: (c + 1, None), x, None, length=7)[0]
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, scanned)

    scan, loop = _compat.open_jaxpr(_compat.trace(loops, X)[0])[0].eqns
    assert (num_trips(scan), num_trips(loop)) == (7, None)
    assert [len(_compat.open_jaxpr(body)[0].outvars) for body in bodies(loop)] == [1, 1]
    assert call_body(scan) is None and call_body(loop) is None


def test_convolutions_are_found_inside_calls():
    function = lambda x: jax.jit(lambda v: lax.conv(v, jnp.ones((2, 3, 2)), (1,), "SAME"))(x)
    layouts = [
        eqn.params["dimension_numbers"].lhs_spec
        for eqn in _compat.open_jaxpr(_compat.trace(with_cpu_layouts(function), np.ones((4, 3, 5), "float32"))[0])[
            0
        ].eqns
        if eqn.primitive.name == "conv_general_dilated"
    ]
    assert layouts == [(0, 2, 1)]


def test_no_module_has_a_table_of_calls_of_its_own():
    """Two names of calls side by side in a module are a table that will disagree with this one."""
    calls = names(CallKind.INLINE, CallKind.REMAT, CallKind.RULE)
    tables = []
    for file in sorted(pathlib.Path(splitjax.__file__).parent.rglob("*.py")):
        if file.name == "calls.py":
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                words = {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
                tables += [str(file)] if len(words & calls) > 1 else []
    assert tables == []
