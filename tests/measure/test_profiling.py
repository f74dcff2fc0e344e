"""`step.profile` against gradients taken worker by worker with plain JAX, and figures computed from them as they are
defined."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax import sync
from splitjax.errors import BatchError, DonatedStateError, ProfileError
from splitjax.sync.choose import choose

NUM_EXAMPLES = 16
TX = optax.adagrad(0.1)


def params():
    random = np.random.default_rng(3)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)
    # Half of the units of `w` are dead but for few examples; no size is a multiple of 8 or of the number of workers.
    return {
        "words": draw(21, 3),
        "tags": draw(10, 3),
        "w": draw(3, 5),
        "b": np.float32([-9, -2, 0, 1, -1.5]),
        "unused": draw(2),
    }


def batch(seed):
    random = np.random.default_rng(seed)
    weight = np.ones(NUM_EXAMPLES, np.float32)
    weight[:2] = 0.0  # the first of eight workers has no gradient at all
    return {
        "words": (21 * random.random((NUM_EXAMPLES, 2)) ** 3).astype(np.int32),
        "tags": random.integers(0, 10, NUM_EXAMPLES).astype(np.int32),
        "weight": weight,
    }


BATCHES = [batch(1), batch(2)]


def loss_fn(p, batch, whole_weight):
    h = p["words"][batch["words"]].sum(1) + p["tags"][batch["tags"]]
    return (jax.nn.relu(h @ p["w"] + p["b"]).sum(-1) * batch["weight"]).sum() / whole_weight


def step_of(loss, **options):
    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel", **options)
    def step(state, batch):
        value, grads = splitjax.value_and_grad(loss)(state["params"], batch)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return step


@pytest.fixture(scope="module")
def step():
    return step_of(lambda p, batch: loss_fn(p, batch, batch["weight"].sum()))


@pytest.fixture(scope="module")
def state(step):
    return step.place({"params": params(), "opt": TX.init(params())}, example=(BATCHES[0],))


@pytest.fixture(scope="module")
def profiles(step, state):
    return {n: step.profile(state, BATCHES, num_workers=n) for n in (1, 2, 4, 8)}


def worker_gradients(batch, n):
    size = NUM_EXAMPLES // n
    parts = [{name: value[i * size : (i + 1) * size] for name, value in batch.items()} for i in range(n)]
    return [jax.tree.map(np.asarray, jax.grad(loss_fn)(params(), part, batch["weight"].sum())) for part in parts]


def expected(gradients, is_table):
    """Zen's figures of one step by their definitions, from dense gradients of every worker."""
    n = len(gradients)
    units = [(np.any(g != 0, axis=tuple(range(1, g.ndim))) if is_table else g.reshape(-1) != 0) for g in gradients]
    sizes = [m for m in (1, 2, 4, 8) if m <= n]
    unions = {m: np.mean([np.any(units[i : i + m], axis=0).mean() for i in range(0, n, m)]) for m in sizes}
    pairs = [np.sum(a & b) / min(a.sum(), b.sum()) for a, b in itertools.combinations(units, 2) if a.any() and b.any()]
    width = -(-units[0].size // n)
    ranges = [[unit[i * width : (i + 1) * width].sum() for i in range(n)] for unit in units if unit.any()]
    return {
        "densities": [np.mean(g != 0) for g in gradients],
        "row_densities": [unit.mean() for unit in units] if is_table else [],
        "unions": unions,
        "overlap": np.mean(pairs) if pairs else 0.0,
        "skewness": np.mean([max(counts) / np.mean(counts) for counts in ranges]) if ranges else 1.0,
    }


@pytest.mark.parametrize("n", [1, 2, 4, 8])  # on two devices
def test_figures_are_those_of_the_workers_gradients(profiles, n):
    profile = profiles[n]
    assert (profile.num_workers, profile.num_examples, profile.notes) == (n, (NUM_EXAMPLES, NUM_EXAMPLES), ())
    assert [tensor.path for tensor in profile.tables] == ["params/tags", "params/words"]
    assert {tensor.path for tensor in profile.tensors} == {f"params/{name}" for name in params()}
    for number, batch in enumerate(BATCHES):
        gradients = worker_gradients(batch, n)
        for tensor in profile.tensors:
            measured, wanted = (
                tensor.steps[number],
                expected([g[tensor.path.removeprefix("params/")] for g in gradients], tensor.is_table),
            )
            for name in ("densities", "row_densities", "overlap", "skewness"):
                np.testing.assert_allclose(getattr(measured, name), wanted[name], err_msg=f"{tensor.path} {name}")
            assert [m for m, _ in measured.unions] == list(wanted["unions"])
            np.testing.assert_allclose(
                [share for _, share in measured.unions], list(wanted["unions"].values()), err_msg=tensor.path
            )
            assert measured.densification(n) == pytest.approx(
                wanted["unions"][n] / wanted["unions"][1] if wanted["unions"][1] else 1.0
            )


def test_the_model_has_what_the_figures_are_about(profiles):
    """Or agreement would mean little: holes in a dense weight, a worker without a gradient, overlaps and skew of either
    sort."""
    profile = profiles[8]
    words, weight = profile.tensor("params/words"), profile.tensor("params/w")
    assert words.steps[0].row_densities[0] == 0.0 and 0.0 < words.overlap < 1.0 and words.skewness > 1.5
    assert 0.2 < weight.density < 0.9 and 1.0 < weight.densification(8) < 2.0
    assert profile.tensor("params/unused").density == 0.0 and profile.tensor("params/unused").densification() == 1.0


def test_averages_over_steps(profiles):
    words = profiles[4].tensor("params/words")
    assert words.row_density == pytest.approx(np.mean([np.mean(step.row_densities) for step in words.steps]))
    assert words.skewness == pytest.approx(np.mean([step.skewness for step in words.steps]))
    matrix = np.asarray(words.overlaps)
    assert matrix.shape == (4, 4) and np.all(matrix == matrix.T) and np.all(np.diag(matrix) == 1.0)
    assert words.overlap == pytest.approx(matrix[np.triu_indices(4, 1)].mean())


def test_a_table_has_the_sparsity_that_chooses_its_scheme(profiles):
    sparsity = profiles[4].sparsity("params/words")
    ids = [
        [batch["words"][4 * i : 4 * i + 4][batch["weight"][4 * i : 4 * i + 4] > 0] for i in range(4)]
        for batch in BATCHES
    ]
    wanted = sync.measure(ids, 21, 3)
    assert all(
        np.array_equal(a, b) for ours, theirs in zip(sparsity.samples, wanted.samples) for a, b in zip(ours, theirs)
    )
    # not only the same rows: the profile's own figures agree with those of the rows
    assert sparsity == wanted
    words = profiles[4].tensor("params/words")
    assert (words.row_density, words.densification(4)) == pytest.approx((sparsity.density, sparsity.densification(4)))
    assert (words.overlap, words.skewness) == pytest.approx((sparsity.overlap, sparsity.skewness))
    # A gradient does not tell how often a row was looked up, which is what a step sends whose rows lack room: it is
    # taken for once, as where every id is there once.
    once = sync.measure([[np.unique(rows) for rows in step] for step in ids], 21, 3)
    assert once == wanted and 0 < sparsity.lookups == once.lookups <= wanted.lookups
    link = sync.Link(100e6, 1e-4)
    assert choose(sparsity, link).reason == choose(once, link).reason


def test_default_workers_are_the_plans_and_nothing_is_consumed(step, state, profiles):
    before = jax.tree.map(np.asarray, state)
    calls = len(step.compiles)
    assert step.profile(state, (batch for batch in BATCHES)) == profiles[2]
    assert len(step.compiles) == calls
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))


