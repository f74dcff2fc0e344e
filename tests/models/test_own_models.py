"""Models of other packages: registered, or written as `package.module:factory`; a Flax module or a whole step."""

from __future__ import annotations

import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from splitjax import models
from splitjax.models.registry import MODELS

IMAGE = {"image": jax.ShapeDtypeStruct((4, 4, 1), jnp.float32)}


class Linear(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, image, train=False):
        return nn.Dense(self.features)(image.reshape(image.shape[0], -1))


class NnxLinear(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, image, train=False):
        return self.head(image.reshape(image.shape[0], -1))


def own(size=2):
    def init_fn(key):
        return {"params": jax.random.normal(key, (size, 3)), "count": jnp.int32(0)}

    def train_step(state, batch):
        return state, {"loss": jnp.mean(batch["x"] @ state["params"])}

    return models.OwnStep(init_fn, train_step, lambda batch_size: {"x": np.zeros((batch_size, size))})


@pytest.fixture
def registered():
    """Names that a test registers, and that are gone after it."""
    before = set(MODELS)
    yield
    for name in set(MODELS) - before:
        MODELS.remove(name)


def test_a_linen_module_of_ones_own_is_trained_like_any_other():
    spec = models.from_linen("mine", Linear(), IMAGE, num_classes=3)
    assert spec.num_params() == 16 * 3 + 3 and spec.reads == "images" and hash(spec.config) is not None
    assert spec.example(5)["image"].shape == (5, 4, 4, 1) and spec.example(5)["label"].shape == (5,)
    init_fn, train_step, eval_step = models.make_step(spec, optax.sgd(1.0))
    batch = {"image": np.eye(16, dtype=np.float32).reshape(16, 4, 4, 1), "label": np.arange(16, dtype=np.int32) % 3}
    state, losses = init_fn(jax.random.key(0)), []
    for _ in range(40):
        state, metrics = jax.jit(train_step)(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2 and float(eval_step(state, batch)["accuracy"]) == 1.0


def test_an_nnx_module_of_ones_own():
    spec = models.from_nnx("mine", NnxLinear, IMAGE, num_classes=3)
    assert spec.num_params() == 51 and isinstance(spec.make(nnx.Rngs(0)), NnxLinear)
    with pytest.raises(models.ModelError, match="this is an NNX model"):
        spec.init(jax.random.key(0))


def test_a_whole_step_tells_its_shapes_without_being_made():
    step = own(4)
    assert step.shapes(6) == {"x": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
    assert step.num_params() == 12 and step.state_shapes()["params"].shape == (4, 3)


def test_registered_models_are_built_by_name(registered):
    @models.register_model("mine")
    def mine(num_classes=3):
        return models.from_linen("mine", Linear(num_classes), IMAGE, num_classes=num_classes)

    models.register_model("whole", own)
    assert models.build("mine", num_classes=5).num_classes == 5
    assert models.make_model("whole", size=7).name == "whole"
    with pytest.raises(models.ModelError, match="whole training step"):
        models.build("whole")
    with pytest.raises(models.ModelError, match="there is a model of this name"):
        models.register_model("vgg16", own)
    with pytest.raises(models.ModelError, match="function of its options"):
        models.register_model("number", 3)
    with pytest.raises(models.ModelError, match="did you mean 'mine'"):
        models.make_model("mime")


def test_shipped_models_are_made_by_the_same_door():
    assert models.make_model("mlp", features=(8,)) == models.build("mlp", features=(8,))
    assert models.make_model("mlp", library="nnx").library == "nnx"


@pytest.mark.parametrize(
    ("which", "options", "words"),
    [
        ("strange_models:good", {"sise": 3}, "has no such option; did you mean 'size'"),
        ("strange_models:needs", {}, "needs the option 'size'.*--model-option size="),
        ("strange_models:number", {}, "returns int, which is no model"),
        ("strange_models:fails", {}, "factory fails: KeyError: 'nothing'"),
        ("strange_models:NUMBER", {}, "function of its options"),
        ("strange_models:godo", {}, "has no 'godo'; did you mean 'good'"),
        ("strange_module:good", {}, "there is no module 'strange_module'"),
        ("strange_models:good", {"library": "nnx"}, "not of the library nnx"),
    ],
)
def test_factories_that_give_no_model_say_why(which, options, words, tmp_path, monkeypatch):
    text = """
        from tests.models.test_own_models import own

        NUMBER = 3

        def good(size=2):
            return own(size)

        def needs(size):
            return own(size)

        def number():
            return 3

        def fails():
            return {}["nothing"]
        """
    (tmp_path / "strange_models.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strange_models", raising=False)
    with pytest.raises(models.ModelError, match=f"(?s){words}") as caught:
        models.make_model(which, place="--model", **options)
    assert caught.value.place == "--model" and caught.value.remedy
    assert models.make_model("strange_models:good", size=5).state_shapes()["params"].shape == (5, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.OwnStep(None, len, len), "init_fn is a function"),
        (lambda: models.OwnStep(len, len, len, dataset=3), "dataset is a function"),
        (lambda: models.from_linen("mine", Linear, IMAGE, num_classes=3), "is a flax.linen.Module"),
        (lambda: models.from_linen("mine", Linear(), {}, num_classes=3), "at least one entry"),
        (lambda: models.from_linen("", Linear(), IMAGE, num_classes=3), "needs a name"),
        (lambda: models.from_nnx("mine", 3, IMAGE, num_classes=3), "function of its rngs"),
    ],
)
def test_descriptions_that_describe_nothing(make, words):
    with pytest.raises(models.ModelError, match=words):
        make()
