"""Microbatches never change the numbers: float64 against the gradient of the whole batch."""

from __future__ import annotations

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from splitjax.errors import MicrobatchError
from splitjax.lower.gradient import grad, value_and_grad
from tests.lower.microbatch.microbatch_harness import build, check, compare, make_mesh, step_of

B, T, F, H, C = 16, 3, 6, 8, 5


@pytest.fixture(autouse=True)
def double_precision():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def batch_of(num=B):
    rng = np.random.default_rng(1)
    return {
        "x": jnp.asarray(rng.normal(size=(num, F))),
        "y": jnp.asarray(rng.integers(0, C, size=num)),
        # Uneven on purpose: some microbatches have no valid example at all.
        "mask": jnp.asarray(np.arange(num) % 7 > 3, jnp.float64),
        "seq": jnp.asarray(rng.normal(size=(num, T, F))),
        "tokens": jnp.asarray(rng.integers(0, 11, size=(num, T))),
        "image": jnp.asarray(rng.normal(size=(num, 8, 8, 2))),
    }


def mlp_params():
    return {
        "w1": normal(2, F, H) / 3,
        "b1": normal(3, H) / 3,
        "w2": normal(4, H, C) / 3,
        "b2": normal(5, C),
        "s": normal(6, 3, H, H) / 5,
    }


def logits_of(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def nll_of(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, b["x"]), b["y"])


def masked_mean(p, b):
    return (nll_of(p, b) * b["mask"]).sum() / b["mask"].sum()


def indexed(p, b):
    log = jax.nn.log_softmax(logits_of(p, b["x"]))
    return -log[jnp.arange(log.shape[0]), b["y"]].mean()


def smoothed(p, b):
    labels = optax.smooth_labels(jax.nn.one_hot(b["y"], C), 0.1)
    return optax.softmax_cross_entropy(logits_of(p, b["x"]), labels).mean()


def safe_weighted(p, b):
    total = (nll_of(p, b) * b["mask"] * (b["y"] + 1)).sum()
    weight = (b["mask"] * (b["y"] + 1)).sum()
    return jnp.where(weight > 0, total / jnp.maximum(weight, 1.0), 0.0)


def penalised(p, b):
    return nll_of(p, b).mean() + 1e-2 * optax.tree.norm(p, squared=True) + 0.3 * jnp.abs(p["w1"]).max()


def scaled_by_parameter(p, b):
    return nll_of(p, b).mean() * jnp.exp(p["b2"][0]) / (1 + p["b2"][1] ** 2)


def class_weights(p, b):  # weights from the label counts of the whole batch
    counts = jnp.zeros(C).at[b["y"]].add(1.0)
    return (nll_of(p, b) / (counts + 1.0)[b["y"]]).mean()


def layers_scanned(p, b):
    h = jnp.tanh(b["x"] @ p["w1"])
    h, norms = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), (h**2).mean()), h, p["s"])
    return (h**2).mean() + norms.sum()


def scanned_remat(p, b):
    body = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w) * b["mask"][:, None] / b["mask"].sum(), None))
    return (lax.scan(body, jnp.tanh(b["x"] @ p["w1"]), p["s"])[0] ** 2).mean()


def remat_with_policy(p, b):
    f = jax.checkpoint(
        lambda p, x: jnp.sin(jnp.tanh(x @ p["w1"]) @ p["w2"]), policy=jax.checkpoint_policies.dots_saveable
    )
    return (f(p, b["x"]) ** 2 * b["mask"][:, None]).sum() / b["mask"].sum()


def jitted_inside(p, b):
    @jax.jit
    def inner(p, x, mask):
        return (jnp.tanh(x @ p["w1"]).sum(-1) * mask).sum() / mask.sum()

    return inner(p, b["x"], b["mask"]) + jax.jit(nll_of)(p, b).mean()


@jax.custom_vjp
def soft(x):
    return jnp.tanh(x)


soft.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (jnp.clip(ct * 2 * (1 - jnp.tanh(x) ** 2), -0.01, 0.01),))


soft_mean = jax.custom_jvp(lambda x: jnp.tanh(x).mean())
soft_mean.defjvp(lambda primals, tangents: (soft_mean(*primals), (tangents[0] * jnp.cosh(primals[0])).mean()))


