"""Steps beyond one forward and one update: whatever JAX can trace has a graph, and it says the right things."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from splitjax.lower.gradient import grad, value_and_grad
from splitjax.primitives.register import register_dims
from splitjax.primitives.table import OPERATIONS
from tests.trace.helpers import (
    VALUE_AND_GRAD,
    check,
    cross_entropy,
    graph_of,
    kinds,
    labels,
    leaf_of,
    names_of,
    trace_loss,
    zeros,
)
from tests.trace.models import VECTORS, B, C, D, T

GRADIENTS = tuple(VALUE_AND_GRAD)
MLP = {"fc1": {"w": zeros(D, 64), "b": zeros(64)}, "fc2": {"w": zeros(64, C), "b": zeros(C)}}


def mlp(p, x):
    return jnp.tanh(x @ p["fc1"]["w"] + p["fc1"]["b"]) @ p["fc2"]["w"] + p["fc2"]["b"]


def mlp_loss(p, b):
    return cross_entropy(mlp(p, b["x"]), b["y"])


def roles(graph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for leaf in graph.leaves:
        found.setdefault(leaf.role, set()).add(leaf.path)
    return found


def params_of(graph) -> set[str]:
    return roles(graph).get("param", set())


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_two_networks_with_an_update_each(gradient):
    """A GAN: the second network's loss reads the first one's new parameters."""
    tx = optax.adam(1e-3)
    generator = {"g1": {"w": zeros(8, 64)}, "g2": {"w": zeros(64, D)}}
    critic = {"d1": {"w": zeros(D, 64)}, "d2": {"w": zeros(64, 1)}}
    state = {
        "gen": generator,
        "critic": critic,
        "gen_opt": jax.eval_shape(tx.init, generator),
        "critic_opt": jax.eval_shape(tx.init, critic),
    }
    take = VALUE_AND_GRAD[gradient]

    def make(p, z):
        return jnp.tanh(z @ p["g1"]["w"]) @ p["g2"]["w"]

    def judge(p, x):
        return (jnp.tanh(x @ p["d1"]["w"]) @ p["d2"]["w"])[:, 0]

    def step(s, batch):
        def critic_loss(p):
            both = jnp.concatenate([batch["x"], lax.stop_gradient(make(s["gen"], batch["z"]))])
            return optax.sigmoid_binary_cross_entropy(judge(p, both), jnp.arange(2 * B) < B).mean()

        _, grads = take(critic_loss)(s["critic"])
        updates, critic_opt = tx.update(grads, s["critic_opt"])
        critic = optax.apply_updates(s["critic"], updates)
        _, grads = take(lambda p: -judge(critic, make(p, batch["z"])).mean())(s["gen"])
        updates, gen_opt = tx.update(grads, s["gen_opt"])
        gen = optax.apply_updates(s["gen"], updates)
        return {"gen": gen, "critic": critic, "gen_opt": gen_opt, "critic_opt": critic_opt}, 0.0

    graph = check(graph_of(step, state, {"x": zeros(B, D), "z": zeros(B, 8)}))
    assert graph.num_boundaries == (2 if gradient == "boundary" else 0)
    assert params_of(graph) == {"gen/g1/w", "gen/g2/w", "critic/d1/w", "critic/d2/w"}
    assert {leaf.follows for leaf in graph.leaves if leaf.path.startswith("gen_opt/0/mu")} == {"gen/g1/w", "gen/g2/w"}
    assert set(kinds(graph).values()) == {"dense"}
    assert labels(graph, "gen/g2/w", 1) == labels(graph, "critic/d1/w", 0)
    # Real and made examples side by side are examples still.
    assert all(graph.is_example(use.data_dims[0]) for use in graph.uses if not use.backward)
    assert {use.data_shape[0] for use in graph.uses if use.param == "critic/d1/w" and not use.backward} == {B, 2 * B}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("scanned", [False, True])
def test_several_updates_in_one_step(gradient, scanned):
    tx = optax.adam(1e-3)

    def update(s, batch):
        value, grads = VALUE_AND_GRAD[gradient](lambda p: mlp_loss(p, batch))(s["params"])
        updates, opt = tx.update(grads, s["opt"])
        return {"params": optax.apply_updates(s["params"], updates), "opt": opt}, value

    def step(s, batch):
        parts = jax.tree.map(lambda x: x.reshape(4, B // 4, *x.shape[1:]), batch)
        if scanned:
            return lax.scan(update, s, parts)
        for i in range(3):
            s, value = update(s, jax.tree.map(lambda x, i=i: x[i], parts))
        return s, value

    graph = check(graph_of(step, {"params": MLP, "opt": jax.eval_shape(tx.init, MLP)}, VECTORS))
    assert params_of(graph) == {f"params/{name}" for name in ("fc1/w", "fc1/b", "fc2/w", "fc2/b")}
    assert all(leaf.follows for leaf in graph.state if leaf.role != "param" and leaf.shape)
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    assert labels(graph, "params/fc1/w", 1) == labels(graph, "params/fc2/w", 0)
    forward = [use for use in graph.uses if not use.backward]
    assert graph.flops == (4 if scanned else 3) * 2 * (B // 4) * (D * 64 + 64 * C)
    assert {use.trips for use in forward} == {4 if scanned else 1}
    assert all(graph.is_example(use.data_dims[0]) for use in forward)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_accumulation_by_hand(gradient):
    """Gradients summed over a scan: the weights are the same in every iteration, and nothing is recurrent."""

    def step(s, batch):
        parts = jax.tree.map(lambda x: x.reshape(4, B // 4, *x.shape[1:]), batch)

        def body(total, part):
            value, grads = VALUE_AND_GRAD[gradient](lambda p: mlp_loss(p, part))(s)
            return jax.tree.map(jnp.add, total, grads), value

        total, values = lax.scan(body, jax.tree.map(jnp.zeros_like, s), parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g / 4, s, total), values.mean()

    graph = check(graph_of(step, MLP, VECTORS))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    assert graph.flops == 2 * B * (D * 64 + 64 * C)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_accumulation_over_slices(gradient):
    """A counter says where the part begins that each turn reads, and gradients are carried: what a weight makes never
    comes back to it."""

    def step(s, batch):
        def body(turn, total):
            part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, turn * (B // 4), B // 4), batch)
            return jax.tree.map(jnp.add, total, VALUE_AND_GRAD[gradient](lambda p: mlp_loss(p, part))(s)[1])

        total = lax.fori_loop(0, 4, body, jax.tree.map(jnp.zeros_like, s))
        return jax.tree.map(lambda p, g: p - 0.1 * g / 4, s, total), 0.0

    assert kinds(check(graph_of(step, MLP, VECTORS))) == {"fc1": "dense", "fc2": "dense"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_sum_over_slices_is_no_recurrence(gradient):
    """A head over a few positions at a time, whose losses a loop in the model adds up."""
    params = {"head": {"w": zeros(D, C)}}

    def loss(p, b):
        def body(t, total):
            x, y = (lax.dynamic_slice_in_dim(b[name], 2 * t, 2, axis=1) for name in ("x", "y"))
            return total + cross_entropy(x @ p["head"]["w"], y)

        return lax.fori_loop(0, T // 2, body, 0.0)

    batch = {"x": zeros(B, T, D), "y": zeros(B, T, dtype="int32")}
    step = lambda s, b: jax.tree.map(lambda p, g: p - g, s, VALUE_AND_GRAD[gradient](lambda p: loss(p, b))(s)[1])
    graph = check(graph_of(lambda s, b: (step(s, b), 0.0), params, batch))
    assert kinds(graph) == {"head": "dense"}


def test_a_state_that_comes_back_by_another_carry_is_recurrent():
    """What the weight makes is handed on for one turn before it reads it."""
    params = {"wh": zeros(D, D), "out": zeros(D, C)}

    def loss(p, batch):
        def cell(state, x):
            near, far = state
            return (jnp.tanh(x + far @ p["wh"]), near), None

        (near, _), _ = lax.scan(cell, (jnp.zeros((B, D)),) * 2, batch["x"].swapaxes(0, 1))
        return cross_entropy(near @ p["out"], batch["y"])

    step = lambda s, b: (jax.tree.map(lambda p, g: p - g, s, jax.grad(loss)(s, b)), 0.0)
    graph = check(graph_of(step, params, {"x": zeros(B, T, D), "y": zeros(B, dtype="int32")}))
    assert kinds(graph) == {"wh": "recurrent", "out": "dense"}


def test_per_example_gradients():
    def step(s, batch):
        grads = jax.vmap(jax.grad(lambda p, x, y: cross_entropy(mlp(p, x), y)), (None, 0, 0))(
            s["params"], batch["x"], batch["y"]
        )
        norms = jnp.sqrt(sum((g.reshape(B, -1) ** 2).sum(1) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: (g / norms.reshape(-1, *[1] * (g.ndim - 1))).mean(0), grads)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, s["mu"], grads)
        return {"params": jax.tree.map(lambda p, m: p - m, s["params"], mu), "mu": mu}, 0.0

    graph = check(graph_of(step, {"params": MLP, "mu": MLP}, VECTORS))
    assert params_of(graph) == {f"params/{name}" for name in ("fc1/w", "fc1/b", "fc2/w", "fc2/b")}
    assert all(
        leaf.follows == leaf.path.replace("mu/", "params/") for leaf in graph.leaves if leaf.path.startswith("mu/")
    )
    assert graph.num_examples == B


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_second_derivatives(gradient):
    """A gradient penalty: a derivative by the input inside the differentiated loss."""

    def loss(p, b):
        slope = jax.vmap(jax.grad(lambda x: mlp(p, x)[0]))(b["x"])
        return mlp_loss(p, b) + (slope**2).sum(-1).mean()

    graph = check(trace_loss(loss, MLP, VECTORS, optax.adam(1e-3), gradient))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    assert names_of(graph, "params/fc1/w") == ("in", "out") == names_of(graph, "params/fc2/w")
    assert all(leaf.follows for leaf in graph.state if leaf.role != "param" and leaf.shape)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_weights_reach_their_use_by_detours(gradient):
    """Casts, weight norm, stopped gradients, low-rank updates: dims keep their names."""
    params = {
        "half": {"w": zeros(D, 64)},
        "normed": {"v": zeros(64, 64), "g": zeros(64)},
        "stopped": {"w": zeros(64, 48)},
        "adapted": {"w": zeros(48, 40), "a": zeros(48, 4), "b": zeros(4, 40)},
        "head": {"w": zeros(40, C)},
    }

    def loss(p, b):
        x = b["x"].astype("bfloat16") @ p["half"]["w"].astype("bfloat16")
        v = p["normed"]["v"]
        x = x.astype("float32") @ (v / jnp.linalg.norm(v, axis=0, keepdims=True) * p["normed"]["g"])
        x = jnp.tanh(x) @ lax.stop_gradient(p["stopped"]["w"])
        x = x @ (p["adapted"]["w"] + p["adapted"]["a"] @ p["adapted"]["b"])
        return cross_entropy(x @ p["head"]["w"].T.T, b["y"])

    graph = check(trace_loss(loss, params, VECTORS, optax.adam(1e-3), gradient))
    for path in ("half/w", "normed/v", "stopped/w", "adapted/w", "head/w"):
        assert names_of(graph, f"params/{path}") == ("in", "out"), path
    assert names_of(graph, "params/normed/g") == ("out",)
    assert names_of(graph, "params/adapted/a")[0] == "in" and names_of(graph, "params/adapted/b")[1] == "out"
    assert set(kinds(graph).values()) == {"dense"}
    assert graph.layer("params/normed").params == ("params/normed/v", "params/normed/g")
    assert (
        labels(graph, "params/normed/v", 1)
        == labels(graph, "params/normed/g", 0)
        == labels(graph, "params/stopped/w", 0)
    )


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_frozen_parameters_are_parameters(gradient):
    def step(s, batch):
        _, grads = VALUE_AND_GRAD[gradient](lambda head: mlp_loss({"fc1": s["frozen"], "fc2": head}, batch))(s["head"])
        return {"frozen": s["frozen"], "head": jax.tree.map(lambda p, g: p - g, s["head"], grads)}, 0.0

    graph = check(graph_of(step, {"frozen": MLP["fc1"], "head": MLP["fc2"]}, VECTORS))
    assert params_of(graph) == {"frozen/w", "frozen/b", "head/w", "head/b"}
    assert labels(graph, "frozen/w", 1) == labels(graph, "head/w", 0)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_averaged_and_target_parameters(gradient):
    """An average that nothing reads follows its parameter; a teacher's weights are parameters of their own."""

    def step(s, batch):
        def loss(p):
            return (
                mlp_loss(p, batch)
                + ((mlp(p, batch["x"]) - lax.stop_gradient(mlp(s["teacher"], batch["x"]))) ** 2).mean()
            )

        _, grads = VALUE_AND_GRAD[gradient](loss)(s["params"])
        params = jax.tree.map(lambda p, g: p - g, s["params"], grads)
        blend = lambda old: jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, s[old], params)  # noqa: E731
        return {"params": params, "ema": blend("ema"), "teacher": blend("teacher")}, 0.0

    graph = check(graph_of(step, {"params": MLP, "ema": MLP, "teacher": MLP}, VECTORS))
    assert params_of(graph) == {
        f"{tree}/{name}" for tree in ("params", "teacher") for name in ("fc1/w", "fc1/b", "fc2/w", "fc2/b")
    }
    # Blended with the new parameters: the same storage, dim for dim.
    for dim in (0, 1):
        assert len({labels(graph, f"{tree}/fc1/w", dim, "hard") for tree in ("params", "ema", "teacher")}) == 1
    assert leaf_of(graph, "ema/fc1/w").follows in ("params/fc1/w", "teacher/fc1/w")


