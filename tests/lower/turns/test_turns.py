"""Group communication in turns: the numbers of one device, what each way sends and holds, and when it is refused."""

from __future__ import annotations

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import splitjax
from splitjax.errors import BatchError, PlanError
from splitjax.mesh import MeshShape
from splitjax.report.hlo import compiled_collectives

WHOLE = splitjax.Rule(name="whole", path="**conv**", shard=[])
COLUMNS = splitjax.Rule(name="columns", kind="dense", shard=[{"out": "model"}, {"in": "model"}], ties="hard")
ROWS = splitjax.Rule(name="rows", path="**rows**", shard=[{"in": "model"}], ties="hard")
RULES = splitjax.RuleSet(name="crossing", rules=(WHOLE, ROWS, COLUMNS), replicated_batch="all")
MESHES = ({"data": 8, "model": 1}, {"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 1, "model": 8})
WIDTH, NUM = 32, 128
by_kind = pytest.mark.parametrize("kind", ("turns", "modulo"))


def on_meshes(cases):
    """Groups of four in the core suite, of all sizes elsewhere."""
    return [case if case[1] == MESHES[2] else pytest.param(*case, marks=pytest.mark.one_version) for case in cases]


def params(*names):
    keys = jax.random.split(jax.random.key(0), len(names))
    return {
        name: jax.random.normal(key, (WIDTH, 15 if name == "logits" else WIDTH)) / 5
        for name, key in zip(names, keys, strict=True)
    }


def batch(num=NUM):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(num, WIDTH)), rng.integers(0, 10, num)
    return {"x": x.astype(np.float32), "y": y.astype(np.int32), "mask": (rng.random(num) > 0.3).astype(np.float32)}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def head(p, x):
    for name in [name for name in ("d1", "rows", "d2", "logits") if name in p]:
        x = x @ p[name] if name == "logits" else jnp.tanh(x @ p[name])
    return x


def plain(p, b, key):
    return cross_entropy(head(p, jnp.tanh(b["x"] @ p["conv"])), b["y"]).mean()


def with_dropout(p, b, key):
    before, behind = jax.random.split(key)
    x = jnp.tanh(b["x"] @ p["conv"])
    x = jnp.where(jax.random.bernoulli(before, 0.8, x.shape), x / 0.8, 0)
    x = jnp.tanh(x @ p["d1"])
    x = jnp.where(jax.random.bernoulli(behind, 0.8, x.shape), x / 0.8, 0)
    return cross_entropy(jnp.tanh(x @ p["d2"]) @ p["logits"], b["y"]).mean()


def masked_mean(p, b, key):
    each = cross_entropy(head(p, jnp.tanh(b["x"] @ p["conv"])), b["y"])
    return (each * b["mask"]).sum() / b["mask"].sum()


def normalised_before(p, b, key):
    x = b["x"] @ p["conv"]
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
    return cross_entropy(head(p, jnp.tanh(x)), b["y"]).mean()


def penalised(p, b, key):
    """Weight decay in the loss, and activations that are read on both sides of the crossing."""
    x = jnp.tanh(b["x"] @ p["conv"])
    penalty = sum(jnp.sum(w * w) for w in jax.tree.leaves(p))
    return cross_entropy(head(p, x), b["y"]).mean() + 1e-3 * penalty + 1e-2 * jnp.mean(x * x)


def jitted(p, b, key):
    """The whole model in a call, and one function called twice."""
    act = jax.jit(jnp.tanh)

    @jax.jit
    def model(p, x):
        x = act(x @ p["conv"])
        return act(act(x @ p["d1"]) @ p["d2"]) @ p["logits"]

    return cross_entropy(model(p, b["x"]), b["y"]).mean()


def residual(p, b, key):
    """What crosses is read behind the crossing by more than products."""
    x = jnp.tanh(b["x"] @ p["conv"])
    return cross_entropy((x + jnp.tanh(x @ p["d1"]) @ p["rows"]) @ p["logits"], b["y"]).mean()


COLUMN_NAMES = ("conv", "d1", "d2", "logits")
LOSSES = {
    "plain": (plain, COLUMN_NAMES),
    "rows behind columns": (plain, ("conv", "d1", "rows", "d2", "logits")),
    "rows first": (plain, ("conv", "rows", "d2", "logits")),
    "dropout": (with_dropout, COLUMN_NAMES),
    "masked mean": (masked_mean, COLUMN_NAMES),
    "batch norm before": (normalised_before, COLUMN_NAMES),
    "penalty": (penalised, COLUMN_NAMES),
    "in calls": (jitted, COLUMN_NAMES),
    "residual": (residual, ("conv", "d1", "rows", "logits")),
}


def step_of(loss):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3))

    def step(state, batch, key):
        value, grads = splitjax.value_and_grad(loss)(state, batch, key)
        updates, _ = tx.update(grads, tx.init(state), state)
        return optax.apply_updates(state, updates), value

    return step


