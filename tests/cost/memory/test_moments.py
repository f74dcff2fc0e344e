"""What is stored at each moment, counted by hand."""

from __future__ import annotations

from splitjax.cost.memory.moments import MemoryTimeline, StoredSpan, passes_of
from splitjax.plan import StoredArray


def span(num_bytes, start, end, layer=""):
    return StoredSpan(StoredArray((num_bytes,), num_bytes, "add", layer), start, end)


def test_the_peak_is_the_moment_at_which_most_is_stored():
    spans = (span(10, 0, 3), span(100, 1, 2, "a"), span(50, 2, 4, "b"), span(1, 1, 4))
    timeline = MemoryTimeline(1000, ("w", "x", "y", "z"), ("forward",) * 4, spans)
    assert timeline.stored_bytes == (10, 111, 61, 51)
    assert timeline.peak == 1 and timeline.temporary_bytes == 111 and timeline.peak_bytes == 1111
    assert [array.num_bytes for array in timeline.at_peak] == [100, 10, 1]


def test_a_step_without_operations_stores_its_arguments():
    timeline = MemoryTimeline(7, (), (), ())
    assert timeline.peak_bytes == 7 and timeline.at_peak == ()


def test_an_operation_without_a_name_belongs_to_the_pass_before_it():
    names = ["", "jit(f)/jvp(Net)/dot_general", "", "jit(f)/transpose(jvp(Net))/dot_general", "", "jit(f)/add"]
    assert passes_of(names) == ("other", "forward", "forward", "backward", "backward", "other")
