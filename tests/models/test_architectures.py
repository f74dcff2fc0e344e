"""The models: their sizes against the published ones, Linen against NNX, what each option changes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

from splitjax import models
from splitjax.models.transformer import causal_attention

NARROW = {
    "vgg11": {"width": 1 / 16, "head_features": 16},
    "vgg16": {"width": 1 / 16, "head_features": (24, 16), "batch_norm": True},
    "resnet18": {"width": 1 / 16},
    "resnet50": {"width": 1 / 16},
    "mobilenet_v2": {"width": 1 / 8, "depth": 0.25, "head_features": 16, "image_size": 8},
    "mobilenet_v3_large": {"width": 1 / 8, "depth": 0.25, "head_features": 16, "image_size": 8},
    "mobilenet_v3_small": {"width": 1 / 8, "depth": 0.25, "head_features": 16, "image_size": 8},
    "efficientnet_b0": {"width": 1 / 8, "depth": 0.25, "image_size": 8},
    "convnext_tiny": {"width": 1 / 12, "stage_sizes": (1, 1, 2, 1), "image_size": 16},
    "mlp": {"features": 16},
    "transformer": {"vocab_size": 17, "max_len": 8, "d_model": 16, "num_heads": 4, "num_layers": 1},
    "lstm": {"vocab_size": 17, "max_len": 8, "embedding_width": 8, "hidden_width": 12, "num_layers": 2},
    "deepfm": {"field_sizes": (5, 3, 7), "num_dense": 2, "embedding_width": 4, "features": 8},
    "dlrm": {"field_sizes": (5, 3, 7), "num_dense": 2, "embedding_width": 4, "bottom_features": (6,), "features": 8},
}

# They take long to compile, and call nothing of JAX that others do not.
LARGE = ("vgg16", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "efficientnet_b0")


def once(*values):
    """Values that one version of Python and JAX is enough for."""
    return pytest.param(*values, marks=pytest.mark.one_version)


def flat(tree):
    return {".".join(path): leaf for path, leaf in traverse_util.flatten_dict(tree).items()}


def flat_nnx(model, kind):
    """By the names of Linen, which calls the input gate's partner of an LSTM `if`: in Python no name for NNX's
    attribute."""
    return {
        ".".join(path).replace(".if_.", ".if."): variable
        for path, variable in nnx.to_flat_state(nnx.state(model, kind))
    }


def abstract(spec):
    """Paths and shapes of the parameters, without making them."""
    if spec.library == "linen":
        params = flat(jax.eval_shape(spec.init, jax.random.key(0))["params"])
    else:
        params = flat_nnx(nnx.eval_shape(lambda: spec.make(nnx.Rngs(0))), nnx.Param)
    return {path: (leaf.shape, leaf.dtype) for path, leaf in params.items()}


def filled(spec):
    """Linen variables of random values, drawn by numpy: much quicker than compiling the model's own initialisers."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        scale = (max(leaf.size // leaf.shape[-1], 1)) ** -0.5 if leaf.ndim > 1 else 0.1
        offset = 1 if path[-1].key in ("scale", "var") else 0
        return jnp.asarray(offset + scale * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(spec.init, jax.random.key(0)))


def twins(name, **options):
    """A Linen model with random variables, and the NNX model that holds the same values."""
    linen = models.build(name, library="linen", **options)
    model = nnx.eval_shape(lambda: models.build(name, library="nnx", **options).make(nnx.Rngs(1)))
    variables = filled(linen)
    for collection, kind in (("params", nnx.Param), ("batch_stats", nnx.BatchStat)):
        values = flat(variables.get(collection, {}))
        targets = flat_nnx(model, kind)
        assert values.keys() == targets.keys()
        for path, variable in targets.items():
            assert variable.shape == values[path].shape, path
        nnx.update(
            model,
            nnx.from_flat_state(
                [(tuple(p.replace(".if.", ".if_.").split(".")), v.replace(values[p])) for p, v in targets.items()]
            ),
        )
    return linen, variables, model