def custom_rules(p, b):
    return (soft(b["x"] @ p["w1"]).sum(-1) * b["mask"]).sum() / b["mask"].sum() + jax.nn.silu(
        jax.nn.relu(b["x"] @ p["w1"])
    ).mean()


def relu_of_weights(p, b):
    """Functions with their own derivative rule on what all examples share."""
    w = jax.nn.relu(p["w1"]) + jax.nn.softplus(p["w1"]) - jax.nn.silu(p["w1"])
    return (b["x"] @ w).std(-1).mean() * jax.nn.relu6(p["b1"]).sum()


def time_major(p, b):
    xs = jnp.swapaxes(b["seq"], 0, 1)
    h = lax.scan(lambda h, x: ((n := jnp.tanh(x @ p["w1"] + h @ p["s"][0])), n), jnp.zeros((xs.shape[1], H)), xs)[1]
    flat = h.reshape(-1, H) @ p["w2"]  # time x batch merged: the batch is the minor factor
    per = flat.reshape(T, -1, C) * b["mask"][None, :, None]
    return (per**2).sum() / b["mask"].sum() + (flat**2).mean()


def merged(p, b):
    flat = b["seq"].reshape(-1, F)
    y = jnp.repeat(b["y"], T)
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, flat), y).mean()


def per_example(p, b):
    def of_example(x, y):
        return -jax.nn.log_softmax(logits_of(p, x))[y]

    return jax.vmap(of_example)(b["x"], b["y"]).mean()


def mapped(p, b):
    return lax.map(lambda x: jnp.sin(x @ p["w1"]).sum(), b["x"]).mean()


def conditional(p, b):
    h = lax.cond(b["mask"].sum() > 3, lambda x: jnp.tanh(x @ p["w1"]), lambda x: x @ p["w1"], b["x"])
    return (
        lax.switch(jnp.argmax(p["b1"]) % 3, [lambda h: h.sum(), lambda h: (h**2).mean(), lambda h: 0.0], h)
        + (h**2).mean()
    )


def accumulated_in_scan(p, b):
    """A sum over examples carried through a loop over time, next to a count of the mask."""

    def body(carry, x):
        total, count = carry
        return (0.9 * total + (jnp.sin(x @ p["w1"]).sum(-1) * b["mask"]).sum(), count + b["mask"].sum()), None

    (total, count), _ = lax.scan(body, (1.0, 0.5), jnp.swapaxes(b["seq"], 0, 1))
    return total / count


def dotted(p, b):  # the sum over examples as a product
    return (
        jnp.dot(nll_of(p, b), b["mask"]) / b["mask"].sum()
        + jnp.einsum("bf,bg->fg", jnp.tanh(b["x"] @ p["w1"]), b["x"]).sum()
    )


def attention(p, b):
    q = b["seq"] @ p["w1"]
    scores = jnp.einsum("bqd,bkd->bqk", q, q) + jnp.where(jnp.tril(jnp.ones((T, T))), 0.0, -1e9)
    return (jax.nn.softmax(scores) @ q).mean()


def embedded(p, b):
    e = p["s"].reshape(-1, H)[b["tokens"]]
    return (e.mean(1) @ p["w2"]).std(-1).mean()


def ranked(p, b):
    top, where = lax.top_k(logits_of(p, b["x"]), 2)
    return (
        (top[:, 0] - top[:, 1]).mean()
        + jnp.take_along_axis(b["x"] @ p["w1"], where, 1).sum()
        + jnp.sort(b["x"] @ p["w1"], -1)[:, 0].sum()
    )