def test_random_bits_and_denominators_are_those_of_the_global_batch():
    key = jax.random.key(0)

    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(state, batch, key):
        def loss(p):
            own, shared = jax.random.split(key)
            keep = jax.random.bernoulli(own, 0.2, batch["words"].shape)  # for every example its own
            negatives = jax.random.randint(shared, (3,), 0, 10)  # one draw for all
            return (p["words"][batch["words"]] * keep[..., None]).mean() - p["tags"][negatives].mean() * batch[
                "weight"
            ].mean()

        value, grads = splitjax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    tables = {name: params()[name] for name in ("words", "tags")}
    profile = step.profile(tables, BATCHES[:1], key, num_workers=4)
    keep = np.asarray(jax.random.bernoulli(jax.random.split(key)[0], 0.2, (NUM_EXAMPLES, 2)))
    ids = BATCHES[0]["words"]
    wanted = [np.unique(ids[4 * i : 4 * i + 4][keep[4 * i : 4 * i + 4]]) for i in range(4)]
    assert [list(ids) for ids in profile.sparsity("words").samples[0]] == [list(ids) for ids in wanted]
    negatives = np.unique(jax.random.randint(jax.random.split(key)[1], (3,), 0, 10))
    assert [list(ids) for ids in profile.sparsity("tags").samples[0]] == [list(negatives)] * 4
    assert profile.tensor("tags").overlap == 1.0


def test_a_loss_that_is_no_sum_is_measured_alone_and_says_so():
    def loss(p, batch):
        h = p["words"][batch["words"]].sum(1)
        return (((h - h.mean(0)) / (h.std(0) + 1e-3)) @ p["w"]).std()

    kept = {name: params()[name] for name in ("words", "w")}
    profile = step_of(loss).profile({"params": kept, "opt": TX.init(kept)}, BATCHES[:1], num_workers=2)
    (note,) = profile.notes
    assert "examples alone" in note and note in " ".join(str(profile).split())
    rows = [np.unique(BATCHES[0]["words"][8 * i : 8 * i + 8]) for i in range(2)]
    assert [list(ids) for ids in profile.sparsity("params/words").samples[0]] == [list(ids) for ids in rows]


