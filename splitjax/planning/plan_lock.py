"""Locks a plan: keeps what a change of code, of a model or of a package must not alter unnoticed.

A `Plan` comes in, a `PlanLock` comes out, and two of these are compared. A plan itself holds much that a new release of
JAX alters without any decision having changed (names of operations, sites in the traced step, notes); a lock holds the
decisions, which have to be equal, and a few figures, of which a comparison says how they moved.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from splitjax._plan_json import MESH_FORM
from splitjax._plan_parts import PartialPlan, Spec, spec_text
from splitjax.codec import Codec, Count, Wording
from splitjax.display.figures import bytes_text, flops_text
from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import BlockRemat, Plan


@dataclasses.dataclass(frozen=True)
class LockedArray:
    """Holds where an array of the step's arguments lives: `path`, `shape` and `dtype` of it, its `spec`, and the spec
    of its `gradient` where that has one of its own."""

    path: str
    shape: tuple[Count, ...]
    dtype: str
    spec: Spec
    gradient: Spec | None = None


@dataclasses.dataclass(frozen=True)
class LockedTable:
    """Holds the `scheme` that synchronises the gradient of the table at the path `param`, and whether its update is
    `lazy` (as `SyncPlan.lazy`)."""

    param: str
    scheme: str
    lazy: bool = False


@dataclasses.dataclass(frozen=True)
class LockedGradient:
    """Holds `how` a gradient boundary runs (as `BoundaryPlan.how`) and in how many parts (`num_parts`)."""

    how: str
    num_parts: Count


@dataclasses.dataclass(frozen=True)
class LockedDepths:
    """Holds how far back the workers of partial backpropagation differentiate: `assignment`, `estimator`, `rotate`,
    `warmup_steps`, `statistics` and `first` as in `splitjax.plan.PartialPlan`."""

    assignment: str
    estimator: str
    rotate: bool
    warmup_steps: Count
    statistics: str
    first: tuple[Count, ...]


@dataclasses.dataclass(frozen=True)
class LockedFigures:
    """Holds the figures of a plan, for a device and a step.

    - `state_bytes`, `peak_bytes`, `bound_bytes`: as in `splitjax.plan.Memory`.
    - `collective_bytes`: what a device sends. `flops`: what it computes.
    """

    state_bytes: Count
    peak_bytes: Count
    bound_bytes: Count | None
    collective_bytes: Count
    flops: Count


@dataclasses.dataclass(frozen=True)
class PlanLock:
    """Holds the decisions and the figures of a plan, for comparison with those of a later one.

    **Attributes:**

    - `made_with`: the versions of splitjax and JAX that it was made with; they may differ.
    - `mesh`, `rules`, `replicated_batch`, `batch_axes`, `group_comm`: as in `Plan`.
    - `arrays`: where every array of the step's arguments lives. `tables`: how tables with row lookups are synchronised.
      `gradients`: how gradient boundaries run. `depths`: of partial backpropagation; None without it.
    - `figures`: predicted bytes and flops.
    - `remat`: which repeated blocks are computed again, beside what the step says itself.
    """

    made_with: str
    mesh: MeshShape
    rules: str
    replicated_batch: str
    batch_axes: tuple[str, ...]
    group_comm: str
    arrays: tuple[LockedArray, ...]
    tables: tuple[LockedTable, ...]
    gradients: tuple[LockedGradient, ...]
    depths: LockedDepths | None
    figures: LockedFigures
    remat: tuple[BlockRemat, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> PlanLock:
        """Locks `plan`. Its memory is predicted for this, where that has not happened yet."""
        return cls(
            made_with=", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("splitjax", "jax")),
            mesh=plan.mesh,
            rules=plan.rules,
            replicated_batch=plan.replicated_batch,
            batch_axes=plan.batch_axes,
            group_comm=plan.group_comm,
            arrays=tuple(
                LockedArray(leaf.path, leaf.shape, leaf.dtype, leaf.spec, leaf.gradient) for leaf in plan.leaves
            ),
            tables=tuple(LockedTable(sync.param, sync.scheme, sync.lazy) for sync in plan.syncs),
            gradients=tuple(LockedGradient(each.how, each.num_parts) for each in plan.boundaries),
            depths=None if plan.partial is None else _depths(plan.partial),
            figures=LockedFigures(
                plan.memory.state_bytes,
                plan.memory.peak_bytes,
                plan.memory.bound_bytes,
                sum(collective.bytes for collective in plan.collectives),
                plan.compute.flops,
            ),
            remat=plan.remat,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlanLock:
        """Reads the lock that `save` wrote to `path`. Raises `PlanError` naming the file and the key path of the first
        problem."""
        return _JSON.load(path)

    @classmethod
    def from_json(cls, text: str) -> PlanLock:
        """Reads `text`, what `to_json` wrote. Raises `PlanError` naming the key path of the first problem."""
        return _JSON.parse(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the lock to the file `path`, whole or not at all. Raises `PlanError` when it cannot be written."""
        _JSON.save(self, path)

    def to_json(self) -> str:
        """Returns the lock as JSON text (ASCII, stable order, an array a line: a change shows as that line)."""
        return _JSON.text(self)

    def changed_decisions(self, later: PlanLock) -> tuple[str, ...]:
        """Returns what was decided otherwise in `later`, as sentences `thing: here -> there`; empty where every
        decision is the same. Layouts that split nothing are equal however they are written."""
        return tuple(_decisions(self, later))

    def changed_figures(self, later: PlanLock) -> tuple[str, ...]:
        """Returns which figures moved in `later`, as sentences with by how much."""
        return tuple(_figures(self.figures, later.figures))


