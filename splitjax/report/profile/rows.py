"""Makes the texts of a profile's document: a line a tensor with those of equal blocks folded, and the tables step by
step.

A `Profile` goes in; titles, rows and remarks come out that say nothing of how they are laid out.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

from splitjax.display.figures import ratio_text, share_text
from splitjax.report.plan.table import MIN_FOLD
from splitjax.sync.analysis import Profile, TensorProfile

# More tensors without zeros than this are one line.
_MAX_FULL = 8
# So many steps of a table are shown; the profile has them all.
MAX_STEPS = 8
LEGEND = (
    (
        "density",
        "share of elements that are not zero, mean over workers; rows: share of rows that are not all zero, of tables",
    ),
    (
        "overlap",
        "what is not zero on two workers, over what is not zero on the one that has less; mean over all pairs, 1 for"
        " the same",
    ),
    (
        "skewness",
        "what is not zero in the fullest of as many equal ranges of the tensor as there are workers, over the mean of"
        " the ranges; 1 for even",
    ),
    ("sum of m", "densification: density of the sum of m workers' gradients over that of one worker's"),
    ("counted", "overlap, skewness and sums count rows of tables, and elements of other tensors"),
)
_NUMBER = re.compile(r"\d+")


def headline(profile: Profile) -> str:
    """Returns what `profile` was measured on, in a line."""
    sizes = sorted(set(profile.num_examples))
    examples = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    steps = f"{profile.num_steps} step{'s' * (profile.num_steps != 1)}"
    workers = f"{profile.num_workers} worker{'s' * (profile.num_workers != 1)}"
    return f"gradients of {profile.step}: {workers}, {steps} of {examples} examples"


def columns(profile: Profile) -> tuple[str, ...]:
    """Returns the titles of the columns under which `tensor_rows` of `profile` stand."""
    return ("tensor", "shape", "density", "rows", "overlap", "skewness", *(f"sum of {m}" for m in _sums(profile)))


def tensor_rows(profile: Profile) -> tuple[tuple[str, ...], ...]:
    """Returns the cells of every tensor of `profile`, averaged over the steps: tables first. Tensors of equal
    blocks with equal cells are one line, and so are those without zeros, of which there is nothing to say, where there
    are many."""
    full = [tensor for tensor in profile.tensors if not tensor.is_table and tensor.density == 1.0]
    full = full if len(full) > _MAX_FULL else []
    told = set(map(id, full))
    paths = [tensor.path for tensor in profile.tensors]
    several = {path for path, times in collections.Counter(paths).items() if times > 1}
    folded: dict[tuple[str, ...], list[str]] = {}
    shown = [tensor for tensor in profile.tensors if id(tensor) not in told]
    for tensor in sorted(shown, key=lambda tensor: not tensor.is_table):
        name = f"{tensor.path} ({tensor.loss})" if tensor.path in several else tensor.path
        folded.setdefault((_NUMBER.sub("*", name), str(tensor.shape), *_cells(profile, tensor)), []).append(name)
    rows: list[tuple[str, ...]] = []
    for (pattern, *cells), names in folded.items():
        if len(names) < MIN_FOLD:
            rows += [(name, *cells) for name in names]
        else:
            rows.append((f"{len(names)} x {pattern}", *cells))
    if full:
        rows.append((f"{len(full)} tensors without zeros", "", *("" for _ in _cells(profile, full[0]))))
    return tuple(rows)


def step_rows(profile: Profile) -> tuple[tuple[str, ...], ...]:
    """Returns the first steps of every table of `profile`: (table, step, rows in the mean over workers, fewest and most
    rows of a worker, overlap, skewness, sum of all). There are none where a single step was profiled: `tensor_rows` has
    it."""
    if profile.num_steps < 2:
        return ()
    rows = []
    for table in profile.tables:
        for number, step in enumerate(table.steps[:MAX_STEPS]):
            densities = step.row_densities
            rows.append((
                "" if number else table.path, str(number), share_text(sum(densities) / len(densities)),
                share_text(min(densities)), share_text(max(densities)),
                ratio_text(step.overlap), ratio_text(step.skewness),
                ratio_text(step.densification(profile.num_workers)),
            ))  # fmt: skip
    return tuple(rows)


STEP_COLUMNS = ("table", "step", "rows", "least of a worker", "most of a worker", "overlap", "skewness", "sum of all")


def remarks(profile: Profile) -> tuple[tuple[str, str], ...]:
    """Returns what to know of `profile` besides: (title, text)."""
    lines = [
        ("dense", f"{table.path}: its gradient has to stay dense: {table.dense_reason}")
        for table in profile.tables
        if table.dense_reason
    ]
    if profile.num_steps > MAX_STEPS and profile.tables:
        lines.append(
            ("steps", f"the first {MAX_STEPS} of {profile.num_steps} are shown by themselves; `tensor.steps` has all")
        )
    return (*lines, *(("note", note) for note in profile.notes))


def _sums(profile: Profile) -> Sequence[int]:
    """Returns the numbers of workers for which sums of gradients were measured."""
    return [m for m, _ in profile.tensors[0].steps[0].unions if m > 1] if profile.tensors else []


def _cells(profile: Profile, tensor: TensorProfile) -> tuple[str, ...]:
    mean = tensor.mean
    rows, densified = mean.row_density, mean.densifications
    overlap = ratio_text(mean.overlap) if profile.num_workers > 1 else ""
    return (
        share_text(mean.density), "" if rows is None else share_text(rows), overlap, ratio_text(mean.skewness),
        *(ratio_text(densified[m]) if m in densified else "" for m in _sums(profile)),
    )  # fmt: skip
