"""Tables synchronised by rows: the numbers of the dense step, on any mesh, with any scheme, whatever the ids."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax import models
from splitjax.compile import step_programs
from splitjax.errors import SyncError, UnavailableError
from splitjax.plan import Plan
from splitjax.planning import observing
from splitjax.sync import SCHEMES, ByRows, Link, RowExchange
from tests.models.test_model_steps import batch_for, build_small

ROWS, OUT_ROWS, WIDTH, EXAMPLES, LENGTH, STEPS = 128, 192, 8, 24, 5, 5


def loss_fn(params, batch):
    """Two tables, one looked up in three ways, with ids from the end and out of range."""
    hidden = jnp.tanh(jnp.take(params["in"], batch["x"], axis=0, mode="clip") @ params["w"])

    @jax.checkpoint
    def first(table):
        return jax.vmap(lambda k: table[k])(batch["x"][:, 0])

    def turn(total, ids):
        return total + jnp.sum(params["in"][ids] ** 2), None

    total, _ = jax.lax.scan(turn, 0.0, batch["x"].T[1:3])
    return (
        jnp.mean((hidden - params["out"][batch["y"]]) ** 2)
        + jnp.mean(first(params["in"]) ** 3)
        + total / batch["x"].shape[0]
    )


def make_step(tx, microbatches=None):
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_fn, microbatches=microbatches)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step


def init(tx):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"in": (ROWS, WIDTH), "w": (WIDTH, WIDTH), "out": (OUT_ROWS, WIDTH)}
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return {"params": params, "opt": tx.init(params)}


def batches():
    rng = np.random.default_rng(0)
    for number in range(STEPS):
        # Later steps touch more rows than the first ones, so that capacities do not suffice.
        spread = ROWS if number >= 4 else 12
        x = rng.integers(-spread // 2, spread // 2, (EXAMPLES, LENGTH)).astype(np.int32)
        x[0, 0], x[1, 1], x[2, 2], x[3, 3] = 0, ROWS - 1, ROWS + 7, -ROWS - 3
        yield {"x": x, "y": rng.integers(0, OUT_ROWS, (EXAMPLES, LENGTH)).astype(np.int32)}


CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.1))


def train(tx, microbatches=None, **options):
    step = splitjax.parallelize(make_step(tx, microbatches), **options)
    data = list(batches())
    state = step.place(init(tx), example=(data[0],))
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state), step


@pytest.fixture(scope="module")
def reference():
    """The same steps on one device, dense."""
    return train(CLIPPED, mesh={"data": 1}, rules="data_parallel")[:2]


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_every_scheme_gives_the_numbers_of_one_device():
    """One table a scheme, all in one step."""
    names = [name for name in SCHEMES if name != "dense"]

    def step(state, batch):
        def loss_fn(params):
            return sum(jnp.mean(jnp.sin(k + table[batch["x"]])) for k, table in enumerate(params.values()))

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = CLIPPED.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = {name: jax.random.normal(jax.random.key(k), (ROWS, 2)) for k, name in enumerate(names)}
    first = {"params": params, "opt": CLIPPED.init(params)}
    found = []
    for options in ({"mesh": {"data": 1}}, {"mesh": {"data": 4}, "sync": {f"**/{name}": name for name in names}}):
        one = splitjax.parallelize(step, rules="data_parallel", **options)
        state, losses = one.place(first, example=(next(batches()),)), []
        for batch in batches():
            state, loss = one(state, batch)
            losses.append(float(loss))
        found.append((losses, jax.tree.map(np.asarray, state)))
    assert_same(found[1], found[0])
    syncs = one.plan(state, batch).syncs
    assert sorted(f"params/{sync.scheme}" for sync in syncs) == sorted(sync.param for sync in syncs)
    assert all("asked for" in sync.why and sync.bytes > 0 for sync in syncs)
    assert [record.reason for record in one.compiles] == ["first call", "its tables were observed"]
    report = one.report(state, batch)
    assert not report.unattributed and not report.missing
    rows = [
        found for found in report.collectives if found.planned is not None and "rows of the gradient" in found.cause
    ]
    assert not [found for found in rows if found.differs]  # to the byte, padding included
    assert sum(found.bytes for found in rows) == sum(sync.bytes for sync in syncs)


LAYOUTS = {
    "one device": ({"data": 1}, "data_parallel", None),
    "three workers": ({"data": 3}, "data_parallel", None),
    "features split": ({"data": 2, "model": 4}, "splitbrain", None),
    "rows split over data": ({"data": 4}, "fsdp", None),
    "rows split over model": ({"data": 2, "model": 2}, "megatron", None),
    "owned": ({"data": 4}, "embedding_owner", None),
    "owned over both axes, microbatches": ({"data": 2, "model": 2}, "embedding_owner", 2),
    "microbatches, features split": ({"data": 2, "model": 2}, "splitbrain", 2),
}


ON_EVERY_VERSION = ("owned",)


@pytest.mark.parametrize(
    "name",
    [name if name in ON_EVERY_VERSION else pytest.param(name, marks=pytest.mark.one_version) for name in LAYOUTS],
)
def test_every_layout_gives_the_numbers_of_one_device(name, reference):
    mesh, rules, microbatches = LAYOUTS[name]
    # the rules say it themselves
    sync = "dense" if rules == "embedding_owner" else {"**/in": "row_exchange", "**/out": RowExchange(hot=True)}
    *found, step = train(CLIPPED, microbatches, mesh=mesh, rules=rules, sync=sync)
    assert_same(found, reference)
    plan = step.plan(found[1], next(batches()))
    scheme = "owner_sharded" if rules in ("embedding_owner", "fsdp") else "row_exchange"
    assert [one.scheme for one in plan.syncs] == [scheme, scheme]
    if rules != "embedding_owner":
        dense = splitjax.parallelize(make_step(CLIPPED, microbatches), mesh=mesh, rules=rules).plan(
            found[1], next(batches())
        )
        sent = {
            one.param: sum(sent.bytes for sent in dense.collectives if sent.why == f"gradient of {one.param}")
            for one in plan.syncs
        }
        assert sent == {one.param: one.dense_bytes for one in plan.syncs} and all(sent.values()) == (
            name != "one device"
        )
    assert not any("stored in pieces" in one.why for one in plan.collectives if "/w" not in one.why)
    expected = {
        "features split": (None, "model"),
        "rows split over data": ("data", None),
        "rows split over model": ("model", None),
        "owned": ("data", None),
        "owned over both axes, microbatches": (("data", "model"), None),
    }
    assert plan.leaf("params/in").spec == expected.get(name, (None, "model") if "features" in name else (None, None))


@pytest.mark.one_version
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "model": 2}], ids=str)
def test_dense_gradients_beside_owned_tables_are_exchanged_once_for_all_microbatches(mesh):
    *found, step = train(CLIPPED, 2, mesh=mesh, rules="embedding_owner")
    report = step.report(found[1], next(batches()))
    assert not report.unattributed and not report.missing and not [one for one in report.collectives if one.differs]


def test_the_compiled_step_makes_nothing_of_the_table_s_size():
    """But for the tables themselves, which are updated in place."""
    rows = 1_000_000
    step = splitjax.parallelize(
        make_step(optax.adagrad(0.1)), mesh={"data": 4}, rules="data_parallel", sync="row_exchange"
    )
    state = jax.eval_shape(lambda: init(optax.adagrad(0.1)))
    grown = lambda leaf: (
        jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) if leaf.shape[:1] == (ROWS,) else leaf
    )
    compiled = step.lower(jax.tree.map(grown, state), next(batches())).compile().memory_analysis()
    table_bytes = rows * WIDTH * 4
    assert compiled.alias_size_in_bytes >= 2 * table_bytes
    assert compiled.temp_size_in_bytes < table_bytes / 20


def test_the_plan_s_peak_has_no_dense_gradients_of_tables():
    spec = models.build("lstm", vocab_size=20_000, max_len=8, embedding_width=32, hidden_width=16, negatives=8)
    init_fn, train_step, _ = models.make_step(spec, optax.adagrad(0.1), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init_fn, jax.random.key(0)), spec.example(16)
    summed, planned, compiled = [], [], []
    for sync in ("dense", "row_exchange", ByRows("row_exchange", wire_dtype="bfloat16")):
        step = splitjax.parallelize(train_step, mesh={"data": 4}, rules="data_parallel", sync=sync)
        planned.append(step.plan(*arguments).memory)
        summed.append(step._programs.entry(arguments).summed.peak_bytes)
        if sync != "row_exchange":
            compiled.append(step.report(*arguments).memory.compiled.total_bytes)
    tables = 2 * 20_000 * 32 * 4
    dense, by_rows, rounded = summed
    assert dense - by_rows > 0.9 * tables and rounded - by_rows == tables  # a residual of each table's size
    assert abs(rounded - compiled[1]) < 0.05 * rounded
    dense, by_rows, rounded = planned  # by lifetimes
    assert dense.peak_bytes == pytest.approx(compiled[0], rel=0.01)
    assert dense.peak_bytes - by_rows.peak_bytes > tables
    assert rounded.argument_bytes - by_rows.argument_bytes == tables
    assert compiled[1] <= rounded.bound_bytes < 1.4 * compiled[1]


@pytest.mark.one_version
def test_the_exchange_falls_back_without_a_loss_and_steps_are_observed_anew(reference, monkeypatch):
    monkeypatch.setattr(observing, "CHECKED_STEPS", 2)
    monkeypatch.setattr(observing, "MOST_FALLBACKS", 1)
    *found, step = train(CLIPPED, mesh={"data": 4}, rules="data_parallel", sync="zen")
    assert_same(found, reference)
    data = list(batches())[-1]
    state = step.place(init(CLIPPED), example=(data,))
    for _ in range(4):
        state, _ = step(state, data)
    assert [record.reason for record in step.compiles].count("its tables were observed") == 2


@pytest.mark.parametrize(
    "sync", ["row_exchange", ByRows("row_exchange", wire_dtype="bfloat16")], ids=["whole", "bfloat16"]
)
def test_owners_serve_steps_that_read_more_rows_than_there_is_room_for(sync):
    """They get all gradients unrounded, and what was rounded away of them before."""

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda table: jnp.sum(table[batch["ids"]] * batch["weights"]))(
            state["table"]
        )
        return {"table": state["table"] - 0.5 * grads}, loss

    rng, found, steps = np.random.default_rng(0), [], []
    for number in range(6):  # three are observed, two are rounded, and one reads every row on every worker
        ids = np.tile(rng.permutation(64), 4) if number == 5 else np.tile(rng.permutation(4), 64)
        steps.append({"ids": ids.astype(np.int32), "weights": rng.normal(size=(256, 3)).astype(np.float32)})
    for options in (
        {"mesh": {"data": 1}, "rules": "data_parallel"},
        {"mesh": {"data": 4}, "rules": "embedding_owner", "sync": sync},
    ):
        one, state = splitjax.parallelize(step, **options), {"table": np.ones((64, 3), np.float32)}
        losses = []
        for batch in steps:
            state, loss = one(state, batch)
            losses.append(float(loss))
        found.append((losses, np.asarray(state["table"])))
    (plan,) = one.plan(state, steps[0]).syncs
    assert plan.scheme == "owner_sharded" and plan.capacities["local"] < 64
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        found[1][0],
        found[0][0],
        rtol=1e-4 if isinstance(sync, str) else 3e-2,
        atol=1e-4 if isinstance(sync, str) else 0.3,
    )


def exchanges_in(eqns, is_in_branch=False):
    """Of every exchange of rows in these equations, whether it stands in a branch or a loop. What the platform decides
    is no branch."""
    of_platform = set()
    for eqn in eqns:
        name = eqn.primitive.name
        if name in ("all_gather", "all_to_all", "ppermute"):
            yield is_in_branch
        if name == "platform_index" or (
            name != "cond" and any(not hasattr(v, "val") and v in of_platform for v in eqn.invars)
        ):
            of_platform |= set(eqn.outvars)
        branches = name == "while" or (name == "cond" and eqn.invars[0] not in of_platform)
        for value in jax.tree.leaves(list(eqn.params.values())):
            body = getattr(value, "jaxpr", value)
            if hasattr(body, "eqns"):
                yield from exchanges_in(body.eqns, is_in_branch or branches)


@pytest.mark.parametrize("rules", ["data_parallel", "embedding_owner"])
def test_exchanges_in_branches_wait_for_all_others(rules):
    """XLA's CPU backend does not order them: devices would meet in different ones, and wait forever."""
    *_, step = train(CLIPPED, mesh={"data": 4}, rules=rules, sync="zen")
    arguments = (init(CLIPPED), next(batches()))
    waits, found = {}, []  # by variable, the exchanges that it waits for; of each exchange, whether it has branches
    for eqn in step._programs.entry(arguments).jitted.trace(*arguments).jaxpr.eqns:
        before = set().union(*(waits.get(v, ()) for v in eqn.invars if not hasattr(v, "val")))
        places = list(exchanges_in([eqn]))
        if places:
            unordered = [k for k, has_branches in enumerate(found) if (has_branches or any(places)) and k not in before]
            assert not unordered, (eqn.primitive.name, len(found), unordered)
            before.add(len(found))
            found.append(any(places))
        waits |= dict.fromkeys(eqn.outvars, before)
    assert sum(found) >= 4  # of two tables, in a norm and in an update


