"""Says in sentences how the parts of two plans differ, for `Plan.diff`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from splitjax._plan_parts import Collective, PartialPlan, spec_text
from splitjax._plan_purpose import Purpose


def comparable(
    here: Sequence[Collective], there: Sequence[Collective]
) -> tuple[Sequence[Collective], Sequence[Collective]]:
    """Returns the collectives of two plans as they can be compared: without their purposes where one plan tells them in
    words and the other has them as data."""
    told = [any(collective.purpose.is_told for collective in side) for side in (here, there)]
    if told[0] == told[1]:
        return here, there
    bare = Purpose.told("")
    here, there = ([dataclasses.replace(collective, purpose=bare) for collective in side] for side in (here, there))
    return here, there


def of_partial(a: PartialPlan | None, b: PartialPlan | None) -> Iterator[str]:
    """Yields a sentence for each difference between the partial backpropagation of two plans."""
    if a is None or b is None:
        yield from of_value("partial", a and a.assignment, b and b.assignment)
        return
    for field in dataclasses.fields(PartialPlan):
        if field.name != "segments":
            yield from of_value(f"partial.{field.name}", getattr(a, field.name), getattr(b, field.name))
    yield from of_entries("segment", a.segments, b.segments, lambda segment: segment.layers[0])


def of_value(name: str, here: Any, there: Any, show: Callable[[Any], str] = repr) -> Iterator[str]:
    """Yields a sentence where two values differ. `name`: what they are. `show`: makes words of either."""
    if here != there:
        if show(here) == show(there):  # such as the specs (None,) and (), which lay out alike
            show = repr
        yield f"{name}: {show(here)} -> {show(there)}"


def of_entries(
    kind: str,
    here: Sequence[Any],
    there: Sequence[Any],
    key: Callable[[Any], Hashable],
    name_of: Callable[[Any], str] | None = None,
) -> Iterator[str]:
    """Yields a sentence for each difference between two lists of entries.

    **Arguments:** `kind`: what an entry is. `here`, `there`: the entries of either plan, dataclasses. `key`: what pairs
    them; several of one key are paired in order. `name_of`: what an entry is called, where that is not its key."""
    if here == there:
        return
    mine, theirs = _grouped(here, key), _grouped(there, key)
    silent = True
    for shared in (*mine, *(shared for shared in theirs if shared not in mine)):
        left, right = mine.get(shared, []), theirs.get(shared, [])
        name = shared if name_of is None else name_of((*left, *right)[0])
        for x, y in zip(left, right, strict=False):
            if x != y:
                silent = False
                for field in dataclasses.fields(x):
                    show = spec_text if field.name == "spec" else repr
                    yield from of_value(
                        f"{kind} {name}: {field.name}", getattr(x, field.name), getattr(y, field.name), show
                    )
        if len(left) != len(right):
            silent = False
            times = f" ({len(left)} -> {len(right)} times)" if left and right else ""
            yield f"{kind} {name}: only in the {'first' if len(left) > len(right) else 'second'} plan{times}"
    if silent:
        yield f"{kind} entries: the same, in another order"


def _grouped(entries: Sequence[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups
