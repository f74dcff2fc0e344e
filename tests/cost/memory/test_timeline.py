"""What is alive at a time, against peaks counted by hand."""

from __future__ import annotations

import itertools
import random

from splitjax.cost.memory.orders import depth_first
from splitjax.cost.memory.schedule import Schedule, Step
from splitjax.cost.memory.timeline import Order, combine, peak_of, spans_of

NO_LIMIT = 2**60


def test_a_buffer_lives_from_its_writer_to_its_last_reader():
    # 1 -> 2 -> 3 -> 4, and 1 is read again at the end
    steps = [Step("a", [], [1]), Step("b", [1], [2]), Step("c", [2], [3]), Step("d", [1, 3], [4])]
    sizes = {1: 10, 2: 100, 3: 1, 4: 5}
    peak = peak_of(Schedule(steps, [4], []), sizes, set())
    assert peak.num_bytes == 10 + 100 + 1 and set(peak.alive) == {1, 2, 3}


def test_what_is_written_in_place_is_counted_once_unless_with_care():
    steps = [Step("a", [], [1]), Step("add", [1], [2], shares=True)]
    schedule, sizes = Schedule(steps, [2], []), {1: 8, 2: 8}
    assert peak_of(schedule, sizes, set()).num_bytes == 8
    assert peak_of(schedule, sizes, set(), Order.CAREFUL).num_bytes == 16


def test_a_loop_hands_on_in_place_where_what_came_in_is_read_no_more():
    def loop(*late: Step) -> int:
        body = Schedule([Step("square", [10], [11]), *late], [11], [(10, 11)])
        steps = [Step("a", [], [1]), Step("scan", [1], [2], inside=(body,))]
        return peak_of(Schedule(steps, [2], []), {1: 8, 2: 8, 10: 8, 11: 8, 12: 1}, {1}).num_bytes

    assert loop() == 8
    assert loop(Step("late", [10], [12])) == 8 + 8 + 1


def test_all_reduces_that_do_not_wait_for_each_other_become_one():
    kind = ("all_reduce", "data")
    steps = [
        Step("a", [], [1]),
        Step("sum", [1], [2], combines=kind),
        Step("b", [2], [3]),  # what follows waits for the first sum
        Step("sum", [3], [4], combines=kind),
        Step("sum", [3], [5], combines=kind),
        Step("other", [3], [6], combines=("all_reduce", "model")),
    ]
    sizes = dict.fromkeys(range(1, 7), 4)
    names = lambda limit: sorted(
        (step.combines[1], len(step.writes))
        for step in combine(Schedule(steps, [4, 5, 6], []), sizes, limit).steps
        if step.combines
    )
    assert names(NO_LIMIT) == [("data", 1), ("data", 2), ("model", 1)]
    assert names(7) == [("data", 1), ("data", 1), ("data", 1), ("model", 1)]
    # The first is first among what the one reads, as in XLA's modules: the order of the steps before follows from it.
    (one,) = [step for step in combine(Schedule(steps, [4, 5, 6], []), sizes, NO_LIMIT).steps if len(step.writes) == 2]
    assert one.writes == [4, 5]


def test_every_order_writes_before_it_reads_and_loses_no_step():
    draws = random.Random(0)
    for _ in range(50):
        steps = []
        for i in range(30):
            reads = draws.sample(range(i), min(i, draws.randrange(3)))
            kind = draws.choice([(), (), ("sum", "data"), ("sum", "model")])
            steps.append(Step("op", reads, [i], combines=kind))
        sizes = {i: draws.randrange(1, 100) for i in range(30)}
        schedule = combine(Schedule(steps, [29, 28], []), sizes, NO_LIMIT)
        assert sorted(itertools.chain.from_iterable(step.writes for step in schedule.steps)) == list(range(30))
        for order in (depth_first(schedule.steps, sizes, [29, 28]), range(len(schedule.steps))):
            written = set()
            for i in order:
                assert written.issuperset(schedule.steps[i].reads)
                written.update(schedule.steps[i].writes)
            assert len(written) == 30


def stored(spans, sizes):
    """The bytes at each moment."""
    return [sum(sizes[b] for b, start, end in spans.buffers if start <= k < end) for k in range(len(spans.steps))]


def test_spans_say_from_when_to_when_a_buffer_is_stored():
    steps = [Step("a", [], [1]), Step("b", [1], [2]), Step("c", [2], [3]), Step("d", [1, 3], [4])]
    sizes = {1: 10, 2: 100, 3: 1, 4: 5}
    spans = spans_of(Schedule(steps, [4], []), sizes, set())
    assert sorted(spans.buffers) == [(1, 0, 4), (2, 1, 3), (3, 2, 4), (4, 3, 4)]
    assert [step.name for step in spans.steps] == ["a", "b", "c", "d"]
    assert stored(spans, sizes) == [10, 110, 111, 16]


def test_what_is_written_over_ends_there():
    steps = [Step("a", [], [1]), Step("add", [1], [2], shares=True)]
    assert sorted(spans_of(Schedule(steps, [2], []), {1: 8, 2: 8}, set()).buffers) == [(1, 0, 1), (2, 1, 2)]


def test_the_body_of_a_loop_stands_where_the_loop_runs():
    body = Schedule([Step("square", [10], [11]), Step("late", [10], [12])], [11], [(10, 11)])
    steps = [Step("a", [], [1]), Step("scan", [1], [2], inside=(body,)), Step("z", [2], [3])]
    schedule, sizes = Schedule(steps, [3], []), {1: 8, 2: 8, 3: 1, 10: 8, 11: 8, 12: 1}
    spans = spans_of(schedule, sizes, {1})
    assert [step.name for step in spans.steps] == ["a", "square", "late", "z"]
    assert (2, 1, 4) in spans.buffers and (12, 2, 3) in spans.buffers
    assert max(stored(spans, sizes)) == peak_of(schedule, sizes, {1}).num_bytes


def test_the_most_of_the_spans_is_the_peak():
    draws = random.Random(1)
    for _ in range(50):
        steps = [
            Step(str(i), sorted({draws.randrange(i) for _ in range(2)}) if i else [], [i], shares=draws.random() < 0.5)
            for i in range(draws.randrange(1, 14))
        ]
        sizes = {i: draws.choice((4, 8, 8, 16)) for i in range(len(steps))}
        schedule = Schedule(steps, [len(steps) - 1], [])
        for name in (Order.DEPTH_FIRST, Order.LEAST, Order.MOST):
            found = spans_of(schedule, sizes, set(), name)
            assert max(stored(found, sizes)) == peak_of(schedule, sizes, set(), name).num_bytes


def test_what_a_loop_ends_with_takes_the_place_of_what_it_begins_with():
    sizes = {1: 8, 2: 8, 3: 1}
    begins = lambda *reads: Schedule(
        [Step("zeros", [], [1]), Step("scan", [1], [2], takes=((1, 2),)), Step("use", [2, *reads], [3])], [3], []
    )
    assert peak_of(begins(), sizes, set()).num_bytes == 9
    assert peak_of(begins(1), sizes, set()).num_bytes == 17  # what is read behind the loop, too, is copied for it
    assert peak_of(begins(), sizes, {1}).num_bytes == 9  # an argument stays as it is: the loop has its own
    assert sorted(spans_of(begins(), sizes, set()).buffers) == [(1, 0, 1), (2, 1, 3), (3, 2, 3)]
