"""Kinds, names and flops of layers, in every framework, for splitjax's gradient and for JAX's own."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

from tests.trace.helpers import (
    VALUE_AND_GRAD,
    check,
    cross_entropy,
    graph_of,
    kinds,
    labels,
    layer_of,
    leaf_of,
    names_of,
    trace_loss,
    zeros,
)
from tests.trace.models import IMAGES, MODELS, SEQUENCES, TOKENS, VECTORS, B, C, D, LinenBlock, T, V, model, traced

GRADIENTS = tuple(VALUE_AND_GRAD)


def block_kinds(name: str, **kinds: str) -> dict[str, str]:
    return {f"{name}/{key}": kind for key, kind in kinds.items()}


_LINEN_BLOCK = {
    "norm1": "norm",
    "attention/query": "attention",
    "attention/key": "attention",
    "attention/value": "attention",
    "attention/out": "attention",
    "norm2": "norm",
    "fc1": "dense",
    "fc2": "dense",
}
_HAND_BLOCK = {"ln1": "norm", "qkv": "attention", "o": "attention", "ln2": "norm", "up": "dense", "down": "dense"}
_GATED_BLOCK = {
    "n1": "norm",
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "o": "attention",
    "n2": "norm",
    "gate": "dense",
    "up": "dense",
    "down": "dense",
}
_CELL = {
    "LSTMCell_0": "ii hi if hf ig hg io ho",
    "GRUCell_0": "ir hr iz hz in hn",
    "OptimizedLSTMCell_0": "hf hg hi ho if ig ii io",
}
EXPECTED: dict[str, dict[str, str]] = {
    "linen_transformer": {
        "embed": "embedding",
        **block_kinds("block0", **_LINEN_BLOCK),
        **block_kinds("block1", **_LINEN_BLOCK),
        "norm": "norm",
        "head": "dense",
    },
    "linen_conv": {
        "Conv_0": "conv",
        "GroupNorm_0": "norm",
        "Conv_1": "conv",
        "Dense_0": "dense",
        "Dense_1": "dense",
        "Dense_2": "dense",
    },
    "linen_stack": {"Dense_0": "dense", **block_kinds("blocks/LinenBlock_0", **_LINEN_BLOCK), "Dense_1": "dense"},
    "linen_recurrent": {f"{cell}/{gate}": "recurrent" for cell, gates in _CELL.items() for gate in gates.split()}
    | {"Dense_0": "dense"},
    "linen_time_major": {f"LSTMCell_0/{gate}": "recurrent" for gate in _CELL["LSTMCell_0"].split()}
    | {"Dense_0": "dense"},
    "nnx_tied": {
        "embed": "embedding",
        "positions/value": "other",
        **{f"blocks/{i}/{key}": kind for i in (0, 1) for key, kind in _LINEN_BLOCK.items()},
    },
    "haiku_model": {
        "embed": "embedding",
        "layer_norm": "norm",
        "multi_head_attention/query": "attention",
        "multi_head_attention/key": "attention",
        "multi_head_attention/value": "attention",
        "multi_head_attention/linear": "attention",
        "lstm/linear": "recurrent",
        "gru": "recurrent",
        "linear": "dense",
    },
    "equinox_model": {
        "embed": "embedding",
        "norm": "norm",
        "attention/query_proj": "attention",
        "attention/key_proj": "attention",
        "attention/value_proj": "attention",
        "attention/output_proj": "attention",
        "conv": "conv",
        "cell": "recurrent",
        "mlp/layers/0": "dense",
        "mlp/layers/1": "dense",
        "mlp/layers/2": "dense",
    },
    "lists_of_tuples": {"0": "dense", "1": "dense", "2": "dense"},
    "plain_dict": {"w1": "dense", "w2": "dense", "w3": "dense"},
    "fused_transformer": {
        "emb": "embedding",
        "pos": "other",
        **{f"blocks/{i}/{key}": kind for i in (0, 1) for key, kind in _HAND_BLOCK.items()},
        "norm": "norm",
    },
    "gated_transformer": {
        "embed": "embedding",
        **{f"blocks/{i}/{key}": kind for i in (0, 1) for key, kind in _GATED_BLOCK.items()},
        "norm": "norm",
        "head": "dense",
    },
    "experts": {"gate": "dense", "up": "expert", "down": "expert", "head": "dense"},
    "ragged_experts": {"gate": "dense", "up": "expert", "down": "expert", "head": "dense"},
    "recurrent_by_hand": {"wh": "recurrent", "out": "dense"},
    "shared_layers": {"w": "dense", "out": "dense"},
    "unrolled_recurrent": {"wx": "dense", "wh": "dense", "out": "dense"},
}
EXPECTED["linen_remat_stack"] = EXPECTED["linen_stack"]


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", MODELS)
def test_kinds(name, gradient):
    loss, params, batch = model(name)
    graph = check(trace_loss(loss, params, batch, optax.sgd(0.1, momentum=0.9), gradient))
    assert kinds(graph) == EXPECTED[name]
    assert graph.unknown == ()
    for layer in graph.layers:
        for path in layer.params[:1]:
            if layer.kind not in ("norm", "other"):
                assert None not in names_of(graph, path), (path, names_of(graph, path))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(
    "name, path, expected",
    [
        ("linen_transformer", "embed/embedding", ("vocab", "features")),
        ("linen_transformer", "block0/attention/query/kernel", ("in", "out", "out")),
        ("linen_transformer", "block0/attention/out/kernel", ("in", "in", "out")),
        ("linen_transformer", "block0/fc1/bias", (None,)),
        ("linen_conv", "Conv_1/kernel", ("height", "width", "in", "out")),
        ("linen_stack", "blocks/LinenBlock_0/fc1/kernel", ("stack", "in", "out")),
        ("linen_stack", "blocks/LinenBlock_0/fc1/bias", ("stack", None)),
        ("linen_stack", "blocks/LinenBlock_0/norm1/scale", ("stack", None)),
        ("linen_stack", "blocks/LinenBlock_0/attention/out/kernel", ("stack", "in", "in", "out")),
        ("linen_recurrent", "OptimizedLSTMCell_0/hf/kernel", ("in", "out")),
        ("nnx_tied", "embed/embedding/value", ("vocab", "features")),
        ("haiku_model", "gru/w_h", ("in", "out")),
        ("equinox_model", "embed/weight", ("vocab", "features")),
        ("equinox_model", "cell/weight_hh", ("out", "in")),
        ("equinox_model", "conv/weight", ("out", "in", "width")),
        ("fused_transformer", "emb", ("vocab", "features")),
        ("fused_transformer", "blocks/0/qkv", ("in", "out")),
        ("gated_transformer", "blocks/0/o", ("in", "in", "out")),
        ("experts", "up", ("expert", "in", "out")),
        ("ragged_experts", "down", ("expert", "in", "out")),
    ],
)
def test_names_of_dims(name, path, expected, gradient):
    assert names_of(traced(name, gradient), f"params/{path}") == expected


def test_a_stack_of_layers_is_one_dim():
    """The leading dims of everything that a scan reads count the same layers."""
    graph = traced("linen_stack")
    stacked = [leaf for leaf in graph.params if "/blocks/" in leaf.path]
    assert len(stacked) == 16 and {leaf.dim_names[0] for leaf in stacked} == {"stack"}
    assert len({labels(graph, leaf.path, 0) for leaf in stacked}) == 1
    assert {use.trips for use in graph.uses if "blocks" in use.layer} == {3}


def test_what_belongs_to_a_layer():
    graph = traced("fused_transformer")
    for name, members in {
        "qkv": ["qkv", "qkv_b"],
        "o": ["o", "o_b"],
        "up": ["up", "up_b"],
        "down": ["down", "down_b"],
        "ln1": ["ln1"],
        "ln2": ["ln2"],
    }.items():
        assert graph.layer(f"params/blocks/1/{name}").params == tuple(f"params/blocks/1/{member}" for member in members)
    assert graph.layer("params/norm").params == ("params/norm/bias", "params/norm/scale")
    order = [layer.name for layer in graph.layers]
    assert order.index("params/emb") < order.index("params/blocks/0/ln1") < order.index("params/blocks/0/qkv")
    assert order.index("params/blocks/0/down") < order.index("params/blocks/1/ln1") < order.index("params/norm")
    assert all("models.py" in layer.source for layer in graph.layers if layer.kind not in ("norm", "other"))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_biases_of_one_shape_go_to_their_own_weight(gradient):
    """Query, key and value biases beside each other have one class; each joins the weight it is added to."""
    params = {
        "wq": zeros(D, D),
        "wk": zeros(D, D),
        "wv": zeros(D, D),
        "bq": zeros(D),
        "bk": zeros(D),
        "bv": zeros(D),
        "t": zeros(),
    }

    def loss(p, b):
        q, k, v = (b["x"] @ p["w" + n] + p["b" + n] for n in "qkv")
        return (jax.nn.softmax(q @ k.swapaxes(1, 2) * p["t"]) @ v).mean()

    graph = check(trace_loss(loss, params, SEQUENCES, gradient=gradient))
    for n in "qkv":
        assert graph.layer(f"params/w{n}").params == (f"params/w{n}", f"params/b{n}")
        assert graph.layer(f"params/w{n}").kind == "attention"


def test_a_tied_table_has_two_uses():
    graph = traced("fused_transformer")
    uses = [use for use in graph.uses if use.param == "params/emb"]
    assert [use.primitive for use in uses] == ["gather", "dot_general"]
    assert uses[0].data_dtype == "int32" and uses[1].data_dtype == "float32"
    assert layer_of(graph, "params/emb").kind == "embedding"
    assert layer_of(graph, "params/emb").flops == 2 * B * T * V * D
    # Its dims are each tied to themselves alone.
    assert set(labels(graph, "params/emb", 0, "hard")) & set(labels(graph, "params/emb", 1, "hard")) == set()


def test_the_first_use_of_a_tied_table_names_its_dims():
    loss = lambda p, b: cross_entropy(jnp.tanh(p["table"][b["x"]]) @ p["table"].T, b["y"])  # noqa: E731
    graph = trace_loss(loss, {"table": zeros(V, D)}, TOKENS)
    alone = lambda p, b: cross_entropy(jnp.tanh(p["table"][b["x"]]) @ p["head"], b["y"])  # noqa: E731
    looked_up = trace_loss(alone, {"table": zeros(V, D), "head": zeros(D, V)}, TOKENS)
    assert names_of(graph, "params/table") == names_of(looked_up, "params/table") == ("vocab", "features")


def test_a_weight_of_several_parameters_is_that_of_the_largest():
    def loss(p, b):
        return cross_entropy((b["x"] @ (p["direction"] * p["a_scale"])) @ p["head"], b["y"])

    params = {"a_scale": zeros(1, 8), "direction": zeros(VECTORS["x"].shape[1], 8), "head": zeros(8, C)}
    graph = trace_loss(loss, params, VECTORS)
    assert [use.param for use in graph.uses] == ["params/direction", "params/head"]


def test_one_hot_products_stay_dense():
    loss = lambda p, b: cross_entropy(jax.nn.one_hot(b["x"], V) @ p["table"] @ p["head"], b["y"])  # noqa: E731
    graph = trace_loss(loss, {"table": zeros(V, D), "head": zeros(D, V)}, TOKENS)
    assert kinds(graph) == {"table": "dense", "head": "dense"}


def test_lookups_by_position():
    """Ids that do not depend on the batch: an embedding without data operand."""

    def loss(p, b):
        x = p["table"]["w"][b["x"]] + jnp.take(p["positions"]["w"], jnp.arange(T), axis=0)
        bias = p["relative"]["w"][(jnp.arange(T)[:, None] - jnp.arange(T)) % 8]
        return cross_entropy((jax.nn.softmax(x @ x.swapaxes(1, 2) + bias) @ x) @ p["head"]["w"], b["y"])

    params = {
        "table": {"w": zeros(V, D)},
        "positions": {"w": zeros(T, D)},
        "relative": {"w": zeros(8)},
        "head": {"w": zeros(D, V)},
    }
    graph = check(trace_loss(loss, params, TOKENS))
    assert kinds(graph) == {
        "table": "embedding",
        "positions": "embedding",
        "relative": "embedding",
        "head": "attention",
    }
    (use,) = (use for use in graph.uses if use.param == "params/positions/w")
    assert use.data is None and use.data_shape == use.out_shape == (T, D)


class Normed(nn.Module):
    norm: type

    @nn.compact
    def __call__(self, x):
        options = {nn.BatchNorm: {"use_running_average": False}, nn.GroupNorm: {"num_groups": 4}}.get(self.norm, {})
        x = nn.relu(self.norm(**options, name="norm")(nn.Conv(8, (3, 3), name="conv")(x)))
        return nn.Dense(C, name="head")(x.mean((1, 2)))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("norm", [nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm])
def test_norms(norm, gradient):
    module = Normed(norm)
    state = jax.eval_shape(module.init, jax.random.key(0), IMAGES["x"])

    def step(s, b):
        def loss(p):
            logits, new = module.apply(s | {"params": p}, b["x"], mutable=["batch_stats"])
            return cross_entropy(logits, b["y"]), new

        (_, new), grads = VALUE_AND_GRAD[gradient](loss, has_aux=True)(s["params"])
        return s | new | {"params": jax.tree.map(lambda p, g: p - g, s["params"], grads)}, 0.0

    graph = check(graph_of(step, state, IMAGES))
    assert kinds(graph) == {"conv": "conv", "norm": "norm", "head": "dense"}
    assert labels(graph, "params/norm/scale", 0)[-1:] == labels(graph, "params/conv/kernel", 3)[-1:]
    for leaf in graph.leaves:
        if leaf.path.startswith("batch_stats"):
            assert leaf.role == "statistic" and leaf.follows is None
            assert labels(graph, leaf.path, 0) == labels(graph, "params/conv/kernel", 3)


def test_modules_that_mutate_statistics_in_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.head, self.dropout = nnx.Linear(8, C, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.head(self.dropout(nnx.relu(self.norm(self.conv(x))).mean((1, 2))))

    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param, ...)

    def step(s, b):
        def loss(p):
            net = nnx.merge(graphdef, p, s["rest"], copy=True)
            return cross_entropy(net(b["x"]), b["y"]), nnx.state(net, nnx.Not(nnx.Param))

        (_, rest), grads = VALUE_AND_GRAD["boundary"](loss, has_aux=True)(s["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, s["params"], grads), "rest": rest}, 0.0

    graph = check(graph_of(step, {"params": params, "rest": rest}, IMAGES))
    assert kinds(graph) == {"conv": "conv", "norm": "norm", "head": "dense"}
    assert {leaf.role for leaf in graph.leaves if leaf.path.startswith("rest/")} == {"statistic"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_attention_in_the_eyes_of_contrast(gradient):
    """A softmax over products of two embeddings is no attention when nothing is averaged with it (CLIP)."""

    def loss(p, b):
        a, c = b["x"] @ p["a"], b["x"] @ p["c"]
        return -jnp.diag(jax.nn.log_softmax(a @ c.T)).mean()

    graph = check(trace_loss(loss, {"a": zeros(D, 8), "c": zeros(D, 8)}, VECTORS, optax.adam(1e-3), gradient))
    assert kinds(graph) == {"a": "dense", "c": "dense"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_recurrence_inside_a_stack_of_layers(gradient):
    """Recurrent layers, stacked by a scan over their weights: sliced by the outer loop, constant in the inner one."""
    params = {"cells": {"wx": zeros(3, D, D), "wh": zeros(3, D, D), "b": zeros(3, D)}, "head": {"w": zeros(D, C)}}

    def loss(p, b):
        def layer(xs, q):
            def cell(h, x):
                h = jnp.tanh(x @ q["wx"] + h @ q["wh"] + q["b"])
                return h, h

            return lax.scan(cell, jnp.zeros((B, D)), xs)[1], None

        xs, _ = lax.scan(layer, b["x"].swapaxes(0, 1), p["cells"])
        return cross_entropy(xs[-1] @ p["head"]["w"], b["y"])

    graph = check(trace_loss(loss, params, SEQUENCES, gradient=gradient))
    assert kinds(graph) == {"cells": "recurrent", "head": "dense"}
    assert names_of(graph, "params/cells/wh") == ("stack", "in", "out")
    assert labels(graph, "params/cells/wh", 1) != labels(graph, "params/cells/wh", 2)
    assert graph.layer("params/cells").flops == 2 * 3 * T * 2 * B * D * D


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_loop_that_picks_its_step(gradient):
    """`fori_loop` over time with an index, instead of a scan."""
    params = {"wx": zeros(D, D), "wh": zeros(D, D), "out": {"w": zeros(D, C)}}

    def loss(p, b):
        def cell(t, h):
            return jnp.tanh(b["x"][:, t] @ p["wx"] + h @ p["wh"])

        return cross_entropy(lax.fori_loop(0, T, cell, jnp.zeros((B, D))) @ p["out"]["w"], b["y"])

    assert kinds(check(trace_loss(loss, params, SEQUENCES, gradient=gradient))) == {"wh": "recurrent", "out": "dense"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_flops_by_hand(gradient):
    """Two per multiply-add of the forward pass: 3x3 convolution with padding, grouped and depthwise, dense, repeated by
    a scan."""
    params = {
        "conv": zeros(3, 3, 3, 8),
        "grouped": zeros(3, 3, 4, 16),
        "depthwise": zeros(5, 5, 1, 16),
        "dense": zeros(16, 16),
        "head": zeros(16, C),
    }

    def convolve(x, w, groups=1, stride=1):
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    def loss(p, b):
        x = convolve(convolve(convolve(b["x"], p["conv"]), p["grouped"], 2, stride=2), p["depthwise"], 16)
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ p["dense"]), None), x.mean((1, 2)), None, length=5)
        return cross_entropy(x @ p["head"], b["y"])

    graph = check(trace_loss(loss, params, IMAGES, gradient=gradient))
    expected = {
        "conv": 2 * B * 8 * 8 * 8 * 9 * 3,
        "grouped": 2 * B * 4 * 4 * 16 * 9 * 4,
        "depthwise": 2 * B * 4 * 4 * 16 * 25,
        "dense": 5 * 2 * B * 16 * 16,
        "head": 2 * B * 16 * C,
    }
    assert {layer.name.removeprefix("params/"): layer.flops for layer in graph.layers} == expected
    assert graph.flops == sum(expected.values())
    assert names_of(graph, "params/grouped") == ("height", "width", "in", "out")


def test_flops_of_a_weight_from_several_layers():
    """One product with concatenated kernels: every layer has its share."""
    graph = traced("linen_recurrent")
    gates = [layer.flops for layer in graph.layers if "OptimizedLSTMCell" in layer.name]
    assert gates == [2 * B * T * D * D] * 8
    assert sum(layer.flops for layer in graph.layers) == graph.flops


def test_activations_of_experts_count():
    graph = traced("experts")
    assert graph.activation_bytes > 4 * (4 * 8 * 64)  # the experts' hidden values at least


@pytest.mark.parametrize("shape", [(B, T, D)])
def test_block_of_a_transformer_alone(shape):
    module = LinenBlock()
    params = jax.eval_shape(module.init, jax.random.key(0), zeros(*shape))["params"]
    graph = trace_loss(lambda p, b: (module.apply({"params": p}, b["x"]) ** 2).mean(), params, {"x": zeros(*shape)})
    assert sorted(kinds(graph).values()) == ["attention"] * 4 + ["dense"] * 2 + ["norm"] * 2
    assert leaf_of(graph, "fc1/kernel").layer == "params/fc1"
