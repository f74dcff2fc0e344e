"""The sparsity of every gradient tensor of a step over its workers, as one value: Zen's analysis (Wang et al., arXiv
2309.13254, section 2).

Numbers only; `measure.profiling` evaluates the gradients. What is counted are a tensor's *units*: rows of a table that
the step looks rows up in, elements of any other tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from splitjax.codec import Codec, Form, Wording, fields_of
from splitjax.display import registry
from splitjax.errors import ProfileError
from splitjax.sync import masks
from splitjax.sync.profile import SPARSITY_FORM, Sparsity, measure

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Figures:
    """The sparsity of one tensor's gradient in one step.

    **Attributes:**

    - `densities`: per worker, the share of elements that are not zero.
    - `row_densities`: per worker, the share of rows that are not all zero; empty for a tensor that is no table.
    - `unions`: (m, share of units that m workers have together, so that their sum is not zero there), for m = 1, 2, 4,
      ... and the number of workers; mean over the disjoint groups of m neighbours. Sums that cancel exactly count as
      not zero.
    - `overlap`: |I1 and I2| / min(|I1|, |I2|), mean over all pairs of workers with a gradient.
    - `skewness`: the units in the fullest of n equal ranges over the mean of the ranges, for n workers; mean over
      workers with a gradient.
    """

    densities: tuple[float, ...]
    row_densities: tuple[float, ...]
    unions: tuple[tuple[int, float], ...]
    overlap: float
    skewness: float

    @property
    def density(self) -> float:
        """The share of elements that are not zero, mean over workers."""
        return float(np.mean(self.densities))

    @property
    def row_density(self) -> float | None:
        """The share of rows that are not all zero, mean over workers; None for a tensor that is no table."""
        return float(np.mean(self.row_densities)) if self.row_densities else None

    def densification(self, num_workers: int) -> float:
        """Returns Zen's gamma: the density of the sum of `num_workers` workers (1, 2, 4, ... or all) over the
        density of a single worker's gradient; 1 for a gradient that is all zero.

        Raises `ProfileError` for another number.
        """
        known = self.densifications
        if num_workers not in known:
            raise ProfileError(
                f"densification was not measured for {num_workers} workers",
                value=num_workers,
                place="densification(num_workers)",
                remedy=f"give one of {', '.join(map(str, known))}, or profile with num_workers=",
            )
        return known[num_workers]

    @property
    def densifications(self) -> dict[int, float]:
        """The densification by the sum of each number of workers that was measured."""
        shares = dict(self.unions)
        return {m: share / shares[1] if shares[1] else 1.0 for m, share in shares.items()}


@dataclasses.dataclass(frozen=True)
class TensorProfile:
    """The sparsity of one gradient tensor.

    **Attributes:**

    - `path`: of its parameter; of the loss's operand for what is no parameter of the step.
    - `shape`, `dtype`: of the gradient.
    - `loss`: the differentiated function and its line.
    - `is_table`: whether the step looks rows up in it: its units are rows then.
    - `dense_reason`: why the gradient of a table has to stay dense whatever its sparsity; empty if it need not.
    - `steps`: the figures of every step.
    - `overlaps`: `[n][n]`, the overlap of every two workers, mean over the steps; 0 where one of them never had a
      gradient.
    - `sparsity`: of a table, what `sync.choose` decides by; None for other tensors.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    loss: str
    is_table: bool
    dense_reason: str
    steps: tuple[Figures, ...]
    overlaps: tuple[tuple[float, ...], ...]
    sparsity: Sparsity | None = None

    @property
    def mean(self) -> Figures:
        """The figures averaged over the steps."""
        average = lambda rows: (
            tuple(float(value) for value in np.mean(np.asarray(rows), axis=0)) if rows and rows[0] else ()
        )
        steps = self.steps
        sizes = [m for m, _ in steps[0].unions]
        return Figures(
            average([step.densities for step in steps]),
            average([step.row_densities for step in steps]),
            tuple(zip(sizes, average([[share for _, share in step.unions] for step in steps]), strict=True)),
            float(np.mean([step.overlap for step in steps])),
            float(np.mean([step.skewness for step in steps])),
        )

    @property
    def num_workers(self) -> int:
        """Workers whose gradients were measured."""
        return len(self.overlaps)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def density(self) -> float:
        """The share of elements that are not zero, mean over workers and steps."""
        return self.mean.density

    @property
    def row_density(self) -> float | None:
        """The share of rows that are not all zero, mean over workers and steps; None for a tensor that is no table."""
        return self.mean.row_density

    @property
    def overlap(self) -> float:
        """Mean over pairs of workers and steps."""
        return self.mean.overlap

    @property
    def skewness(self) -> float:
        """Mean over workers and steps."""
        return self.mean.skewness

    def densification(self, num_workers: int | None = None) -> float:
        """Returns the mean densification by the sum of `num_workers` workers (None: all); see
        `Figures.densification`."""
        return self.mean.densification(self.num_workers if num_workers is None else num_workers)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Describes how sparse a step's gradients are over its workers. Print it, show it in a notebook, keep it with
    `save`, draw it with `plot`.

    **Attributes:**

    - `step`: the step's name.
    - `num_workers`: workers among which each batch was divided.
    - `num_examples`: of every step's batch.
    - `tensors`: all gradient tensors, in the order of the losses' arguments.
    - `notes`: what to know about how it was measured.
    """

    step: str
    num_workers: int
    num_examples: tuple[int, ...]
    tensors: tuple[TensorProfile, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Batches that were measured."""
        return len(self.num_examples)

    @property
    def tables(self) -> tuple[TensorProfile, ...]:
        """The tensors that the step looks rows up in."""
        return tuple(tensor for tensor in self.tensors if tensor.is_table)

    def tensor(self, path: str) -> TensorProfile:
        """Returns the tensor at `path`. Raises `ProfileError` for a path that is not there, or that several losses
        differentiate."""
        named = [tensor for tensor in self.tensors if tensor.path == path]
        if len(named) == 1:
            return named[0]
        if named:
            raise ProfileError(
                f"{len(named)} losses differentiate {path!r}",
                value=[tensor.loss for tensor in named],
                place="Profile.tensor",
                remedy="choose among `profile.tensors` by their `loss`",
            )
        raise ProfileError(
            "the profile has no such tensor",
            value=path,
            place="Profile.tensor",
            remedy=f"give one of {_paths(self.tensors)}",
        )

    def sparsity(self, path: str) -> Sparsity:
        """Returns what `sync.choose` needs to know of the table at `path`; a profile that was read from JSON has no
        samples, and does not do.

        Raises `ProfileError` for a tensor that is no table.
        """
        sparsity = self.tensor(path).sparsity
        if sparsity is None:
            raise ProfileError(
                f"{path!r} is no table: the step looks no rows up in it",
                value=path,
                place="Profile.sparsity",
                remedy=f"give one of {_paths(self.tables)}"
                if self.tables
                else "the step has no table: its gradients travel dense",
            )
        return sparsity

    def to_json(self) -> str:
        """The profile as JSON text (ASCII), one tensor a line, read back by `from_json`. The row numbers behind a
        table's `sparsity` (its `samples`) are left out."""
        return _JSON.text(self)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads the `text` that `to_json` wrote. Raises `ProfileError` for anything else, with the key path of the
        first problem."""
        return _JSON.parse(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON to the file `path`, whole or not at all. Raises `ProfileError` when the file cannot be
        written."""
        _JSON.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a profile that `save` wrote to `path`. Raises `ProfileError` when it cannot be read."""
        return _JSON.load(path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws a `matplotlib.figure.Figure`: density and skewness by tensor, densification by number of workers,
        overlap of workers.

        `path`: also written there (PNG, SVG, PDF by the ending). Raises `ProfileError` where matplotlib is not
        installed, or the file cannot be written."""
        return registry.draw(self, path)

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        return (
            f"<Profile of {self.step}: {len(self.tensors)} gradients, {len(self.tables)} of tables, {self.num_workers}"
            f" workers, {self.num_steps} steps>"
        )

    def _repr_html_(self) -> str:
        return registry.html(self)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A gradient that is measured: the first fields of `TensorProfile`, and bytes a value."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    loss: str
    is_table: bool
    dense_reason: str
    itemsize: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_units(self) -> int:
        """Rows of a table, elements of another tensor."""
        return self.shape[0] if self.is_table else self.size