def _depths(partial: PartialPlan) -> LockedDepths:
    return LockedDepths(**{field.name: getattr(partial, field.name) for field in dataclasses.fields(LockedDepths)})


def _decisions(here: PlanLock, there: PlanLock) -> Iterator[str]:
    for name, show in (
        ("mesh", str),
        ("rules", str),
        ("replicated_batch", str),
        ("batch_axes", ", ".join),
        ("group_comm", str),
    ):
        before, after = (getattr(lock, name) for lock in (here, there))
        if before != after:
            yield f"{name}: {show(before)} -> {show(after)}"
    yield from _entries("array", here.arrays, there.arrays, lambda array: array.path, _array_changes)
    yield from _entries("table", here.tables, there.tables, lambda table: table.param, _table_changes)
    before, after = (
        ", ".join(f"{each.how} ({each.num_parts})" if each.num_parts > 1 else each.how for each in lock.gradients)
        for lock in (here, there)
    )
    if before != after:
        yield f"gradients: {before or 'none'} -> {after or 'none'}"
    yield from _entries("block", here.remat, there.remat, lambda block: block.name, _block_changes)
    if here.depths is None or there.depths is None:
        if here.depths != there.depths:
            yield "partial backpropagation: " + ("none -> some" if here.depths is None else "some -> none")
        return
    for field in dataclasses.fields(LockedDepths):
        before, after = (getattr(depths, field.name) for depths in (here.depths, there.depths))
        if before != after:
            yield f"partial backpropagation: {field.name} {before} -> {after}"


def _entries(
    kind: str,
    here: Sequence[Any],
    there: Sequence[Any],
    key: Callable[[Any], str],
    changes: Callable[[Any, Any], Iterator[tuple[str, str, str]]],
) -> Iterator[str]:
    mine: Mapping[str, Any] = {key(entry): entry for entry in here}
    theirs: Mapping[str, Any] = {key(entry): entry for entry in there}
    for name, entry in mine.items():
        if name not in theirs:
            yield f"{kind} {name}: is no longer there"
        else:
            for what, before, after in changes(entry, theirs[name]):
                yield f"{kind} {name}: {what}{before} -> {after}"
    for name in theirs:
        if name not in mine:
            yield f"{kind} {name}: is new"


def _array_changes(here: LockedArray, there: LockedArray) -> Iterator[tuple[str, str, str]]:
    layouts = _layout(here.spec), _layout(there.spec)
    gradients = _layout(_of_gradient(here)), _layout(_of_gradient(there))
    for what, (before, after) in (
        ("shape ", (str(list(here.shape)), str(list(there.shape)))),
        ("dtype ", (here.dtype, there.dtype)),
        ("", layouts),
        ("gradient ", gradients if gradients != layouts else ("", "")),
    ):
        if before != after:
            yield what, before, after


def _table_changes(here: LockedTable, there: LockedTable) -> Iterator[tuple[str, str, str]]:
    if here.scheme != there.scheme:
        yield "synchronised by ", here.scheme, there.scheme
    if here.lazy != there.lazy:
        yield "lazy ", str(here.lazy), str(there.lazy)


def _block_changes(here: BlockRemat, there: BlockRemat) -> Iterator[tuple[str, str, str]]:
    if here.keeps != there.keeps:
        yield "keeps ", here.keeps, there.keeps


def _of_gradient(array: LockedArray) -> Spec:
    return array.spec if array.gradient is None else array.gradient


def _layout(spec: Spec) -> str:
    """Writes a spec; entries of one axis are equal as a name and as a tuple of it."""
    return spec_text(tuple(entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec))


def _figures(here: LockedFigures, there: LockedFigures) -> Iterator[str]:
    for name, show in (
        ("state_bytes", bytes_text),
        ("peak_bytes", bytes_text),
        ("bound_bytes", bytes_text),
        ("collective_bytes", bytes_text),
        ("flops", flops_text),
    ):
        before, after = getattr(here, name), getattr(there, name)
        if before == after:
            continue
        shown = " -> ".join("unknown" if value is None else show(value) for value in (before, after))
        moved = f" ({100 * (after / before - 1):+.1f} %)" if before and after is not None else ""
        yield f"{name}: {shown}{moved}"


def _check(lock: PlanLock) -> None:
    for kind, names in (
        ("arrays", [array.path for array in lock.arrays]),
        ("tables", [table.param for table in lock.tables]),
        ("remat", [block.name for block in lock.remat]),
    ):
        known: set[str] = set()
        for number, name in enumerate(names):
            if name in known:
                raise PlanError(
                    "the lock names it twice",
                    value=name,
                    place=f"{kind}[{number}]",
                    remedy="write the lock anew: splitjax plan --lock FILE --update-lock",
                )
            known.add(name)


_JSON: Codec[PlanLock] = Codec(
    PlanLock,
    PlanError,
    Wording(
        "a lock of a plan",
        "pass what `PlanLock.to_json()` returned; for a file use `PlanLock.load(path)`",
        remake="write the lock anew: splitjax plan --lock FILE --update-lock",
    ),
    format=1,
    forms={MeshShape: MESH_FORM},
    entries=("arrays", "tables", "gradients", "remat"),
    unless_empty=("remat",),
    finite=True,
    check=_check,
)
