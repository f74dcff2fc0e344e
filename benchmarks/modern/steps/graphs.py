"""Steps over graphs, whose nodes, edges and targets have leading dims of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import Perceptron, apply_dense, apply_perceptron, perceptron
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH = 32
NODES, EDGES, GRAPHS, CLASSES = 64, 192, 16, 8


def _graph(drawn: Drawn) -> dict[str, Any]:
    """One graph, of which some nodes are labelled."""
    return {
        "nodes": drawn.normal(NODES, 16),
        "senders": drawn.integers(NODES, EDGES),
        "receivers": drawn.integers(NODES, EDGES),
        "labels": drawn.integers(CLASSES, NODES),
        "mask": drawn.uniform(NODES) < 0.6,
    }


def _masked_cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def gcn(dtype: str) -> Problem:
    """Kipf and Welling's: sums over neighbours, over the roots of both degrees; a node is its own neighbour."""
    drawn = Drawn.of(dtype, 30)
    params = {"hidden": drawn.dense(16, WIDTH), "out": drawn.dense(WIDTH, CLASSES)}
    tx = optax.adam(1e-2)

    def convolve(x: jax.Array, batch: Any) -> jax.Array:
        own = jnp.arange(NODES, dtype=jnp.int32)
        senders, receivers = (jnp.concatenate([batch[name], own]) for name in ("senders", "receivers"))
        ones = jnp.ones_like(senders, x.dtype)
        out_degree = jax.ops.segment_sum(ones, senders, NODES)
        in_degree = jax.ops.segment_sum(ones, receivers, NODES)
        x = x * jax.lax.rsqrt(jnp.maximum(out_degree, 1))[:, None]
        x = jax.ops.segment_sum(x[senders], receivers, NODES)
        return x * jax.lax.rsqrt(jnp.maximum(in_degree, 1))[:, None]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            x = jax.nn.relu(convolve(apply_dense(params["hidden"], batch["nodes"]), batch))
            decay = 5e-4 * (params["hidden"]["kernel"] ** 2).sum()
            return _masked_cross_entropy(convolve(apply_dense(params["out"], x), batch), batch) + decay

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(_graph(drawn) for _ in range(2)))


class GAT(nn.Module):
    """Attention over neighbours, with a softmax over the edges that end in the same node."""

    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        for number in range(2):
            h = nn.DenseGeneral((self.heads, WIDTH // self.heads), use_bias=False)(x)
            left = self.param(f"left_{number}", nn.initializers.normal(0.1), h.shape[1:])
            right = self.param(f"right_{number}", nn.initializers.normal(0.1), h.shape[1:])
            scores = nn.leaky_relu((h * left).sum(-1)[senders] + (h * right).sum(-1)[receivers], 0.2)
            top = jax.ops.segment_max(scores, receivers, x.shape[0])
            weights = jnp.exp(scores - jax.lax.stop_gradient(top)[receivers])
            total = jax.ops.segment_sum(weights, receivers, x.shape[0])
            weights = weights / total[receivers]
            h = jax.ops.segment_sum(weights[..., None] * h[senders], receivers, x.shape[0])
            x = nn.elu(h.reshape(x.shape[0], -1)) + nn.Dense(WIDTH)(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x))


def gat(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 31)
    model, batches = GAT(), tuple(_graph(drawn) for _ in range(2))
    edges = batches[0]["senders"], batches[0]["receivers"]
    params = drawn.linen(model, batches[0]["nodes"], *edges)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(5e-3))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["nodes"], batch["senders"], batch["receivers"])
            return _masked_cross_entropy(logits, batch)

        loss, grads = splitjax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Problem(train_step, state, batches)