def two_views(p, b):
    both = jnp.concatenate([b["x"], b["x"] * 2])  # a dim of two batches
    h = jnp.tanh(both @ p["w1"])
    left, right = jnp.split(h, 2)
    return (left * right).sum() / left.shape[0] + (h[: h.shape[0] // 2] ** 2).mean()


def tiled(p, b):
    h = jnp.tile(jnp.tanh(b["x"] @ p["w1"]), (3, 2))
    return (h * jnp.concatenate([b["mask"]] * 3)[:, None]).sum() / b["mask"].sum()


def centred_input(p, b):  # batch statistics of what does not depend on parameters
    x = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
    return (jnp.tanh(x @ p["w1"]) ** 2).mean()


def constant_per_example(p, b):
    weights = np.linspace(0, 1, b["x"].shape[0]) ** 2
    return (nll_of(p, b) * weights).sum() / weights.sum() + (nll_of(p, b) * jnp.arange(b["x"].shape[0])).sum()


LOSSES = [
    masked_mean,
    indexed,
    smoothed,
    safe_weighted,
    penalised,
    scaled_by_parameter,
    class_weights,
    layers_scanned,
    scanned_remat,
    remat_with_policy,
    jitted_inside,
    custom_rules,
    relu_of_weights,
    time_major,
    merged,
    per_example,
    mapped,
    conditional,
    accumulated_in_scan,
    dotted,
    attention,
    embedded,
    ranked,
    two_views,
    tiled,
    centred_input,
    constant_per_example,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_same_numbers(loss):
    check(loss, mlp_params(), batch_of(), 4)


@pytest.mark.parametrize(
    "loss",
    [
        masked_mean,
        indexed,
        scanned_remat,
        time_major,
        accumulated_in_scan,
        custom_rules,
        constant_per_example,
        conditional,
        mapped,
    ],
    ids=lambda f: f.__name__,
)
def test_same_numbers_on_a_mesh(loss):
    check(loss, mlp_params(), batch_of(), 2, mesh=make_mesh(data=4, model=2))


@pytest.mark.one_version
@pytest.mark.parametrize("num", [1, 2, 8, 16])
def test_any_number_of_microbatches(num):
    check(masked_mean, mlp_params(), batch_of(), num)


@pytest.mark.parametrize(
    "loss",
    [indexed, scanned_remat, custom_rules, time_major, merged, two_views, per_example, mapped, penalised],
    ids=lambda f: f.__name__,
)
def test_one_example_at_a_time(loss):
    """With one example JAX traces other operations (`take_along_axis`), so the loop is run from a trace with two."""
    check(loss, mlp_params(), batch_of(), B)
    check(loss, mlp_params(), batch_of(2), 2)


@pytest.mark.parametrize(
    "axes, batch_axes, manual",
    [
        ({"data": 8}, ("data",), None),
        ({"data": 4, "model": 2}, ("data", "model"), ("data",)),
        pytest.param({"data": 2, "model": 4}, ("data", "model"), (), marks=pytest.mark.one_version),
        pytest.param({"data": 4, "model": 2}, ("data", "model"), ("data", "model"), marks=pytest.mark.one_version),
        pytest.param(
            {"replica": 2, "data": 2, "model": 2}, ("replica", "data"), ("data",), marks=pytest.mark.one_version
        ),
    ],
)
def test_batch_axes(axes, batch_axes, manual):
    def loss(p, b):
        per = nll_of(p, b)
        return (per * b["mask"]).sum() / b["mask"].sum(), {"per": per, "counted": jnp.arange(per.shape[0]) * per}

    check(loss, mlp_params(), batch_of(), 2, has_aux=True, mesh=make_mesh(**axes), batch_axes=batch_axes, manual=manual)


# Auxiliary results.


def with_metrics(p, b):
    logits = logits_of(p, b["x"])
    per = optax.softmax_cross_entropy_with_integer_labels(logits, b["y"])
    loss = (per * b["mask"]).sum() / b["mask"].sum()
    hit = (logits.argmax(-1) == b["y"]) * b["mask"]
    return loss, {
        "accuracy": hit.sum() / b["mask"].sum(),
        "hits": (logits.argmax(-1) == b["y"]).sum(),
        "perplexity": jnp.exp(loss),
        "logits": logits,
        "per": per,
        "worst": per.max(),
        "worst example": per.argmax(),
        "hardest": lax.top_k(per, 2),
        "sorted": jnp.sort(per),
        "norm": optax.tree.norm(p),
        "valid": b["mask"].sum(),
        "mean": logits.mean(0),
        "variance": logits.var(0),
        "similarity": logits @ logits.T,
        "f1": 2 * hit.sum() / (hit.sum() + b["mask"].sum()),
        "p": p["b1"],
        "x": b["x"],
        "constant": 3.0,
        "predictions": logits.argmax(-1),
    }


@pytest.mark.parametrize("where", [{}, {"mesh": (4, 2)}], ids=["one device", "mesh"])
def test_aux(where):
    if where:
        where = {"mesh": make_mesh(data=4, model=2)}
    check(with_metrics, mlp_params(), batch_of(), 2, has_aux=True, **where)


def test_gradient_of_the_examples():
    fun = lambda p, b: nll_of(p, {**b, "x": jnp.sin(b["x"])}).mean()
    floats = {"x": batch_of()["x"]}
    loss = lambda p, b: fun(p, {**b, "y": jnp.arange(b["x"].shape[0]) % C})
    check(loss, mlp_params(), floats, 4, argnums=(0, 1))
    check(loss, mlp_params(), floats, 2, argnums=1, mesh=make_mesh(data=4, model=2))


def test_debug_prints_show_the_whole_batch(capfd):
    def loss(p, b):
        value = nll_of(p, b).mean()
        jax.debug.print("loss {v:.6f}", v=value)
        return value

    value, _ = check(loss, mlp_params(), batch_of(), 4)
    jax.effects_barrier()
    assert capfd.readouterr().out.count(f"loss {float(value):.6f}") == 2  # once as JAX alone, once in microbatches


# Randomness: the bits are those of the whole batch.


def dropout_at_top(p, b, key):
    h = jnp.tanh(b["x"] @ p["w1"])
    return ((h * jax.random.bernoulli(key, 0.5, h.shape)) @ p["w2"]).std(-1).mean(), h * jax.random.normal(key, h.shape)


def dropout_in_scan(p, b, key):
    def body(carry, w):
        h, key = carry
        key, use = jax.random.split(key)
        h = jnp.tanh(h @ w) * jax.random.bernoulli(use, 0.7, h.shape)
        return (h, key), jax.random.normal(key, h.shape) * b["mask"][:, None]

    (h, key), noise = lax.scan(body, (jnp.tanh(b["x"] @ p["w1"]), key), p["s"])
    return (h**2).mean() + (noise * h[None]).mean(), (jax.random.key_data(key), noise)


def dropout_in_remat(p, b, key):
    @jax.checkpoint
    def block(h, w, key):
        return jnp.tanh(h @ w) * jax.random.bernoulli(key, 0.7, h.shape) / b["mask"].sum()

    h = b["x"] @ p["w1"]
    for i, layer_key in enumerate(jax.random.split(key, 3)):
        h = block(h, p["s"][i], layer_key)
    return (h**2).mean(), h


def keys_per_example(p, b, key):
    keys = jax.random.split(key, b["x"].shape[0])
    h = jax.vmap(lambda k, x: (x @ p["w1"]) * jax.random.bernoulli(k, 0.5, (H,)))(keys, b["x"])
    return (h**3).mean(), h


@pytest.mark.parametrize("mesh", [pytest.param(False, marks=pytest.mark.one_version), True])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "loss", [dropout_at_top, dropout_in_scan, dropout_in_remat, keys_per_example], ids=lambda f: f.__name__
)
def test_dropout_has_the_same_bits(loss, legacy, mesh):
    if legacy and loss is dropout_in_scan:
        plain, loss = loss, lambda p, b, key: plain(p, b, jax.random.wrap_key_data(key))
    key = jax.random.PRNGKey(5) if legacy else jax.random.key(5)
    where = {"mesh": make_mesh(data=4, model=2)} if mesh else {}
    check(loss, mlp_params(), batch_of(), 2, has_aux=True, rest=(key,), **where)


# Models from libraries.


class ConvNet(nn.Module):
    norm: str = "layer"

    @nn.compact
    def __call__(self, x, train=True):
        for width in (4, 8):
            x = nn.Conv(width, (3, 3), param_dtype=jnp.float64)(x)
            if self.norm == "batch":
                x = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(x)
            elif self.norm == "group":
                x = nn.GroupNorm(2, param_dtype=jnp.float64)(x)
            else:
                x = nn.LayerNorm(param_dtype=jnp.float64)(x)
            x = nn.max_pool(nn.gelu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(16, param_dtype=jnp.float64)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(C, param_dtype=jnp.float64)(nn.avg_pool(x[:, None, :], (1,), (1,))[:, 0])


def initialised(model, *args):
    return jax.jit(lambda key: model.init(key, *args))(jax.random.key(0))


@pytest.mark.parametrize(
    "norm, mesh",
    [
        ("layer", True),
        pytest.param("layer", False, marks=pytest.mark.slow),
        pytest.param("group", True, marks=pytest.mark.slow),
    ],
)
def test_flax_conv_net(norm, mesh):
    model, b = ConvNet(norm), batch_of()
    params = initialised(model, b["image"], False)["params"]

    def loss(params, b, key):
        logits = model.apply({"params": params}, b["image"], rngs={"dropout": key})
        per = optax.softmax_cross_entropy_with_integer_labels(logits, b["y"])
        return (per * b["mask"]).sum() / b["mask"].sum(), logits

    where = {"mesh": make_mesh(data=4, model=2)} if mesh else {}
    check(loss, params, b, 2, has_aux=True, rest=(jax.random.key(1),), **where)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(param_dtype=jnp.float64)(x)
        y = nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64, dropout_rate=0.2, deterministic=False)(
            y, mask=nn.make_causal_mask(x[..., 0])
        )
        x = x + y
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(F, param_dtype=jnp.float64)(x)), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, F, param_dtype=jnp.float64)
        x = embed(tokens) + self.param("pos", nn.initializers.normal(), (T, F), jnp.float64)
        blocks = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=2
        )
        return embed.attend(blocks()(x, None)[0])


