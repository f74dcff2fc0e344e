"""Static values of a call: which of them share a program."""

from __future__ import annotations

import pytest

from splitjax._static import Fixed, Static
from splitjax.errors import TraceError


def static(**fields):
    """The static argument of a module that has these fields."""
    held = {path: Fixed(value) for path, value in fields.items()}
    return Static(tuple(held.items()) if all(one.has_hash for one in held.values()) else [held], "step", lambda: held)


def test_a_list_that_changed_in_place_is_another_program():
    sizes = [8, 16]
    before = static(sizes=sizes)
    assert before == before and hash(before) == hash(static(sizes=sizes))
    sizes.append(32)
    after = static(sizes=sizes)
    assert before != after and hash(before) != hash(after)


def test_values_of_two_types_are_two_programs():
    assert static(rate=1) == static(rate=1)
    assert static(rate=1) != static(rate=True) and static(rate=1) != static(rate=1.0)


def test_what_has_no_hash_is_refused():
    with pytest.raises(TraceError, match="has no hash"):
        static(table=bytearray(2))
