"""The ordinary training steps: they learn, they weigh, they keep their state, in both libraries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from splitjax import models
from splitjax.errors import DataError
from splitjax.models.objectives import cross_entropy

NARROW = {
    "vgg11": {"width": 1 / 16, "head_features": 32},
    "resnet18": {"width": 1 / 16},
    "mobilenet_v2": {"width": 1 / 8, "depth": 0.1, "head_features": 32, "image_size": 8},
    "efficientnet_b0": {"width": 1 / 8, "depth": 0.1, "image_size": 8},
    "convnext_tiny": {
        "width": 1 / 12,
        "stage_sizes": (1, 2),
        "stage_channels": (96, 192),
        "image_size": 16,
        "layer_scale": 0.1,
    },
    "mlp": {"features": 32, "input_shape": (8, 8, 1)},
    "transformer": {"vocab_size": 16, "max_len": 8, "d_model": 16, "num_heads": 2, "num_layers": 1},
    "lstm": {"vocab_size": 16, "max_len": 8, "embedding_width": 8, "hidden_width": 12, "negatives": 4},
    "deepfm": {"field_sizes": (5, 3, 7), "num_dense": 2, "embedding_width": 4, "features": 8},
    "dlrm": {"field_sizes": (5, 3, 7), "num_dense": 2, "embedding_width": 4, "bottom_features": 8, "features": 8},
}


def once(name):
    """A model that one version of Python and JAX is enough for: what it calls of JAX, others call too."""
    return pytest.param(name, marks=pytest.mark.one_version)


LARGE = [once(name) for name in ("mobilenet_v2", "efficientnet_b0", "convnext_tiny")]  # they take long to compile


def build_small(name, library="linen", **options):
    """A model that compiles quickly. The ResNet is of one block, the only small one with batch norm."""
    spec = models.build(name, library=library, **NARROW[name], **options)
    if name != "resnet18":
        return spec
    config = dataclasses.replace(spec.config, stage_sizes=(1,), image_size=8)
    return dataclasses.replace(spec, config=config, module=models.LinenResNet(config) if library == "linen" else None)


def batch_for(spec, batch_size=8, seed=0):
    rng = np.random.default_rng(seed)
    if spec.reads == "text":
        shapes = {name: one.shape for name, one in spec.example(batch_size).items()}
        return {name: rng.integers(0, spec.num_classes, shape).astype(np.int32) for name, shape in shapes.items()}
    if spec.reads == "clicks":
        return {
            "ids": np.stack([rng.integers(0, size, batch_size) for size in spec.config.field_sizes], 1).astype(
                np.int32
            ),
            "values": rng.random((batch_size, spec.config.num_dense), np.float32),
            "label": rng.integers(0, 2, batch_size).astype(np.int32),
        }
    return {
        "image": rng.normal(size=(batch_size, *spec.input_shape)).astype(np.float32),
        "label": rng.integers(0, spec.num_classes, batch_size).astype(np.int32),
    }


def close(ours, theirs, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), ours, theirs)


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "mlp", "transformer", *LARGE])
def test_training_reduces_the_loss(name):
    spec = build_small(name)
    init_fn, train_step, eval_step = models.make_step(spec, optax.sgd(0.05, momentum=0.9))
    state, batch, step = init_fn(jax.random.key(0)), batch_for(spec), jax.jit(train_step)
    state, first = step(state, batch)
    for _ in range(12):
        state, last = step(state, batch)
    assert last["loss"] < 0.9 * first["loss"]
    assert int(state["step"]) == 13
    assert set(first) == {"loss", "accuracy"}
    assert set(jax.eval_shape(eval_step, state, batch)) == {"loss", "accuracy", "correct"}


@pytest.mark.parametrize("name", ["resnet18", "transformer"])
def test_nnx_training_reduces_the_loss(name):
    spec = build_small(name, library="nnx", dropout=0.1)
    init_fn, train_step, eval_step = models.make_nnx_step(spec, optax.sgd(0.05, momentum=0.9))
    model, optimizer = init_fn(jax.random.key(0))
    batch, step = batch_for(spec), nnx.jit(train_step)
    first = step(model, optimizer, batch)
    for _ in range(12):
        last = step(model, optimizer, batch)
    assert last["loss"] < 0.9 * first["loss"]
    assert set(nnx.eval_shape(eval_step, model, batch)) == {"loss", "accuracy", "correct"}


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet18", "deepfm", *LARGE, once("dlrm")])
def test_a_linen_step_and_an_nnx_step_are_the_same(name):
    linen, nnx_ = (build_small(name, library) for library in models.LIBRARIES)
    tx = optax.sgd(0.1, momentum=0.9)
    init_fn, train_step, _ = models.make_step(linen, tx, label_smoothing=0.1)
    nnx_init, nnx_step, _ = models.make_nnx_step(nnx_, tx, label_smoothing=0.1)
    model, optimizer = nnx_init(jax.random.key(0))
    state = init_fn(jax.random.key(0))
    state["params"] = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    state, ours = jax.jit(train_step)(state, batch_for(linen))
    theirs = nnx.jit(nnx_step)(model, optimizer, batch_for(linen))
    close(ours, theirs, rtol=1e-5)
    close(state["params"], nnx.to_pure_dict(nnx.state(model, nnx.Param)), atol=1e-5)
    close(state.get("batch_stats", {}), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), atol=1e-5)


def test_the_state_holds_what_the_model_needs():
    def keys(name, **options):
        init_fn, train_step, _ = models.make_step(models.build(name, **options), optax.sgd(0.1, momentum=0.9))
        state = jax.eval_shape(init_fn, jax.random.key(0))
        after, _ = jax.eval_shape(train_step, state, models.build(name, **options).example(2))
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert jax.tree.leaves(after) == jax.tree.leaves(state)  # shapes and dtypes
        return set(state)

    assert keys("mlp") == {"params", "opt", "step"}
    assert keys("mlp", dropout=0.5) == {"params", "opt", "step", "key"}
    assert keys("resnet18") == {"params", "opt", "step", "batch_stats"}
    assert keys("vgg11", batch_norm=True, dropout=0.5) == {"params", "opt", "step", "batch_stats", "key"}


def test_batch_statistics_move_in_training_and_serve_in_evaluation():
    spec = build_small("resnet18")
    init_fn, train_step, eval_step = models.make_step(spec, optax.sgd(0.0))
    before, batch = init_fn(jax.random.key(0)), batch_for(spec)
    after, trained = jax.jit(train_step)(before, batch)
    moved = after["batch_stats"]["stem_norm"]["mean"] - before["batch_stats"]["stem_norm"]["mean"]
    assert np.abs(moved).max() > 0
    evaluate = jax.jit(eval_step)
    # Same parameters, other statistics; and evaluation does not use those of its own batch.
    assert evaluate(before, batch)["loss"] != evaluate(after, batch)["loss"] != trained["loss"]


def test_dropout_differs_between_steps_and_repeats_between_runs():
    spec = build_small("mlp", dropout=0.5)
    init_fn, train_step, eval_step = models.make_step(spec, optax.sgd(0.0))

    def losses():
        state, batch, step = init_fn(jax.random.key(0)), batch_for(spec), jax.jit(train_step)
        for _ in range(3):
            state, metrics = step(state, batch)
            yield float(metrics["loss"])

    first = list(losses())
    assert len(set(first)) == 3
    assert first == list(losses())


@pytest.mark.parametrize("library", models.LIBRARIES)
@pytest.mark.parametrize("name", ["resnet18", "transformer"])
def test_padding_does_not_count(name, library):
    """Evaluating 5 examples padded to 8 is evaluating the 5, whatever the padding holds."""
    spec = build_small(name, library)
    batch = batch_for(spec)
    padded = {**batch, "mask": np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32)}
    short = {key: value[:5] for key, value in batch.items()}
    if library == "linen":
        init_fn, _, eval_step = models.make_step(spec, optax.sgd(0.1))
        state = init_fn(jax.random.key(0))
        ours, theirs, whole = (jax.jit(eval_step)(state, b) for b in (padded, short, batch))
    else:
        init_fn, _, eval_step = models.make_nnx_step(spec, optax.sgd(0.1))
        model, _ = init_fn(jax.random.key(0))
        ours, theirs, whole = (nnx.jit(eval_step)(model, b) for b in (padded, short, batch))
    close(ours, theirs, rtol=1e-5)
    assert abs(ours["loss"] - whole["loss"]) > 1e-5
    targets = 5 * (7 if name == "transformer" else 1)
    np.testing.assert_allclose(ours["correct"], ours["accuracy"] * targets, rtol=1e-5)


def test_a_batch_of_padding_alone_counts_nothing():
    spec = build_small("mlp")
    init_fn, train_step, eval_step = models.make_step(spec, optax.sgd(0.1))
    state, batch = init_fn(jax.random.key(0)), {**batch_for(spec), "mask": np.zeros(8, np.float32)}
    assert {k: float(v) for k, v in jax.jit(eval_step)(state, batch).items()} == {
        "loss": 0,
        "accuracy": 0,
        "correct": 0,
    }
    after, _ = jax.jit(train_step)(state, batch)
    close(after["params"], state["params"], atol=0)


def test_a_mask_weighs_training_too():
    spec = build_small("mlp")
    init_fn, train_step, _ = models.make_step(spec, optax.sgd(0.1))
    state, batch = init_fn(jax.random.key(0)), batch_for(spec)
    masked = {**batch, "mask": np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)}
    ours, theirs = (jax.jit(train_step)(state, b)[0] for b in (masked, {k: v[:3] for k, v in batch.items()}))
    close(ours["params"], theirs["params"], atol=1e-6)


def test_tokens_predict_their_successors():
    spec = build_small("transformer")
    init_fn, _, eval_step = models.make_step(spec, optax.sgd(0.1))
    state, tokens, eval_step = init_fn(jax.random.key(0)), batch_for(spec)["tokens"], jax.jit(eval_step)
    shifted = eval_step(state, {"tokens": tokens})
    explicit = eval_step(state, {"tokens": tokens[:, :-1], "label": tokens[:, 1:]})
    close(shifted, explicit, rtol=1e-6)
    # A mask over positions belongs to the tokens as targets.
    mask = np.ones_like(tokens, np.float32)
    mask[:, 4:] = 0
    close(eval_step(state, {"tokens": tokens, "mask": mask}), eval_step(state, {"tokens": tokens[:, :4]}), rtol=1e-5)


def test_cross_entropy_and_its_smoothing():
    logits = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    labels = np.array([0, 4, 2, 2], np.int32)
    for smoothing in (0.0, 0.1):
        target = np.eye(5)[labels] * (1 - smoothing) + smoothing / 5
        expected = -np.sum(target * (logits - np.log(np.exp(logits).sum(-1, keepdims=True))), axis=-1)
        np.testing.assert_allclose(cross_entropy(logits, labels, label_smoothing=smoothing), expected, rtol=1e-5)
    assert cross_entropy(jnp.asarray(logits, jnp.bfloat16), labels).dtype == jnp.float32


def test_smoothing_is_for_training_only():
    spec = build_small("mlp")
    batch = batch_for(spec)
    plain, smooth = (models.make_step(spec, optax.sgd(0.0), label_smoothing=s) for s in (0.0, 0.2))
    state = plain[0](jax.random.key(0))
    ours, theirs = (jax.jit(step)(state, batch)[1]["loss"] for step in (plain[1], smooth[1]))
    assert ours != theirs
    close(*(jax.jit(step)(state, batch) for step in (plain[2], smooth[2])), rtol=0)


@pytest.mark.parametrize("library", models.LIBRARIES)
def test_the_boundary_and_the_loss_can_be_replaced(library):
    spec, called = build_small("mlp", library), []

    def value_and_grad(*args, **kwargs):
        called.append(kwargs)
        return (jax if library == "linen" else nnx).value_and_grad(*args, **kwargs)

    def squared(logits, labels):
        return jnp.sum((logits - jax.nn.one_hot(labels, logits.shape[-1])) ** 2, axis=-1)

    make = models.make_step if library == "linen" else models.make_nnx_step
    init_fn, train_step, _ = make(spec, optax.sgd(0.0), loss=squared, value_and_grad=value_and_grad)
    states = init_fn(jax.random.key(0))
    if library == "linen":
        logits = spec.apply({"params": states["params"]}, batch_for(spec)["image"])
        _, metrics = jax.jit(train_step)(states, batch_for(spec))
    else:
        logits = states[0](batch_for(spec)["image"])
        metrics = nnx.jit(train_step)(*states, batch_for(spec))
    np.testing.assert_allclose(metrics["loss"], squared(logits, batch_for(spec)["label"]).mean(), rtol=1e-5)
    assert called == [{"has_aux": True}]


def test_mistakes_are_named():
    linen, nnx_ = (build_small("mlp", library) for library in models.LIBRARIES)
    tx = optax.sgd(0.1)
    with pytest.raises(models.ModelError, match="make_nnx_step, or build"):
        models.make_step(nnx_, tx)
    with pytest.raises(models.ModelError, match="make_step, or build"):
        models.make_nnx_step(linen, tx)
    with pytest.raises(models.ModelError, match=r"no such loss[\s\S]*'hinge'"):
        models.make_step(linen, tx, loss="hinge")
    with pytest.raises(models.ModelError, match=r"lies in \[0, 1\)"):
        models.make_step(linen, tx, label_smoothing=1.0)
    with pytest.raises(models.ModelError, match="smooth inside the loss"):
        models.make_step(linen, tx, loss=cross_entropy, label_smoothing=0.1)
    _, train_step, eval_step = models.make_step(linen, tx)
    with pytest.raises(DataError, match=r"no entry 'label'[\s\S]*\['image'\][\s\S]*'mlp'"):
        eval_step({"params": {}}, {"image": np.zeros((2, 8, 8, 1), np.float32)})
    normed = build_small("resnet18")
    _, train_step, _ = models.make_step(normed, tx)
    with pytest.raises(models.ModelError, match="statistics of batch norm"):
        train_step({}, {**batch_for(normed), "mask": np.ones(8, np.float32)})