def test_batches_of_any_structure():
    """Nested, with scalars, with keys beside; integer state, keys in the state, and optimizer state without leaves."""
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    typed, raw = jax.eval_shape(lambda: jax.random.key(0)), zeros(2, dtype="uint32")
    state = {
        "params": MLP,
        "opt": jax.eval_shape(tx.init, MLP),
        "count": zeros(dtype="int32"),
        "key": typed,
        "raw": raw,
        "seen": zeros(C, dtype="int32"),
    }
    batch = {"inputs": {"x": zeros(B, D), "scale": zeros()}, "targets": [zeros(B, dtype="int32")]}

    def step(s, batch, key):
        use, new = jax.random.split(s["key"])
        noise = jax.random.normal(use, (B, D)) + jax.random.normal(s["raw"], (D,)) * jax.random.uniform(key)

        def loss(p):
            return mlp_loss(p, {"x": batch["inputs"]["x"] * batch["inputs"]["scale"] + noise, "y": batch["targets"][0]})

        value, grads = value_and_grad(loss)(s["params"])
        updates, opt = tx.update(grads, s["opt"])
        seen = s["seen"].at[batch["targets"][0]].add(1)
        return {
            "params": optax.apply_updates(s["params"], updates),
            "opt": opt,
            "count": s["count"] + 1,
            "key": new,
            "raw": jax.random.split(s["raw"])[0],
            "seen": seen,
        }, value

    graph = check(graph_of(step, state, batch, extra=(typed,)))
    found = roles(graph)
    assert found["param"] == {f"params/{name}" for name in ("fc1/w", "fc1/b", "fc2/w", "fc2/b")}
    assert found["input"] == {"batch1"} and "batch0/inputs/scale" in found["batch"]
    assert {"count", "key", "raw", "seen"} <= found["statistic"]
    assert graph.num_examples == B
    assert not any(graph.is_example(dim) for path in ("raw", "seen") for dim in leaf_of(graph, path).dims)


