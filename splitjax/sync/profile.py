"""Measures how sparse a table's gradient is across workers: Zen's analysis (Wang et al., arXiv 2309.13254, section
2), on sets of row ids.

Ids that each worker touched in a few steps go in, numbers come out; nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from splitjax.codec import Codec, Form, Wording, fields_of
from splitjax.errors import SyncError
from splitjax.sync import masks

_ID_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Table:
    """Describes what is synchronised: a table of `num_rows` rows of `row_size` values of `itemsize` bytes, over
    `num_workers` workers."""

    num_rows: int
    row_size: int
    itemsize: int
    num_workers: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_size * self.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole table."""
        return self.num_rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """The sparsity of one table's gradient, per step and worker.

    **Attributes:**

    - `table`: its sizes.
    - `rows`: rows with a gradient, mean over workers and steps; `rows_max`: the most that was seen.
    - `unions`: (m, rows in the union of m workers, mean), for m = 1, 2, 4, ... and the number of workers.
    - `overlap`: |I1 and I2| / min(|I1|, |I2|), mean over pairs of workers.
    - `skewness`: the largest density of n equal ranges of the table, over the whole's: what a range owner has to bear.
    - `hot_rows`: rows that every worker has, mean over steps.
    - `samples`: [step][worker] sorted unique ids: schemes take their capacities from them. Not in the JSON.
    - `lookups`: the most ids that a worker looked up in a step, repeated ones included: what a step gathers whose rows
      lack room. 0: not known. Not in the JSON.
    """

    table: Table
    rows: float
    rows_max: int
    unions: tuple[tuple[int, float], ...]
    overlap: float
    skewness: float
    hot_rows: float
    samples: tuple[tuple[np.ndarray, ...], ...] = dataclasses.field(repr=False, compare=False, default=())
    lookups: int = dataclasses.field(repr=False, compare=False, default=0)

    @property
    def num_workers(self) -> int:
        """Workers that take part."""
        return self.table.num_workers

    @property
    def density(self) -> float:
        """The share of rows with a gradient on one worker."""
        return self.rows / max(self.table.num_rows, 1)

    def union(self, num_workers: int) -> float:
        """Returns the rows in the union of `num_workers` workers, between measured numbers by a power law."""
        (m0, u0), (m1, u1) = self.unions[0], self.unions[-1]
        for point in self.unions:
            if point[0] <= num_workers:
                m0, u0 = point
        for point in reversed(self.unions):
            if point[0] >= num_workers:
                m1, u1 = point
        if m0 == m1 or not u0 or not u1:
            return u0
        return u0 * (u1 / u0) ** (math.log(num_workers / m0) / math.log(m1 / m0))

    def densification(self, num_workers: int) -> float:
        """Returns the density of the sum of `num_workers` workers over the density of a single worker's (Zen's
        gamma)."""
        return self.union(num_workers) / self.rows if self.rows else 1.0

    def bound_bytes(self) -> float:
        """The least that a worker must send on average, values only: w (k + (1 - 2/n) U)."""
        n = self.num_workers
        return self.table.row_bytes * (self.rows + (1 - 2 / n) * self.union(n)) if n > 1 else 0.0

    @property
    def fallback_bytes(self) -> int:
        """What a worker sends in a step whose rows lack room, beside the attempt: room for all lookups of every
        worker, ids and values."""
        rows = min(max(self.lookups, self.rows_max), self.table.num_rows)
        return (self.num_workers - 1) * rows * (self.table.row_bytes + _ID_BYTES)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, without the samples."""
        return _JSON.values(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sparsity:
        """Reads `data` that `to_json` gave, without samples: good for reading, not for a scheme's capacities. Raises
        `SyncError` for anything else."""
        return _JSON.read(data)


def _written(sparsity: Sparsity) -> dict[str, Any]:
    """Gives what is written of a sparsity: one object with the table's sizes and what follows from the numbers."""
    return {
        **fields_of(sparsity.table),
        "rows": sparsity.rows,
        "rows_max": sparsity.rows_max,
        "density": sparsity.density,
        "unions": sparsity.unions,
        "densification": sparsity.densification(sparsity.num_workers),
        "overlap": sparsity.overlap,
        "skewness": sparsity.skewness,
        "hot_rows": sparsity.hot_rows,
        "bound_bytes": sparsity.bound_bytes(),
    }


