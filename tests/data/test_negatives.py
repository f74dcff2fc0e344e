"""Drawn words: of the right distribution, anew in each epoch, and the same for an example wherever it is read."""

import dataclasses
import itertools

import numpy as np
import pytest

from splitjax.data import ByCounts, Dataset, LogUniform, Negatives, Position, example_keys
from splitjax.errors import DataError


@pytest.mark.parametrize(
    "sampler",
    [LogUniform(1000), ByCounts([5, 1, 10, 4]), ByCounts(np.arange(1, 200), power=0.75)],
    ids=["log_uniform", "counts", "power"],
)
def test_words_are_drawn_with_their_probabilities(sampler):
    if isinstance(sampler, LogUniform):
        words = np.arange(1000)
        probabilities = np.log((words + 2) / (words + 1)) / np.log(1001)
    else:
        probabilities = sampler.counts**sampler.power / (sampler.counts**sampler.power).sum()
        np.testing.assert_allclose(sampler.probabilities, probabilities)
    drawn = Negatives(sampler, 400)(example_keys(np.arange(500), seed=1, epoch=0))
    assert drawn.shape == (500, 400) and drawn.dtype == np.int32
    counts, expected = np.bincount(drawn.ravel(), minlength=len(probabilities)), probabilities * drawn.size
    assert len(counts) == len(probabilities)
    # Chi squared has as many degrees of freedom as words less one, so this mean and this deviation.
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = len(probabilities) - 1
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5


def test_the_ends_of_the_unit_interval_are_words():
    largest = np.nextafter(1, 0)
    for sampler in (LogUniform(793_471), LogUniform(1), ByCounts([0.1] * 10)):
        words = sampler.words(np.array([0.0, largest]))
        assert words.tolist() == [0, (getattr(sampler, "vocab_size", None) or 10) - 1]


@pytest.mark.parametrize("counts", [[3, 0, 1], [], [[1, 2]], [1, -1], [1, np.nan]])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(DataError, match="one number above 0"):
        ByCounts(counts)
    with pytest.raises(DataError, match="no word"):
        LogUniform(0)


def dataset():
    tokens = np.arange(44, dtype=np.int32).reshape(11, 4)
    return Dataset(
        "t", {"tokens": tokens}, {"tokens": tokens[:3]}, tuple("ab"), draws={"negatives": Negatives(LogUniform(50), 6)}
    )


def test_a_stream_brings_them_from_any_position_and_tests_do_not():
    items = list(itertools.islice(dataset().train_stream(2, seed=3), 12))
    assert all(batch["negatives"].shape == (2, 6) for _, batch in items)
    resumed = itertools.islice(dataset().train_stream(2, seed=3, start=items[6][0]), 5)
    for (position, batch), (other, again) in zip(items[7:], resumed, strict=True):
        assert position == other
        np.testing.assert_array_equal(batch["negatives"], again["negatives"])
    for (_, batch), again in zip(items[:5], dataset().train_batches(2, seed=3), strict=True):
        np.testing.assert_array_equal(batch["negatives"], again["negatives"])
    of_first = [b["negatives"][list(b["tokens"][:, 0]).index(0)] for _, b in items if 0 in b["tokens"][:, 0]]
    assert len(of_first) >= 2 and not np.array_equal(of_first[0], of_first[1])  # another epoch, other words
    assert next(dataset().test_batches(2)).keys() == {"tokens", "mask"}


def test_processes_draw_those_of_their_rows_even_where_these_differ_from_the_tokens():
    _, whole = next(dataset().train_stream(6, seed=3))
    for rows in (np.array([1, 4]), {"tokens": np.array([0, 5]), "negatives": np.array([2, 3, 4])}):
        _, part = next(dataset().train_stream(6, seed=3, rows=rows))
        for name in whole:
            chosen = rows[name] if isinstance(rows, dict) else rows
            np.testing.assert_array_equal(part[name], whole[name][chosen])


def test_an_augmentation_gets_the_keys_that_they_are_drawn_from():
    keys = example_keys(np.arange(3), seed=0, epoch=0)
    seen = []
    changed = dataclasses.replace(dataset(), augmentation=lambda batch, given: (seen.append(given), batch)[1])
    _, batch = next(changed.train_stream(3, seed=0, start=Position(), augment=True))
    assert len(seen) == 1 and seen[0].shape == keys.shape and "negatives" in batch