@pytest.mark.one_version
def test_auto_measures_the_links_and_says_what_it_chose(reference):
    *found, step = train(CLIPPED, mesh={"data": 4}, rules="data_parallel", sync="auto")
    assert_same(found, reference)
    for sync in step.plan(found[1], next(batches())).syncs:
        assert sync.why.startswith("chosen: ") and "next: " in sync.why and "3 steps" in sync.why


@pytest.mark.parametrize("rules", [pytest.param("data_parallel", marks=pytest.mark.one_version), "embedding_owner"])
def test_a_step_that_skips_updates_which_are_not_finite(rules):
    """All rows of all owners count, and one number decides for all."""

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda params: jnp.mean(jnp.log(params["table"][batch["ids"]])))(state)
        good = jnp.all(jnp.isfinite(grads["table"])) & jnp.logical_not(jnp.any(grads["table"] > 1))
        return {"table": state["table"] - 0.1 * jnp.where(good, grads["table"], 0)}, good

    found = []
    for options in (
        {"mesh": {"data": 1}, "rules": "data_parallel"},
        {"mesh": {"data": 4}, "rules": rules, "sync": "zen"},
    ):
        one = splitjax.parallelize(step, **options)
        table = np.ones((64, 3), np.float32)
        table[50] = 0
        state, decided = {"table": table}, []
        for number in range(6):
            ids = np.random.default_rng(number).integers(0, 40, (8, 2)).astype(np.int32)
            if number % 2:
                ids[5, 1] = 50  # its gradient is infinite
            state, good = one(state, {"ids": ids})
            decided.append(bool(good))
        found.append((decided, np.asarray(state["table"])))
    assert found[0][0] == found[1][0] == [True, False] * 3
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-6)


