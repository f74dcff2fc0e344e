"""The models whose gradients are mostly tables: their numbers against numpy's, and their tables found as read by
lookups alone."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax import data, models
from splitjax.cli._train_options import OptimizerOptions
from splitjax.cli._train_parts import optimizer
from splitjax.models.deepfm import second_order
from splitjax.models.dlrm import interactions
from tests.models.test_model_steps import batch_for, build_small


def random_params(spec, scale=0.5):
    """Parameters of the model, drawn by numpy: none is zero, and tables are not small."""
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(spec.init, jax.random.key(0))["params"]
    return jax.tree.map(lambda leaf: np.asarray(scale * rng.normal(size=leaf.shape), np.float32), shapes)


def run(spec, params, *inputs, **options):
    """The model, compiled."""
    return jax.jit(lambda params, *inputs: spec.apply({"params": params}, *inputs, **options))(params, *inputs)


def sampled_cross_entropy(*arrays, log_probability=None):
    return jax.jit(lambda *arrays: models.sampled_cross_entropy(*arrays, log_probability))(*arrays)


def relu(x):
    return np.maximum(x, 0)


def dense(params, x):
    return x @ params["kernel"].astype(np.float64) + params.get("bias", 0.0)


def rows_of(spec, ids):
    """Each field has its own part of the one table."""
    return np.stack([sum(spec.config.field_sizes[:field]) + column for field, column in enumerate(ids.T)], 1)


def test_second_order_is_the_sum_over_pairs():
    factors = np.random.default_rng(0).normal(size=(4, 6, 3))
    pairs = sum((factors[:, i] * factors[:, j]).sum(-1) for i, j in itertools.combinations(range(6), 2))
    np.testing.assert_allclose(second_order(jnp.asarray(factors, jnp.float32)), pairs, rtol=1e-5)


def test_interactions_are_every_pair_once():
    vectors = np.random.default_rng(0).normal(size=(4, 5, 3))
    pairs = [(vectors[:, i] * vectors[:, j]).sum(-1) for i in range(5) for j in range(i)]
    np.testing.assert_allclose(
        interactions(jnp.asarray(vectors, jnp.float32)), np.stack(pairs, 1), rtol=1e-5, atol=1e-6
    )


def test_deepfm_is_linear_plus_pairs_plus_network():
    spec, batch = build_small("deepfm"), batch_for(build_small("deepfm"))
    params, values, rows = random_params(spec), batch["values"].astype(np.float64), rows_of(spec, batch["ids"])
    factors = np.concatenate(
        [params["embedding"]["embedding"][rows], values[:, :, None] * params["dense_embedding"]], 1
    )
    linear = params["first_order"]["embedding"][rows].sum((1, 2)) + dense(params["dense_first_order"], values)[:, 0]
    pairs = sum((factors[:, i] * factors[:, j]).sum(-1) for i, j in itertools.combinations(range(factors.shape[1]), 2))
    hidden = relu(dense(params["dense2"], relu(dense(params["dense1"], factors.reshape(len(rows), -1)))))
    logits = run(spec, params, batch["ids"], batch["values"])
    np.testing.assert_allclose(logits, linear + pairs + dense(params["logits"], hidden)[:, 0], rtol=2e-5, atol=1e-5)


def test_dlrm_is_a_network_over_dot_products():
    spec, batch = build_small("dlrm"), batch_for(build_small("dlrm"))
    params, x = random_params(spec), batch["values"].astype(np.float64)
    for name in ("bottom1", "bottom2", "bottom3"):
        x = relu(dense(params[name], x))
    vectors = [x, *params["embedding"]["embedding"][rows_of(spec, batch["ids"])].transpose(1, 0, 2)]
    pairs = [(vectors[i] * vectors[j]).sum(-1) for i in range(len(vectors)) for j in range(i)]
    x = np.concatenate([x, np.stack(pairs, 1)], 1)
    for name in ("top1", "top2"):
        x = relu(dense(params[name], x))
    logits = run(spec, params, batch["ids"], batch["values"])
    np.testing.assert_allclose(logits, dense(params["logits"], x)[:, 0], rtol=2e-5, atol=1e-5)


def test_a_sample_of_all_words_is_the_full_softmax():
    rng = np.random.default_rng(0)
    logits, labels = (
        jnp.asarray(rng.normal(size=(2, 5, 7)), jnp.float32),
        jnp.asarray(rng.integers(0, 7, (2, 5)), jnp.int32),
    )
    true_logits = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    everything = jnp.stack([jnp.asarray(rng.permutation(7), jnp.int32) for _ in range(2)])
    sampled = jnp.take_along_axis(logits, jnp.broadcast_to(everything[:, None], logits.shape), -1)
    losses = sampled_cross_entropy(true_logits, sampled, labels, everything)
    np.testing.assert_allclose(losses, optax.softmax_cross_entropy_with_integer_labels(logits, labels), rtol=1e-6)


def test_the_sampled_loss_takes_off_expected_counts_and_accidental_hits():
    """As TensorFlow defines it, position by position."""
    rng = np.random.default_rng(1)
    num_words, num_draws = 9, 6
    hidden, table = rng.normal(size=(3, 4)), rng.normal(size=(num_words, 4))
    labels, negatives = np.array([0, 3, 8]), np.array([3, 3, 0, 1, 7, 2])
    counts = num_draws * np.log((np.arange(num_words) + 2) / (np.arange(num_words) + 1)) / np.log(num_words + 1)
    expected = []
    for h, label in zip(hidden, labels, strict=True):
        kept = [label, *(word for word in negatives if word != label)]
        scores = np.array([h @ table[word] - np.log(counts[word]) for word in kept])
        expected.append(np.log(np.exp(scores).sum()) - scores[0])
    given = (
        jnp.asarray((hidden * table[labels]).sum(-1), jnp.float32),
        jnp.asarray(hidden @ table[negatives].T, jnp.float32),
    )
    words = (jnp.asarray(labels, jnp.int32), jnp.asarray(negatives, jnp.int32))
    np.testing.assert_allclose(
        sampled_cross_entropy(*given, *words, log_probability=models.log_uniform(num_words)), expected, rtol=1e-5
    )
    probabilities = counts / num_draws
    np.testing.assert_allclose(
        sampled_cross_entropy(*given, *words, log_probability=models.tabled(probabilities)), expected, rtol=1e-5
    )


def test_a_sample_of_hits_alone_has_no_loss_and_finite_gradients():
    def loss(h):
        return models.sampled_cross_entropy(
            h[..., 0], h, jnp.full((1, 2), 3), jnp.full((1, 4), 3), models.log_uniform(5)
        ).sum()

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.ones((1, 2, 4)))
    assert float(value) == 0 and np.isfinite(grad).all()


@pytest.mark.parametrize(
    "sampler", [data.LogUniform(50), data.ByCounts(np.arange(1, 51)[::-1] ** 2)], ids=["log_uniform", "counts"]
)
def test_the_model_knows_the_distribution_that_the_data_draw_from(sampler):
    log_probability = (
        models.log_uniform(50) if isinstance(sampler, data.LogUniform) else models.tabled(sampler.probabilities)
    )
    probabilities = np.exp(log_probability(jnp.arange(50, dtype=jnp.int32)))
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    # equally spaced: their shares are the probabilities, but for one of them each
    uniform = (np.arange(200_000) + 0.5) / 200_000
    np.testing.assert_allclose(np.bincount(sampler.words(uniform), minlength=50) / 200_000, probabilities, atol=2e-5)


def test_the_lstm_starts_anew_in_each_window_and_does_not_see_the_future():
    spec = models.build("lstm", vocab_size=11, max_len=6, bptt=3, embedding_width=4, hidden_width=5, negatives=2)
    params, tokens = {"params": random_params(spec)}, np.array([[1, 2, 3, 4, 5, 6]])
    logits = jax.jit(spec.apply)(params, tokens)
    changed = jax.jit(spec.apply)(params, np.array([[1, 9, 3, 4, 5, 6]]))
    differs = np.abs(logits - changed).max((0, 2)) > 1e-6
    assert differs.tolist() == [False, True, True, False, False, False]
    with pytest.raises(models.ModelError, match="bptt, 3, must divide"):
        spec.apply(params, np.zeros((1, 7), np.int32))


def test_the_lstm_compares_each_example_with_its_own_negatives():
    spec, batch = build_small("lstm"), batch_for(build_small("lstm"), 3)
    params = random_params(spec)
    tokens, labels, negatives = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["negatives"]
    full = run(spec, params, tokens)
    true_logits, sampled, *_ = run(spec, params, tokens, labels, negatives, method="sampled")
    np.testing.assert_allclose(
        true_logits, np.take_along_axis(np.asarray(full), labels[..., None], -1)[..., 0], rtol=1e-4, atol=1e-5
    )
    expected = np.take_along_axis(np.asarray(full), np.broadcast_to(negatives[:, None], sampled.shape), -1)
    np.testing.assert_allclose(sampled, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(models.ModelError, match=r"i32\[B, S\] for the 3 examples"):
        run(spec, params, tokens, labels, negatives[:2], method="sampled")


def tables(name, tx, library="linen", **options):
    """{parameter: table} of the training step."""
    spec = build_small(name, library)
    batch = spec.example(8)
    key = jax.eval_shape(lambda: jax.random.key(0))
    if library == "nnx":
        init_fn, train_step, _ = models.make_nnx_step(spec, tx, value_and_grad=splitjax.nnx.value_and_grad, **options)
        step = splitjax.nnx.parallelize(train_step, mesh={"data": 2}, rules="data_parallel")
        from flax import nnx

        found = step.graph(*nnx.eval_shape(init_fn, key), batch).tables
    else:
        init_fn, train_step, _ = models.make_step(spec, tx, value_and_grad=splitjax.value_and_grad, **options)
        step = splitjax.parallelize(train_step, mesh={"data": 2}, rules="data_parallel")
        found = step.graph(jax.eval_shape(init_fn, key), batch).tables
    return {table.param.removeprefix("params/"): table for table in found}


LOOKUPS = {
    # tokens; labels, negatives
    "lstm": {"embedding/embedding": [64], "softmax/embedding": [64, 32]},
    "deepfm": {"embedding/embedding": [24], "first_order/embedding": [24]},
    "dlrm": {"embedding/embedding": [24]},
}


@pytest.mark.usefixtures("standard_promotion")  # which schedules rely on
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("optimizer_name", ["sgd", "adagrad"])
def test_tables_are_read_and_updated_row_by_row(name, optimizer_name):
    """With the command's own optimizer: a schedule, and gradients clipped to a global norm."""
    tx = optimizer(OptimizerOptions(optimizer=optimizer_name, clip_norm=1.0), optax.cosine_decay_schedule(0.1, 10))
    found = tables(name, tx)
    assert {param: [lookup.num_ids for lookup in table.lookups] for param, table in found.items()} == LOOKUPS[name]
    assert all(table.is_sparse for table in found.values()), [table.reason for table in found.values()]


