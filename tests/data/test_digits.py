"""scikit-learn's digits as 32x32 images."""

import sys

import numpy as np
import pytest

from splitjax.data import load_digits
from splitjax.errors import DataError

sklearn_datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def test_every_digit_is_in_one_split(digits):
    assert digits.train["image"].shape == (1438, 32, 32, 3) and digits.test["image"].shape == (359, 32, 32, 3)
    assert digits.train["image"].dtype == np.uint8 and digits.train["label"].dtype == np.int32
    ours = np.concatenate([digits.train["image"], digits.test["image"]])
    labels = np.concatenate([digits.train["label"], digits.test["label"]])
    # one pixel of each enlarged one, back in the original's units
    small = np.rint(ours[:, ::4, ::4, 0] * (16 / 255)).astype(int).reshape(-1, 64)
    source = sklearn_datasets.load_digits()
    original = source.images.astype(int).reshape(-1, 64)
    assert sorted(map(tuple, np.column_stack([small, labels]).tolist())) == sorted(
        map(tuple, np.column_stack([original, source.target]).tolist())
    )


def test_pixels_are_enlarged_and_channels_equal(digits):
    image = digits.train["image"][0]
    for shift in range(4):
        np.testing.assert_array_equal(image[shift::4, shift::4], image[::4, ::4])
    np.testing.assert_array_equal(image[..., 0], image[..., 2])
    assert digits.train["image"].max() == 255


def test_batches_are_standardised(digits):
    images = np.concatenate([batch["image"] for batch in digits.train_batches(200)])
    assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02
    assert len(list(digits.test_batches(100))) == 4


def test_the_seed_decides_the_split(digits):
    np.testing.assert_array_equal(load_digits().test["label"], digits.test["label"])
    assert (load_digits(seed=1).test["label"] != digits.test["label"]).any()
    assert len(load_digits(test_fraction=0.5).test["label"]) == 898


@pytest.mark.parametrize("fraction", [0, 1, -0.2, 1e-5, 2.0, "half", float("nan")])
def test_a_share_that_leaves_a_split_empty_is_an_error(fraction):
    with pytest.raises(DataError, match="leaves a split empty"):
        load_digits(test_fraction=fraction)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"scikit-learn[\s\S]*pip install 'splitjax\[demo\]'"):
        load_digits()