@pytest.mark.parametrize(
    "rules", ["data_parallel", pytest.param("fsdp", marks=pytest.mark.one_version), "embedding_owner"]
)
def test_room_that_no_row_fills_takes_no_part_in_a_sum(rules):
    """Adagrad as one writes it, without an epsilon: for rows of zeros, which no table has here, it divides by 0."""

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda table: jnp.mean(jnp.sin(table[batch["ids"]])))(state["table"])
        total = state["total"] + grads**2
        update = grads * jax.lax.rsqrt(total)
        update = jnp.where(jnp.all(jnp.isfinite(update)), update / jnp.maximum(1.0, jnp.sqrt(jnp.sum(update**2))), 0.0)
        return {"table": state["table"] - 0.1 * update, "total": total}, loss

    found = []
    for options in (
        {"mesh": {"data": 1}, "rules": "data_parallel"},
        {"mesh": {"data": 4}, "rules": rules, "sync": "all_gather"},
    ):
        one = splitjax.parallelize(step, **options)
        state = {"table": jax.random.normal(jax.random.key(0), (512, 3)), "total": jnp.full((512, 3), 0.1)}
        for number in range(5):
            state, loss = one(state, {"ids": np.random.default_rng(number).integers(0, 40, (8, 2)).astype(np.int32)})
        found.append(([float(loss)], jax.tree.map(np.asarray, state)))
    assert "dense" not in {sync.scheme for sync in one.plan(state, {"ids": np.zeros((8, 2), np.int32)}).syncs}
    assert np.abs(found[0][1]["table"]).max() > 0
    assert_same(found[1], found[0])