def inputs_for(spec, batch_size=2):
    rng = np.random.default_rng(7)
    if spec.reads == "clicks":
        ids = [rng.integers(0, size, batch_size) for size in spec.config.field_sizes]
        return jnp.asarray(np.stack(ids, 1), jnp.int32), jnp.asarray(
            rng.random((batch_size, spec.config.num_dense)), jnp.float32
        )
    shape = (batch_size, *spec.input_shape)
    if spec.reads == "text":
        return (jnp.asarray(rng.integers(0, spec.num_classes, shape), jnp.int32),)
    return (jnp.asarray(rng.normal(size=shape), jnp.float32),)


def given_to(spec, batch):
    """The arrays of a batch that the model takes."""
    return [batch[name] for name in spec.inputs]


@pytest.mark.parametrize("library", models.LIBRARIES)
@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        # Published: VGG-16 and VGG-11 on ImageNet (Simonyan and Zisserman 2014, table 2: 138 and 133 million).
        ("vgg16", {"num_classes": 1000, "image_size": 224}, 138_357_544),
        ("vgg11", {"num_classes": 1000, "image_size": 224}, 132_863_336),
        # The same convolutions under a CIFAR-10 head 512-4096-4096-10.
        ("vgg16", {}, 14_714_688 + (512 * 4096 + 4096) + (4096 * 4096 + 4096) + (4096 * 10 + 10)),
        ("resnet18", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 11_689_512),
        ("resnet18", {}, 11_173_962),
        ("resnet50", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 25_557_032),
        # The same blocks between a 3x3 stem and ten classes: 9,408 fewer values by 1,728, 2,049,000 by 20,490
        ("resnet50", {}, 25_557_032 - 9_408 + 1_728 - 2_049_000 + 20_490),
        # Published: 3.5 million (Sandler et al. 2018, table 4), 5.4 and 2.5 million (Howard et al. 2019, table 3), 5.3,
        # 7.8 and 9.2 million for EfficientNet-B0, B1 and B2 (Tan and Le 2019, table 2), 28.6 million (Liu et al. 2022,
        # table 1).
        ("mobilenet_v2", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 3_504_872),
        ("mobilenet_v3_large", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 5_483_032),
        ("mobilenet_v3_small", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 2_542_856),
        ("efficientnet_b0", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 5_288_548),
        ("efficientnet_b0", {"num_classes": 1000, "image_size": 240, "depth": 1.1, "stem": "imagenet"}, 7_794_184),
        (
            "efficientnet_b0",
            {"num_classes": 1000, "image_size": 260, "width": 1.1, "depth": 1.2, "stem": "imagenet"},
            9_109_994,
        ),
        ("convnext_tiny", {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}, 28_589_128),
        ("mlp", {"features": (512,)}, 3072 * 512 + 512 + 512 * 10 + 10),
    ],
)
def test_published_parameter_counts(name, options, count, library):
    assert models.build(name, library=library, **options).num_params() == count


@pytest.mark.parametrize("library", models.LIBRARIES)
def test_vgg16_convolutions_have_the_published_size(library):
    shapes = {p: s for p, (s, _) in abstract(models.build("vgg16", library=library)).items() if p.startswith("conv")}
    assert len(shapes) == 13 * 2
    assert sum(map(math.prod, shapes.values())) == 14_714_688
    assert shapes["conv5_3.kernel"] == (3, 3, 512, 512)