def test_a_loop_that_carries_nothing_beside_a_recurrence():
    """A map over the sequence reads it by steps as a recurrence does, but carries nothing: its weights are not
    recurrent."""
    params = {"wh": zeros(D, D), "each": zeros(D, D), "out": zeros(D, C)}

    def loss(p, batch):
        xs = batch["x"].swapaxes(0, 1)

        def cell(h, x):
            h = jnp.tanh(x + h @ p["wh"])
            return h, h

        _, hs = lax.scan(cell, jnp.zeros((B, D)), xs)
        mapped = lax.map(lambda x: x @ p["each"], xs)
        return cross_entropy((hs + mapped).swapaxes(0, 1) @ p["out"], batch["y"])

    def step(s, batch):
        value, grads = jax.value_and_grad(loss)(s, batch)
        return jax.tree.map(lambda p, g: p - g, s, grads), value

    graph = check(graph_of(step, params, {"x": zeros(B, T, D), "y": zeros(B, T, dtype="int32")}))
    assert kinds(graph) == {"wh": "recurrent", "each": "dense", "out": "dense"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_state_that_holds_examples(gradient):
    """Truncated backpropagation through time hands the hidden state to the next step."""
    params = {"wx": zeros(D, D), "wh": zeros(D, D), "out": zeros(D, C)}

    def step(s, batch):
        def loss(p):
            def cell(h, x):
                h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
                return h, h

            h, hs = lax.scan(cell, s["hidden"], batch["x"].swapaxes(0, 1))
            return cross_entropy(hs.swapaxes(0, 1) @ p["out"], batch["y"]), h

        (_, h), grads = VALUE_AND_GRAD[gradient](loss, has_aux=True)(s["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, s["params"], grads), "hidden": h}, 0.0

    batch = {"x": zeros(B, T, D), "y": zeros(B, T, dtype="int32")}
    graph = check(graph_of(step, {"params": params, "hidden": zeros(B, D)}, batch))
    hidden = leaf_of(graph, "hidden")
    assert hidden.role == "statistic" and hidden.follows is None
    assert graph.is_example(hidden.dims[0]) and not graph.is_example(hidden.dims[1])
    assert kinds(graph) == {"wh": "recurrent", "out": "dense"}
    assert set(graph.layer("params/wh").params) == {"params/wx", "params/wh"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_examples_and_positions_in_one_dim(gradient):
    def loss(p, b):
        x = b["x"].reshape(B * T, D)
        return cross_entropy(mlp(p, x), b["y"].reshape(-1))

    batch = {"x": zeros(B, T, D), "y": zeros(B, T, dtype="int32")}
    graph = check(trace_loss(loss, MLP, batch, gradient=gradient))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    for use in graph.uses:
        if not use.backward:
            assert [graph.atom_sizes[a] for a in use.data_dims[0]] == [B, T] and graph.is_example(use.data_dims[0])


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_time_before_examples(gradient):
    """Time-major: the example dim is the second one inside."""

    def loss(p, b):
        return cross_entropy(mlp(p, b["x"].swapaxes(0, 1)).mean(0), b["y"])

    graph = check(trace_loss(loss, MLP, {"x": zeros(B, T, D), "y": zeros(B, dtype="int32")}, gradient=gradient))
    first = next(use for use in graph.uses if use.param == "params/fc1/w")
    assert [graph.is_example(dim) for dim in first.data_dims] == [False, True, False]


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("source", ["key", "constant", "nothing"])
def test_batches_without_dims(gradient, source):
    """Points are sampled inside the step, closed over, or made from nothing."""
    points = np.linspace(0, 1, 40 * D, dtype="float32").reshape(40, D)

    def loss(p, key):
        if source == "key":
            x = jax.random.uniform(key, (40, D))
        else:
            x = jnp.asarray(points) if source == "constant" else jnp.arange(40.0)[:, None] * jnp.arange(float(D))
        return (mlp(p, x) ** 2).mean()

    graph = check(trace_loss(loss, MLP, jax.eval_shape(lambda: jax.random.key(0)), optax.adam(1e-3), gradient))
    assert graph.num_examples is None and not graph.example_atoms
    assert params_of(graph) == {f"params/{name}" for name in ("fc1/w", "fc1/b", "fc2/w", "fc2/b")}
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    assert all(leaf.follows for leaf in graph.state if leaf.role != "param" and leaf.shape)


def test_examples_one_by_one():
    """`lax.map` over examples: inside there is no example dim, and its results have one again."""

    def loss(p, b):
        return cross_entropy(lax.map(lambda x: mlp(p, x), b["x"]) * 2, b["y"])

    graph = check(trace_loss(loss, MLP, VECTORS))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    assert graph.flops == 2 * B * (D * 64 + 64 * C)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_views_of_one_batch(gradient):
    """Two views end to end, a permuted batch to mix with, and half a batch."""

    def loss(p, b):
        key = jax.random.key(0)
        z = mlp(p, jnp.concatenate([b["x"], b["x"] + 1.0]))
        mixed = mlp(p, 0.5 * b["x"] + 0.5 * b["x"][jax.random.permutation(key, B)])
        half = mlp(p, b["x"][: B // 2 - 1])
        return (z @ z.T).mean() + mixed.mean() + half.mean()

    graph = check(trace_loss(loss, MLP, {"x": zeros(B, D)}, gradient=gradient))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    sizes = {use.data_shape[0]: graph.is_example(use.data_dims[0]) for use in graph.uses if not use.backward}
    assert sizes == {2 * B: True, B: True, B // 2 - 1: False}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_examples_that_are_pooled(gradient):
    """Nodes to graphs: behind the pooling no example is left, and the head is a layer all the same."""

    def loss(p, b):
        pooled = jax.ops.segment_sum(jnp.tanh(b["x"] @ p["fc1"]["w"] + p["fc1"]["b"]), b["y"], 4)
        return ((pooled @ p["fc2"]["w"]) ** 2).mean()

    params = {"fc1": MLP["fc1"], "fc2": {"w": zeros(64, C)}}
    graph = check(trace_loss(loss, params, VECTORS, optax.adam(1e-3), gradient))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}
    assert graph.flops == 2 * (B * D * 64 + 4 * 64 * C)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_examples_that_are_picked(gradient):
    def loss(p, b):
        return (
            mlp(p, b["x"][np.array([0, 3, 4])]).sum() + mlp(p, jnp.take(b["x"], jnp.arange(2 * B) // 2, axis=0)).sum()
        )

    graph = check(trace_loss(loss, MLP, {"x": zeros(B, D)}, gradient=gradient))
    sizes = {use.data_shape[0]: graph.is_example(use.data_dims[0]) for use in graph.uses if not use.backward}
    assert sizes == {3: False, 2 * B: True}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_anchors_in_the_loss_follow_their_parameter(gradient):
    """Old parameters that the loss pulls towards never meet the batch: they are no layers of their own."""

    def step(s, batch):
        def loss(p):
            pull = sum(
                ((a - b) ** 2 * w).sum()
                for a, b, w in zip(*map(jax.tree.leaves, (p, s["old"], s["weight"])), strict=True)
            )
            return mlp_loss(p, batch) + pull

        _, grads = VALUE_AND_GRAD[gradient](loss)(s["params"])
        return s | {"params": jax.tree.map(lambda p, g: p - g, s["params"], grads)}, 0.0

    graph = check(graph_of(step, {"params": MLP, "old": MLP, "weight": MLP}, VECTORS))
    assert params_of(graph) == {f"params/{name}" for name in ("fc1/w", "fc1/b", "fc2/w", "fc2/b")}
    assert leaf_of(graph, "old/fc1/w").follows == leaf_of(graph, "weight/fc1/w").follows == "params/fc1/w"


def test_no_parameters_and_no_state():
    graph = check(graph_of(lambda s, b: (s, b["x"].sum()), {}, {"x": zeros(B, D)}))
    assert graph.layers == () and graph.params == () and graph.num_examples == B
    graph = check(graph_of(lambda s, b: (s, 0.0), {"w": zeros(3, 3)}, {"x": zeros(B, D)}))
    assert graph.params == () and leaf_of(graph, "w").role == "statistic"


def test_evaluation_has_parameters_too():
    graph = check(graph_of(lambda s, b: (s, cross_entropy(mlp(s, b["x"]), b["y"])), MLP, VECTORS))
    assert kinds(graph) == {"fc1": "dense", "fc2": "dense"}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_odd_shapes(gradient):
    """Dims of size 1 and 0, scalars as parameters, one example."""
    params = {"a": zeros(1, 1), "b": zeros(), "c": zeros(0, 3), "d": zeros(1, 7), "e": zeros(7, 1)}

    def loss(p, b):
        return (b["x"] @ p["a"] * p["b"] @ p["d"] @ p["e"] + p["c"].sum()).sum()

    graph = check(trace_loss(loss, params, {"x": zeros(1, 1)}, optax.adam(1e-3), gradient))
    assert leaf_of(graph, "params/a").dims == ((), ())
    assert graph.num_examples == 1


def test_unknown_primitives_are_listed():
    def loss(p, b):
        x = b["x"] @ p["fc1"]["w"]
        x = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return cross_entropy(jnp.tanh(x) @ p["fc2"]["w"], b["y"])

    step = lambda s, b: (s, loss(s, b))  # noqa: E731
    graph = check(graph_of(step, MLP, VECTORS))
    (unknown,) = graph.unknown
    assert unknown.primitive == "pure_callback" and "test_robustness.py" in unknown.source
    assert graph.is_example(unknown.operand_dims[0][0])
    assert [graph.local[a] for a in unknown.operand_dims[0][1]] == list(labels(graph, "fc1/w", 1))


def test_mutable_arrays_are_unknown():
    def step(s, b):
        total = jax.new_ref(jnp.zeros(()))
        total[...] = mlp_loss(s, b)
        return s, total[...]

    assert {one.primitive for one in check(graph_of(step, MLP, VECTORS)).unknown} >= {"new_ref", "get"}


def test_foreign_calls_are_told_apart_by_name():
    def step(s, b):
        x = b["x"] @ s["fc1"]["w"]
        for target in ("mine", "yours"):
            x = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return s, x.sum()

    graph = graph_of(step, MLP, VECTORS)
    assert [one.primitive for one in graph.unknown] == ["ffi_call:mine", "ffi_call:yours"]
    register_dims("ffi_call:mine", "b i -> b i")
    try:
        graph = graph_of(step, MLP, VECTORS)
    finally:
        OPERATIONS.forget("ffi_call:mine")
    (unknown,) = graph.unknown
    assert unknown.primitive == "ffi_call:yours" and graph.is_example(unknown.operand_dims[0][0])


def test_a_gradient_without_its_value():
    def step(s, b):
        return jax.tree.map(lambda p, g: p - g, s, grad(mlp_loss)(s, b)), 0.0

    graph = check(graph_of(step, MLP, VECTORS))
    assert graph.num_boundaries == 1 and kinds(graph) == {"fc1": "dense", "fc2": "dense"}