def gains(**options):
    return splitjax.parallelize(step_of(plain), rules=RULES, **options)


def num_links(compiled, mesh):
    """(op, axis) -> bytes and (op, axis) -> how often, but for scalars and sums per example."""
    sent, count = collections.Counter(), collections.Counter()
    for collective in compiled_collectives(compiled, MeshShape.of(mesh)):
        if len(collective.shape) > 1:
            sent[collective.op, collective.axis] += collective.bytes
            count[collective.op, collective.axis] += collective.trips
    return sent, count


# What several tests look at is compiled once.


@functools.cache
def on_one_device(case):
    """State and losses after two steps on one device."""
    loss, names = LOSSES[case]
    step, key, state, losses = jax.jit(step_of(loss)), jax.random.key(7), params(*names), []
    for turn in range(2):
        state, value = step(state, batch(), jax.random.fold_in(key, turn))
        losses.append(value)
    return state, losses


@functools.cache
def parallel_step(case, mesh, kind):
    mesh = dict(mesh)
    rules = RULES if mesh["model"] > 1 else "data_parallel"
    return splitjax.parallelize(step_of(LOSSES[case][0]), mesh=mesh, rules=rules, donate=False, group_comm=kind)


@pytest.mark.parametrize(
    ("case", "mesh", "kind"),
    on_meshes(
        [
            (case, mesh, "modulo")
            for case in LOSSES
            for mesh in MESHES
            if mesh["model"] == 4 or case in ("plain", "dropout")
        ]
        + [(case, MESHES[2], "turns") for case in ("dropout", "masked mean", "rows first", "residual", "penalty")]
        + [("plain", mesh, "turns") for mesh in MESHES]
    ),
    ids=lambda argument: argument if isinstance(argument, str) else f"K={argument['model']}",
)
def test_numbers_are_those_of_one_device(case, mesh, kind):
    names, key = LOSSES[case][1], jax.random.key(7)
    state, losses = on_one_device(case)
    parallel = parallel_step(case, tuple(mesh.items()), kind)
    mine = params(*names)
    for turn, want in enumerate(losses):
        mine, got = parallel(mine, batch(), jax.random.fold_in(key, turn))
        np.testing.assert_allclose(got, want, rtol=2e-6)
    for name in names:
        np.testing.assert_allclose(mine[name], state[name], atol=2e-6)
    assert parallel.plan(state, batch(), key).group_comm == (kind if mesh["model"] > 1 else "gather")


