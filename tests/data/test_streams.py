"""Streams over epochs: resumed anywhere they go on exactly, and each process reads its own rows only."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax import data
from splitjax.data import Augmentation, Position, stream
from splitjax.errors import DataError


def split(num):
    numbers = np.arange(num)
    return {"image": np.stack([numbers, -numbers], axis=1), "label": numbers.astype(np.int32)}


class Recorded:
    """An array that notes which rows are read."""

    def __init__(self, array):
        self.array, self.shape, self.ndim, self.read = array, array.shape, array.ndim, []

    def __getitem__(self, indices):
        self.read.extend(np.asarray(indices).tolist())
        return self.array[indices]


def labels(items):
    return [(position, batch["label"].tolist()) for position, batch in items]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**40), st.integers(0, 40))
def test_resumed_at_any_position_it_goes_on_exactly(num, batch_size, seed, taken):
    batch_size = min(num, batch_size)
    whole = labels(itertools.islice(stream(split(num), batch_size, seed=seed), taken + 8))
    position = whole[taken - 1][0] if taken else Position()
    saved = Position.from_json(json.loads(json.dumps(position.to_json())))
    assert labels(itertools.islice(stream(split(num), batch_size, seed=seed, start=saved), 8)) == whole[taken:]


def test_epochs_are_those_of_epoch_batches_and_positions_lie_behind_batches():
    items = list(stream(split(11), 3, seed=5, num_epochs=2))
    assert [position for position, _ in items] == [
        Position(0, 1),
        Position(0, 2),
        Position(1),
        Position(1, 1),
        Position(1, 2),
        Position(2),
    ]
    expected = [b for epoch in range(2) for b in data.epoch_batches(split(11), 3, seed=5, epoch=epoch)]
    for (_, batch), other in zip(items, expected, strict=True):
        np.testing.assert_array_equal(batch["image"], other["image"])
    assert list(stream(split(11), 3, seed=5, num_epochs=2, start=Position(2))) == []
    # the end of an epoch, written as its last batch, is the start of the next
    assert labels(stream(split(11), 3, seed=5, num_epochs=2, start=Position(0, 3))) == labels(items[3:])


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_the_batches_do_not_depend_on_the_number_of_processes_and_none_reads_anothers_rows(num_processes):
    images = np.random.default_rng(0).integers(0, 256, (31, 8, 8, 3), dtype=np.uint8)
    plain = {"image": images, "label": np.arange(31, dtype=np.int32)}
    options = {
        "seed": 3,
        "num_epochs": 2,
        "augment": Augmentation(crop_padding=2),
        "transform": data.Standardise((0.5,) * 3, (0.2,) * 3),
    }
    whole = list(stream(plain, 12, **options))
    shards, read = [], []
    for process in range(num_processes):
        arrays = {name: Recorded(array) for name, array in plain.items()}
        rows = np.arange(process, 12, num_processes)
        shards.append(list(stream(arrays, 12, rows=rows, **options)))
        expected = [label for _, batch in whole for label in batch["label"][rows].tolist()]
        assert arrays["image"].read == arrays["label"].read == expected
        read.append(expected)
    for number, (position, batch) in enumerate(whole):
        for process, shard in enumerate(shards):
            assert shard[number][0] == position
            for name in batch:
                np.testing.assert_array_equal(shard[number][1][name], batch[name][process::num_processes])
    epoch = [set(shard[: 24 // num_processes]) for shard in read]
    assert sum(map(len, epoch)) == len(set.union(*epoch)) == 24  # within an epoch no example is read twice


def test_augmentation_comes_before_the_transform_and_sees_the_examples_keys():
    seen = []

    def augment(batch, keys):
        seen.append(keys)
        return {**batch, "label": batch["label"] + 100}

    items = list(
        stream(
            split(6), 3, seed=1, num_epochs=1, augment=augment, transform=lambda batch: {"label": batch["label"] * 2}
        )
    )
    order = data.shuffled_indices(6, seed=1, epoch=0)
    np.testing.assert_array_equal(np.concatenate([b["label"] for _, b in items]), (order + 100) * 2)
    np.testing.assert_array_equal(np.concatenate(seen), data.example_keys(order, seed=1, epoch=0))


def test_without_shuffling_the_order_is_that_of_the_arrays():
    assert [batch for _, batch in labels(stream(split(5), 2, seed=0, num_epochs=2, shuffle=False))] == [
        [0, 1],
        [2, 3],
    ] * 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 8}, "no full batch"),
        ({"seed": -1}, "seed must be"),
        ({"num_epochs": 1.5}, "num_epochs must be"),
        ({"start": Position(0, 4)}, "an epoch of 7 examples has 3 batches of 2"),
        ({"rows": np.array([0, 2])}, "rows must be whole numbers from 0 to 1"),
        ({"rows": np.array([-1])}, "rows must be"),
        ({"rows": np.array([], int)}, "rows must be"),
        ({"rows": np.array([0.0])}, "rows must be"),
        ({"rows": np.zeros((1, 1), int)}, "rows must be"),
    ],
)
def test_wrong_arguments_are_errors_at_once(options, match):
    with pytest.raises(DataError, match=match):
        stream(split(7), **{"batch_size": 2, "seed": 0, **options})  # not iterated


@pytest.mark.parametrize("value", [None, [], {}, {"epoch": 1}, {"epoch": 1, "batch": 2, "more": 3}])
def test_what_is_no_position_is_an_error(value):
    with pytest.raises(DataError, match="not a position"):
        Position.from_json(value)


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None])
def test_a_position_holds_whole_numbers(value):
    with pytest.raises(DataError, match="batch must be a whole number"):
        Position.from_json({"epoch": 0, "batch": value})


def test_a_data_sets_stream_is_augmented_only_when_asked():
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    arrays = {"image": images, "label": np.arange(8, dtype=np.int32)}
    standardise = data.Standardise((0.5,) * 3, (0.2,) * 3)
    dataset = data.Dataset("tiny", arrays, arrays, tuple("abcdefgh"), standardise, Augmentation(crop_padding=2))
    ((position, plain),) = dataset.train_stream(8, seed=4, num_epochs=1)
    ((_, changed),) = dataset.train_stream(8, seed=4, num_epochs=1, augment=True)
    (expected,) = dataset.train_batches(8, seed=4)
    assert position == Position(1)
    np.testing.assert_array_equal(plain["image"], expected["image"])
    np.testing.assert_array_equal(changed["label"], plain["label"])
    assert (changed["image"] != plain["image"]).any()


def test_arrays_may_be_read_at_other_rows_each():
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    arrays = {"image": Recorded(images), "label": np.arange(20, dtype=np.int32)}
    options = {
        "seed": 3,
        "num_epochs": 1,
        "augment": Augmentation(crop_padding=2),
        "transform": data.Standardise((0.5,) * 3, (0.2,) * 3),
    }
    whole = [batch for _, batch in stream({**arrays, "image": images}, 8, **options)]
    parts = [
        batch for _, batch in stream(arrays, 8, rows={"image": np.asarray([2, 3]), "label": np.arange(4)}, **options)
    ]
    assert len(arrays["image"].read) == 2 * len(whole)
    for one, part in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(part["image"], one["image"][2:4])
        np.testing.assert_array_equal(part["label"], one["label"][:4])
    with pytest.raises(DataError, match="no rows to read"):
        stream(arrays, 8, rows={"image": np.arange(2)}, seed=0)


def test_padded_batches_are_read_by_rows_too():
    arrays = {"image": np.arange(10), "label": np.arange(10)}
    rows = {"image": np.asarray([1]), "label": np.asarray([0, 1]), "mask": np.asarray([0, 1])}
    batches = list(data.padded_batches(arrays, 4, rows=rows))
    assert [batch["image"].tolist() for batch in batches] == [[1], [5], [9]]
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 1], [1, 1]]
    assert [batch["label"].tolist() for batch in batches] == [[0, 1], [4, 5], [8, 9]]