def _padded_graphs(drawn: Drawn) -> dict[str, Any]:
    """Sixteen graphs of four nodes in one array each, as jraph pads them: the last graph holds what is padding."""
    owner = np.repeat(np.arange(GRAPHS), NODES // GRAPHS).astype(np.int32)
    first = drawn.integers(NODES, EDGES)
    second = owner[first] * (NODES // GRAPHS) + drawn.integers(NODES // GRAPHS, EDGES)
    return {
        "nodes": drawn.normal(NODES, 16),
        "edges": drawn.normal(EDGES, 8),
        "senders": first,
        "receivers": second.astype(np.int32),
        "graph_of_node": owner,
        "targets": drawn.normal(GRAPHS),
        "real": np.arange(GRAPHS) < GRAPHS - 1,
    }


class MessagePassing(nn.Module):
    """Edges are updated by their ends, nodes by the mean and maximum of their edges, graphs by their nodes."""

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        senders, receivers = batch["senders"], batch["receivers"]
        nodes = nn.Dense(WIDTH, name="embed_nodes")(batch["nodes"])
        edges = nn.Dense(WIDTH, name="embed_edges")(batch["edges"])
        graphs = jnp.zeros((GRAPHS, WIDTH), nodes.dtype)
        for number in range(2):
            ends = [edges, nodes[senders], nodes[receivers]]
            edges = edges + Perceptron((64, WIDTH), name=f"edge_{number}")(jnp.concatenate(ends, -1))
            total = jax.ops.segment_sum(edges, receivers, NODES)
            degree = jax.ops.segment_sum(jnp.ones_like(receivers, edges.dtype), receivers, NODES)
            highest = jax.ops.segment_max(edges, receivers, NODES)
            highest = jnp.where(degree[:, None] > 0, highest, 0)
            near = [nodes, total / jnp.maximum(degree, 1)[:, None], highest, graphs[batch["graph_of_node"]]]
            nodes = nodes + Perceptron((64, WIDTH), name=f"node_{number}")(jnp.concatenate(near, -1))
            summed = jax.ops.segment_sum(nodes, batch["graph_of_node"], GRAPHS, indices_are_sorted=True)
            graphs = graphs + Perceptron((64, WIDTH), name=f"graph_{number}")(summed)
        return nn.Dense(1, name="head")(nn.LayerNorm()(graphs))[:, 0]


def message_passing(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 32)
    model, batches = MessagePassing(), tuple(_padded_graphs(drawn) for _ in range(2))
    params = drawn.linen(model, batches[0])["params"]
    tx = optax.adam(1e-3)
    state = {"params": params, "opt": tx.init(params), "ema": params}

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            errors = optax.huber_loss(model.apply({"params": params}, batch), batch["targets"])
            return jnp.where(batch["real"], errors, 0).sum() / batch["real"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 0.01)
        return {"params": params, "opt": opt, "ema": ema}, {"loss": loss}

    return Problem(train_step, state, batches)


def egnn(dtype: str) -> Problem:
    """Molecules of eight atoms, every pair an edge: messages depend on distances, and coordinates move along edges.
    Forces are the gradient of the energy by coordinates, so that the loss holds a gradient."""
    atoms, species = 8, 4
    drawn = Drawn.of(dtype, 33)
    layer = lambda: {
        "edge": perceptron(drawn, 2 * WIDTH + 1, 64, WIDTH),
        "move": perceptron(drawn, WIDTH, WIDTH, 1),
        "node": perceptron(drawn, 2 * WIDTH, 64, WIDTH),
    }
    params = {
        "species": drawn.normal(species, WIDTH),
        "layers": [layer() for _ in range(2)],
        "energy": perceptron(drawn, WIDTH, WIDTH, 1),
    }
    tx = optax.adam(1e-3)
    apart = 1 - np.eye(atoms, dtype=dtype)[..., None]

    def energy(params: Any, x: jax.Array, kinds: jax.Array) -> jax.Array:
        h = params["species"][kinds]
        for w in params["layers"]:
            difference = x[:, None] - x[None]
            squares = (difference**2).sum(-1, keepdims=True)
            pairs = jnp.broadcast_to(h[:, None], (atoms, atoms, WIDTH))
            m = jnp.concatenate([pairs, pairs.swapaxes(0, 1), squares], -1)
            m = apart * jax.nn.silu(apply_perceptron(w["edge"], m, jax.nn.silu))
            x = x + (apart * difference * apply_perceptron(w["move"], m, jax.nn.silu)).sum(1) / (atoms - 1)
            h = h + apply_perceptron(w["node"], jnp.concatenate([h, m.sum(1)], -1), jax.nn.silu)
        return apply_perceptron(params["energy"], h, jax.nn.silu).sum()

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            both = jax.vmap(jax.value_and_grad(energy, argnums=1), (None, 0, 0))
            energies, slopes = both(params, batch["positions"], batch["species"])
            error = ((energies - batch["energy"]) ** 2).mean()
            force_error = ((slopes + batch["forces"]) ** 2).mean()
            return error + 10 * force_error, force_error

        (loss, force_error), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new, {"loss": loss, "force_error": force_error}

    draw = lambda: {
        "positions": drawn.normal(16, atoms, 3),
        "species": drawn.integers(species, 16, atoms),
        "energy": drawn.normal(16),
        "forces": drawn.normal(16, atoms, 3),
    }
    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("GCN on one graph", "graph network", gcn, ("segment_sum", "mask", "dims of their own")),
    ModernStep(
        "GAT on one graph", "graph network", gat, ("splitjax gradient", "segment softmax", "mask", "dims of their own")
    ),
    ModernStep(
        "message passing over padded graphs", "graph network", message_passing, ("segment_max", "ema", "padding")
    ),
    ModernStep(
        "EGNN with forces", "graph network", egnn, ("table", "splitjax gradient", "vmap", "gradient of a gradient")
    ),
)
