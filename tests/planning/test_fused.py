"""Weights that hold several others side by side, under tensor parallelism: they compile to the exchanges of separate
ones, but for their own columns, which are dealt out as planned. Heads are never cut through."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from benchmarks.modern.steps.catalogue import every_step
from splitjax.cost.dealing import find_moves
from splitjax.step.dealing.rewriting import Parts, find_parts

WIDTH, HEADS, SIZE, HIDDEN = 16, 4, 4, 32
INNER = HEADS * SIZE


def separate(params, x):
    return [x @ params[name] for name in ("q", "k", "v")], [x @ params[name] for name in ("gate", "up")]


def split(params, x):
    qkv = x @ params["qkv"] + params["bias"]
    return jnp.split(qkv, 3, -1), jnp.split(x @ params["mlp"], 2, -1)


def sliced(params, x):
    qkv, mlp = x @ params["qkv"] + params["bias"], x @ params["mlp"]
    return [qkv[..., at : at + INNER] for at in (0, INNER, 2 * INNER)], (mlp[..., :HIDDEN], mlp[..., HIDDEN:])


def stacked(params, x):
    qkv = (x @ params["qkv"] + params["bias"]).reshape(*x.shape[:-1], 3, HEADS, SIZE).transpose(2, 0, 1, 3, 4)
    mlp = (x @ params["mlp"]).reshape(*x.shape[:-1], 2, HIDDEN)
    return [part.reshape(*x.shape[:-1], INNER) for part in qkv], (mlp[..., 0, :], mlp[..., 1, :])


FORMS = {form.__name__: form for form in (separate, split, sliced, stacked)}


def parameters(form, kv=HEADS):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4)
    names = {"q": INNER, "k": kv * SIZE, "v": kv * SIZE, "gate": HIDDEN, "up": HIDDEN}
    if form != "separate":
        names = {"qkv": 3 * INNER, "mlp": 2 * HIDDEN}
    params = {name: make(WIDTH, columns) for name, columns in names.items()}
    bias = {} if form == "separate" else {"bias": make(3 * INNER)}
    return {**params, **bias, "o": make(INNER, WIDTH), "down": make(HIDDEN, WIDTH)}


def loss(params, batch, form="separate", kv=HEADS):
    (q, k, v), (gate, up) = FORMS[form](params, batch["x"])
    heads = lambda x, count: jnp.repeat(x.reshape(*x.shape[:-1], count, SIZE), HEADS // count, -2)
    q, k, v = heads(q, HEADS), heads(k, kv), heads(v, kv)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), -1)
    attended = jnp.einsum("bhts,bshd->bthd", weights, v)
    x = attended.reshape(*attended.shape[:2], -1) @ params["o"] + (jax.nn.silu(gate) * up) @ params["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def step(form, kv=HEADS, **options):
    def train(params, batch):
        value, grads = splitjax.value_and_grad(lambda params, batch: loss(params, batch, form, kv), **options)(
            params, batch
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train


def examples(number=8):
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=(number, 4, WIDTH))) for name in ("x", "y")}


TWO, THREE = {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("form", "mesh", "options"),
    [
        ("separate", TWO, {}),
        ("split", TWO, {}),
        pytest.param("stacked", THREE, {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("sliced", TWO, {}, marks=pytest.mark.slow),
        pytest.param("split", THREE, {}, marks=pytest.mark.slow),
        pytest.param("sliced", THREE, {}, marks=pytest.mark.slow),
    ],
)
def test_fused_weights_compile_to_the_exchanges_of_separate_ones(form, mesh, options):
    with jax.enable_x64(True):
        params, batch = parameters(form), examples()
        parallel = splitjax.parallelize(step(form, **options), mesh=mesh, rules="megatron", donate=False)
        expected, found = jax.jit(step(form))(params, batch), parallel(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)
        report, plan = parallel.report(params, batch), parallel.plan(params, batch)
    if options:
        return
    assert [one for one in report.unplanned if one.compiled.shape] == [] and report.missing == ()
    moves = [one for one in report.collectives if one.op in ("collective_permute", "all_to_all")]
    assert bool(moves) == (form != "separate")
    assert report.total.compiled_bytes - 8 * len(report.unplanned) <= report.total.predicted_bytes
    said = [note for note in plan.notes if "dealt out over tensor" in note]
    assert len(said) == (0 if form == "separate" else 3)


def test_fused_weights_are_dealt_out_outside_of_the_gradient_and_in_it():
    """A teacher, or a target that the step works out before, has the same products as the loss."""

    def train(params, batch):
        goal = loss(params, batch, "split")
        value, grads = splitjax.value_and_grad(lambda params, batch: (loss(params, batch, "split") - goal / 2) ** 2)(
            params, batch
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with jax.enable_x64(True):
        params, batch = parameters("split"), examples()
        parallel = splitjax.parallelize(train, mesh=TWO, rules="megatron", donate=False)
        expected, found = jax.jit(train)(params, batch), parallel(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)
        said = [note for note in parallel.plan(params, batch).notes if "dealt out over tensor" in note]
    assert len(said) == 3


def block(params, batch):
    """A block of a transformer, whose second half reads the first one's sum with the residual stream."""
    parts = jnp.split(batch["x"] @ params["qkv"] + params["bias"], 3, -1)
    q, k, v = (part.reshape(*part.shape[:-1], HEADS, SIZE) for part in parts)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), -1)
    attended = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch["x"].shape)
    x = batch["x"] + attended @ params["o"]
    gate, up = jnp.split(x @ params["mlp"], 2, -1)
    return jnp.mean((x + (jax.nn.silu(gate) * up) @ params["down"] - batch["y"]) ** 2)


