"""`register_primitive`: operations of one's own under every option, with the numbers of one device, and its errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.errors import MicrobatchError, TraceError
from splitjax.primitives.operation import Examples, Linear, Linearity, OperationFacts, RowAction, RowFacts, Trait
from splitjax.primitives.rows import row_facts
from splitjax.primitives.table import OPERATIONS
from tests.primitives.own import forgotten, normalise_p, product_p, total_p, tropical_p, wave_p

NUM_EXAMPLES, IN, HIDDEN, OUT = 32, 16, 32, 8


@pytest.fixture(autouse=True)
def precise():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def taught():
    """Teaches the dims of the primitives that the step uses, and nothing else."""
    with forgotten(wave_p, product_p, normalise_p):
        splitjax.register_primitive(wave_p, dims="... -> ...")
        splitjax.register_primitive(product_p, dims="b i, i o -> b o")
        splitjax.register_primitive(normalise_p, dims="b f -> b f", along="f")
        yield


def params():
    draw = np.random.default_rng(0).normal
    shapes = {"a": (IN, HIDDEN), "mid": (HIDDEN, HIDDEN), "out": (HIDDEN, OUT)}
    return {name: jnp.asarray(draw(size=shape) / 4) for name, shape in shapes.items()}


def batch():
    draw = np.random.default_rng(1).normal
    return {"x": jnp.asarray(draw(size=(NUM_EXAMPLES, IN))), "y": jnp.asarray(draw(size=(NUM_EXAMPLES, OUT)))}


def _own(x, w):
    return normalise_p.bind(wave_p.bind(product_p.bind(x, w)))


def _scanned(x, w):
    return jax.lax.scan(lambda carry, _: (_own(carry, w), None), x, None, length=2)[0]


BODIES = {"plain": _own, "remat": jax.checkpoint(_own), "scan": _scanned}


def make_step(body="plain", microbatches=None):
    def loss(p, b):
        x = BODIES[body](jnp.tanh(b["x"] @ p["a"]), p["mid"])
        return ((x @ p["out"] - b["y"]) ** 2).sum(-1).mean()

    def step(p, b):
        value, gradient = splitjax.value_and_grad(loss, microbatches=microbatches)(p, b)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), value

    return step


def run(step):
    state, losses = params(), []
    for _ in range(2):
        state, loss = step(state, batch())
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state), losses


def same_numbers(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


FULL = splitjax.PartialBackprop(depths=(1.0,) * 4)
MODEL = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 8}, "rules": "data_parallel"},
        {"mesh": MODEL, "rules": "splitbrain"},
        {"mesh": MODEL, "rules": "megatron"},
        {"mesh": {"data": 8}, "rules": "fsdp"},
        {"mesh": {"data": 8}, "shard_state": True},
        {"mesh": {"data": 4}, "backprop": FULL},
        {"mesh": {"data": 4}, "backprop": splitjax.PartialBackprop(depths=(1.0,) * 4, execution="program")},
    ],
    ids=["data_parallel", "splitbrain", "megatron", "fsdp", "shard_state", "branches", "programs"],
)
def test_dims_are_enough_for_every_option(options, taught):
    step = make_step()
    same_numbers(run(splitjax.parallelize(step, **options)), run(jax.jit(step)))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("microbatches", [2, 8])
def test_dims_are_enough_for_microbatches(body, microbatches, taught):
    """With 8 microbatches on 4 devices each holds a single example, which JAX may trace otherwise."""
    step = make_step(body, microbatches)
    same_numbers(run(splitjax.parallelize(step, mesh={"data": 4})), run(jax.jit(make_step(body))))


def test_microbatches_beside_split_layers(taught):
    step = make_step(microbatches=2)
    same_numbers(run(splitjax.parallelize(step, mesh=MODEL, rules="splitbrain")), run(jax.jit(make_step())))


@pytest.mark.parametrize("group_comm", ["gather", "turns", "modulo"])
def test_dims_are_enough_for_group_communication(group_comm, taught):
    """Examples cross from replicated layers, one of which is the product, into split ones."""
    draw = np.random.default_rng(3).normal
    shapes = {"conv": (3, 4, 8), "own": (64, 64), "mid": (64, 32), "out": (32, 8)}
    start = {name: jnp.asarray(draw(size=shape) / 8) for name, shape in shapes.items()}
    examples = {"x": jnp.asarray(draw(size=(32, 8, 4))), "y": jnp.asarray(draw(size=(32, 8)))}

    def loss(p, b):
        x = jax.lax.conv_general_dilated(b["x"], p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        x = wave_p.bind(product_p.bind(x.reshape(x.shape[0], -1), p["own"]))
        x = normalise_p.bind(jnp.tanh(x @ p["mid"]))
        return ((x @ p["out"] - b["y"]) ** 2).sum(-1).mean()

    def step(p, b):
        value, gradient = splitjax.value_and_grad(loss)(p, b)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), value

    parallel = splitjax.parallelize(step, mesh=MODEL, rules="splitbrain", group_comm=group_comm, donate=False)
    same_numbers(parallel(start, examples), jax.jit(step)(start, examples))


def _three_products(product):
    def loss(p, b):
        x = jnp.tanh(product(b["x"], p["a"]))
        return ((product(jnp.tanh(product(x, p["mid"])), p["out"]) - b["y"]) ** 2).mean()

    def step(p, b):
        value, gradient = splitjax.value_and_grad(loss)(p, b)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), value

    return step


@pytest.mark.parametrize("rules", ["splitbrain", "megatron"])
def test_a_product_that_is_taught_is_a_layer(rules, taught):
    """Rules split it, by its columns or by its rows, and its exchanges are explicit and planned as a dense layer's."""
    splitjax.register_primitive(product_p, dims="b i, i o -> b o", linear=Linearity.EACH, replace=True)
    plans = [
        splitjax.parallelize(_three_products(product), mesh=MODEL, rules=rules).plan(params(), batch())
        for product in (product_p.bind, jnp.matmul)
    ]
    assert plans[0].layers == plans[1].layers and plans[0].collectives == plans[1].collectives
    assert [layer.kind for layer in plans[0].layers] == ["dense"] * 3
    assert {axis for layer in plans[0].layers for spec in layer.specs for axis in spec} > {None}, "none is split"


