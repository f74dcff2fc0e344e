"""Optimizer state follows its parameter by what the update does with it, dim for dim, for every optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import splitjax
from splitjax.trace.graph import Graph, Leaf
from tests.trace.helpers import VALUE_AND_GRAD, check, cross_entropy, graph_of, labels, leaf_of, trace_loss, zeros
from tests.trace.models import VECTORS, B, C, D, model

GRADIENTS = tuple(VALUE_AND_GRAD)
_SCHEDULE = optax.cosine_decay_schedule(1e-3, 100)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_rank(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "adafactor with momentum": optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(0.1),
    "sm3": optax.sm3(0.1),
    "rmsprop": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adabelief": optax.adabelief(0.1),
    "novograd": optax.novograd(0.1),
    "yogi": optax.yogi(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "nadamw": optax.nadamw(0.1),
    "adan": optax.adan(0.1),
    "rprop": optax.rprop(0.1),
    "adadelta": optax.adadelta(0.1),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_SCHEDULE, weight_decay=0.1, mask=is_matrix)),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1, momentum=0.9)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=_SCHEDULE, weight_decay=0.1),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1e-3), "vector": optax.sgd(0.1, momentum=0.9)}, by_rank
    ),
    "masked": optax.masked(optax.adam(1e-3), is_matrix),
    "frozen vectors": optax.multi_transform({"matrix": optax.adam(1e-3), "vector": optax.set_to_zero()}, by_rank),
    "averaged updates": optax.chain(optax.sgd(0.1), optax.ema(0.99)),
    "muon": contrib.muon(0.02),
    "schedule_free": contrib.schedule_free_adamw(0.01),
    "prodigy": contrib.prodigy(),
    "sam": contrib.sam(optax.sgd(0.1, momentum=0.9), optax.sgd(0.01), sync_period=2),
    "ademamix": contrib.ademamix(0.1),
}
# State of its own that belongs to no parameter.
OWN = ("ns_coeffs",)


def loose_ends(graph: Graph, prefix: str = "params/") -> list[str]:
    """State that should follow a parameter dim for dim, and does not."""
    found = []
    for leaf in graph.state:
        if (
            leaf.role == "param"
            or leaf.size <= 1
            or leaf.path.endswith(OWN)
            or not leaf.dtype.startswith(("float", "bfloat"))
        ):
            continue
        ending = [f"/{one.path.removeprefix(prefix)}" for one in graph.params]
        expected = {
            end
            for end in ending
            if leaf.path.endswith(end) or f"{end}/" in leaf.path or leaf.path.endswith(f"{end}/raw_value")
        }
        if not leaf.follows or leaf.role != "optimizer":
            found.append(f"{leaf.path} follows nothing")
        elif not any(f"/{leaf.follows.removeprefix(prefix)}" == end for end in expected):
            found.append(f"{leaf.path} follows {leaf.follows}")
        elif not same_dims(graph, leaf, graph.leaf(leaf.follows)):
            found.append(f"{leaf.path} {leaf.shape} has other dims than {leaf.follows}")
    return found


def same_dims(graph: Graph, leaf: Leaf, param: Leaf) -> bool:
    mine = [tuple(graph.hard[a] for a in dim) for dim in leaf.dims]
    whole = [tuple(graph.hard[a] for a in dim) for dim in param.dims]
    # A factored statistic has some of the dims, in order, and size 1 for the others.
    rest = iter(whole)
    return mine == whole if leaf.shape == param.shape else all(dim in rest for dim in mine if dim)


def tied_params(graph: Graph) -> list[set]:
    """Hard classes with dims of several parameters, or several dims of one."""
    owners: dict[int, set] = {}
    for leaf in graph.params:
        for position, dim in enumerate(leaf.dims):
            for atom in dim:
                owners.setdefault(graph.hard[atom], set()).add((leaf.path, position))
    return [one for one in owners.values() if len(one) > 1]


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, gradient):
    loss, params, batch = model("plain_dict")
    graph = check(trace_loss(loss, params, batch, OPTIMIZERS[name], gradient))
    assert {leaf.path for leaf in graph.params} == {f"params/{key}" for key in params}
    assert loose_ends(graph) == []
    assert tied_params(graph) == []
    assert graph.unknown == ()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", ["adafactor", "clipped"])
@pytest.mark.parametrize(
    "kind", ["linen_conv", "linen_stack", "nnx_tied", "haiku_model", "equinox_model", "lists_of_tuples", "experts"]
)
def test_every_framework(kind, name, gradient):
    loss, params, batch = model(kind)
    graph = check(trace_loss(loss, params, batch, OPTIMIZERS[name], gradient))
    assert len(graph.params) == len(jax.tree.leaves(params))
    assert loose_ends(graph) == []
    assert tied_params(graph) == []


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_factored_statistics_keep_the_right_dim(gradient):
    loss, params, batch = model("plain_dict")
    graph = trace_loss(loss, params, batch, OPTIMIZERS["adafactor"], gradient)
    rows, columns = ([leaf for leaf in graph.leaves if f"/{name}/w1" in leaf.path] for name in ("v_row", "v_col"))
    (row,), (column,) = rows, columns
    assert {row.shape, column.shape} == {(D,), (64,)}
    for leaf in (row, column):
        assert labels(graph, leaf.path, 0, "hard") == labels(graph, "params/w1", (D, 64).index(leaf.shape[0]), "hard")


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_lookahead_and_averages(gradient):
    """Two copies of the parameters in one state: both are the same storage, dim for dim."""
    tx = optax.lookahead(optax.adam(1e-3), sync_period=3, slow_step_size=0.5)
    loss, params, batch = model("plain_dict")
    both = optax.LookaheadParams.init_synced(params)

    def step(s, b):
        _, grads = VALUE_AND_GRAD[gradient](lambda p: loss(p, b))(s["both"].fast)
        updates, opt = tx.update(grads, s["opt"], s["both"])
        new = optax.apply_updates(s["both"], updates)
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, s["ema"], new.fast)
        return {"both": new, "opt": opt, "ema": ema}, 0.0

    graph = check(graph_of(step, {"both": both, "opt": jax.eval_shape(tx.init, both), "ema": params}, batch))
    assert {leaf.path for leaf in graph.params} == {f"both/fast/{key}" for key in params}
    assert loose_ends(graph, "both/fast/") == []


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_accumulators_under_a_condition(gradient):
    """An update every fourth step, by hand: `lax.cond` hands state through one branch and changes it in the other."""
    loss, params, batch = model("plain_dict")

    def step(s, b):
        _, grads = VALUE_AND_GRAD[gradient](lambda p: loss(p, b))(s["params"])
        total = jax.tree.map(jnp.add, s["total"], grads)

        def apply(params, mu, total):
            mu = jax.tree.map(lambda m, g: 0.9 * m + g / 4, mu, total)
            return jax.tree.map(lambda p, m: p - m, params, mu), mu, jax.tree.map(jnp.zeros_like, total)

        params, mu, total = jax.lax.cond(s["count"] % 4 == 3, apply, lambda *same: same, s["params"], s["mu"], total)
        return {"params": params, "mu": mu, "total": total, "count": s["count"] + 1}, 0.0

    graph = check(
        graph_of(step, {"params": params, "mu": params, "total": params, "count": zeros(dtype="int32")}, batch)
    )
    assert loose_ends(graph) == []
    assert tied_params(graph) == []


def test_state_that_no_update_reaches_follows_by_its_path():
    loss, params, batch = model("plain_dict")
    step = lambda s, b: (
        s | {"params": jax.tree.map(lambda p, g: p - g, s["params"], jax.grad(loss)(s["params"], b))},
        0.0,
    )  # noqa: E731
    spare = {"params": {"inner": zeros(D, 64)}}
    params = {"inner": zeros(D, 64), "out": zeros(64, C)}
    loss = lambda p, b: cross_entropy(b["x"] @ p["inner"] @ p["out"], b["y"])  # noqa: E731
    graph = check(graph_of(step, {"params": params, "kept": spare}, batch))
    assert leaf_of(graph, "kept/params/inner").follows == "params/inner"


def test_batch_statistics_follow_no_parameter():
    def step(s, b):
        def loss(p):
            x = b["x"] @ p["w"]
            mean = x.mean(0)
            return cross_entropy((x - mean) * p["scale"], b["y"]), 0.9 * s["mean"] + 0.1 * mean

        (_, mean), grads = VALUE_AND_GRAD["boundary"](loss, has_aux=True)(s["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, s["params"], grads), "mean": mean}, 0.0

    graph = check(graph_of(step, {"params": {"w": zeros(D, C), "scale": zeros(C)}, "mean": zeros(C)}, VECTORS))
    mean = leaf_of(graph, "mean")
    assert mean.role == "statistic" and mean.follows is None
    assert labels(graph, "mean", 0) == labels(graph, "params/w", 1)
    assert labels(graph, "mean", 0, "hard") != labels(graph, "params/w", 1, "hard")


def test_spectral_norm_keeps_the_weight_tied():
    """A vector of state that the forward pass reads and renews: no update, and the weight's dims stay linked."""

    def step(s, b):
        def loss(p):
            u = p["w"].T @ (p["w"] @ s["u"])
            u = jax.lax.stop_gradient(u / jnp.linalg.norm(u))
            sigma = jnp.linalg.norm(p["w"] @ u)
            return cross_entropy(jnp.tanh(b["x"] @ (p["w"] / sigma)) @ p["out"], b["y"]), u

        (_, u), grads = VALUE_AND_GRAD["boundary"](loss, has_aux=True)(s["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, s["params"], grads), "u": u}, 0.0

    graph = check(graph_of(step, {"params": {"w": zeros(D, 64), "out": zeros(64, C)}, "u": zeros(64)}, VECTORS))
    assert labels(graph, "params/w", 1) == labels(graph, "params/out", 0)
    assert graph.num_examples == B


def averaging(update: bool, averages_of):
    """A step that keeps averages of its parameters, and hands them on as they are in every second of its programs."""

    def step(state, batch):
        def loss_fn(p):
            return jnp.mean((jax.nn.relu(batch @ p["w1"] + p["b1"]) @ p["w2"]) ** 2)

        grads = splitjax.grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        new = averages_of(params)
        averages = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["mean"], new) if update else state["mean"]
        return {"params": params, "mean": averages, "other": state["other"]}

    return step


@pytest.mark.parametrize("averages_of", [dict, lambda p: tuple(jax.tree.leaves(p))], ids=["names", "leaves"])
def test_averages_of_a_program_that_hands_them_on_follow_their_parameters(averages_of):
    params = {"w1": jnp.ones((16, 32)), "b1": jnp.ones(32), "w2": jnp.ones((32, 8))}
    state = {"params": params, "mean": averages_of(params), "other": (jnp.ones((16, 32)), jnp.ones(3))}
    batch = jnp.ones((8, 16))
    layouts = []
    for update in (False, True):
        step = splitjax.parallelize(averaging(update, averages_of), mesh={"data": 2, "model": 4}, rules="megatron")
        layouts.append({leaf.path: leaf.spec for leaf in step.plan(state, batch).leaves})
    assert layouts[0] == layouts[1]
    for name, other in zip(("b1", "w1", "w2"), ("0", "1", "2"), strict=True):
        own = layouts[0].get(f"mean/{name}", layouts[0].get(f"mean/{other}"))
        assert own == layouts[0][f"params/{name}"] and any(own)
    assert layouts[0]["other/0"] == (None, None)  # one shape alone says nothing


def test_programs_that_update_averages_and_that_do_not_take_turns():
    leaves = lambda p: tuple(jax.tree.leaves(p))
    both = [averaging(update, leaves) for update in (False, True)]
    step = splitjax.parallelize(
        lambda state, batch, update: both[update](state, batch),
        mesh={"data": 2, "model": 4},
        rules="megatron",
        static_argnums=2,
    )
    params = {"w1": jnp.ones((16, 32)), "b1": jnp.ones(32), "w2": jnp.ones((32, 8))}
    batch = jnp.ones((8, 16))
    make = lambda: {"params": params, "mean": leaves(params), "other": (jnp.ones(3),)}
    state = step.init(make, example=(batch, 0))
    for number in range(4):  # the program that hands them on comes first, and saw no update
        state = step(state, batch, number % 2)
    assert len(step.compiles) == 2