def test_transformer_parameter_count():
    v, t, d, f, n = 31, 12, 16, 40, 3
    block = 4 * (d * d + d) + (d * f + f) + (f * d + d) + 2 * 2 * d
    options = {"vocab_size": v, "max_len": t, "d_model": d, "d_ff": f, "num_layers": n}
    count = v * d + t * d + n * block + 2 * d + d * v
    assert models.build("transformer", **options).num_params() == count
    assert models.build("transformer", tied=True, **options).num_params() == count - d * v
    kernel = abstract(models.build("transformer", **options))["block2.attention.query.kernel"]
    assert kernel[0] == (d, 4, d // 4)


@pytest.mark.parametrize("name", models.NAMES)
def test_linen_and_nnx_have_the_same_parameters(name):
    linen, nnx_ = (abstract(models.build(name, library=library)) for library in models.LIBRARIES)
    assert linen == nnx_


@pytest.mark.parametrize("name", models.NAMES)
def test_logits_have_the_right_shape_at_full_size(name):
    spec = models.build(name)
    batch = spec.example(3)
    variables = jax.eval_shape(spec.init, jax.random.key(0))
    logits = jax.eval_shape(spec.apply, variables, *given_to(spec, batch))
    shape = {"transformer": (3, 128, 256), "lstm": (3, 21, 10_000), "deepfm": (3,), "dlrm": (3,)}.get(name, (3, 10))
    assert (logits.shape, logits.dtype) == (shape, jnp.float32)
    assert (
        ("batch_stats" in variables) == spec.has_batch_stats == name.startswith(("resnet", "mobilenet", "efficientnet"))
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [once(name, {}) if name in LARGE else (name, {}) for name in models.NAMES]
    + [once("resnet18", {"stem": "imagenet"}), ("transformer", {"tied": True})],
)
def test_linen_and_nnx_compute_the_same(name, more):
    linen, variables, model = twins(name, **NARROW[name], **more)
    x = inputs_for(linen)
    ours = jax.jit(lambda v, x: linen.apply(v, *x))(variables, x)
    theirs = nnx.jit(lambda m, x: m(*x))(model, x)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.std(ours) > 1e-3  # the logits depend on something


def test_width_scales_convolutions_and_not_the_head():
    shapes = {p: s for p, (s, _) in abstract(models.build("vgg11", width=0.25, head_features=(8, 6))).items()}
    assert shapes["conv1_1.kernel"] == (3, 3, 3, 16)
    assert shapes["dense1.kernel"] == (128, 8)
    assert shapes["dense2.kernel"] == (8, 6)
    assert shapes["logits.kernel"] == (6, 10)


def test_batch_norm_replaces_the_biases_of_vgg():
    plain, normed = (abstract(models.build("vgg11", batch_norm=on)) for on in (False, True))
    assert "conv1_1.bias" in plain and "norm1_1.scale" not in plain
    assert "conv1_1.bias" not in normed and "norm1_1.scale" in normed


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("library", models.LIBRARIES)
@pytest.mark.parametrize("name", models.NAMES)
def test_bfloat16_computes_in_it_and_keeps_float32_parameters(name, library):
    spec = models.build(name, library=library, dtype="bfloat16", **NARROW[name])
    x = given_to(spec, spec.example(2))
    assert {dtype for _, dtype in abstract(spec).values()} == {jnp.dtype("float32")}
    if library == "linen":
        logits = jax.eval_shape(spec.apply, jax.eval_shape(spec.init, jax.random.key(0)), *x)
    else:
        logits = nnx.eval_shape(lambda x: spec.make(nnx.Rngs(0))(*x), x)
    assert logits.dtype == jnp.bfloat16
    halves = models.build(name, library=library, param_dtype=jnp.bfloat16, **NARROW[name])
    assert {dtype for _, dtype in abstract(halves).values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, library) for name in ("vgg11", "resnet18", "mlp", "transformer") for library in models.LIBRARIES]
    + [once("mobilenet_v2", "nnx"), once("efficientnet_b0", "linen"), once("convnext_tiny", "nnx")]
    + [("lstm", "linen"), ("deepfm", "linen"), ("dlrm", "nnx")],
)
def test_dropout_acts_in_training_only(name, library):
    spec = models.build(name, library=library, dropout=0.5, **NARROW[name])
    if name == "resnet18":
        config = dataclasses.replace(spec.config, stage_sizes=(1,), image_size=8)
        spec = dataclasses.replace(spec, config=config, module=spec.module and models.LinenResNet(config))
    x = inputs_for(spec)
    if library == "linen":
        variables = filled(spec)

        @jax.jit
        def drop(x, key):
            return spec.apply(variables, *x, train=True, rngs={"dropout": key}, mutable=["batch_stats"])[0]

        first, again, other = (drop(x, jax.random.key(seed)) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        evaluate = jax.jit(lambda v, x: spec.apply(v, *x))
        still = [evaluate(variables, x) for _ in range(2)]
    else:
        model = nnx.jit(lambda: spec.make(nnx.Rngs(0)))()
        train = nnx.jit(lambda m, x: m(*x, train=True))
        first, other = train(model, x), train(model, x)
        evaluate = nnx.jit(lambda m, x: m(*x))
        still = [evaluate(model, x) for _ in range(2)]
    assert not np.allclose(first, other)
    np.testing.assert_array_equal(*still)


@pytest.mark.parametrize("name", [once("efficientnet_b0"), "convnext_tiny"])
def test_stochastic_depth_skips_blocks_for_whole_examples(name):
    """An example either skips a block or has all of it: of examples that are alike there are at most two kinds for each
    block."""
    spec = models.build(name, drop_path=0.5, **NARROW[name])
    assert spec.has_dropout and not models.build(name, **NARROW[name]).has_dropout
    twin = nnx.eval_shape(lambda: models.build(name, library="nnx", drop_path=0.5, **NARROW[name]).make(nnx.Rngs(0)))
    num_drops = sum(isinstance(node, nnx.Dropout) for _, node in nnx.iter_graph(twin))
    # The first block has rate 0, and one without a shortcut is never skipped.
    assert num_drops == {"efficientnet_b0": 2, "convnext_tiny": 4}[name]
    x = jnp.broadcast_to(inputs_for(spec, 1)[0], (64, *spec.input_shape))

    @jax.jit
    def train(variables, x):
        return spec.apply(variables, x, train=True, rngs={"dropout": jax.random.key(0)}, mutable=["batch_stats"])[0]

    kinds = {tuple(np.round(row, 4)) for row in np.asarray(train(filled(spec), x)).tolist()}
    assert 2 ** (num_drops - 1) < len(kinds) <= 2**num_drops


@pytest.mark.parametrize("library", models.LIBRARIES)
def test_no_dropout_needs_no_random_state(library):
    spec = models.build("mlp", library=library, features=4)
    assert not spec.has_dropout
    if library == "linen":
        spec.apply(spec.init(jax.random.key(0)), *inputs_for(spec), train=True)
    else:
        model = spec.make(nnx.Rngs(0))
        assert not jax.tree.leaves(nnx.state(model, nnx.RngState))
        model(*inputs_for(spec), train=True)


def test_the_transformer_does_not_see_the_future():
    spec = models.build("transformer", **NARROW["transformer"])
    variables = filled(spec)
    (tokens,) = inputs_for(spec)
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % spec.num_classes)
    apply = jax.jit(lambda t: spec.apply(variables, t))
    before, after = (np.asarray(apply(t)) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_causal_attention_against_a_loop():
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 5, 3, 4)).astype(np.float32)
    expected = np.zeros_like(query)
    for b, t, h in np.ndindex(2, 5, 3):
        scores = np.exp(key[b, : t + 1, h] @ query[b, t, h] / 2)
        expected[b, t, h] = scores @ value[b, : t + 1, h] / scores.sum()
    np.testing.assert_allclose(jax.jit(causal_attention)(query, key, value), expected, atol=1e-5)


def test_a_sequence_longer_than_max_len_is_an_error():
    spec = models.build("transformer", **NARROW["transformer"])
    variables = jax.eval_shape(spec.init, jax.random.key(0))
    with pytest.raises(models.ModelError, match=r"at most max_len, 8[\s\S]*\(2, 9\)[\s\S]*larger max_len"):
        jax.eval_shape(spec.apply, variables, jax.ShapeDtypeStruct((2, 9), jnp.int32))
    short = jax.eval_shape(spec.apply, variables, jax.ShapeDtypeStruct((2, 5), jnp.int32))
    assert short.shape == (2, 5, 17)


def test_specs_are_values():
    one, two = (models.build("vgg11", head_features=16) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "vgg16"
