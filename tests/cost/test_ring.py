"""Bytes of collectives, against a simulation that moves the blocks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from splitjax.cost.ring import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes


@given(st.integers(1, 9), st.integers(0, 50))
def test_ring_all_gather_sends_what_a_simulation_sends(n, block):
    held = [{i} for i in range(n)]
    sent = [0] * n
    for round_ in range(n - 1):
        moved = [(i - round_) % n for i in range(n)]  # the block that i passes on
        assert all(block_id in held[i] for i, block_id in enumerate(moved))
        for i, block_id in enumerate(moved):
            held[(i + 1) % n].add(block_id)
            sent[i] += block
    assert all(len(blocks) == n for blocks in held)
    assert sent == [all_gather_bytes(n, n * block)] * n
    assert sent == [reduce_scatter_bytes(n, n * block)] * n  # the same rounds backwards
    assert all_reduce_bytes(n, n * block) == 2 * sent[0]
    assert all_to_all_bytes(n, n * block) == sent[0]


@pytest.mark.parametrize("count", [all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes])
def test_alone_nothing_is_sent_and_parts_of_bytes_round_up(count):
    assert count(1, 1000) == 0
    assert count(3, 1) in (1, 2)
    assert isinstance(count(3, 10**18 + 1), int)


def test_hand_computed():
    assert all_reduce_bytes(4, 1000) == 1500
    assert all_gather_bytes(4, 1000) == reduce_scatter_bytes(4, 1000) == all_to_all_bytes(4, 1000) == 750