def block_step(params, batch):
    value, grads = splitjax.value_and_grad(block)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def test_a_fused_weight_behind_another_is_dealt_out_too_also_where_the_step_is_evaluated():
    with jax.enable_x64(True):
        params, batch = parameters("split"), examples()
        parallel = splitjax.parallelize(block_step, mesh=TWO, rules="megatron", donate=False)
        evaluated = parallel.like(block)
        found, expected = parallel(params, batch), jax.jit(block_step)(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, (found, evaluated(params, batch)), (expected, expected[1]))
        plans = [decorated.plan(params, batch) for decorated in (parallel, evaluated)]
        reports = [decorated.report(params, batch) for decorated in (parallel, evaluated)]
        pinned = splitjax.parallelize(block_step, mesh=TWO, plan=plans[0]).plan(params, batch)
    for plan, report in zip(plans, reports, strict=True):
        assert [one for one in report.unplanned if one.compiled.shape] == [] and report.missing == ()
        assert len([note for note in plan.notes if "dealt out over tensor" in note]) == 3
    assert pinned.collectives == plans[0].collectives


def test_gradients_of_fused_weights_are_summed_into_the_parts_that_are_stored():
    """Their columns are dealt out over tensor, and they are stored over data and fsdp: XLA summed their gradients
    whole, twice the bytes, where the product was left to it."""
    with jax.enable_x64(True):
        params, batch = parameters("split"), examples()
        parallel = splitjax.parallelize(block_step, mesh=THREE, rules="transformer", donate=False)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), jax.jit(block_step)(params, batch))
        report = parallel.report(params, batch)
    stored = [one for one in report.collectives if one.axis == "data+fsdp" and one.compiled.shape]
    assert [one for one in stored if one.differs] == []
    assert sum(one.op == "reduce_scatter" for one in stored) == 4  # the bias is whole, and all-reduced as planned