def reasons(step, state, **options):
    plan = splitjax.parallelize(step, **{"mesh": {"data": 4}, "rules": "data_parallel", "sync": "auto"} | options).plan(
        state, next(batches())
    )
    return {sync.param: sync.why for sync in plan.syncs if sync.scheme == "dense"}, plan


def test_what_stays_dense_says_why():
    adam = optax.adam(0.1)
    why = reasons(make_step(adam), init(adam))[0]["params/in"]
    assert "changes, by mul" in why and why.endswith("lazy=True would leave these rows alone")
    found, plan = reasons(make_step(CLIPPED), init(CLIPPED), shard_state=True)
    (why,) = set(found.values())
    assert why.startswith("its gradient is summed into parts (shard_state), of which each worker writes its own")
    assert "leave shard_state off" in why and 'rules="embedding_owner"' in why  # what it says to do is possible:
    assert reasons(make_step(CLIPPED), init(CLIPPED), shard_state=True, rules="embedding_owner")[0] == {}
    assert not any(one.op == "row_exchange" for one in plan.collectives)
    assert all(sync.bytes == sync.dense_bytes > 0 for sync in plan.syncs)

    def twice(state, batch):
        return jax.lax.scan(lambda state, _: (make_step(CLIPPED)(state, batch)[0], None), state, None, length=2)[0], 0.0

    note = next(note for note in reasons(twice, init(CLIPPED))[1].notes if "nothing to synchronise by rows" in note)
    assert re.search(
        r"its gradient is taken inside scan, more than once a step \(.*test_sparse.py:\d+ \(.*twice\)\)", note
    )
    by_name = {"**/in": "zen"}
    plan = splitjax.parallelize(make_step(CLIPPED), mesh={"data": 4}, rules="data_parallel", sync=by_name).plan(
        init(CLIPPED), next(batches())
    )
    assert [(sync.param, sync.scheme, sync.why) for sync in plan.syncs][1] == (
        "params/out",
        "dense",
        "no pattern of sync= fits it",
    )
    assert plan.syncs[1].bytes == plan.syncs[1].dense_bytes == 2 * 3 * OUT_ROWS * WIDTH  # 2 (n-1)/n of 4 bytes each


