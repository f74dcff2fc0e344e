"""Which parameter dims are tied, and how strongly: the groups that people shard by hand, and no more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from splitjax.trace.graph import Graph
from tests.trace.helpers import VALUE_AND_GRAD, check, cross_entropy, labels, trace_loss, zeros
from tests.trace.models import IMAGES, MODELS, VECTORS, C, D, traced

GRADIENTS = tuple(VALUE_AND_GRAD)


def groups(graph: Graph, strength: str = "local") -> set[frozenset[str]]:
    """Classes of parameter dims as sets of `path:dim`, of at least two."""
    table = getattr(graph, strength)
    found: dict[int, set[str]] = {}
    for leaf in graph.params:
        for position, dim in enumerate(leaf.dims):
            for atom in dim:
                found.setdefault(table[atom], set()).add(f"{leaf.path.removeprefix('params/')}:{position}")
    return {frozenset(one) for one in found.values() if len(one) > 1}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_megatron_groups_of_a_transformer(gradient):
    graph = traced("linen_transformer", gradient)
    found = groups(graph)
    for block in ("block0", "block1"):
        assert {f"{block}/fc1/kernel:1", f"{block}/fc1/bias:0", f"{block}/fc2/kernel:0"} in found
        attention = f"{block}/attention"
        heads = {
            f"{attention}/{one}/{leaf}:{dim}"
            for one in ("query", "key", "value")
            for leaf, dim in (("kernel", 1), ("bias", 0))
        }
        assert heads | {f"{attention}/out/kernel:0"} in found
        assert {
            f"{attention}/{one}/{leaf}:{dim}" for one in ("query", "key") for leaf, dim in (("kernel", 2), ("bias", 1))
        } in found
        assert {f"{attention}/value/kernel:2", f"{attention}/value/bias:1", f"{attention}/out/kernel:1"} in found


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_blocks_meet_only_softly_in_the_residual_stream(gradient):
    graph = traced("linen_transformer", gradient)
    stream = [
        ("block0/attention/query/kernel", 0),
        ("block0/fc1/kernel", 0),
        ("block1/attention/query/kernel", 0),
        ("block1/fc1/kernel", 0),
        ("head/kernel", 0),
    ]
    assert len({labels(graph, f"params/{path}", dim) for path, dim in stream}) == len(stream)
    assert len({labels(graph, f"params/{path}", dim, "soft") for path, dim in stream}) == 1
    # What a branch adds is the next one's input, by way of the sum.
    assert labels(graph, "params/block0/attention/out/kernel", 2) == labels(graph, "params/block0/fc1/kernel", 0)
    assert labels(graph, "params/block0/fc2/kernel", 1) == labels(graph, "params/block1/attention/query/kernel", 0)
    largest = max(len(one) for one in groups(graph))
    assert largest <= 9, "a whole residual stream in one local class"


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", MODELS)
def test_no_array_has_one_class_twice(name, gradient):
    """Square kernels: in and out are never tied locally, however often a layer repeats."""
    graph = traced(name, gradient)
    for leaf in graph.params:
        found = [graph.local[atom] for dim in leaf.dims for atom in dim]
        assert len(found) == len(set(found)), (leaf.path, leaf.dims)


@pytest.mark.parametrize("name", MODELS)
def test_both_kinds_of_gradient_give_the_same_groups(name):
    mine, plain = traced(name, "boundary"), traced(name, "plain")
    for strength in ("hard", "local", "soft"):
        assert groups(mine, strength) == groups(plain, strength)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(
    "name, path",
    [
        ("recurrent_by_hand", "wh"),
        ("unrolled_recurrent", "wh"),
        ("linen_recurrent", "LSTMCell_0/hi/kernel"),
        ("shared_layers", "w"),
    ],
)
def test_recurrent_kernels_are_tied_softly_only(name, path, gradient):
    graph = traced(name, gradient)
    assert labels(graph, f"params/{path}", 0) != labels(graph, f"params/{path}", 1)
    assert labels(graph, f"params/{path}", 0, "soft") == labels(graph, f"params/{path}", 1, "soft")


def test_a_recurrent_layer_feeds_the_next_one():
    graph = traced("recurrent_by_hand")
    assert (
        labels(graph, "params/wx", 1)
        == labels(graph, "params/wh", 1)
        == labels(graph, "params/b", 0)
        == labels(graph, "params/out", 0)
    )


def test_experts_share_their_dim():
    for name in ("experts", "ragged_experts"):
        graph = traced(name)
        assert labels(graph, "params/up", 0) == labels(graph, "params/down", 0)
        assert labels(graph, "params/up", 2) == labels(graph, "params/down", 1)
    assert labels(traced("experts"), "params/gate", 1) == labels(traced("experts"), "params/up", 0)


def test_gates_and_shared_heads():
    graph = traced("gated_transformer")
    block = "params/blocks/0"
    assert labels(graph, f"{block}/gate", 1) == labels(graph, f"{block}/up", 1) == labels(graph, f"{block}/down", 0)
    # Two key heads serve four query heads: the query's heads are (shared, group).
    heads = labels(graph, f"{block}/q", 1)
    assert len(heads) == 2 and labels(graph, f"{block}/k", 1) == labels(graph, f"{block}/v", 1) == heads[:1]
    assert labels(graph, f"{block}/o", 0) == heads
    assert labels(graph, f"{block}/v", 2) == labels(graph, f"{block}/o", 1)


def test_fused_projections_split_into_heads():
    graph = traced("fused_transformer")
    block = "params/blocks/0"
    fused = labels(graph, f"{block}/qkv", 1)
    assert [graph.atom_sizes[a] for a in graph.leaf(f"{block}/qkv").dims[1]] == [3, 4, 8]
    assert labels(graph, f"{block}/qkv_b", 0) == fused
    assert labels(graph, f"{block}/o", 0) == fused[1:]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_flattened_images_keep_their_channels(gradient):
    graph = traced("linen_conv", gradient)
    rows = labels(graph, "params/Dense_0/kernel", 0)
    assert len(rows) == 3 and rows[-1:] == labels(graph, "params/Conv_1/kernel", 3)
    sizes = [graph.atom_sizes[a] for a in graph.leaf("params/Dense_0/kernel").dims[0]]
    assert sizes == [2, 2, 16]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_projected_skips_and_gates_by_few_values(gradient):
    """A skip through a projection ties both branches; squeeze and excitation scales what it is scaled by."""
    params = {
        "a": zeros(3, 3, 3, 8),
        "skip": zeros(1, 1, 3, 8),
        "down": zeros(8, 2),
        "up": zeros(2, 8),
        "head": zeros(8, C),
    }

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(p, b):
        x = convolve(b["x"], p["skip"]) + convolve(b["x"], p["a"])
        x = jax.nn.relu(x)
        x = x * jax.nn.sigmoid(jax.nn.relu(x.mean((1, 2)) @ p["down"]) @ p["up"])[:, None, None]
        return cross_entropy(x.mean((1, 2)) @ p["head"], b["y"])

    graph = check(trace_loss(loss, params, IMAGES, gradient=gradient))
    tied = {
        labels(graph, f"params/{path}", dim)
        for path, dim in (("a", 3), ("skip", 3), ("up", 1), ("head", 0), ("down", 0))
    }
    assert len(tied) == 1


def test_grouped_convolutions_split_by_group():
    params = {"a": zeros(3, 3, 3, 8), "b": zeros(3, 3, 4, 16), "c": zeros(1, 1, 16, C)}

    def convolve(x, w, groups=1):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    loss = lambda p, b: cross_entropy(
        convolve(convolve(convolve(b["x"], p["a"]), p["b"], 2), p["c"]).mean((1, 2)), b["y"]
    )  # noqa: E731
    graph = check(trace_loss(loss, params, IMAGES))
    out, group = labels(graph, "params/a", 3), labels(graph, "params/b", 3)
    assert len(out) == len(group) == 2 and out[0] == group[0]
    assert out[1:] == labels(graph, "params/b", 2)
    assert group == labels(graph, "params/c", 2)


def test_two_towers_meet_where_they_are_multiplied():
    loss = lambda p, b: cross_entropy(jnp.tanh(b["x"] @ p["a"]) * (b["x"] @ p["b"]) @ p["out"], b["y"])  # noqa: E731
    graph = check(trace_loss(loss, {"a": zeros(D, 64), "b": zeros(D, 64), "out": zeros(64, C)}, VECTORS))
    assert labels(graph, "params/a", 1) == labels(graph, "params/b", 1) == labels(graph, "params/out", 0)
    assert labels(graph, "params/a", 0) == labels(graph, "params/b", 0)