@dataclasses.dataclass(frozen=True)
class StepMasks:
    """One tensor's gradient in one step: per worker its units that are not zero (packed), and its elements that are not
    zero."""

    units: tuple[np.ndarray, ...]
    num_elements: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MeasuredSparsity:
    """Holds what is kept of a step: its `figures`, `overlaps` (nan where undefined), and of a table the `rows` of
    every worker."""

    figures: Figures
    overlaps: np.ndarray
    rows: tuple[np.ndarray, ...]


def analyse_step(tensor: Tensor, step_masks: StepMasks) -> MeasuredSparsity:
    """Computes the figures of one step of a `tensor` from the masks of all workers, `step_masks`."""
    n, size = len(step_masks.units), max(tensor.size, 1)
    matrix = masks.overlaps(step_masks.units)
    skews = [
        skew for skew in (masks.skewness(mask, tensor.num_units, n) for mask in step_masks.units) if skew is not None
    ]
    rows = tuple(masks.count(mask) / max(tensor.num_units, 1) for mask in step_masks.units) if tensor.is_table else ()
    figures = Figures(
        tuple(number / size for number in step_masks.num_elements), rows,
        tuple((m, number / max(tensor.num_units, 1)) for m, number in masks.union_counts(step_masks.units)),
        masks.mean_overlap(matrix) or 0.0, float(np.mean(skews)) if skews else 1.0,
    )  # fmt: skip
    return MeasuredSparsity(
        figures, matrix, tuple(masks.units_of(mask) for mask in step_masks.units) if tensor.is_table else ()
    )