def test_a_fused_weight_that_is_reshaped_before_its_product_is_planned():
    def of(params, batch):
        gate, up = jnp.einsum("btd,dph->pbth", batch["x"], params["mlp"].reshape(WIDTH, 2, HIDDEN))
        return jnp.mean(((jax.nn.silu(gate) * up) @ params["down"] - batch["y"]) ** 2)

    def train(params, batch):
        value, grads = splitjax.value_and_grad(of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {name: leaf for name, leaf in parameters("split").items() if name in ("mlp", "down")}
    plan = splitjax.parallelize(train, mesh=TWO, rules="megatron").plan(params, examples())
    assert {leaf.path: leaf.spec for leaf in plan.leaves}["mlp"] == (None, "tensor")


def moved(moves, columns):
    """What devices hold after the moves, a row each: no device sends or receives twice in a round."""
    units = columns.reshape(moves.num, moves.places, moves.unit)
    shares = np.full_like(units, -1)
    for edges in (moves.kept, *moves.rounds):
        for source, place, to, at in edges:
            shares[to, at] = units[source, place]
    for edges in moves.rounds:
        assert len({edge[0] for edge in edges}) == len({edge[2] for edge in edges}) == len(edges)
    sent = [sum(edge[0] == device for edges in moves.rounds for edge in edges) for device in range(moves.num)]
    assert len(moves.rounds) == max(sent)  # no more rounds than the busiest device has units to send
    return shares.reshape(moves.num, -1)


@pytest.mark.parametrize(("sizes", "num"), [((32, 32, 32), 4), ((64, 16, 16), 2), ((12, 12), 6), ((40, 8, 8), 8)])
def test_moves_deal_every_column_out_in_rounds_of_one_unit(sizes, num):
    columns = np.arange(sum(sizes))
    parts = np.split(columns, np.cumsum(sizes)[:-1])
    wanted = np.concatenate([part.reshape(num, -1) for part in parts], axis=1)
    np.testing.assert_array_equal(moved(find_moves(sizes, num), columns), wanted)


@pytest.mark.parametrize(
    ("sizes", "stored", "num"),
    [((100, 100, 100), (112, 112, 112), 4), ((20, 4, 4), (24, 8, 8), 4), ((5, 5), (6, 6), 2), ((12, 8), (12, 12), 3)],
)
def test_moves_deal_padding_out_behind_every_part(sizes, stored, num):
    real = np.arange(sum(sizes))
    shares = moved(find_moves(sizes, num, stored), np.concatenate([real, np.full(sum(stored) - sum(sizes), -7)]))
    parts = np.split(real, np.cumsum(sizes)[:-1])
    wide = [np.pad(part, (0, n - len(part)), constant_values=-7) for part, n in zip(parts, stored, strict=True)]
    np.testing.assert_array_equal(shares, np.concatenate([part.reshape(num, -1) for part in wide], axis=1))


def interleaved(params, x):
    return jnp.split((x @ params["w"]).reshape(*x.shape[:-1], 4, 12), 3, -1)


def used_whole(params, x):
    y = x @ params["w"]
    return [*jnp.split(y, 3, -1), y.sum()]


def grouped(params, x):
    q, kv = jnp.split((x @ params["w"]).reshape(*x.shape[:-1], 12, 4), [8], -2)
    return [q, *jnp.split(kv, 2, -2)]


def padded_behind(part, num):
    """With `num` zeros behind its last dim."""
    return jax.lax.pad(part, np.zeros((), part.dtype), [(0, 0, 0)] * (part.ndim - 1) + [(0, num, 0)])


def with_wider_heads(params, x):
    """A kernel wants heads of sixteen: the program pads them, and no padding is stored."""
    parts = jnp.split(x @ params["w"], 3, -1)
    return [padded_behind(part.reshape(*x.shape[:-1], 2, 8), 8) for part in parts]


def beside_a_gate(params, x):
    """Three parts are padded by what the fourth has: it is no padding."""
    *parts, gate = jnp.split(x @ params["w"], [10, 20, 30], -1)
    return [*(padded_behind(part, 6) for part in parts), gate]


def with_stored_padding(params, x):
    return [padded_behind(part, 4) for part in jnp.split((x @ params["w"])[..., :36], 3, -1)]


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (with_wider_heads, Parts((16,) * 3, (16,) * 3, (2,) * 3)),
        (beside_a_gate, Parts((10, 10, 10, 18), (10, 10, 10, 18), (None,) * 4)),
        (with_stored_padding, Parts((12,) * 3, (16,) * 3, (None,) * 3)),
        (
            lambda params, x: split({"qkv": params["w"], "bias": 0.0, "mlp": params["w"]}, x)[0],
            Parts((16,) * 3, (16,) * 3, (None,) * 3),
        ),
        (grouped, Parts((32, 8, 8), (32, 8, 8), (8, 2, 2))),
        (interleaved, None),
        (used_whole, None),
    ],
)
def test_parts_are_found_where_the_result_is_used_in_parts_alone(function, parts):
    jaxpr = jax.make_jaxpr(function)({"w": np.ones((WIDTH, 48))}, np.ones((2, 3, WIDTH)))
    (site,) = [(n,) for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"][:1]
    assert find_parts(jaxpr, [(site, 1, 1, 2)]) == [parts]
    assert parts is None or (parts.fit(2) and not parts.fit(3 if parts.heads[0] is None else 4))


@pytest.mark.parametrize(("kv", "mesh", "whole"), [(2, TWO, "kv"), (1, TWO, "kv"), (HEADS, {"tensor": 8}, "qkvo")])
def test_no_head_is_cut_through(kv, mesh, whole):
    params, batch = parameters("separate", kv), examples()
    plan = splitjax.parallelize(step("separate", kv), mesh=mesh, rules="megatron").plan(params, batch)
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    assert all((leaves[name].axes == ()) == (name in whole) for name in "qkvo")
    assert any("none is cut through" in note and note.startswith("k: ") for note in plan.notes)


def test_devices_that_share_heads_have_the_numbers_of_one():
    with jax.enable_x64(True):
        params, batch = parameters("separate", 2), examples()
        parallel = splitjax.parallelize(step("separate", 2), mesh=TWO, rules="megatron", donate=False)
        expected, found = jax.jit(step("separate", 2))(params, batch), parallel(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)


def test_a_fused_weight_whose_heads_devices_do_not_share_evenly_is_noted():
    def train(params, batch):
        def of(params):
            q, k, v = jnp.split(batch["x"] @ params["qkv"], [48, 60], -1)
            heads = lambda x, count: jnp.repeat(x.reshape(*x.shape[:-1], count, SIZE), 12 // count, -2)
            weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", heads(q, 12), heads(k, 3)), -1)
            out = jnp.einsum("bhts,bshd->bthd", weights, heads(v, 3))
            return jnp.mean((out.reshape(*out.shape[:2], -1) @ params["o"] - batch["y"]) ** 2)

        value, grads = splitjax.value_and_grad(of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"qkv": jnp.ones((WIDTH, 72)), "o": jnp.ones((48, WIDTH))}
    plan = splitjax.parallelize(train, mesh=TWO, rules="megatron").plan(params, examples())
    assert any("of 3 heads that it holds side by side (48, 12, 12)" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("parts", "num", "copied"),
    [
        (Parts((32, 8, 8), (32, 8, 8), (8, 2, 2)), 4, (False, True, True)),
        (Parts((8, 2, 2), (8, 2, 2), (None, None, None)), 4, (False, True, True)),
        (Parts((8, 32, 8), (8, 32, 8), (2, 8, 2)), 4, (True, False, True)),
        (Parts((32, 8, 8), (40, 8, 8), (8, 2, 2)), 4, None),  # padded
        (Parts((32, 12, 12), (32, 12, 12), (8, 3, 3)), 4, None),  # three heads for four devices
        (Parts((8, 8), (8, 8), (2, 2)), 4, None),  # nothing is dealt out
        (Parts((32, 1, 32), (32, 1, 32), (8, 1, 8)), 4, None),  # a single column
    ],
)
def test_parts_of_fewer_heads_than_devices_are_copied(parts, num, copied):
    assert not parts.fit(num) and parts.copied(num) == copied


def test_a_fused_weight_whose_gradient_is_stopped_is_dealt_out_too():
    """A teacher's, beside a student's of the same shape: XLA took the place of a device out of the region that knows it
    (`PartitionId instruction is not supported`)."""
    dino = next(each for each in every_step() if each.name == "DINO, large and small crops")
    with jax.enable_x64(True):
        problem = dino.make(dino.dtype)
        step = splitjax.parallelize(problem.step, mesh={"data": 2, "tensor": 4}, rules="splitbrain", donate=False)
        assert any("dealt out" in note for note in step.plan(problem.state, problem.batches[0]).notes)
        state = step.place(problem.state, example=(problem.batches[0],))
        got, want = step(state, problem.batches[0]), jax.jit(problem.step)(problem.state, problem.batches[0])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), got[1], want[1])


def test_a_fused_weight_whose_gradient_jax_takes_is_noted_with_the_remedy():
    def train(params, batch, value_and_grad=jax.value_and_grad):
        value, grads = value_and_grad(lambda p: loss(p, batch, "split"))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    plan = lambda step: splitjax.parallelize(step, mesh=TWO, rules="megatron").plan(parameters("split"), examples())
    noted = [note for note in plan(train).notes if "side by side" in note]
    assert [note.split(",")[0] for note in noted] == [
        "qkv: holds 3 weights side by side (16",
        "mlp: holds 2 weights side by side (32",
    ]
    assert all("take the gradient by splitjax.value_and_grad, which deals" in note for note in noted)
    remedied = plan(functools.partial(train, value_and_grad=splitjax.value_and_grad))
    assert not any("take the gradient" in note for note in remedied.notes)
