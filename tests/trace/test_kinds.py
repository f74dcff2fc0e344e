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
    VALUE_AND_GRAD, check, cross_entropy, graph_of, kinds, labels, layer_of, leaf_of, names_of, trace_loss, zeros,
)
from tests.trace.models import B, C, D, IMAGES, MODELS, SEQUENCES, T, TOKENS, V, VECTORS, LinenBlock, model

GRADIENTS = tuple(VALUE_AND_GRAD)


def block_kinds(name: str, **kinds: str) -> dict[str, str]:
    return {f"{name}/{key}": kind for key, kind in kinds.items()}


_LINEN_BLOCK = {
    "norm1": "norm", "attention/query": "attention", "attention/key": "attention", "attention/value": "attention",
    "attention/out": "attention", "norm2": "norm", "fc1": "dense", "fc2": "dense",
}
_HAND_BLOCK = {"ln1": "norm", "qkv": "attention", "o": "attention", "ln2": "norm", "up": "dense", "down": "dense"}
_GATED_BLOCK = {
    "n1": "norm", "q": "attention", "k": "attention", "v": "attention", "o": "attention", "n2": "norm", "gate": "dense", "up": "dense",
    "down": "dense",
}
_CELL = {
    "LSTMCell_0": "ii hi if hf ig hg io ho", "GRUCell_0": "ir hr iz hz in hn", "OptimizedLSTMCell_0": "hf hg hi ho if ig ii io",
}
EXPECTED: dict[str, dict[str, str]] = {
    "linen_transformer": {
        "embed": "embedding", **block_kinds("block0", **_LINEN_BLOCK), **block_kinds("block1", **_LINEN_BLOCK), "norm": "norm", "head": "dense",
    },
    "linen_conv": {"Conv_0": "conv", "GroupNorm_0": "norm", "Conv_1": "conv", "Dense_0": "dense", "Dense_1": "dense", "Dense_2": "dense"},
    "linen_stack": {"Dense_0": "dense", **block_kinds("blocks/LinenBlock_0", **_LINEN_BLOCK), "Dense_1": "dense"},
    "linen_recurrent": {f"{cell}/{gate}": "recurrent" for cell, gates in _CELL.items() for gate in gates.split()} | {"Dense_0": "dense"},
    "linen_time_major": {f"LSTMCell_0/{gate}": "recurrent" for gate in _CELL["LSTMCell_0"].split()} | {"Dense_0": "dense"},
    "nnx_tied": {
        "embed": "embedding", "positions/value": "other",
        **{f"blocks/{i}/{key}": kind for i in (0, 1) for key, kind in _LINEN_BLOCK.items()},
    },
    "haiku_model": {
        "embed": "embedding", "layer_norm": "norm", "multi_head_attention/query": "attention", "multi_head_attention/key": "attention",
        "multi_head_attention/value": "attention", "multi_head_attention/linear": "attention", "lstm/linear": "recurrent",
        "gru": "recurrent", "linear": "dense",
    },
    "equinox_model": {
        "embed": "embedding", "norm": "norm", "attention/query_proj": "attention", "attention/key_proj": "attention",
        "attention/value_proj": "attention", "attention/output_proj": "attention", "conv": "conv", "cell": "recurrent",
        "mlp/layers/0": "dense", "mlp/layers/1": "dense", "mlp/layers/2": "dense",
    },
    "lists_of_tuples": {"0": "dense", "1": "dense", "2": "dense"},
    "plain_dict": {"w1": "dense", "w2": "dense", "w3": "dense"},
    "fused_transformer": {
        "emb": "embedding", "pos": "other", **{f"blocks/{i}/{key}": kind for i in (0, 1) for key, kind in _HAND_BLOCK.items()}, "norm": "norm",
    },
    "gated_transformer": {
        "embed": "embedding", **{f"blocks/{i}/{key}": kind for i in (0, 1) for key, kind in _GATED_BLOCK.items()}, "norm": "norm",
        "head": "dense",
    },
    "experts": {"gate": "dense", "up": "expert", "down": "expert", "head": "dense"},
    "ragged_experts": {"gate": "dense", "up": "expert", "down": "expert", "head": "dense"},
    "recurrent_by_hand": {"wh": "recurrent", "out": "dense"},
    "shared_layers": {"w": "dense", "out": "dense"},
    "unrolled_recurrent": {"wx": "dense", "wh": "dense", "out": "dense"},
}
EXPECTED["linen_remat_stack"] = {
    name.replace("LinenBlock_0", "CheckpointLinenBlock_0") if False else name: kind for name, kind in EXPECTED["linen_stack"].items()
}


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


def names(name: str) -> dict[str, tuple]:
    loss, params, batch = model(name)
    graph = trace_loss(loss, params, batch)
    return {leaf.path.removeprefix("params/"): leaf.dim_names for leaf in graph.params}
