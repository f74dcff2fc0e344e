"""When a device does what, by hand: seconds by tasks and links that a table says."""

from __future__ import annotations

import dataclasses
import time

import pytest

from splitjax.cost.time.machine import Machine
from splitjax.cost.time.schedule import _overlapped, simulate
from splitjax.cost.time.work import Task


@dataclasses.dataclass(frozen=True)
class Told(Machine):
    """A machine that takes as many seconds as a task's bytes say, and whose collectives take the links of its axes."""

    def seconds(self, task):
        return task.num_bytes

    def places(self, task):
        return frozenset(task.axes)


def computed(name, seconds, reads=(), writes=()):
    return Task(name, num_bytes=seconds, reads=reads, writes=writes)


def sent(name, seconds, axes, reads=(), writes=()):
    return Task(name, num_bytes=seconds, op="all_reduce", axes=axes, reads=reads, writes=writes)


def begins(tasks, overlaps):
    timed, end = simulate(tasks, Told({}, overlaps=overlaps))
    return {each.task.name: each.begin for each in timed}, end


# The gradient of the last layer is there first, and is summed while the first layer's is computed.
BACKWARD = (
    computed("last", 2, (), (1,)),
    sent("sum of last", 3, ("data",), (1,), (2,)),
    computed("first", 4, (1,), (3,)),
    sent("sum of first", 1, ("data",), (3,), (4,)),
    computed("update", 1, (2, 4), (5,)),
)


def test_one_after_the_other():
    assert begins(BACKWARD, overlaps=False)[1] == 11


def test_sums_go_on_while_the_rest_is_computed():
    found, end = begins(BACKWARD, overlaps=True)
    assert found == {"last": 0, "sum of last": 2, "first": 2, "sum of first": 6, "update": 7} and end == 8


def test_collectives_share_links_or_do_not():
    two = (sent("a", 2, ("data",), (), (1,)), sent("b", 2, ("data",), (), (2,)), sent("c", 2, ("model",), (), (3,)))
    assert begins(two, overlaps=True) == ({"a": 0, "b": 2, "c": 0}, 4)


def test_what_is_ready_is_computed_while_a_collective_is_waited_for():
    tasks = (
        sent("gather", 5, ("data",), (), (1,)),
        computed("needs it", 1, (1,), (2,)),
        computed("needs nothing", 3, (), (3,)),
    )
    assert begins(tasks, overlaps=True) == ({"gather": 0, "needs nothing": 0, "needs it": 5}, 6)


def test_a_loop_takes_all_of_its_turns():
    loop = Task("scan", inside=BACKWARD, turns=10, writes=(9,))
    (timed,), end = simulate((loop,), Told({}, overlaps=True))
    assert end == timed.seconds == pytest.approx(80)


def test_a_large_program_is_put_together_quickly():
    tasks = [Task(str(number), reads=(number - 1,), writes=(number,)) for number in range(20_000)]
    machine = Machine({}, overlaps=True)
    began = time.process_time()
    begins = _overlapped(tasks, [1.0] * len(tasks), machine)
    assert begins == list(map(float, range(20_000)))
    assert time.process_time() - began < 5  # it is a tenth of a second; the square of the tasks is minutes


@dataclasses.dataclass(frozen=True)
class Waited(Told):
    """A machine at whose collectives over `hosts` processes wait for a tenth of what they computed since the last."""

    def has_waits(self, task):
        return bool(task.op) and "hosts" in task.axes

    def waiting_seconds(self, computed_seconds):
        return computed_seconds / 10


def test_processes_wait_by_what_they_computed_since_the_last_collective():
    tasks = (
        computed("a", 10), sent("within", 1, ("data",)), computed("b", 20), sent("first", 1, ("hosts",)),
        sent("second", 1, ("hosts",)), computed("c", 5), sent("third", 1, ("hosts",)),
    )  # fmt: skip
    timed, end = simulate(tasks, Waited({}))
    waits = {each.task.name: each.waiting_seconds for each in timed if each.task.op}
    # Devices of a process do not wait for each other, and nobody right behind another collective.
    assert waits == {"within": 0, "first": pytest.approx(3), "second": 0, "third": pytest.approx(0.5)}
    assert end == pytest.approx(39 + 3.5) and timed[3].seconds == pytest.approx(4)


def test_a_turn_of_a_loop_waits_for_what_the_turn_before_computed_behind_its_last_collective():
    loop = Task("scan", inside=(computed("a", 10), sent("sum", 1, ("hosts",)), computed("b", 30)), turns=5)
    (timed, after, last), _ = simulate((loop, computed("c", 10), sent("sum", 1, ("hosts",))), Waited({}))
    assert [each.waiting_seconds for each in timed.inside] == [0, pytest.approx(4), 0]
    assert timed.seconds == pytest.approx(5 * 45) and last.waiting_seconds == pytest.approx(4)
    # A loop without any is computing, all of it.
    quiet = Task("scan", inside=(computed("a", 10), sent("sum", 1, ("data",))), turns=5)
    _, last = simulate((quiet, sent("sum", 1, ("hosts",))), Waited({}))[0]
    assert last.waiting_seconds == pytest.approx(5.5)
