"""Two recordings, cell by cell: what differs, in full where both have their texts."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.corpus.cells import Cell
from benchmarks.corpus.exceptions import known_defect
from benchmarks.corpus.record import Recording, read
from benchmarks.corpus.store import StoreError, Summary, load

_FEW = 1000  # lines


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one cell: `part` is `plan` or `program`; `lines` say what differs."""

    cell: str
    part: str
    lines: tuple[str, ...]

    @property
    def known(self) -> str:
        """Why it may differ; empty where it may not."""
        return known_defect(self.cell, self.part)


def compare(before: pathlib.Path, after: pathlib.Path, num_lines: int) -> int:
    """Prints every cell that differs; returns 1 where one does that is no named exception. A recording of some cells is
    compared in those alone. Raises `StoreError` where no cell is in both, or releases of JAX are not the same."""
    first, second = load(before), load(after)
    for name in ("jax", "jaxlib"):
        if first.about.get(name) != second.about.get(name):
            raise StoreError(f"{before} is of {name} {first.about.get(name)} and {after} of {second.about.get(name)}")
    plans, programs = (_shared(getattr(first, part), getattr(second, part)) for part in ("plans", "programs"))
    if not plans and not programs:
        raise StoreError(f"no cell is both in {before} and in {after}")
    found = list(differences(first, second))
    for one in found:
        print(
            f"{'known' if one.known else 'DIFFERS'}  {one.part}  {one.cell}" + (f"  ({one.known})" if one.known else "")
        )
        for line in one.lines[:num_lines]:
            print(f"    {line[:300]}")
        if len(one.lines) > num_lines:
            print(f"    ... {len(one.lines) - num_lines} lines more")
    new = [one for one in found if not one.known]
    for what, shared, here, there in (
        ("plans", plans, first.plans, second.plans),
        ("programs", programs, first.programs, second.programs),
    ):
        alone = len(here.keys() ^ there.keys())
        part = what.removesuffix("s")
        wrong = sum(one.part == part for one in found)
        print(f"{what}: {len(shared) - wrong} of {len(shared)} cells are identical; {alone} are in one recording only")
    return 1 if new else 0


def differences(before: Summary, after: Summary) -> Iterator[Difference]:
    """The cells of both that differ."""
    for cell in _shared(before.plans, after.plans):
        here, there = before.plans[cell], after.plans[cell]
        if here != there:
            lines = _texts_of_plans(before, after, cell) if _is_planned(here) and _is_planned(there) else ()
            yield Difference(cell, "plan", lines or (f"{here} -> {there}",))
    for cell in _shared(before.programs, after.programs):
        here, there = before.programs[cell], after.programs[cell]
        if here != there:
            yield Difference(cell, "program", (*_figures(here, there), *_texts_of_programs(before, after, cell)))


def _shared(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    return [name for name in here if name in there]


def _is_planned(value: str) -> bool:
    return " " not in value


def _figures(here: Any, there: Any) -> Iterator[str]:
    """The figures that differ."""
    if isinstance(here, str) or isinstance(there, str):
        yield f"{here if isinstance(here, str) else 'compiled'} -> {there if isinstance(there, str) else 'compiled'}"
        return
    for name in sorted(here.keys() | there.keys()):
        old, new = here.get(name, {}), there.get(name, {})
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                yield f"{name}: {key} {old.get(key)} -> {new.get(key)}"


def _texts_of_plans(before: Summary, after: Summary, cell: str) -> tuple[str, ...]:
    if before.folder is None or after.folder is None:
        return ()
    unit = Cell.parse(cell).unit
    here, there = (
        next(record["plans"] for record in read(Recording(folder).plan_file(unit)) if record["cell"] == cell)
        for folder in (before.folder, after.folder)
    )
    return tuple(line for name in here for line in _changed(here[name], there.get(name, ""), name))


def _texts_of_programs(before: Summary, after: Summary, cell: str) -> tuple[str, ...]:
    if before.folder is None or after.folder is None:
        return ()
    here, there = (read(Recording(folder).program_file(Cell.parse(cell))) for folder in (before.folder, after.folder))
    if here["status"] != "ok" or there["status"] != "ok":
        return ()
    lines: list[str] = []
    for name, old in here["programs"].items():
        new = there["programs"].get(name, {"module": "", "report": ""})
        lines += [line for part in ("report", "module") for line in _changed(old[part], new[part], f"{name} {part}")]
    return tuple(lines)


def _changed(here: str, there: str, name: str) -> list[str]:
    """Of a text with few lines those that only one of the two has, with where they stand. Of a module the first line
    that differs: behind it all numbers may be others."""
    if here == there:
        return []
    old, new = here.splitlines(), there.splitlines()
    if max(len(old), len(new)) <= _FEW:
        return list(difflib.unified_diff(old, new, f"{name}, before", f"{name}, after", n=0, lineterm=""))
    number = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    shown = [(lines[number] if number < len(lines) else "(the end)") for lines in (old, new)]
    return [
        f"{name}: {len(old)} lines -> {len(new)}, of which line {number + 1} is the first to differ",
        f"- {shown[0]}",
        f"+ {shown[1]}",
    ]
