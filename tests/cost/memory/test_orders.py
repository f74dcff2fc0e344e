"""The orders of XLA's memory schedulers, of small schedules."""

from __future__ import annotations

import itertools
import math
import random
import re

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.orders import depth_first, greedy, made_late, post_order
from splitjax.cost.memory.schedule import Schedule, Step
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


def test_depth_first_is_the_order_of_xlas_scheduler():
    """The order of a module of many layers as its compiler wrote it down."""

    def step(weights, x):
        def loss(weights):
            y, kept = x, []
            for weight in weights:
                y = jnp.tanh(y @ weight)
                kept.append(y)
            return sum(jnp.mean(each**2) / (number + 2) for number, each in enumerate(kept))

        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    widths = [64, 256, 32, 512, 128, 64]
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in itertools.pairwise(widths)]
    lowered = jax.jit(step).lower(weights, jax.ShapeDtypeStruct((16, 64), jnp.float32))
    module = lowered.compile({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}).as_text()
    entry = module[module.index("\nENTRY") :]
    found = re.findall(r"%([\w.-]+) = f32\[([\d,]*)\]\S* ([\w-]+)\(([^)]*)\)", entry)
    numbers = {name: number for number, (name, *_) in enumerate(found)}
    reads_of = lambda text: [numbers[each] for each in re.findall(r"%([\w.-]+)", text)]
    steps = [
        Step(made_by, reads_of(reads), [numbers[name]])
        for name, _, made_by, reads in found
        if made_by not in ("parameter", "constant")
    ]
    sizes = {
        numbers[name]: 0 if made_by == "bitcast" else 4 * math.prod(map(int, filter(None, dims.split(","))))
        for name, dims, made_by, _ in found
    }
    outputs = reads_of(re.search(r"ROOT %[\w.-]+ = \(.*?\) tuple\(([^)]*)\)", entry)[1])
    assert len(steps) > 25 and len(outputs) == 5
    # Program order is another: what the compiler was given is not kept.
    draws = random.Random(0)
    for _ in range(3):
        mixed = steps.copy()
        draws.shuffle(mixed)
        mixed = [mixed[i] for i in post_order(mixed, outputs)]
        assert [mixed[i].writes for i in depth_first(mixed, sizes, outputs)] == [each.writes for each in steps]