@pytest.mark.slow
def test_flax_transformer_scanned_remat_dropout():
    model, b = Transformer(), batch_of()
    params = initialised(model, b["tokens"])["params"]

    def loss(params, b, key):
        logits = model.apply({"params": params}, b["tokens"], rngs={"dropout": key})
        per = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], b["tokens"][:, 1:])
        valid = (b["tokens"][:, 1:] > 2).astype(per.dtype)
        return (per * valid).sum() / valid.sum(), logits

    for where in ({}, {"mesh": make_mesh(data=4, model=2)}):
        check(loss, params, b, 2, has_aux=True, rest=(jax.random.key(1),), **where)


@pytest.mark.slow
def test_haiku_lstm():
    def forward(tokens):
        core = hk.LSTM(H)
        x = hk.Embed(11, F)(tokens).astype(jnp.float64)
        out, _ = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), core.initial_state(tokens.shape[0]))
        return hk.BatchApply(hk.Linear(11))(out)

    net, b = hk.without_apply_rng(hk.transform(forward)), batch_of()
    params = net.init(jax.random.PRNGKey(0), b["tokens"])
    loss = lambda p, b: optax.softmax_cross_entropy_with_integer_labels(net.apply(p, b["tokens"]), b["tokens"].T).mean()
    check(loss, params, b, 4)