ROWS = splitjax.RuleSet(
    "rows",
    rules=(
        splitjax.Rule("mid", path="mid", shard=({"out": "model"},)),
        splitjax.Rule("rest", path="a|out", shard=({"in": "model"},)),
    ),
    replicated_batch="all",
)


@pytest.mark.parametrize("rules", ["splitbrain", "megatron", ROWS], ids=["splitbrain", "megatron", "rows"])
def test_what_is_not_linear_is_not_added_up(rules):
    """The largest of the sums x + w has the dims of a product; the largest of two parts is not their sum."""
    with forgotten(tropical_p):
        splitjax.register_primitive(tropical_p, dims="b i, i o -> b o")
        expected = jax.jit(_three_products(tropical_p.bind))(params(), batch())
        parallel = splitjax.parallelize(_three_products(tropical_p.bind), mesh=MODEL, rules=rules, donate=False)
        assert [layer.kind for layer in parallel.plan(params(), batch()).layers] == ["dense"] * 3
        same_numbers(parallel(params(), batch()), expected)


def test_dims_that_are_taught_anew_make_another_layer_or_none():
    """What followed from the dims follows from those that replace them; what is stated of an operation stays."""
    with forgotten("own_mix"):
        splitjax.register_primitive("own_mix", dims="b i, i o -> b o")
        splitjax.register_dims("own_mix", "b i, o i -> b o")
        weights = OPERATIONS["own_mix"].weights
        assert weights.names({}, [(8, 4), (6, 4)], [(8, 6)], 1) == ("out", "in")
        assert weights.flops({}, [(8, 4), (6, 4)], [(8, 6)]) == 2 * 8 * 4 * 6
        splitjax.register_dims("own_mix", "b i, b i -> b i")
        assert OPERATIONS["own_mix"].weights is None
        assert Trait.PRODUCT not in OPERATIONS["own_mix"].traits
    stated = OPERATIONS["gather"]
    try:
        splitjax.register_primitive("gather", dims=stated.dims, replace=True)
        assert OPERATIONS["gather"].weights is stated.weights
    finally:
        OPERATIONS.teach(stated)