def _read(codec: Codec[Any], values: Any, place: str) -> Sparsity:
    known = codec.object(Sparsity, values, place)
    table = {field.name: known.pop(field.name) for field in dataclasses.fields(Table) if field.name in known}
    own = codec.arguments(Sparsity, known, place, ("table", "samples", "lookups"))
    counts = [count for count, _ in own["unions"]]
    rows = [rows for _, rows in own["unions"]]
    if not counts or counts[0] < 1 or counts != sorted(set(counts)) or not all(0 <= known < math.inf for known in rows):
        message = "unions are rows, 0 or more, of 1 worker or more, by rising numbers of workers"
        codec.fail(message, own["unions"], f"{place}.unions" if place else "unions")
    return Sparsity(codec.instance(Table, table, place), **own)


SPARSITY_FORM: Form[Sparsity] = Form(_written, _read, ("density", "densification", "bound_bytes"))
_JSON = Codec(Sparsity, SyncError, Wording.of_result("a sparsity", "sparsity"), forms={Sparsity: SPARSITY_FORM})


def measure(id_sets: Sequence[Sequence[np.ndarray]], num_rows: int, row_size: int, itemsize: int = 4) -> Sparsity:
    """Measures the sparsity of the steps whose ids are given.

    **Arguments:**

    - `id_sets`: [step][worker] integer arrays of row ids, any shape; duplicates and ids outside 0..`num_rows`-1
      do not count.
    - `num_rows`, `row_size`, `itemsize`: of the table; bytes a value.

    Raises `SyncError` without a step or a worker, or where steps have different numbers of workers.
    """
    num_workers = {len(step) for step in id_sets}
    if len(num_workers) != 1 or 0 in num_workers:
        raise SyncError(
            "a profile needs at least one step, all with the same workers", value=[len(step) for step in id_sets],
            place="measure(id_sets)", remedy="pass ids as [step][worker]",
        )  # fmt: skip
    (n,) = num_workers
    samples = tuple(tuple(_unique(ids, num_rows) for ids in step) for step in id_sets)
    unions = tuple((m, float(np.mean([_union_size(step, m) for step in samples]))) for m in masks.group_sizes(n))
    sets = [ids for step in samples for ids in step]
    held = [np.unique(np.concatenate(step), return_counts=True)[1] for step in samples]
    return Sparsity(
        Table(num_rows, row_size, itemsize, n),
        float(np.mean([ids.size for ids in sets])),
        max(ids.size for ids in sets),
        unions,
        _overlap(samples),
        skewness(sets, num_rows, n),
        float(np.mean([np.sum(counts == n) for counts in held])) if n > 1 else 0.0,
        samples,
        max(np.size(ids) for step in id_sets for ids in step),
    )


def _unique(ids: np.ndarray, num_rows: int) -> np.ndarray:
    unique = np.unique(np.asarray(ids).reshape(-1))
    return unique[(unique >= 0) & (unique < num_rows)].astype(np.int32)


def _union_size(step: Sequence[np.ndarray], m: int) -> float:
    """Mean over the disjoint groups of m workers."""
    groups = [step[i : i + m] for i in range(0, len(step) - m + 1, m)]
    return float(np.mean([np.unique(np.concatenate(group)).size for group in groups]))


def _overlap(samples: Sequence[Sequence[np.ndarray]]) -> float:
    """Mean over all pairs of workers of a step, and over the steps that have such pairs."""
    of_steps = [masks.mean_overlap(masks.overlaps(list(_membership(step)))) for step in samples]
    means = [mean for mean in of_steps if mean is not None]
    return float(np.mean(means)) if means else 0.0


def _membership(step: Sequence[np.ndarray]) -> np.ndarray:
    """Packs, per worker, a mask over the rows that any worker has."""
    union, position = np.unique(np.concatenate(step), return_inverse=True)
    has = np.zeros((len(step), max(union.size, 1)), bool)
    has[np.repeat(np.arange(len(step)), [ids.size for ids in step]), position] = True
    return masks.pack(has)


def skewness(sets: Sequence[np.ndarray], num_rows: int, n: int) -> float:
    """Returns the largest density of `n` equal ranges of `num_rows` rows over the density of all; 1 where all are
    empty.

    It is the mean over `sets` of ids.
    """
    size = max(-(-num_rows // n), 1)
    ratios = [np.bincount(ids // size, minlength=n).max() * n / ids.size for ids in sets if ids.size]
    return float(np.mean(ratios)) if ratios else 1.0