# Refusals.


mean_gradient = jax.custom_vjp(lambda x: x)
mean_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct / ct.shape[0],))
centred_gradient = jax.custom_vjp(lambda x: x)
centred_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct - ct.mean(0),))


def batch_norm(p, b):
    h = b["x"] @ p["w1"]
    return ((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)).std(-1).mean()


def contrastive(p, b):
    z = b["x"] @ p["w1"]
    return -jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()


REFUSED = {
    "batch norm": (batch_norm, "total over the batch"),
    "contrastive": (contrastive, "multiplies examples with other examples"),
    "rmse": (lambda p, b: jnp.sqrt((logits_of(p, b["x"]) ** 2).mean()), "sqrt.*not linear"),
    "learned denominator": (
        lambda p, b: nll_of(p, b).sum() / jax.nn.sigmoid(b["x"] @ p["w1"]).sum(),
        "div.*not linear",
    ),
    "hardest examples": (lambda p, b: lax.top_k(nll_of(p, b), 2)[0].mean(), "along the dim that holds the examples"),
    "maximum": (lambda p, b: nll_of(p, b).max(), "along the dim"),
    "neighbours": (lambda p, b: jnp.diff(nll_of(p, b)).sum(), "some of the examples"),
    "first example": (lambda p, b: nll_of(p, b)[0], "some of the examples"),
    "shuffled": (lambda p, b: (nll_of(p, b) * nll_of(p, b)[::-1]).sum(), "examples"),
    "pairs": (lambda p, b: nll_of(p, b).reshape(-1, 2).max(1).sum(), "splits or regroups|whole examples"),
    "in scan": (
        lambda p, b: lax.scan(lambda h, w: (jnp.tanh((h - h.mean(0)) @ w), None), b["x"] @ p["w1"], p["s"])[0].sum(),
        "total over the batch",
    ),
    "relu of a mean": (lambda p, b: jax.nn.relu(nll_of(p, b).mean()), "max.*not linear"),
    "own rule over the batch": (lambda p, b: soft_mean(b["x"] @ p["w1"]), "derivative rule"),
    # Functions whose forward is innocent, and whose derivative rule is not.
    "gradient scaled by the batch size": (lambda p, b: mean_gradient(b["x"] @ p["w1"]).mean(), "derivative rule"),
    "clipped gradient of shared weights": (lambda p, b: (b["x"] @ soft(p["w1"])).mean(), "derivative rule"),
    "gradient centred over the batch": (
        lambda p, b: centred_gradient(b["x"] @ p["w1"]).std(-1).mean(),
        "derivative rule",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_examples_is_refused(name):
    loss, words = REFUSED[name]
    with pytest.raises(MicrobatchError, match=f"(?s){words}.*test_microbatch.py.*remedy"):
        check(loss, mlp_params(), batch_of(), 4)


def test_flax_batch_norm_is_refused_naming_the_line():
    model, b = ConvNet("batch"), batch_of()
    variables = initialised(model, b["image"], False)

    def loss(params, b):
        logits, state = model.apply(
            {**variables, "params": params}, b["image"], mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)}
        )
        return logits.mean(), state

    with pytest.raises(MicrobatchError, match=r"(?s)test_microbatch.py:\d+ \(.*__call__\).*batch norm"):
        check(loss, variables["params"], b, 4, has_aux=True)