@pytest.mark.parametrize("mesh", [pytest.param({"data": 1}, marks=pytest.mark.one_version), {"data": 4}], ids=str)
def test_lazy_updates_leave_rows_without_gradient_alone(mesh):
    """Adam on touched rows: as the dense update, with the other rows put back after each step."""
    adam = optax.adam(0.1)
    *found, step = train(adam, mesh=mesh, rules="data_parallel", sync=ByRows("row_exchange", lazy=True))
    why = step.plan(found[1], next(batches())).syncs[0].why
    assert why.startswith("lazy, which changes the numbers: ") and "changes, by mul" in why
    state, losses = init(adam), []
    dense = jax.jit(make_step(adam))
    for batch in batches():
        grads = jax.grad(loss_fn)(state["params"], batch)
        new, metrics = dense(state, batch)
        losses.append(float(metrics["loss"]))

        def keep(path, old, new, grads=grads):
            name = getattr(path[-1], "key", None)
            if name not in ("in", "out"):
                return new
            return jnp.where(jnp.any(grads[name] != 0, axis=-1, keepdims=True), new, old)

        state = jax.tree_util.tree_map_with_path(keep, state, new)
    assert_same(found, (losses, jax.tree.map(np.asarray, state)))


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 4}], ids=str)
def test_auto_never_makes_rows_dense_where_that_would_change_the_numbers(mesh, monkeypatch):
    """Every row is touched in every step, which a dense exchange does best; but the update is lazy. One worker has no
    exchange at all."""
    monkeypatch.setattr(step_programs, "measure_link", lambda *_: Link(0.0, 1e6))
    adam = optax.adam(0.1)

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda params: jnp.mean(params["table"][batch["ids"]] ** 2))(
            state["params"]
        )
        updates, opt = adam.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    chosen = []
    for lazy, tx in ((True, adam), (False, None)):
        one = splitjax.parallelize(
            step if tx else one_table, mesh=mesh, rules="data_parallel", sync=ByRows("auto", lazy=lazy)
        )
        params = {"table": np.ones((16, 8), np.float32)}
        state = {"params": params, "opt": adam.init(params)} if tx else params
        batch = {"ids": np.tile(np.arange(16, dtype=np.int32), (4, 1))}
        for _ in range(4):
            state, _ = one(state, batch)
        (sync,) = one.plan(state, batch).syncs
        assert sync.lazy == lazy
        chosen.append(sync.scheme)
    assert chosen[0] != "dense" and (chosen[1] == "dense") == (mesh["data"] > 1)