def test_a_dense_model_and_a_table_that_must_stay_dense():
    weights = {name: params()[name] for name in ("words", "w")}
    data = {"x": np.ones((4, 21), np.float32), "words": np.arange(4, dtype=np.int32)}
    dense = step_of(lambda p, batch: (batch["x"] @ p["words"] @ p["w"]).mean())
    profile = dense.profile({"params": weights, "opt": TX.init(weights)}, [data])
    assert not profile.tables and all(
        (tensor.density, tensor.overlap, tensor.skewness) == (1, 1, pytest.approx(1, abs=0.1))
        for tensor in profile.tensors
    )
    with pytest.raises(ProfileError, match="looks no rows up"):
        profile.sparsity("params/w")
    tied = step_of(lambda p, batch: (p["words"][batch["words"]] @ p["words"].T).mean() + p["w"].sum())
    profile = tied.profile({"params": weights, "opt": TX.init(weights)}, [data])
    (table,) = profile.tables
    assert "also read by" in table.dense_reason and "its gradient has to stay dense: it is also read by" in str(profile)
    assert table.row_density == 1.0 and table.densification() == 1.0


@pytest.mark.parametrize(
    ("options", "batches", "error", "match"),
    [
        ({"num_workers": 3}, BATCHES, BatchError, "does not divide among 3 workers"),
        ({"num_workers": 32}, BATCHES, BatchError, "does not divide among 32 workers"),
        ({"num_workers": 0}, BATCHES, ProfileError, "positive whole number"),
        ({}, [], ProfileError, "no batch to profile"),
        ({}, BATCHES[0], BatchError, r"for a single one, \[batch\]"),
        ({}, [jax.eval_shape(lambda: jax.tree.map(jnp.asarray, BATCHES[0]))], ProfileError, "only a shape"),
    ],
)
def test_what_cannot_be_measured_is_an_error(step, state, options, batches, error, match):
    with pytest.raises(error, match=match):
        step.profile(state, batches, **options)


def test_steps_without_gradients_to_see_are_errors(state):
    def plain(state, batch):
        value, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, 16.0))(state["params"])
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    with pytest.raises(ProfileError, match=re.escape("splitjax.value_and_grad or splitjax.grad")):
        splitjax.parallelize(plain, mesh={"data": 2}, rules="data_parallel").profile(state, BATCHES)

    def repeated(state, batch):
        def body(p, _):
            return jax.tree.map(lambda a, g: a - g, p, splitjax.grad(lambda p: loss_fn(p, batch, 16.0))(p)), None

        return {**state, "params": jax.lax.scan(body, state["params"], length=2)[0]}

    with pytest.raises(ProfileError, match="gradients inside a scan"):
        splitjax.parallelize(repeated, mesh={"data": 2}, rules="data_parallel").profile(state, BATCHES)

    def alone(state):
        return jax.tree.map(lambda a, g: a - g, state, splitjax.grad(lambda p: jnp.sum(p["w"] ** 2))(state))

    with pytest.raises(BatchError, match="no batch"):
        splitjax.parallelize(alone, mesh={"data": 2}, rules="data_parallel").profile({"w": np.ones((3, 4), np.float32)})


def test_a_step_for_one_batch_size_is_measured_as_a_whole_only():
    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(w, x):
        return w - splitjax.grad(lambda w: ((x.reshape(8, 2, 3) @ w) ** 2).mean())(w)

    w, x = np.ones(3, np.float32), np.ones((16, 3), np.float32)
    with pytest.raises(BatchError, match="8 examples of one of 2 workers: .*cannot be traced with 8 examples"):
        step.profile(w, [x])
    assert step.profile(w, [x], num_workers=1).tensors[0].density == 1.0


def test_a_consumed_state_is_an_error(step):
    mine = step.place({"params": params(), "opt": TX.init(params())}, example=(BATCHES[0],))
    step(mine, BATCHES[0])
    with pytest.raises(DonatedStateError, match="call 1 of the step"):
        step.profile(mine, BATCHES)


def test_two_batch_arguments_and_two_losses():
    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel", batch_argnums=(1, 2))
    def step(state, ids, y):
        grads = splitjax.grad(lambda p: ((p["words"][ids].sum((1, 2)) - y) ** 2).mean())(state)
        moved = jax.tree.map(lambda p, g: p + 0.1 * g, state, grads)
        grads = splitjax.grad(lambda p: ((p["words"][ids[:, :1]].sum((1, 2)) - y) ** 2).mean())(moved)
        return jax.tree.map(lambda p, g: p - g, state, grads)

    table, targets = {"words": params()["words"]}, [np.ones(NUM_EXAMPLES, np.float32)] * 2
    ids = [batch["words"] for batch in BATCHES]
    first, second = step.profile(table, ids, targets).tensors
    assert first.path == second.path == "words" and first.loss != second.loss and first.is_table
    assert [len(rows) for rows in second.sparsity.samples[0]] == [
        np.unique(ids[0][8 * i : 8 * i + 8, 0]).size for i in range(2)
    ]
    with pytest.raises(ProfileError, match="2 losses differentiate 'words'"):
        step.profile(table, ids, targets).tensor("words")
    with pytest.raises(BatchError, match="argument 2 ends first"):
        step.profile(table, ids, targets[:1])