@pytest.mark.slow
def test_flax_batch_norm_with_running_statistics():
    """It is then a function of single examples."""
    model, b = ConvNet("batch"), batch_of()
    variables = initialised(model, b["image"], False)
    evaluated = lambda params, b: (model.apply({**variables, "params": params}, b["image"], False) ** 2).mean()
    check(evaluated, variables["params"], b, 4)


def test_sizes_that_do_not_divide():
    with pytest.raises(MicrobatchError, match="(?s)12 or 18"):
        check(masked_mean, mlp_params(), batch_of(16), 6)
    with pytest.raises(MicrobatchError, match="(?s)of 24 examples"):
        check(masked_mean, mlp_params(), batch_of(16), 3, mesh=make_mesh(data=8))


def test_branching_on_the_batch_size_is_refused():
    def loss(p, b):
        return nll_of(p, b).mean() if b["x"].shape[0] > 8 else nll_of(p, b).sum() * 2

    with pytest.raises(MicrobatchError, match="(?s)different operations.*Python branches"):
        check(loss, mlp_params(), batch_of(), 4)


# One exchange.


def collectives(compiled):
    """The collectives of a compiled function: those inside a loop's body, and those outside, as HLO lines."""
    inside, outside, current, bodies = [], [], "", set()
    text = compiled.as_text()
    for line in text.splitlines():
        if " while(" in line:
            bodies.update(
                part.split("=%")[1].strip(" ,")
                for part in line.split(", ")
                if part.strip().startswith(("body=%", "condition=%"))
            )
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            current = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%")
        elif any(
            f" {op}{end}(" in line
            for op in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
            for end in ("", "-start")
        ):
            (inside if current in bodies else outside).append(line.strip())
    return inside, outside