def collect(tensor: Tensor, steps: Sequence[MeasuredSparsity]) -> TensorProfile:
    """Collects the profile of a `tensor` from its measured `steps`."""
    matrices = np.asarray([step.overlaps for step in steps])
    defined = ~np.isnan(matrices)
    overlaps = np.where(defined, matrices, 0.0).sum(axis=0) / np.maximum(defined.sum(axis=0), 1)
    sparsity = None
    if tensor.is_table:
        sparsity = measure(
            [step.rows for step in steps], tensor.num_units, math.prod(tensor.shape[1:]), tensor.itemsize
        )
    return TensorProfile(
        tensor.path, tensor.shape, tensor.dtype, tensor.loss, tensor.is_table, tensor.dense_reason,
        tuple(step.figures for step in steps), tuple(tuple(map(float, row)) for row in overlaps), sparsity,
    )  # fmt: skip


def _paths(tensors: Sequence[TensorProfile]) -> str:
    names = [tensor.path for tensor in tensors]
    return ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")


def _written(profile: Profile) -> dict[str, Any]:
    """Gives what is written of a profile: what is short comes first."""
    fields = fields_of(profile)
    tensors = fields.pop("tensors")
    return {**fields, "tensors": tensors}


def _written_tensor(tensor: TensorProfile) -> dict[str, Any]:
    """Gives what is written of a tensor: the means first, for whoever reads it by eye; they are not read back."""
    mean = tensor.mean
    means = {
        "density": mean.density,
        "row_density": mean.row_density,
        "overlap": mean.overlap,
        "skewness": mean.skewness,
        "densification": [[m, ratio] for m, ratio in mean.densifications.items()],
    }
    return {"path": tensor.path, "means": means, **fields_of(tensor)}


def _check(profile: Profile) -> None:
    """Raises `ProfileError` for what types do not say: every step of a tensor has figures of the same workers."""
    if not profile.num_examples:
        raise ProfileError(
            "a profile has the examples of every step", value=[], place="num_examples", remedy="profile the step anew"
        )
    for number, tensor in enumerate(profile.tensors):
        steps, size = tensor.steps, len(tensor.overlaps)
        shapes = {(len(step.densities), len(step.row_densities), tuple(m for m, _ in step.unions)) for step in steps}
        shares = [share for step in steps for share in (*step.densities, *(share for _, share in step.unions))]
        message = ""
        if len(shapes) != 1 or not steps[0].densities or 1 not in dict(steps[0].unions):
            message = "a tensor has steps, all of them with figures of the same numbers of workers, of 1 among them"
        elif tensor.is_table and not steps[0].row_densities:
            message = "a table has densities of rows"
        elif not {size, profile.num_workers} <= dict(steps[0].unions).keys():
            message = "the sum of all workers is among the unions"
        elif not _are_of_groups([m for m, _ in steps[0].unions], {size, profile.num_workers}):
            message = "unions are of 1, 2, 4, ... workers and of all, by rising numbers"
        elif any(len(row) != size for row in tensor.overlaps):
            message = "overlaps are of every worker with every worker"
        elif not all(0 <= share < math.inf for share in shares):
            message = "shares are 0 or more"
        if message:
            place = f"tensors[{number}]"
            raise ProfileError(message, value=tensor.path, place=place, remedy="profile the step anew")


def _are_of_groups(numbers: Sequence[int], workers: Collection[int]) -> bool:
    """Tells whether `numbers` rise from 1, and are powers of two or those of all `workers`, as profiling groups these:
    each is a column of tables."""
    rise = numbers[0] == 1 and all(before < behind for before, behind in itertools.pairwise(numbers))
    return rise and all(number in workers or number.bit_count() == 1 for number in numbers)


_JSON = Codec(
    Profile,
    ProfileError,
    Wording.of_result("a profile", "profile"),
    format=FORMAT,
    forms={
        Profile: Form(_written),
        TensorProfile: Form(_written_tensor, unread=("means",)),
        Sparsity: SPARSITY_FORM,
    },
    entries=("tensors",),
    check=_check,
    finite=True,
)
