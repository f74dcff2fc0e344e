"""`register_dims`: the notation, its errors, and primitives of one's own."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from splitjax import _compat
from splitjax.errors import TraceError
from splitjax.primitives.dims import DimMap, from_notation, parse_notation
from splitjax.primitives.register import register_dims
from splitjax.primitives.table import OPERATIONS
from tests.trace.helpers import check, cross_entropy, graph_of, labels, trace_loss, zeros
from tests.trace.models import VECTORS, B, C, D


@pytest.fixture
def registered():
    """Registers rules for one test only."""
    names = []

    def register(primitive, rule, **options):
        register_dims(primitive, rule, **options)
        names.append(primitive if isinstance(primitive, str) else primitive.name)

    yield register
    for name in names:
        OPERATIONS.forget(name)


def test_notation_parses():
    assert parse_notation("b (h d), h o -> b o") == ([["b", ("h", "d")], ["h", "o"]], [["b", "o"]])
    assert parse_notation("... i, _ -> ... i, i") == ([[..., "i"], ["_"]], [[..., "i"], ["i"]])
    assert parse_notation(" -> ") == ([[]], [[]])


@pytest.mark.parametrize(
    "text, message",
    [
        ("b i, i o", "one ->"),
        ("b -> i -> o", "one ->"),
        ("(h d -> h", "not closed"),
        ("h d) -> h", "cannot hold ')'"),
        ("b [i] -> b", "cannot hold '['"),
        ("... b ... -> b", "cannot hold '...'"),
        ("(... d) -> d", "cannot hold '...'"),
        ("((h) d) -> h", "cannot hold '('"),
        ("3 b -> b", "cannot hold '3'"),
    ],
)
def test_notation_that_does_not_parse(text, message):
    with pytest.raises(
        TraceError, match=message.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("...", r"\.\.\.")
    ) as info:
        register_dims("never_registered", text)
    assert text in str(info.value) and "remedy" in str(info.value)
    assert "never_registered" not in OPERATIONS.with_dims()


@pytest.mark.parametrize(
    "text, inputs, outputs, message",
    [
        ("b i -> b", [(2, 3), (3,)], [(2,)], "1 operands and 1 results, the operation 2 and 1"),
        ("b i -> b", [(2, 3, 4)], [(2,)], "does not fit a tensor of shape"),
        ("b i -> b", [(2,)], [(2,)], "does not fit a tensor of shape"),
        ("b i, i -> b", [(2, 3), (4,)], [(2,)], "label 'i' has sizes 3 and 4"),
        ("(h d) -> h", [(12,)], [(5,)], "cannot be told"),
        ("(h d e) -> h", [(12,)], [(3,)], "cannot be told"),
    ],
)
def test_notation_that_does_not_fit(text, inputs, outputs, message):
    with pytest.raises(TraceError, match=message):
        from_notation(text, inputs, outputs)


def test_notation_fits_shapes():
    found = from_notation("... (h d), h -> ... d", [(2, 5, 12), (3,)], [(2, 5, 4)])
    assert found.inputs == ((("...2",), ("...1",), ("h", "d")), (("h",),))
    assert found.outputs == ((("...2",), ("...1",), ("d",)),)
    assert found.sizes["h"] == 3 and found.sizes["d"] == 4 and found.mixing
    one = from_notation("b i -> b i", [(1, 3)], [(2, 3)])
    assert one.inputs == (((), ("i",)),) and not one.mixing
    blank = from_notation("_ i -> _ i", [(2, 3)], [(5, 3)])
    assert blank.inputs[0][0] != blank.outputs[0][0] and not blank.mixing


def test_a_rule_is_a_notation_or_a_function():
    with pytest.raises(TraceError, match="notation or a function"):
        register_dims("never_registered", 3)


def _linear_primitive(name: str):
    def evaluate(x, w):
        return [x @ w]

    return _compat.define_primitive(
        name, evaluate, lambda x, w: ([jax.core.ShapedArray((x.shape[0], w.shape[1]), x.dtype)], set())
    )


def test_a_primitive_of_ones_own(registered):
    mine = _linear_primitive("my_linear")
    params = {"a": zeros(D, 64), "b": zeros(64, C)}

    def step(s, b):
        return s, cross_entropy(jnp.tanh(mine.bind(b["x"], s["a"])[0]) @ s["b"], b["y"])

    graph = check(graph_of(step, params, VECTORS))
    assert [one.primitive for one in graph.unknown] == ["my_linear"]
    assert labels(graph, "a", 1) != labels(graph, "b", 0)
    registered(mine, "b i, i o -> b o")
    graph = check(graph_of(step, params, VECTORS))
    assert graph.unknown == ()
    assert labels(graph, "a", 1) == labels(graph, "b", 0)
    assert {leaf.path for leaf in graph.params} == {"a", "b"}


def test_rules_as_functions(registered):
    mine = _linear_primitive("my_product")
    seen = []

    def rule(inputs, outputs, params):
        seen.append((inputs, outputs, dict(params)))
        return DimMap(((("b",), ("i",)), (("i",), ("o",))), ((("b",), ("o",)),), mixing=True)

    registered("my_product", rule)
    graph = graph_of(lambda s, b: (s, mine.bind(b["x"], s["a"])[0].sum()), {"a": zeros(D, 64)}, VECTORS)
    assert seen == [([(B, D), (D, 64)], [(B, 64)], {})]
    assert graph.unknown == ()


@pytest.mark.parametrize(
    "rule", ["b i, i o, x -> b o", lambda inputs, outputs, params: 1 / 0, lambda *_: DimMap((((),),), ())]
)
def test_a_rule_that_does_not_fit_its_operation(registered, rule):
    mine = _linear_primitive("my_misfit")
    registered("my_misfit", rule)
    with pytest.raises(TraceError) as info:
        graph_of(lambda s, b: (s, mine.bind(b["x"], s["a"])[0].sum()), {"a": zeros(D, 64)}, VECTORS)
    assert "my_misfit" in str(info.value) or "operands" in str(info.value)


def test_a_pallas_kernel_by_its_name(registered):
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def loss(p, b):
        x = b["x"] @ p["a"]
        x = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double")(x)
        return cross_entropy(x @ p["b"], b["y"])

    params = {"a": zeros(D, 64), "b": zeros(64, C)}
    assert [one.primitive for one in trace_loss(loss, params, VECTORS).foreign] == ["pallas_call:double"]
    registered("pallas_call:double", "... i -> ... i")
    graph = check(trace_loss(loss, params, VECTORS))
    assert graph.foreign == () and labels(graph, "params/a", 1) == labels(graph, "params/b", 0)


def test_a_rule_registered_before_the_first_trace_stays():
    """splitjax's own rules are loaded when a step is first traced: they do not replace a user's."""
    program = """
import splitjax
from splitjax.primitives.table import OPERATIONS
splitjax.register_dims("sin", "a b -> a b")
mine = OPERATIONS["sin"].dims
import splitjax.trace.tracer
assert OPERATIONS["cos"].dims is not None
assert OPERATIONS["sin"].dims is mine
"""
    subprocess.run([sys.executable, "-c", program], check=True)