@pytest.mark.parametrize(
    ("case", "mesh", "kind"),
    on_meshes(
        [("plain", mesh, kind) for mesh in MESHES[1:] for kind in ("gather", "turns", "modulo")]
        + [(case, MESHES[2], kind) for case in ("rows behind columns", "rows first") for kind in ("turns", "modulo")]
    ),
    ids=lambda argument: argument if isinstance(argument, str) else f"K={argument['model']}",
)
def test_what_is_sent_is_what_was_planned(case, mesh, kind):
    """To the byte, and each way in its own number of messages: one for all, or one a turn."""
    num_workers = mesh["model"]
    step = parallel_step(case, tuple(mesh.items()), kind)
    arguments = params(*LOSSES[case][1]), batch(), jax.random.key(0)
    sent, count = num_links(step.lower(*arguments).compile(), mesh)
    planned = collections.Counter()
    for collective in step.plan(*arguments).collectives:
        planned[collective.op, collective.axis] += collective.bytes
    assert sent == planned
    if case == "plain":
        # One crossing, the gather of features for d2, and the sum over the rows of logits.
        gathers = {"gather": 2, "modulo": 2 * num_workers, "turns": num_workers}[kind]
        assert count["all_gather", "model"] == count["reduce_scatter", "model"] == gathers
        sums = {"gather": 1, "modulo": num_workers, "turns": 3 * num_workers}[kind]
        # and the gradient of conv, where that is the only axis
        assert count["all_reduce", "model"] == sums + (mesh["data"] == 1)
        share = NUM // 8 * WIDTH * 4
        own = 2 * (num_workers - 1) * (2 * share if kind == "turns" else share)
        crossing = [
            collective
            for collective in step.plan(*arguments).collectives
            if "group's examples" in collective.why or "to their workers" in collective.why
        ]
        assert sum(collective.bytes for collective in crossing) == own