@pytest.mark.parametrize(
    ("name", "given", "by_labels"),
    [
        ("own_mix", {}, True),
        ("own_mix", {"size_params": ("block",)}, False),
        ("pallas_call:own_mix", {}, False),
        ("ffi_call:own_mix", {}, False),
    ],
)
def test_what_holds_sizes_is_not_run_on_parts(name, given, by_labels):
    with forgotten(name):
        splitjax.register_primitive(name, dims="b i, i o -> b o", linear=Linearity.EACH, **given)
        assert OPERATIONS[name].weights.by_labels is by_labels


def test_experts_of_a_taught_product_have_their_name():
    """A label of weight and result alone is what comes out, one of all three numbers experts."""
    with forgotten("own_experts"):
        splitjax.register_primitive("own_experts", dims="e b i, e i o -> e b o")
        weights = OPERATIONS["own_experts"].weights
        assert weights.names({}, [(2, 8, 4), (2, 4, 6)], [(2, 8, 6)], 1) == ("expert", "in", "out")


def _total_step(microbatches=None):
    def loss(p, b):
        return (total_p.bind(b["x"] @ p["a"]) * jnp.arange(HIDDEN)).sum() / NUM_EXAMPLES

    def step(p, b):
        value, gradient = splitjax.value_and_grad(loss, microbatches=microbatches)(p, b)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), value

    return step


def test_a_linear_contraction_of_examples_is_a_sum_over_them():
    with forgotten(total_p):
        splitjax.register_primitive(total_p, dims="b f -> f", linear=True)
        got = run(splitjax.parallelize(_total_step(4), mesh={"data": 2}))
        same_numbers(got, run(jax.jit(_total_step())))


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"dims": "b f -> f"}, "not known to add them up"),
        ({"dims": "b f -> f", "linear": True, "examples": Examples.MIXED}, "does not know"),
        ({"dims": "b f -> f", "linear": Linear(Linearity.TOGETHER, fixed=(0,))}, "not linear in all"),
    ],
)
def test_a_contraction_of_examples_that_is_no_sum_is_refused(facts, message):
    with forgotten(total_p), pytest.raises(MicrobatchError, match=message):
        splitjax.register_primitive(total_p, **facts)
        run(splitjax.parallelize(_total_step(4), mesh={"data": 2}))


def test_examples_that_an_operation_works_along_are_refused(taught):
    splitjax.register_primitive(normalise_p, along="b", replace=True)
    with pytest.raises(MicrobatchError, match="works along the dim that holds the examples"):
        run(splitjax.parallelize(make_step(microbatches=2), mesh={"data": 2}))


@pytest.mark.parametrize(
    "facts, message",
    [
        ({}, "nothing says what it does to dims"),
        ({"dims": 3}, "a dim rule is a notation or a function"),
        ({"dims": "b f -> b f", "along": "g"}, "no label 'g'"),
        ({"dims": "b f -> b f", "linear": Linear(Linearity.EACH, operands=(1,))}, "no operand 1"),
        ({"dims": "a, a -> a", "linear": Linear(Linearity.EACH, operands=(0,), fixed=(0,))}, "both linear and fixed"),
        ({"dims": "a, a -> a", "linear": Linearity.PAIRED}, "differ in number"),
        ({"dims": "a -> a", "linear": "yes"}, "True, a Linearity or a Linear"),
        ({"dims": "b f -> f", "elementwise": True}, "same labels on both sides"),
        ({"dims": "b f -> b f", "elementwise": True, "along": "f"}, "works along no dim"),
        ({"dims": "b f -> b f", "examples": "apart"}, "a function or an Examples"),
        ({"dims": "b f -> b f", "traits": ["elementwise"]}, "a trait is a Trait"),
        ({"dims": "b f -> b f", "rows": RowAction.ARRANGES}, "which rows it keeps"),
    ],
)
def test_facts_that_cannot_be(facts, message):
    with pytest.raises(TraceError, match=message) as info:
        splitjax.register_primitive("never_registered", **facts)
    assert info.value.remedy and "never_registered" in info.value.place
    assert "never_registered" not in OPERATIONS


