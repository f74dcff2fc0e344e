"""A balance loss of experts is taken over each microbatch where it is marked so: float64 against one device that
computes it over the same examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import splitjax
from splitjax.errors import MicrobatchError, PartialError
from tests.lower.microbatch.microbatch_harness import build, make_mesh

pytestmark = pytest.mark.usefixtures("programs_are_kept")
B, S, D, E, H, L = 32, 4, 8, 4, 16, 2


@pytest.fixture(autouse=True)
def double_precision():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def balance(gates):
    """The balance loss of Switch Transformers, of the gates [batch, sequence, experts]."""
    routed = jax.nn.one_hot(gates.argmax(-1), E, dtype=gates.dtype)
    return E * (gates.mean((0, 1)) * routed.mean((0, 1))).sum()


def loss_with(balance_of):
    def layer(carry, p):
        x, total = carry
        gates = jax.nn.softmax(x @ p["router"])
        hidden = jax.nn.relu(jnp.einsum("bsd,edh->bseh", x, p["up"]))
        out = jnp.einsum("bseh,ehd,bse->bsd", hidden, p["down"], gates)
        return (x + out, total + balance_of(gates)), None

    def loss(p, b):
        (x, total), _ = lax.scan(jax.checkpoint(layer), (b["x"], jnp.zeros(())), p["layers"])
        logits = x.mean(1) @ p["head"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, b["y"])
        return nll.mean() + 0.1 * total, {"balance": total}

    return loss


def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]))
    layers = {"router": 3 * normal(L, D, E), "up": normal(L, E, D, H), "down": normal(L, E, H, D)}
    return {"layers": layers, "head": normal(D, 5)}


def batch():
    rng = np.random.default_rng(1)
    return {"x": jnp.asarray(rng.normal(size=(B, S, D))), "y": jnp.asarray(rng.integers(0, 5, B))}


def group_by_group(loss, p, b, groups):
    """The mean over groups of examples that one device computes one after the other; `groups`: their positions."""
    part = lambda at: jax.tree.map(lambda a: a[at], b)
    results = [jax.value_and_grad(loss, has_aux=True)(p, part(at)) for at in groups]
    return jax.tree.map(lambda *values: sum(values) / len(values), *results)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), a, b)


def in_order(count):
    return np.arange(B).reshape(count, -1)


def dealt_out(workers, shared, number):
    """The groups of `number` microbatches of workers that share their examples among so many devices."""
    return np.arange(B).reshape(workers, shared, number, -1).swapaxes(1, 2).reshape(workers * number, -1)


PLAIN, MARKED = loss_with(balance), loss_with(splitjax.per_microbatch(balance))


def marked_step(number):
    return lambda p, b: splitjax.value_and_grad(MARKED, has_aux=True, microbatches=number)(p, b)


def test_on_one_device_it_is_taken_per_microbatch():
    got = jax.jit(build(marked_step(4), params(), batch(), 4))(params(), batch())
    close(got, group_by_group(PLAIN, params(), batch(), in_order(4)))


def test_each_worker_takes_its_own_examples():
    run = build(marked_step(2), params(), batch(), 2, mesh=make_mesh(data=4, model=2))
    close(jax.jit(run)(params(), batch()), group_by_group(PLAIN, params(), batch(), in_order(8)))


@pytest.mark.parametrize("number", [None, 1])
def test_without_microbatches_it_is_the_whole_batch(number):
    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(state, b):
        (value, aux), grads = splitjax.value_and_grad(MARKED, has_aux=True, microbatches=number)(state, b)
        return optax.tree.add_scale(state, -0.1, grads), (value, aux)

    state, results = step(step.place(params(), example=(batch(),)), batch())
    value, grads = jax.value_and_grad(PLAIN, has_aux=True)(params(), batch())
    close(results, value)
    close(state, optax.tree.add_scale(params(), -0.1, grads))


# The rule set, its mesh, and the positions of the examples of each group: one a worker and microbatch. What is stored
# or split over an axis of the batch makes the devices along it one worker.
LAYOUTS = {
    "data_parallel": ("data_parallel", {"data": 4}, in_order(8)),
    "megatron": ("megatron", {"data": 2, "model": 2}, in_order(4)),
    "fsdp": ("fsdp", {"data": 4}, dealt_out(1, 4, 2)),
    "splitbrain": (
        "splitbrain",
        {"data": 2, "model": 2},
        dealt_out(2, 2, 2),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rule_sets(layout):
    rules, mesh, groups = LAYOUTS[layout]

    @splitjax.parallelize(mesh=mesh, rules=rules)
    def step(state, b):
        (value, aux), grads = splitjax.value_and_grad(MARKED, has_aux=True, microbatches=2)(state, b)
        return optax.tree.add_scale(state, -0.1, grads), (value, aux)

    (boundary,) = step.plan(params(), batch()).boundaries
    assert boundary.why.endswith(f"the mean over {len(groups)} groups of {B // len(groups)} examples")
    state, results = step(step.place(params(), example=(batch(),)), batch())
    value, grads = group_by_group(PLAIN, params(), batch(), groups)
    close(results, value)
    close(state, optax.tree.add_scale(params(), -0.1, grads))


def test_fused_weights_and_padding_keep_the_mark():
    def loss(p, b):
        q, k = jnp.split(b["x"] @ p["qk"], 2, -1)
        gates = jax.nn.softmax(q.mean(1) @ p["router"])
        out = jnp.tanh(q * k).mean(1) * gates.max(-1, keepdims=True)
        nll = optax.softmax_cross_entropy_with_integer_labels(out @ p["head"], b["y"])
        return nll.mean() + taken(lambda g: (g.mean(0) ** 2).sum())(gates)

    @splitjax.parallelize(mesh={"data": 2, "model": 2}, rules="megatron", uneven="pad")
    def step(state, b):
        value, grads = splitjax.value_and_grad(loss, microbatches=2)(state, b)
        return optax.tree.add_scale(state, -0.1, grads), value

    rng = np.random.default_rng(2)
    p = {"qk": jnp.asarray(rng.normal(size=(D, 2 * H))), "router": jnp.asarray(rng.normal(size=(H, 5))),
         "head": jnp.asarray(rng.normal(size=(H, 5)))}  # fmt: skip
    taken = splitjax.per_microbatch
    stored, value = step(step.place(p, example=(batch(),)), batch())
    taken = lambda fun: fun
    expected, grads = group_by_group(lambda p, b: (loss(p, b), None), p, batch(), in_order(4))
    close(value, expected[0])
    close(step.logical(stored), optax.tree.add_scale(p, -0.1, grads))


REFUSED = {
    "a total over the batch": lambda p, b: splitjax.per_microbatch(lambda m: m**2)((b["x"] @ p).mean()),
    "size of the batch": lambda p, b: splitjax.per_microbatch(lambda x, n: x.sum() ** 2 / n)(b["x"] @ p, len(b["x"])),
    "values of single ones": lambda p, b: splitjax.per_microbatch(lambda x: x - x.mean(0))(b["x"] @ p).sum(),
    "whole numbers": lambda p, b: splitjax.per_microbatch(lambda x: x.argmax())(b["x"] @ p) * p.sum(),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_microbatch_can_take(words):
    loss = lambda p, b: (REFUSED[words](p, b), None)
    step = lambda p, b: splitjax.value_and_grad(loss, has_aux=True, microbatches=4)(p, b)
    with pytest.raises(MicrobatchError, match=f"(?s){words}.*test_per_microbatch.py"):
        build(step, jnp.ones((D,)), batch(), 4)(jnp.ones((D,)), batch())


def test_a_microbatch_of_one_example():
    with pytest.raises(MicrobatchError, match="because of balance: .* of which it needs two") as caught:
        build(marked_step(B), params(), batch(), B)(params(), batch())
    assert "fewer microbatches or a larger batch" in caught.value.remedy
    assert "per_microbatch" not in caught.value.remedy


def test_workers_without_microbatches_do_not_take_it_for_themselves():
    """Depths of their own give every worker a loop of one microbatch, which the user did not ask for."""

    def loss(p, b):
        gates = jax.nn.softmax(jnp.tanh(b["x"].mean(1) @ p["up"]) @ p["router"])
        return gates.max(-1).mean() + splitjax.per_microbatch(lambda g: (g.mean(0) ** 2).sum())(gates)

    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel", backprop=splitjax.PartialBackprop())
    def step(state, b):
        value, grads = splitjax.value_and_grad(loss)(state, b)
        return optax.tree.add_scale(state, -0.1, grads), value

    with pytest.raises(PartialError, match="taken over the examples of a microbatch"):
        step.plan({"up": jnp.ones((D, H)), "router": jnp.ones((H, E))}, batch())


def test_it_is_verified_without_microbatches():
    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(state, b):
        (value, aux), grads = splitjax.value_and_grad(MARKED, has_aux=True, microbatches=2)(state, b)
        return optax.tree.add_scale(state, -0.1, grads), (value, aux)

    jax.config.update("jax_enable_x64", False)  # it computes in float64 by itself
    result = step.verify(params(), batch())
    assert result.ok
    assert "verified without microbatches" in str(result)
