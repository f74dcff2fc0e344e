"""`build`: what it refuses, and how it says so."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from splitjax import models
from splitjax.errors import SplitjaxError


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(models.ModelError, match="no such model") as caught:
        models.build("vgg19")
    assert isinstance(caught.value, SplitjaxError) and isinstance(caught.value, ValueError)
    assert caught.value.value == "vgg19"
    for name in models.NAMES:
        assert repr(name) in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mlp", {"library": "haiku"}, "no such library.*'haiku'.*'linen', 'nnx'"),
        ("vgg16", {"widht": 3}, "no such option; did you mean 'width'"),
        ("vgg16", {"depth": 3}, "no such option.*'depth'.*'head_features'"),
        ("vgg16", {"letter": "A"}, "no such option.*'letter'"),  # the name settles it
        ("vgg16", {"dropout": 1.0}, "fraction.*1.0.*dropout"),
        ("vgg16", {"width": 0}, "width must be a number above 0"),
        ("vgg16", {"width": "wide"}, "width must be a number above 0.*'wide'"),
        ("vgg16", {"head_features": (16, 0)}, r"head_features.*\(16, 0\)"),
        ("vgg16", {"num_classes": 2.5}, "num_classes must hold whole numbers"),
        ("vgg16", {"image_size": 8}, "smaller than 32.*8.*load_digits"),
        ("resnet18", {"stem": "none"}, "no such ResNet stem.*'cifar', 'imagenet'"),
        ("mobilenet_v2", {"version": "v3_large"}, "no such option.*'version'"),  # the name settles it
        ("mobilenet_v2", {"depth": 0}, "depth must be a number above 0"),
        ("mobilenet_v3_small", {"stem": "none"}, "no such stem.*'cifar', 'imagenet'"),
        ("efficientnet_b0", {"drop_path": 1.0}, "drop_path is the fraction.*1.0.*ConvNeXt-T"),
        ("convnext_tiny", {"stage_sizes": (1, 1)}, "same length.*'stage_sizes'.*channels of every stage"),
        ("mlp", {"features": -1}, "features must hold whole numbers above 0"),
        ("transformer", {"d_model": 30, "num_heads": 4}, "num_heads must divide d_model, 30"),
        ("transformer", {"num_classes": 5, "vocab_size": 6}, r"differ.*\(5, 6\)"),
        ("transformer", {"num_layers": True}, "num_layers"),
        ("mlp", {"dtype": "int32"}, "dtype must be a floating-point type.*'int32'"),
        ("mlp", {"param_dtype": "float23"}, "param_dtype must be a floating-point type.*'float23'"),
    ],
)
def test_wrong_options_name_value_place_and_remedy(name, options, says):
    with pytest.raises(models.ModelError) as caught:
        models.build(name, **options)
    assert re.search(says, str(caught.value), re.DOTALL), str(caught.value)
    assert caught.value.value is not None and caught.value.place and caught.value.remedy


def test_each_library_names_the_other():
    linen, nnx_ = (models.build("mlp", library=library) for library in models.LIBRARIES)
    with pytest.raises(models.ModelError, match='library="nnx"'):
        linen.make(nnx.Rngs(0))
    with pytest.raises(models.ModelError, match='library="linen"'):
        nnx_.init(jax.random.key(0))
    with pytest.raises(models.ModelError, match='library="linen"'):
        nnx_.apply({}, jnp.zeros((1, 4)))


def test_num_classes_is_the_vocabulary_of_a_transformer():
    assert models.build("transformer", num_classes=99).config.vocab_size == 99
    assert models.build("transformer", vocab_size=98).num_classes == 98
    assert models.build("mlp", num_classes=7).num_classes == 7
    assert models.build("mlp").num_classes == 10


def test_examples_are_shapes_only():
    image = models.build("vgg11", image_size=64).example(5)
    assert {k: (v.shape, v.dtype) for k, v in image.items()} == {
        "image": ((5, 64, 64, 3), jnp.float32),
        "label": ((5,), jnp.int32),
    }
    tokens = models.build("transformer", max_len=9).example(2)
    assert {k: (v.shape, v.dtype) for k, v in tokens.items()} == {"tokens": ((2, 9), jnp.int32)}
    assert models.build("mlp", input_shape=12).example(2)["image"].shape == (2, 12)


def test_importing_touches_no_device():
    # With a platform that does not exist, the first use of a device fails.
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "import splitjax.models as m, splitjax.data; m.build('vgg16'); m.build('transformer', library='nnx')"
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)


@pytest.mark.parametrize("library", models.LIBRARIES)
def test_counting_parameters_starts_no_backend(library):
    code = (
        "from jax._src import xla_bridge\n"
        "from splitjax import models\n"
        f"assert models.build('mlp', library={library!r}, features=(4,), input_shape=(2, 2, 1)).num_params() == 70\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