def test_blocks_needs_whole_rows():
    options = {"mesh": {"data": 2, "model": 2}, "rules": "splitbrain"}
    found, plan = reasons(make_step(CLIPPED), init(CLIPPED), sync="blocks", **options)
    split = {leaf.path for leaf in plan.leaves if any(leaf.spec[1:])}
    assert split & set(found) and all(
        ("tells rows by their values" in why) == (param in split) for param, why in found.items()
    )
    assert not split & set(reasons(make_step(CLIPPED), init(CLIPPED), sync="zen", **options)[0])


def test_what_cannot_be_had_is_a_typed_error():
    def plain(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, loss

    for step, sync, words in (
        (plain, "zen", "plain jax.grad"),
        (make_step(CLIPPED), {"**/inn": "zen"}, "no parameter has such a path"),
    ):
        with pytest.raises(SyncError, match=words):
            splitjax.parallelize(step, mesh={"data": 4}, rules="data_parallel", sync=sync).plan(
                init(CLIPPED), next(batches())
            )
    with pytest.raises(SyncError, match="no such value"):
        splitjax.parallelize(plain, sync={"**": 3})
    with pytest.raises(UnavailableError, match="bfloat16"):
        splitjax.parallelize(plain, sync=RowExchange(wire_dtype="float16"))
    for scheme in ("zen", "auto"):
        with pytest.raises(UnavailableError, match="name a scheme that rounds and keeps the rest: row_exchange"):
            splitjax.parallelize(plain, sync=ByRows(scheme, wire_dtype="bfloat16"))


def one_table(state, batch):
    loss, grads = splitjax.value_and_grad(lambda params: jnp.mean(params["table"][batch["ids"]] ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


@pytest.fixture(scope="module")
def settled():
    """A step with one table after its first steps on four devices: its plan, as a file has it, and its arguments."""
    rows, width = 4096, 128
    state, batch = {"table": np.zeros((rows, width), np.float32)}, {"ids": np.arange(32, dtype=np.int32).reshape(8, 4)}
    step = splitjax.parallelize(one_table, mesh={"data": 4}, rules="data_parallel", sync="row_exchange", donate=False)
    for _ in range(4):
        step(state, batch)
    return Plan.from_json(step.plan(state, batch).to_json()), (state, batch)


@pytest.mark.tpu_aot
def test_a_tpu_s_train_step_consists_of_kernels(settled):
    """The final program, compiled ahead of time by a pinned plan that knows schemes and capacities."""
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices).reshape(4), ("data",), axis_types=(AxisType.Auto,))
    step = splitjax.parallelize(one_table, mesh=mesh, rules="data_parallel", plan=settled[0])
    text = step.lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), settled[1])).compile().as_text()
    kernels = ("exchange_rows", "gather_rows", "scatter_rows", "segment_sum", "bitmap_encode")
    assert "tpu_custom_call" in text and [name for name in kernels if f"splitjax_{name}" not in text] == []


