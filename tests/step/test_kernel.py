"""`splitjax.kernel`: a kernel is kept whole in a step, and runs on each device's part, forward and backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import splitjax
from splitjax.errors import KernelError, PlanError, TraceError, UnknownPrimitiveError
from splitjax.step.kernel_derivative import derivative
from tests.step.pallas_kernels import attention, rms_norm

DIMS = "b s h d, b t h d, b t h d -> b s h d"
kept_attention = splitjax.kernel(attention, dims=DIMS, whole="s d")
kept_norm = splitjax.kernel(rms_norm, dims="b s f, f -> b s f", whole="f")


def network(attend, norm):
    """A loss of one attention layer with a norm before it."""

    def loss_fn(params, batch):
        x = norm(batch["x"], params["scale"])
        q, k, v = (jnp.einsum("bsf,fhd->bshd", x, params[name]) for name in ("q", "k", "v"))
        out = jnp.einsum("bshd,hdf->bsf", attend(q, k, v), params["out"])
        return ((x + out - batch["y"]) ** 2).mean()

    return loss_fn


def train(loss_fn, **options):
    differentiate = options.pop("differentiate", splitjax.value_and_grad)

    def step(params, batch):
        loss, gradients = differentiate(loss_fn, **options)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), (loss, gradients)

    return step


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("f") * 0.3
    params = {"scale": draw(32), "q": draw(32, 4, 8), "k": draw(32, 4, 8), "v": draw(32, 4, 8), "out": draw(4, 8, 32)}
    return params, {"x": draw(8, 6, 32), "y": draw(8, 6, 32)}


@pytest.fixture(scope="module")
def expected(data):
    step = train(network(attention, rms_norm), differentiate=jax.value_and_grad)
    return jax.device_get(jax.jit(step)(*data))


def close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


RULES = ["data_parallel", "megatron", "fsdp"]


FIRST = {("boundary", "megatron"), ("plain", "data_parallel"), ("microbatches", "megatron")}


@pytest.mark.parametrize(
    ("how", "rules"),
    [
        pytest.param(how, rules, marks=() if (how, rules) in FIRST else pytest.mark.slow)
        for how in ("boundary", "plain", "microbatches")
        for rules in RULES
    ],
)
def test_numbers_are_those_of_one_device(rules, how, data, expected):
    options = {
        "boundary": {},
        "plain": {"differentiate": jax.value_and_grad},
        "microbatches": {"microbatches": 2},
    }[how]
    mesh = {"data": 2, "model": 2} if rules == "megatron" else {"data": 4}
    step = splitjax.parallelize(
        train(network(kept_attention, kept_norm), **options), mesh=mesh, rules=rules, donate=False
    )
    state = step.place(data[0], example=(data[1],))
    plan = step.plan(state, data[1])
    (note,) = [note for note in plan.notes if note.startswith("kernel attention at")]
    assert "b over data" in note and ("h over model" in note) == (rules == "megatron")
    close(step(state, data[1]), expected)


def test_nothing_is_sent_for_a_kernel(data):
    """A step sends what it sends with attention and norm of plain operations."""

    def plain_attention(q, k, v):
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k)), v)

    def plain_norm(x, scale):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    sent = []
    for loss_fn in (network(kept_attention, kept_norm), network(plain_attention, plain_norm)):
        step = splitjax.parallelize(train(loss_fn), mesh={"data": 2, "model": 2}, rules="megatron", donate=False)
        report = step.report(step.place(data[0], example=(data[1],)), data[1])
        sent.append({key: (total.compiled_count, total.compiled_bytes) for key, total in report.by_op.items()})
    assert sent[0] == sent[1] and set(sent[0]) == {("all_reduce", "data"), ("all_reduce", "model")}


def test_on_one_device_it_is_the_call(data, expected):
    step = splitjax.parallelize(
        train(network(kept_attention, kept_norm)), mesh={"data": 1}, rules="data_parallel", donate=False
    )
    plan = step.plan(*data)
    assert not [note for note in plan.notes if "kernel" in note]
    assert "manual" not in step.lower(*data).as_text()
    close(step(*data), expected)
    q = jnp.ones((2, 3, 2, 4))
    assert (kept_attention(q, q, q) == attention(q, q, q)).all()  # outside of a step, too
    close(
        jax.jit(jax.grad(lambda q: kept_attention(q, q, q).sum()))(q), jax.grad(lambda q: attention(q, q, q).sum())(q)
    )


def test_the_backward_pass_starts_from_what_the_forward_pass_kept():
    q = jax.ShapeDtypeStruct((4, 6, 2, 8), "float32")
    fn = lambda *operands: [attention(*operands)]
    found = derivative(fn, kept_attention.dims, [q, q, q])
    assert found.kept == (0, 1, 2) and found.positions == (0, 1, 2)
    assert found.forward[1].results == ("b s h d", "b h _")  # the sums of the weights
    assert found.backward[1].operands == (*kept_attention.dims.operands, "b h _", "b s h d")
    text = str(jax.make_jaxpr(jax.grad(lambda q: kept_attention(q, q, q).sum()))(q))
    assert text.count("splitjax_kernel[") == 2 and text.count("name=attention_backward") == 1


def test_a_kernel_that_takes_one_size_runs_its_forward_pass_again():
    def picky(x):
        if x.shape[0] % 4:
            raise ValueError("blocks of 4")
        return jnp.sin(x) * x.sum(-1, keepdims=True)

    found = derivative(
        lambda x: [picky(x)],
        splitjax.kernel(picky, "b f -> b f", whole="f").dims,
        [jax.ShapeDtypeStruct((4, 6), "float32")],
    )
    assert found.kept == (0,) and found.forward[1].results == ("b f",)
    kept = splitjax.kernel(picky, "b f -> b f", whole="f")
    x = jnp.arange(48.0).reshape(8, 6)
    close(
        jax.jit(jax.grad(lambda x: kept(x).sum()))(x[:4]),
        jax.grad(lambda x: picky(x).sum())(x[:4]),
    )


def test_labels_of_factors_leading_dims_and_examples_of_vmap():
    product = splitjax.kernel(lambda x, w: jnp.tanh(x @ w.reshape(len(w), -1)), "... k, k h d -> ... (h d)")

    def loss_fn(params, x):
        hidden = jax.vmap(lambda row: product(row, params["up"]))(x)
        return (hidden.reshape(*x.shape[:2], 4, 8) * params["down"]).sum() / x.shape[0]

    rng = np.random.default_rng(1)
    params = {"up": rng.normal(size=(16, 4, 8)).astype("f"), "down": rng.normal(size=(4, 8)).astype("f")}
    x = rng.normal(size=(8, 3, 16)).astype("f")
    rules = splitjax.RuleSet("columns", [splitjax.Rule("up", path="up", shard={1: "model"})], replicated_batch="data")
    step = splitjax.parallelize(train(loss_fn), mesh={"data": 2, "model": 2}, rules=rules, donate=False)
    plan = step.plan(params, x)
    (note,) = [note for note in plan.notes if note.startswith("kernel <lambda> at")]
    assert "batch0 over data" in note and "h over model" in note
    close(step(params, x), jax.jit(train(loss_fn, differentiate=jax.value_and_grad))(params, x))


@pytest.mark.slow
def test_layers_in_a_scan_that_are_computed_again(data):
    def loss_fn(params, batch):
        layer = network(kept_attention, kept_norm)
        block = jax.checkpoint(lambda x, params: layer(params, {"x": x, "y": 0 * x}) * 1e-3 + x)
        x, _ = jax.lax.scan(lambda x, params: (block(x, params), None), batch["x"], params)
        return ((x - batch["y"]) ** 2).mean()

    params = jax.tree.map(lambda p: np.stack([p, 0.5 * p]), data[0])
    expected = jax.jit(train(loss_fn, differentiate=jax.value_and_grad))(params, data[1])
    step = splitjax.parallelize(train(loss_fn), mesh={"data": 2, "model": 2}, rules="megatron", donate=False)
    assert any("h over model" in note for note in step.plan(params, data[1]).notes)
    close(step(params, data[1]), expected)


@jax.custom_vjp
def cholesky(x):
    """The Cholesky factors of matrices [b, n, n], by a foreign call of LAPACK."""
    columns = (0, 2, 1)
    out, _ = jax.ffi.ffi_call(
        "lapack_spotrf_ffi",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], "int32")),
        input_layouts=[columns],
        output_layouts=[columns, (0,)],
        input_output_aliases={0: 0},
    )(x, uplo=np.uint8(ord("L")))
    return jnp.tril(out)


cholesky.defvjp(lambda x: (cholesky(x), x), lambda x, ct: jax.vjp(jnp.linalg.cholesky, x)[1](ct))


def test_a_foreign_call():
    jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()  # JAX registers LAPACK when it is first used
    factors = splitjax.kernel(cholesky, "b n m -> b n m", whole="n m")

    def loss_fn(params, batch):
        x = jnp.einsum("bnf,fg->bng", batch["x"], params["w"])
        spread = jnp.einsum("bng,bmg->bnm", x, x) + jnp.eye(x.shape[1])
        return (batch["factors"](spread) ** 2).sum((1, 2)).mean()

    rng = np.random.default_rng(0)
    params, x = {"w": rng.normal(size=(4, 5)).astype("f")}, rng.normal(size=(8, 3, 4)).astype("f")
    of = lambda function: lambda params, x: loss_fn(params, {"x": x, "factors": function})
    expected = jax.jit(train(of(jnp.linalg.cholesky), differentiate=jax.value_and_grad))(params, x)
    step = splitjax.parallelize(train(of(factors)), mesh={"data": 4}, rules="data_parallel", donate=False)
    close(step(step.place(params, example=(x,)), x), expected)
    with pytest.raises(UnknownPrimitiveError, match="lapack_spotrf_ffi"):
        splitjax.parallelize(train(of(cholesky)), mesh={"data": 4}, rules="data_parallel").plan(params, x)


def test_of_weights_alone_it_runs_before_the_microbatches(data):
    squashed = splitjax.kernel(lambda w: jnp.tanh(w) * w, "f h d -> f h d", whole="f d")

    def loss_fn(params, batch):
        hidden = jnp.einsum("bsf,fhd->bshd", batch["x"], squashed(params["q"]))
        return ((jnp.einsum("bshd,hdf->bsf", hidden, params["out"]) - batch["y"]) ** 2).mean()

    params = {name: data[0][name] for name in ("q", "out")}
    expected = jax.jit(train(loss_fn, differentiate=jax.value_and_grad))(params, data[1])
    for rules, mesh in (("data_parallel", {"data": 2}), ("megatron", {"data": 2, "model": 2})):
        step = splitjax.parallelize(train(loss_fn, microbatches=2), mesh=mesh, rules=rules, donate=False)
        close(step(step.place(params, example=(data[1],)), data[1]), expected)


def test_under_an_explicit_mesh(data, expected):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    step = splitjax.parallelize(train(network(kept_attention, kept_norm)), mesh=mesh, rules="megatron", donate=False)
    with jax.set_mesh(mesh):
        close(step(step.place(data[0], example=(data[1],)), data[1]), expected)


def test_inside_a_rule_of_the_users_own_it_is_refused(data):
    @jax.custom_vjp
    def ruled(q, k, v):
        return kept_attention(q, k, v)

    ruled.defvjp(lambda *operands: (ruled(*operands), operands), lambda kept, ct: jax.vjp(attention, *kept)[1](ct))
    step = splitjax.parallelize(train(network(ruled, kept_norm)), mesh={"data": 4}, rules="data_parallel")
    with pytest.raises(PlanError, match="derivative rule of its own") as caught:
        step.plan(*data)
    assert "splitjax.kernel" in caught.value.remedy and "test_kernel.py" in caught.value.place


@pytest.mark.parametrize(
    ("dims", "whole", "says"),
    [
        ("b s h d, b t h d", "", "has one ->"),
        ("b s h d -> b s (h d", "", "bracket is not closed"),
        ("b b -> b", "", "stands twice in one array"),
        ("b s -> b s", "t", "no label 't'"),
        (3, "", "dims is a notation"),
    ],
)
def test_dims_that_contradict_themselves(dims, whole, says):
    with pytest.raises(TraceError, match=says):
        splitjax.kernel(attention, dims, whole=whole)


def test_calls_that_do_not_fit():
    q = jnp.ones((2, 3, 2, 4))
    for dims, error, says in [
        ("b s h d, b t h d -> b s h d", KernelError, "2 operands, the call 3"),
        ("b s h d, b t h d, b t h d -> b s h d, b h s", KernelError, "2 results, the kernel gives 1"),
        ("b s h d, b t h d, b t h d -> b s d", TraceError, "does not fit a tensor"),
        ("b s h d, b t h d, b t h d -> b s d h", TraceError, "label 'd' has sizes"),
    ]:
        with pytest.raises(error, match=says):
            jax.make_jaxpr(splitjax.kernel(attention, dims))(q, q, q)
    scaled = splitjax.kernel(lambda x, *, by: x * by, "b -> b")
    assert jax.jit(functools.partial(scaled, by=2.0))(jnp.ones(3)).sum() == 6
    with pytest.raises(KernelError, match="passed by keyword"):
        jax.jit(lambda x: scaled(x, by=x))(jnp.ones(3))
    with pytest.raises(KernelError, match="closes over a traced array") as caught:
        jax.jit(lambda x, mask: splitjax.kernel(lambda x: x * mask, "b -> b")(x))(jnp.ones(3), jnp.ones(3))
    assert "by position" in caught.value.remedy


def test_a_promise_that_does_not_hold_is_found():
    q = jax.random.normal(jax.random.key(0), (2, 2, 2, 2))
    kept_attention.check(q, q, q)
    with pytest.raises(KernelError, match="on halves along 'd'") as caught:
        splitjax.kernel(attention, DIMS).check(q, q, q)
    assert "whole='d'" in caught.value.remedy
