"""The orders of XLA's memory schedulers, of small schedules."""

from __future__ import annotations

import random
import re

import pytest

from splitjax.cost.memory.buffers import Schedule, Step
from splitjax.cost.memory.orders import depth_first, greedy, made_late, post_order
from splitjax.cost.memory.timeline import Order, combined, peak_of
from tests.cost.memory.on_a_gpu import compiled

SCHEDULERS = {
    "depth first": depth_first,
    "post": lambda steps, sizes, outputs: post_order(steps, outputs),
    "greedy": lambda steps, sizes, outputs: greedy(steps, sizes, outputs, set(), [0] * len(steps)),
    "late": lambda steps, sizes, outputs: made_late(steps, range(len(steps))),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_order_has_every_step_once_behind_what_it_reads(name):
    draws = random.Random(0)
    for _ in range(50):
        steps = [Step("op", draws.sample(range(i), min(i, draws.randrange(3))), [i]) for i in range(30)]
        sizes = {i: draws.randrange(1, 100) for i in range(30)}
        order = SCHEDULERS[name](steps, sizes, [29, 28])
        assert sorted(order) == list(range(30))
        place = {i: at for at, i in enumerate(order)}
        assert all(place[read] < place[i] for i in range(30) for read in steps[i].reads)


def test_greedy_runs_what_frees_most_first():
    # Both large arrays are made of the small one, and each is read once: one at a time is enough.
    steps = [
        Step("a", [], [0]), Step("b", [0], [1]), Step("c", [0], [2]), Step("d", [1], [3]), Step("e", [2], [4]),
        Step("f", [3, 4], [5]),
    ]  # fmt: skip
    sizes = {0: 1, 1: 100, 2: 100, 3: 1, 4: 1, 5: 1}
    order = greedy(steps, sizes, [5], set(), [0] * 6)
    assert order == [0, 1, 3, 2, 4, 5]
    # What is counted elsewhere frees nothing: of two steps the one that writes less is first.
    given = [Step("b", [9], [1]), Step("c", [8], [2])]
    assert greedy(given, {1: 5, 2: 4, 8: 1, 9: 100}, [1, 2], {8, 9}, [0, 0]) == [1, 0]


def test_zeros_are_made_right_before_they_are_read():
    steps = [Step("zeros", [], [0]), Step("a", [9], [1]), Step("b", [1], [2]), Step("add", [0, 2], [3])]
    assert made_late(steps, [0, 1, 2, 3]) == [1, 2, 0, 3]


def test_the_least_of_the_orders_is_at_most_each_and_the_most_at_least():
    draws = random.Random(1)
    differ = 0
    for _ in range(50):
        steps = [Step("op", draws.sample(range(i), min(i, 2)), [i]) for i in range(30)]
        sizes = {i: draws.randrange(1, 100) for i in range(30)}
        schedule = Schedule(steps, [29], [])
        least, first, most = (
            peak_of(schedule, sizes, set(), order).num_bytes for order in (Order.LEAST, Order.DEPTH_FIRST, Order.MOST)
        )
        assert least <= first <= most
        differ += least < most
    assert differ > 10


def test_gathers_that_wait_for_nothing_become_one_where_the_compiler_joins_them():
    kind = ("all_gather", "data")
    steps = [
        Step("all_gather", [10], [0], gathers=kind), Step("dot_general", [0], [1]),
        Step("all_gather", [11], [2], gathers=kind), Step("dot_general", [1, 2], [3]),
    ]  # fmt: skip
    sizes = {0: 100, 1: 1, 2: 100, 3: 1, 10: 10, 11: 10}
    peak = lambda gathers, limit=1000: (
        peak_of(combined(Schedule(steps, [3], []), sizes, limit, gathers), sizes, {10, 11}, Order.LEAST).num_bytes
    )
    assert peak(False) == 102 and peak(True) == 201  # both live from before the first product
    assert peak(True, limit=150) == 102


@pytest.mark.gpu_aot
def test_the_compiler_gathers_both_weights_at_once():
    assert re.search(r"f32\[512,512\]\S*, f32\[512,512\]\S*\).* all-gather(-start)?\(", compiled("gathered_weights"))
