"""The models whose memory on TPUs is predicted have the sizes that their names promise, in millions of parameters."""

from __future__ import annotations

import math

import jax
import pytest

from benchmarks.planner.cells import TPU_MODELS, TPU_POD_MODELS
from benchmarks.planner.large import made_large

# As published, or by hand from the options: tables of DeepFM (and its rows of width 1) and of the LSTM. GPT-2 XL has a
# head of its own here, of 80.4 million.
MILLIONS = {
    "vgg16_cifar": 33.6, "vgg16_imagenet": 138.4, "resnet50": 25.6, "deepfm": 2_772_200 * 65e-6 + 1.3, "lstm": 840.2,
    "gpt2_medium": 355, "gpt2_xl": 1558 + 80.4, "vit_large": 304.3, "unet": 17.4, "llama_8b": 8030, "llama_70b": 70_554,
    "mixture": 46_703,
}  # fmt: skip


@pytest.mark.parametrize("name", MILLIONS)
def test_sizes_are_those_of_the_names(name):
    _, (state, batch) = made_large(name, 16)
    params = state["params"] if isinstance(state, dict) else state.params
    found = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e6
    assert found == pytest.approx(MILLIONS[name], rel=0.05)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape} == {16}


def test_every_model_of_the_cells_is_there():
    assert set(MILLIONS) == {*TPU_MODELS, *(model for model, _ in TPU_POD_MODELS)}