def test_a_known_primitive_is_taught_anew_only_if_told():
    with pytest.raises(TraceError, match="known already"):
        splitjax.register_primitive("sin", dims="... -> ...")
    stated = OPERATIONS["sin"]
    with forgotten("sin"):
        splitjax.register_primitive("sin", along="f", dims="... f -> ... f", replace=True)
        assert OPERATIONS["sin"].along == {"f"} and OPERATIONS["sin"].traits == stated.traits
    assert OPERATIONS["sin"] is stated


def test_a_fact_is_stated_once():
    with pytest.raises(ValueError, match="'dims' of 'sin' is stated twice"):
        OPERATIONS.state("sin", dims=OPERATIONS["cos"].dims)


def _table_step(update):
    def loss(p, b):
        x = wave_p.bind(p["table"][b["ids"]].sum(1))
        return ((product_p.bind(x, p["w"]) - b["y"]) ** 2).mean()

    def step(p, b):
        value, gradient = splitjax.value_and_grad(loss)(p, b)
        return jax.tree.map(lambda w, g: w - 0.1 * update(g), p, gradient), value

    return step


def _table_run(step):
    draw = np.random.default_rng(2)
    state = {"table": jnp.asarray(draw.normal(size=(64, 8))), "w": jnp.asarray(draw.normal(size=(8, 4)))}
    ids = jnp.asarray(draw.integers(0, 64, size=(16, 3)))
    batch = {"ids": ids, "y": jnp.asarray(draw.normal(size=(16, 4)))}
    for _ in range(2):
        state, loss = step(state, batch)
    return jax.tree.map(np.asarray, state), float(loss)


@pytest.mark.parametrize("update", [lambda g: g, wave_p.bind], ids=["in the model", "in the optimizer"])
def test_gradients_go_by_rows(update, taught):
    """Rows without a gradient stay as they are if the operation makes zero of zero, which its value tells."""
    value = lambda params, x: x * np.sin(x)
    splitjax.register_primitive(wave_p, rows=RowFacts(RowAction.APART, value=value), replace=True)
    step = _table_step(update)
    parallel = splitjax.parallelize(step, mesh={"data": 4}, sync="all_gather")
    same_numbers(_table_run(parallel), _table_run(jax.jit(step)))
    same_numbers(_table_run(splitjax.parallelize(step, mesh={"data": 4})), _table_run(jax.jit(step)))


@pytest.mark.parametrize(
    "facts, action",
    [
        ({"dims": "r f -> r f"}, RowAction.APART),
        ({"dims": "r f, f -> r f"}, RowAction.APART),
        ({"dims": "r f -> r f", "along": "f"}, RowAction.APART),
        ({"dims": "r f -> r f", "along": "r"}, RowAction.WHOLE),
        ({"dims": "r f -> f r"}, RowAction.WHOLE),
        ({"dims": "r f -> r f", "examples": Examples.MIXED}, RowAction.WHOLE),
        ({"elementwise": True}, RowAction.APART),
        ({"elementwise": True, "rows": RowAction.WHOLE}, RowAction.WHOLE),
    ],
)
def test_what_happens_to_rows_follows_from_the_dims(facts, action):
    shapes = [(6, 4), (4,)] if "," in facts.get("dims", "") else [(6, 4)]
    result = (4, 6) if facts.get("dims") == "r f -> f r" else (6, 4)
    with forgotten("own_rows"):
        splitjax.register_primitive("own_rows", **facts)
        assert row_facts(OPERATIONS["own_rows"], {}, shapes, [result]).action is action
    assert row_facts(OperationFacts("own_rows"), {}, shapes, [result]).action is RowAction.WHOLE