def test_activations_of_one_turn_are_alive_at_a_time():
    """A head wide enough to matter: temporaries of turns at most 0.4 of gather's, predicted as a saving, and chosen for
    it."""
    width, mesh = 1024, {"data": 1, "model": 8}
    shapes = {"conv": (16, width), "d1": (width, width), "d2": (width, width), "logits": (width, 16)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    b = {"x": jax.ShapeDtypeStruct((1024, 16), jnp.float32), "y": jax.ShapeDtypeStruct((1024,), jnp.int32)}
    arguments = state, b, jax.random.key(0)
    temporaries, plans = {}, {}
    for kind in ("gather", "turns", "modulo", "auto"):
        step = splitjax.parallelize(step_of(plain), mesh=mesh, rules=RULES, group_comm=kind)
        temporaries[kind] = step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        plans[kind] = step.plan(*arguments)
    assert temporaries["modulo"] < 0.4 * temporaries["gather"]
    assert temporaries["turns"] < 0.45 * temporaries["gather"]
    assert plans["auto"].group_comm == "modulo"
    assert temporaries["auto"] == temporaries["modulo"]
    assert plans["modulo"].memory.activation_bytes < 0.4 * plans["gather"].memory.activation_bytes
    assert any("group_comm" in line for line in plans["gather"].diff(plans["modulo"]))
    assert splitjax.Plan.from_json(plans["modulo"].to_json()) == plans["modulo"]


def test_a_pinned_plan_keeps_its_group_communication():
    mesh, arguments = {"data": 2, "model": 4}, (params(*COLUMN_NAMES), batch(), jax.random.key(0))
    plan = gains(mesh=mesh, group_comm="modulo").plan(*arguments)
    assert gains(mesh=mesh, plan=plan).plan(*arguments) == plan


def test_next_turn_is_fetched_while_this_one_computes():
    """The loop carries gathered activations: the all-gather in its body does not feed that turn's products."""
    mesh = {"data": 1, "model": 8}
    lowered = gains(mesh=mesh, group_comm="modulo").lower(params(*COLUMN_NAMES), batch(), jax.random.key(0))
    sent = [
        collective
        for collective in compiled_collectives(lowered.compile(), MeshShape.of(mesh))
        if "splitjax:enter:d1" in collective.op_name
    ]
    gathers = sorted(collective.trips for collective in sent if collective.op == "all_gather")
    scatters = sorted(collective.trips for collective in sent if collective.op == "reduce_scatter")
    assert gathers == scatters == [1, 7]  # the first before the loop, the last turn behind it: none in vain


def behind(p, b, key):
    x = jnp.tanh(b["x"] @ p["conv"]) @ p["d1"]
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
    return cross_entropy(x @ p["logits"], b["y"]).mean()


def whole_behind(p, b, key):
    x = jnp.tanh(jnp.tanh(b["x"] @ p["conv"]) @ p["d1"])
    return cross_entropy((x @ p["rows"]) @ p["conv2"] @ p["logits"], b["y"]).mean()


def in_remat(p, b, key):
    return jax.checkpoint(plain)(p, b, key)


REFUSALS = {
    "batch norm behind": (behind, ("conv", "d1", "logits"), "cannot be accumulated"),
    "replicated layer behind": (whole_behind, ("conv", "d1", "rows", "conv2", "logits"), "replicated layer"),
    "all in one remat": (in_remat, COLUMN_NAMES, "rematerialised"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_why_and_auto_falls_back(case):
    loss, names, words = REFUSALS[case]
    mesh, arguments = {"data": 1, "model": 8}, (params(*names), batch(), jax.random.key(0))
    for kind in ("turns", "modulo"):
        with pytest.raises(PlanError, match=words) as caught:
            splitjax.parallelize(step_of(loss), mesh=mesh, rules=RULES, group_comm=kind).plan(*arguments)
        assert caught.value.value == kind and "auto" in caught.value.remedy
    wide = {name: jax.ShapeDtypeStruct((512, 16 if name == "logits" else 512), jnp.float32) for name in names}
    big = {name: jax.ShapeDtypeStruct((1024, *a.shape[1:]), a.dtype) for name, a in batch().items()} | {
        "x": jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    }
    plan = splitjax.parallelize(step_of(loss), mesh=mesh, rules=RULES).plan(wide, big, jax.random.key(0))
    assert plan.group_comm == "gather"
    assert any(words in note for note in plan.notes)
    step = step_of(loss)
    got = splitjax.parallelize(step, mesh=mesh, rules=RULES, donate=False)(*arguments)[1]
    np.testing.assert_allclose(got, jax.jit(step)(*arguments)[1], rtol=1e-5)


def test_a_batch_that_does_not_divide_names_the_nearest():
    arguments = params(*COLUMN_NAMES), batch(96), jax.random.key(0)
    with pytest.raises(BatchError, match="96 examples") as caught:
        gains(mesh={"data": 1, "model": 8}, group_comm="modulo").plan(*arguments)
    assert "64 or 128" in caught.value.remedy
    assert gains(mesh={"data": 1, "model": 8}, group_comm="turns").plan(*arguments).group_comm == "turns"


def test_without_the_boundary_turns_are_an_error():
    def step(state, batch, key):
        value, grads = jax.value_and_grad(plain)(state, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    arguments = params(*COLUMN_NAMES), batch(), jax.random.key(0)
    with pytest.raises(PlanError, match=r"plain jax\.grad") as caught:
        splitjax.parallelize(step, mesh={"data": 1, "model": 8}, rules=RULES, group_comm="modulo").plan(*arguments)
    assert "splitjax.value_and_grad" in caught.value.remedy
    assert splitjax.parallelize(step, mesh={"data": 1, "model": 8}, rules=RULES).plan(*arguments).group_comm == "gather"


def test_microbatches_are_turns_enough():
    def step(state, batch, key):
        value, grads = splitjax.value_and_grad(plain, microbatches=2)(state, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    with pytest.raises(PlanError, match="2 microbatches"):
        splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules=RULES, group_comm="modulo").plan(
            params(*COLUMN_NAMES), batch(), jax.random.key(0)
        )


def test_prints_on_both_sides_of_the_crossing(capfd):
    def loss(p, b, key):
        x = jnp.tanh(b["x"] @ p["conv"])
        jax.debug.print("before {}", (x * x).mean())
        value = cross_entropy(head(p, x), b["y"]).mean()
        jax.debug.print("behind {}", value)
        return value

    arguments = params(*COLUMN_NAMES), batch(), jax.random.key(0)
    jax.block_until_ready(
        splitjax.parallelize(step_of(loss), mesh=MESHES[2], rules=RULES, donate=False, group_comm="modulo")(*arguments)
    )
    jax.effects_barrier()
    printed = capfd.readouterr().out
    jax.block_until_ready(jax.jit(step_of(loss))(*arguments))
    jax.effects_barrier()
    wanted = capfd.readouterr().out
    number = lambda text, word: float(next(line.split()[1] for line in text.splitlines() if line.startswith(word)))
    np.testing.assert_allclose(number(printed, "before"), number(wanted, "before"), rtol=1e-5)
    assert "behind" in printed


class Net(nn.Module):
    """Convolutions with batch norm, then dense layers with dropout."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(16)(x)


@by_kind
def test_a_flax_model_with_statistics_and_dropout(kind):
    net, tx = Net(), optax.sgd(1e-1, momentum=0.9)
    rng = np.random.default_rng(1)
    b = {"x": rng.normal(size=(64, 8, 8, 3)).astype(np.float32), "y": rng.integers(0, 10, 64).astype(np.int32)}

    def step(state, batch, key):
        def loss(p):
            logits, new = net.apply(
                {"params": p, "batch_stats": state["stats"]}, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"]
            )
            each = cross_entropy(logits, batch["y"])
            return each.mean(), (new["batch_stats"], (logits.argmax(-1) == batch["y"]).mean(), each)

        (value, (stats, accuracy, each)), grads = splitjax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "stats": stats, "opt": opt}, (
            value,
            accuracy,
            each,
        )

    variables = net.init(jax.random.key(0), b["x"], train=False)
    state = {"params": variables["params"], "stats": variables["batch_stats"], "opt": tx.init(variables["params"])}
    parallel = splitjax.parallelize(
        step, mesh={"data": 2, "model": 4}, rules="splitbrain", donate=False, group_comm=kind
    )
    want_state, want = jax.jit(step)(state, b, jax.random.key(3))
    got_state, got = parallel(state, b, jax.random.key(3))
    assert parallel.plan(state, b, jax.random.key(3)).group_comm == kind
    jax.tree.map(lambda a, c: np.testing.assert_allclose(a, c, rtol=2e-5, atol=2e-5), got, want)
    jax.tree.map(lambda a, c: np.testing.assert_allclose(a, c, atol=1e-5), got_state["params"], want_state["params"])
    jax.tree.map(
        lambda a, c: np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6), got_state["stats"], want_state["stats"]
    )


def test_nnx_modules_take_turns_too():
    import splitjax.nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.hidden = nnx.Linear(8 * 64, 64, rngs=rngs)
            self.out = nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.conv(x))
            return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))

    def step(model, optimizer, b):
        value, grads = splitjax.nnx.value_and_grad(lambda m: cross_entropy(m(b["x"]), b["y"]).mean())(model)
        optimizer.update(model, grads)
        return value

    rng = np.random.default_rng(1)
    b = {"x": rng.normal(size=(64, 8, 8, 3)).astype(np.float32), "y": rng.integers(0, 10, 64).astype(np.int32)}
    losses = {}
    for kind in ("gather", "modulo"):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        parallel = splitjax.nnx.parallelize(
            step,
            mesh={"data": 2, "model": 4},
            rules="splitbrain",
            state_argnums=(0, 1),
            batch_argnums=(2,),
            group_comm=kind,
        )
        losses[kind] = [float(parallel(model, optimizer, b)) for _ in range(3)]
    np.testing.assert_allclose(losses["modulo"], losses["gather"], rtol=1e-6)
