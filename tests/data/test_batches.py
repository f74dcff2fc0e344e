"""Batches: every example where it belongs, once, in an order that only the seed and the epoch decide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax import data
from splitjax.errors import DataError

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)
quick = settings(max_examples=60, deadline=None)


def split(num):
    """Each example carries its number twice, so that rows torn apart show."""
    numbers = np.arange(num)
    return {"image": np.stack([numbers, -numbers], axis=1), "label": numbers.astype(np.int32)}


def tiny(num_train=10, num_test=7):
    def arrays(num):
        images = np.random.default_rng(num).integers(0, 256, (num, 2, 2, 3)).astype(np.uint8)
        return {"image": images, "label": np.arange(num, dtype=np.int32) % 2}

    return data.Dataset(
        "tiny", arrays(num_train), arrays(num_test), ("a", "b"), data.Standardise((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    )


@quick
@given(num=sizes, batch_size=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_has_each_example_at_most_once(num, batch_size, seed, epoch):
    batch_size = min(num, batch_size)
    batches = list(data.epoch_batches(split(num), batch_size, seed=seed, epoch=epoch))
    assert len(batches) == num // batch_size
    assert all(batch["label"].shape == (batch_size,) and batch["image"].shape == (batch_size, 2) for batch in batches)
    labels = np.concatenate([batch["label"] for batch in batches])
    images = np.concatenate([batch["image"] for batch in batches])
    assert len(set(labels.tolist())) == len(labels)
    np.testing.assert_array_equal(images, np.stack([labels, -labels], axis=1))
    again = np.concatenate([b["label"] for b in data.epoch_batches(split(num), batch_size, seed=seed, epoch=epoch)])
    np.testing.assert_array_equal(labels, again)


@quick
@given(num=sizes, batch_size=sizes)
def test_padded_batches_have_each_example_exactly_once(num, batch_size):
    batches = list(data.padded_batches(split(num), batch_size))
    assert len(batches) == -(-num // batch_size)
    assert all(b["label"].shape == b["mask"].shape == (batch_size,) for b in batches)
    assert all((b["mask"] == 1).all() for b in batches[:-1])  # padding at the end only
    mask = np.concatenate([b["mask"] for b in batches])
    assert mask.dtype == np.float32 and set(mask.tolist()) <= {0.0, 1.0}
    np.testing.assert_array_equal(mask, np.arange(len(mask)) < num)
    np.testing.assert_array_equal(np.concatenate([b["label"] for b in batches])[mask == 1], np.arange(num))


@quick
@given(num=sizes, seed=seeds, epoch=st.integers(0, 2**32))
def test_an_order_is_a_permutation(num, seed, epoch):
    order = data.shuffled_indices(num, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(np.sort(order), np.arange(num))


def test_orders_differ_by_seed_and_by_epoch():
    orders = {tuple(data.shuffled_indices(50, seed=s, epoch=e).tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16


def test_the_order_is_the_same_for_good():
    # A change here changes every recorded run: the stream is promised by numpy and by splitjax.
    np.testing.assert_array_equal(data.shuffled_indices(8, seed=0, epoch=0), [6, 3, 5, 0, 7, 2, 1, 4])


def test_without_shuffling_the_order_is_that_of_the_arrays():
    batches = data.epoch_batches(split(7), 3, shuffle=False)
    assert [b["label"].tolist() for b in batches] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("batch_size", [0, -4, 2.5, True, "8", None])
@pytest.mark.parametrize("batches", [data.epoch_batches, data.padded_batches])
def test_a_wrong_batch_size_is_an_error_at_once(batches, batch_size):
    with pytest.raises(DataError, match="batch_size must be a whole number above 0") as caught:
        batches(split(10), batch_size)  # not iterated
    assert caught.value.value is batch_size and caught.value.remedy


def test_a_batch_larger_than_the_split_is_an_error_only_without_padding():
    with pytest.raises(DataError, match=r"split of 10 examples[\s\S]*value:  11[\s\S]*at most 10"):
        data.epoch_batches(split(10), 11)
    (batch,) = data.padded_batches(split(10), 11)
    assert batch["mask"].sum() == 10
    assert len(list(data.epoch_batches(split(10), np.int64(10)))) == 1


@pytest.mark.parametrize(("seed", "epoch", "name"), [(-1, 0, "seed"), (0, -1, "epoch"), (0.5, 0, "seed")])
def test_a_wrong_seed_or_epoch_is_an_error(seed, epoch, name):
    with pytest.raises(DataError, match=f"{name} must be a whole number, 0 or more"):
        data.shuffled_indices(4, seed=seed, epoch=epoch)


@pytest.mark.parametrize("arrays", [{}, {"a": np.zeros(3), "b": np.zeros(4)}, {"a": np.zeros(())}])
def test_arrays_of_different_lengths_are_an_error(arrays):
    with pytest.raises(DataError, match="same number of examples"):
        data.epoch_batches(arrays, 1)
    with pytest.raises(DataError, match="data set 'odd', split 'test'"):
        data.Dataset("odd", split(3), arrays, ("a",))


def test_an_array_named_mask_is_an_error():
    with pytest.raises(DataError, match="'mask' is taken"):
        data.padded_batches({"mask": np.zeros(3)}, 2)


def test_batches_of_a_data_set_are_standardised():
    dataset = tiny()
    (batch,) = dataset.train_batches(10, seed=3, epoch=2)
    order = data.shuffled_indices(10, seed=3, epoch=2)
    expected = (dataset.train["image"][order] / 255 - np.array([0.4, 0.5, 0.6])) / np.array([0.2, 0.25, 0.3])
    assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int32
    np.testing.assert_allclose(batch["image"], expected, atol=1e-5)
    np.testing.assert_array_equal(batch["label"], dataset.train["label"][order])
    *_, last = dataset.test_batches(4)
    assert last["mask"].tolist() == [1, 1, 1, 0] and last["image"].dtype == np.float32


def test_a_data_set_cannot_be_changed():
    dataset = tiny()
    with pytest.raises(ValueError, match="read-only"):
        dataset.train["image"][0] = 0
    with pytest.raises(TypeError):
        dataset.train["image"] = None
    with pytest.raises(AttributeError):
        dataset.name = "other"
    (batch,) = dataset.train_batches(10)
    batch["label"][0] = 5  # a batch is the caller's own
    assert repr(dataset) == "Dataset('tiny', 10 train, 7 test, 2 classes)"
