"""Sums among some of the workers: the bytes that are said to be sent, and the order in which the sum is handed on."""

from __future__ import annotations

import pytest

from splitjax.partial.contributors import handing, sent_bytes


@pytest.mark.parametrize("contributors", [(0,), (1, 3), (0, 1, 2)], ids=str)
def test_bytes_are_those_of_the_contributors(contributors):
    num_bytes, num_workers, count = 1024, 8, len(contributors)
    ring = 2 * (count - 1) / count * num_bytes  # what each contributor sends in a ring of its own
    handed = sum(len(pairs) for pairs in handing(contributors, num_workers)) * num_bytes
    assert sent_bytes(num_bytes, count, num_workers) == (ring * count / num_workers, handed / num_workers)


def test_a_worker_hands_the_sum_on_only_once_it_has_it():
    have = {1, 3}
    for pairs in handing((1, 3), 8):
        assert {source for source, _ in pairs} <= have and len({source for source, _ in pairs}) == len(pairs)
        have |= {target for _, target in pairs}
    assert have == set(range(8)) and len(handing((1, 3), 8)) == 2
