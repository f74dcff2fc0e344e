"""Augmentation: the changes that are meant, each decided by seed, epoch and example alone."""

import numpy as np
import pytest

from splitjax.data import Augmentation, example_keys, fit_images, standardise
from splitjax.data.augment import random_below, random_bits
from splitjax.errors import DataError

IMAGES = np.random.default_rng(0).integers(1, 256, (64, 6, 7, 3), dtype=np.uint8)  # no zeros: these come from padding
KEYS = example_keys(np.arange(64), seed=1, epoch=2)


def changed(images=IMAGES, keys=KEYS, **options):
    return Augmentation(**{"crop_padding": 0, "flip": False, **options})(
        {"image": images, "label": np.arange(len(images))}, keys
    )["image"]


def test_the_bits_are_those_of_splitmix64():
    # The first outputs of Vigna's splitmix64.c from state 1234567
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert random_bits(np.array([1234567]), np.arange(5)).tolist() == expected


def test_the_keys_are_the_same_for_good():
    keys = example_keys(np.array([0, 1, 49_999]), seed=0, epoch=0)
    assert keys.tolist() == [13465446865884528784, 195402931607361276, 16522907122199381076]
    assert random_below(example_keys(np.arange(8), seed=7, epoch=3), 0, 9).tolist() == [2, 1, 7, 7, 5, 2, 2, 0]


def test_keys_differ_by_seed_epoch_and_example():
    keys = [example_keys(np.arange(100), seed=seed, epoch=epoch) for seed in range(4) for epoch in range(4)]
    assert len(np.unique(keys)) == 1600
    with pytest.raises(DataError, match="epoch must be"):
        example_keys(np.arange(3), seed=0, epoch=-1)


def test_draws_are_even_and_independent():
    keys = example_keys(np.arange(90_000), seed=0, epoch=0)
    first, second = (random_below(keys, number, 9) for number in (0, 1))
    counts = np.bincount(first * 9 + second, minlength=81)
    # chi-square of 80 degrees of freedom: mean 80, standard deviation 12.6
    assert ((counts - 90_000 / 81) ** 2 / (90_000 / 81)).sum() < 80 + 4 * 12.6


def test_a_crop_is_a_part_of_the_padded_image():
    crops = changed(crop_padding=2)
    offsets = set()
    for image, crop in zip(IMAGES, crops, strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        places = [(y, x) for y in range(5) for x in range(5) if np.array_equal(padded[y : y + 6, x : x + 7], crop)]
        assert len(places) == 1
        offsets.update(places)
    assert len(offsets) > 18  # of 25
    assert crops.dtype == np.uint8


def test_about_half_of_the_images_are_mirrored_and_none_otherwise_changed():
    flipped = changed(flip=True)
    same = (flipped == IMAGES).all((1, 2, 3))
    np.testing.assert_array_equal(flipped[~same], IMAGES[~same][:, :, ::-1])
    assert 16 < same.sum() < 48


def test_cutout_is_a_square_of_zeros_cut_off_at_the_border():
    holes = (changed(cutout=3) == 0).all(-1)
    assert (changed(cutout=3)[~holes] == IMAGES[~holes]).all()
    sizes = set()
    for hole in holes:
        rows, columns = hole.any(1).sum(), hole.any(0).sum()
        assert hole.sum() == rows * columns and {rows, columns} <= {2, 3}
        sizes.add((rows, columns))
    assert len(sizes) == 4


def test_what_happens_to_an_example_does_not_depend_on_its_batch():
    whole = changed(crop_padding=2, flip=True, cutout=2)
    chosen = np.array([40, 3, 17])
    np.testing.assert_array_equal(
        changed(IMAGES[chosen], KEYS[chosen], crop_padding=2, flip=True, cutout=2), whole[chosen]
    )


def test_nothing_is_changed_in_place_and_nothing_asked_for_changes_nothing():
    before = IMAGES.copy()
    changed(crop_padding=2, flip=True, cutout=2)
    np.testing.assert_array_equal(IMAGES, before)
    np.testing.assert_array_equal(changed(), before)


@pytest.mark.parametrize("options", [{"crop_padding": -1}, {"cutout": 2.5}])
def test_wrong_options_are_errors(options):
    with pytest.raises(DataError, match="must be a whole number, 0 or more"):
        Augmentation(**options)


def test_fitted_images_are_enlarged_then_padded_then_repeated():
    small = IMAGES[:2, :, :6, :1]
    fitted = fit_images(small, 15, 3)
    assert fitted.shape == (2, 15, 15, 3)
    # twice as large, 3 pixels lack: 1 before, 2 behind
    np.testing.assert_array_equal(fitted[:, 1:13:2, 1:13:2, 2], small[..., 0])
    assert not fitted[:, 0].any() and not fitted[:, 13:].any() and fitted[:, 1:13, 1:13].all()
    assert fit_images(IMAGES, None, None) is IMAGES
    assert fit_images(IMAGES, 7, None).shape == (64, 7, 7, 3)


@pytest.mark.parametrize(
    ("size", "channels", "match"),
    [(5, 3, "6x7 pixels are only enlarged"), (None, 4, "3 channel"), (8.5, None, "enlarged")],
)
def test_images_that_would_lose_something_are_errors(size, channels, match):
    with pytest.raises(DataError, match=match):
        fit_images(IMAGES, size, channels)


def test_standardising_is_the_formula_in_float32():
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    expected = (IMAGES / 255 - np.array(mean)) / np.array(std)
    assert standardise(IMAGES, mean, std).dtype == np.float32
    np.testing.assert_allclose(standardise(IMAGES, mean, std), expected, atol=2e-6)
    np.testing.assert_allclose(
        standardise(IMAGES.transpose(0, 2, 1, 3), mean, std), expected.transpose(0, 2, 1, 3), atol=2e-6
    )
    assert standardise(IMAGES[:0], mean, std).shape == (0, 6, 7, 3)
