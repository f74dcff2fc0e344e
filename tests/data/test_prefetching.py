"""Prefetching: the same items in order, never too many, and no thread left behind, however the consumer ends."""

import gc
import itertools
import threading
import time
import traceback
import weakref

import jax
import numpy as np
import pytest

from splitjax import data
from splitjax.data import Position, prefetch
from splitjax.errors import DataError


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "splitjax-prefetch"]


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not threads()
    yield
    gc.collect()
    wait_until(lambda: not threads())


def test_items_come_placed_and_in_order():
    batches = prefetch(iter(range(50)), lambda item: item * 2)
    assert list(batches) == list(range(0, 100, 2))
    assert list(batches) == []  # and stays at its end


def test_a_stream_keeps_its_positions_and_its_batches_are_placed_on_devices():
    arrays = {"image": np.arange(40, dtype=np.float32).reshape(10, 4), "label": np.arange(10, dtype=np.int32)}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    with prefetch(
        data.stream(arrays, 4, seed=0, num_epochs=2), lambda batch: jax.device_put(batch, sharding)
    ) as batches:
        items = list(batches)
    assert [position for position, _ in items] == [Position(0, 1), Position(1), Position(1, 1), Position(2)]
    for (_, placed), (_, plain) in zip(items, data.stream(arrays, 4, seed=0, num_epochs=2), strict=True):
        assert placed["image"].devices() == {jax.devices()[1]}
        np.testing.assert_array_equal(placed["image"], plain["image"])


@pytest.mark.parametrize("position", [data.LoaderPosition(b"\xff"), Position(0, 1)], ids=str)
def test_of_a_pair_with_a_position_the_batch_is_placed(position):
    assert list(prefetch(iter([(position, 3)]), lambda batch: batch * 2)) == [(position, 6)]


@pytest.mark.parametrize("item", [(1, 2), ("train", {"x": 1}), ([1, 2], [3, 4]), (np.ones(2), np.zeros(2)), {"x": 1}])
def test_any_other_item_is_placed_whole(item):
    """Who counts by `enumerate`, names the split or has lists for a batch places all of it."""
    (placed,) = prefetch(iter([item]), lambda whole: [whole])
    assert placed == [item] or placed[0] is item


@pytest.mark.parametrize("depth", [1, 3])
def test_it_works_ahead_by_its_depth_and_no_further(depth):
    placed = []
    with prefetch(itertools.count(), lambda item: placed.append(item) or item, depth) as batches:
        wait_until(lambda: len(placed) == depth)
        time.sleep(0.03)
        assert len(placed) == depth
        assert next(batches) == 0
        wait_until(lambda: len(placed) == depth + 1)


def test_the_work_is_done_in_one_other_thread():
    used = set()

    def source():
        for number in range(5):
            used.add(threading.current_thread().name)
            yield number

    assert list(prefetch(source(), lambda item: used.add(threading.current_thread().name))) == [None] * 5
    assert used == {"splitjax-prefetch"}


@pytest.mark.parametrize("where", ["source", "place"])
def test_an_exception_comes_in_its_turn_with_its_traceback(where):
    def fail_at_two(item):
        if item == 2:
            raise DataError("broken disk")
        return item

    source = map(fail_at_two, range(5)) if where == "source" else iter(range(5))
    batches = prefetch(source, fail_at_two if where == "place" else lambda item: item, depth=4)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(DataError, match="broken disk") as caught:
        next(batches)
    assert "fail_at_two" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_a_stray_stop_iteration_does_not_pass_for_the_end():
    with prefetch(iter([[1], []]), lambda item: next(iter(item))) as batches:
        assert next(batches) == 1
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(batches)


def test_leaving_early_ends_the_thread_and_closes_the_source():
    closed = threading.Event()

    def source():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    with prefetch(source(), lambda item: item) as batches:
        next(batches)
    assert closed.is_set() and not threads()
    batches.close()  # again: nothing
    with pytest.raises(StopIteration):
        next(batches)


def test_a_source_that_no_collector_closes_is_closed():
    class Source:
        is_closed = False

        def __iter__(self):
            return self

        def __next__(self):
            return 1

        def close(self):
            self.is_closed = True

    source = Source()
    with prefetch(source, lambda item: item) as batches:
        next(batches)
    assert source.is_closed and not threads()


def test_a_consumer_that_raises_leaves_no_thread():
    with pytest.raises(KeyboardInterrupt):
        with prefetch(itertools.count(), lambda item: item) as batches:
            for item in batches:
                if item == 3:
                    raise KeyboardInterrupt
    assert not threads()


def test_a_loop_left_without_closing_leaves_no_thread():
    for item in prefetch(itertools.count(), lambda item: item):
        if item == 3:
            break
    gc.collect()
    wait_until(lambda: not threads())


def test_what_is_ready_is_dropped_when_it_closes():
    class Item:
        pass

    made = weakref.WeakSet()

    def source():
        while True:
            item = Item()
            made.add(item)
            yield item

    with prefetch(source(), lambda item: item, depth=2) as batches:
        wait_until(lambda: len(made) >= 2)
    del batches
    gc.collect()
    assert not made


def test_a_thread_that_does_not_end_in_time_is_warned_of(monkeypatch):
    monkeypatch.setattr("splitjax.data.prefetching.CLOSE_SECONDS", 0.05)
    held = threading.Event()
    begun = threading.Event()

    def place(item):
        begun.set()
        held.wait(10)

    batches = prefetch(itertools.count(), place)
    begun.wait(10)
    with pytest.warns(RuntimeWarning, match="did not end within 0.05 s"):
        batches.close()
    held.set()


def test_the_time_waited_is_counted():
    def slow():
        for number in range(4):
            time.sleep(0.05)
            yield number

    with prefetch(slow(), lambda item: item) as batches:
        list(batches)
        assert 0.15 < batches.wait_seconds < 2
    with prefetch(iter(range(4)), lambda item: item, depth=5) as batches:
        wait_until(lambda: not threads())
        for _ in range(4):
            time.sleep(0.05)  # the consumer's own work is not waiting
            next(batches)
        assert batches.wait_seconds < 0.1


@pytest.mark.parametrize("depth", [0, -1, 1.5, None])
def test_a_wrong_depth_is_an_error(depth):
    with pytest.raises(DataError, match="depth must be"):
        prefetch(iter([]), lambda item: item, depth)