def test_a_gpu_s_train_step_contains_kernels(settled):
    step = splitjax.parallelize(one_table, mesh={"data": 4}, rules="data_parallel", plan=settled[0])
    text = step._programs.entry(settled[1]).jitted.trace(*settled[1]).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "splitjax_gather_rows" in text and "splitjax_segment_sum" in text


@pytest.mark.one_version
def test_recurrent_weights_are_summed_over_workers_once_and_tables_by_rows():
    """An LSTM's gradients add up over time steps first: the compiled step sends what the plan says, scalars aside."""
    spec = build_small("lstm")
    init_fn, train_step, _ = models.make_step(spec, optax.adagrad(0.1), value_and_grad=splitjax.value_and_grad)
    found = []
    for options in ({"mesh": {"data": 1}}, {"mesh": {"data": 4}, "sync": "row_exchange"}):
        step = splitjax.parallelize(train_step, rules="data_parallel", **options)
        state, losses = step.init(init_fn, jax.random.key(0), example=(spec.example(8),)), []
        for number in range(4):
            state, metrics = step(state, batch_for(spec, 8, seed=number))
            losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    report = step.report(state, batch_for(spec, 8))
    assert not report.missing and max(one.compiled.trips for one in report.collectives) == 1
    assert abs(report.total.compiled_bytes - report.total.predicted_bytes) < 100
    assert {sync.scheme for sync in step.plan(state, batch_for(spec, 8)).syncs} == {"row_exchange"}


@pytest.mark.parametrize("rules", ["data_parallel", "embedding_owner"])
@pytest.mark.parametrize("num_shared", [3, pytest.param(8, marks=pytest.mark.one_version)])
def test_rows_that_all_workers_read_alike_count_once(rules, num_shared):
    """Ids that no example has, whether or not they divide over four workers; and rows laid out before the examples."""

    def step(state, batch):
        def loss_fn(params):
            shared = params["table"][jnp.arange(num_shared) * 7 % 64]
            own = jax.vmap(lambda k: params["table"][k], out_axes=1)(batch["ids"])
            return jnp.mean(jnp.sin(own.T @ shared.T))

        loss, grads = splitjax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.5 * g, state, grads), loss

    found = []
    for options in (
        {"mesh": {"data": 1}, "rules": "data_parallel"},
        {"mesh": {"data": 4}, "rules": rules, "sync": "row_exchange"},
    ):
        one = splitjax.parallelize(step, **options)
        state, losses = {"table": np.asarray(jax.random.normal(jax.random.key(0), (64, 5)))}, []
        for number in range(5):
            batch = {"ids": np.random.default_rng(number).integers(0, 64, 8).astype(np.int32)}
            state, loss = one(state, batch)
            losses.append(float(loss))
        found.append((losses, jax.tree.map(np.asarray, state)))
    assert [sync.scheme for sync in one.plan(state, batch).syncs] == [
        "owner_sharded" if rules == "embedding_owner" else "row_exchange"
    ]
    assert_same(found[1], found[0])