@pytest.mark.parametrize("name", LOOKUPS)
def test_tables_of_nnx_models_are_found_too(name):
    found = tables(name, optax.adagrad(0.1), library="nnx")
    assert len(found) == len(LOOKUPS[name]) and all(table.is_sparse for table in found.values())


@pytest.mark.usefixtures("standard_promotion")
def test_what_makes_a_table_dense_is_named():
    found = tables("lstm", optax.sgd(0.1), loss="cross_entropy")  # the whole softmax
    assert found["embedding/embedding"].is_sparse and "softmax/embedding" not in found
    assert "changes" in tables("dlrm", optax.adam(0.1))["embedding/embedding"].reason


def test_area_under_curve_counts_pairs():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 80), rng.integers(0, 2, 80)
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    assert models.area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))
    assert models.area_under_curve([0.1, 0.2, 0.9], [0, 0, 1]) == 1


def test_clicks_are_judged_by_log_loss():
    spec, batch = build_small("deepfm"), batch_for(build_small("deepfm"))
    init_fn, _, eval_step = models.make_step(spec, optax.sgd(0.1))
    state = {**init_fn(jax.random.key(0)), "params": random_params(spec)}
    found = jax.jit(eval_step)(state, batch)
    probability = 1 / (1 + np.exp(-np.asarray(found["logits"], np.float64)))
    chosen = np.where(batch["label"] == 1, probability, 1 - probability)
    assert float(found["loss"]) == pytest.approx(-np.log(chosen).mean(), rel=1e-5)
    assert float(found["accuracy"]) == pytest.approx((chosen > 0.5).mean())
    assert set(found) == {"loss", "accuracy", "correct", "logits"}


def test_mistakes_are_named():
    with pytest.raises(models.ModelError, match="sampled softmax is the LSTM's"):
        models.make_step(build_small("transformer"), optax.sgd(0.1), loss="sampled_softmax")
    with pytest.raises(models.ModelError, match="no label smoothing"):
        models.make_step(build_small("lstm"), optax.sgd(0.1), label_smoothing=0.1)
    with pytest.raises(models.ModelError, match="(?s)no such option.*num_classes"):
        models.build("deepfm", num_classes=2)
    with pytest.raises(models.ModelError, match="more rows than an int32"):
        models.build("dlrm", field_sizes=1 << 30)
    with pytest.raises(models.ModelError, match="one for each field"):
        spec = build_small("dlrm")
        jax.eval_shape(spec.apply, {"params": random_params(spec)}, jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 2)))
    assert models.reads("lstm") == "text" and models.reads("dlrm") == "clicks" and models.reads("vgg16") == "images"
    assert math.prod(models.build("deepfm", field_sizes=3).example(4)["ids"].shape) == 4 * 26