@pytest.mark.parametrize(
    "loss, rest, most", [(layers_scanned, (), 1), (masked_mean, (), 2), (dropout_in_scan, (jax.random.key,), 1)]
)
def test_one_gradient_exchange(loss, rest, most):
    """One all-reduce after the loop (a second for a mask's sum before it); slicing the batch moves nothing."""
    mesh, params, b, rest = make_mesh(data=8), mlp_params(), batch_of(32), tuple(make(0) for make in rest)
    data, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("data",), ()))
    step = lambda p, b, *rest: step_of(loss, has_aux=bool(rest))(p, b, *rest)
    compiled = {}
    for manual in (("data",), ()):
        run = build(step, params, b, 4, mesh=mesh, manual=manual, rest=rest)
        gradient = lambda p, b, *rest, run=run: (lambda value, grads: (value[0] if rest else value, grads))(
            *run(p, b, *rest)
        )
        shardings = (whole, data, *(whole for _ in rest))
        compiled[manual] = collectives(
            jax.jit(gradient, in_shardings=shardings, out_shardings=whole).lower(params, b, *rest).compile()
        )
    inside, outside = compiled[("data",)]
    exchanges = [line for line in outside if " all-reduce" in line]
    assert not inside and outside == exchanges
    # The compiler joins the all-reduces of all parameters into one.
    assert 1 <= len(exchanges) <= most
    assert compiled[()][0]  # left to the compiler, every iteration exchanges: what the shard_map avoids


def test_parameters_sharded_over_model_and_data():
    params, b = mlp_params(), batch_of()
    spec = jax.sharding.PartitionSpec
    for mesh, manual, entry in (
        (make_mesh(data=4, model=2), ("data",), "model"),
        (make_mesh(data=4, model=2), (), "data"),
    ):
        shardings = {
            k: jax.sharding.NamedSharding(
                mesh, spec(*([None] * (v.ndim - 1)), entry) if v.shape[-1] % mesh.shape[entry] == 0 else spec()
            )
            for k, v in params.items()
        }
        placed = {k: jax.device_put(v, shardings[k]) for k, v in params.items()}
        run = build(step_of(masked_mean), placed, b, 2, mesh=mesh, manual=manual)
        got = jax.jit(run, out_shardings=(None, shardings))(placed, b)
        compare(got, jax.jit(jax.value_and_grad(masked_mean))(params, b))


# Steps.


def test_several_boundaries_and_an_optimizer():
    tx = optax.adam(1e-2)

    def step_with(transform, **options):
        def step(state, b, key):
            (loss, aux), grads = transform(with_metrics, has_aux=True, **options)(state["p"], b)
            updates, opt = tx.update(grads, state["opt"], state["p"])
            p = optax.apply_updates(state["p"], updates)
            noise = transform(lambda p: (dropout_at_top(p, b, key)[0] + loss).sum(), **options)(p)
            return {"p": p, "opt": opt}, (loss, aux["accuracy"], noise)

        return step

    state = {"p": mlp_params(), "opt": tx.init(mlp_params())}
    args = (state, batch_of(), jax.random.key(2))
    expected = jax.jit(step_with(jax.value_and_grad))(*args)
    for where in ({}, {"mesh": make_mesh(data=4, model=2)}):
        run = build(step_with(value_and_grad, microbatches=2), *args[:2], 2, rest=args[2:], **where)
        got = jax.jit(run)(*args)
        compare(got[1], expected[1])
        for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(expected[0]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-7)  # Adam divides rounding noise of vanishing gradients by itself


def test_half_precision_accumulates_in_single():
    params, b = (
        jax.tree.map(lambda a: a.astype(jnp.bfloat16), mlp_params()),
        {"x": batch_of(64)["x"].astype(jnp.bfloat16)},
    )
    loss = lambda p, b: (jnp.tanh(b["x"] @ p["w1"]).astype(jnp.float32) ** 2).mean()
    run = build(step_of(loss), params, b, 16)
    value, grads = jax.jit(run)(params, b)
    expected, theirs = jax.jit(jax.value_and_grad(loss))(params, b)
    assert grads["w1"].dtype == jnp.bfloat16
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["w1"].astype(float), theirs["w1"].astype(float), rtol=2e-2, atol=1e-4)


def test_grad_and_loss_without_examples():
    run = build(lambda p, b: grad(lambda p: (p["w1"] ** 2).sum(), microbatches=4)(p), mlp_params(), batch_of(), 4)
    compare(jax.jit(run)(mlp_params(), batch_of()), jax.grad(lambda p: (p["w1"] ** 2).sum())(mlp_params()))
    check(lambda p, b: (p["w1"] ** 2).sum() + b["x"].sum(), mlp_params(), batch_of(), 4)
