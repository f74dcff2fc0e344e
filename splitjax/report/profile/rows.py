"""What a rendered profile shows, independent of how: a line a tensor with those of equal blocks folded, and the tables
step by step."""

from __future__ import annotations

import re
from collections.abc import Sequence

from splitjax.display.figures import ratio_text, share_text
from splitjax.report.table import MIN_FOLD
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
    ("overlap", "what two workers both have, over the smaller of the two"),
    ("skewness", "the fullest of as many equal ranges as workers, over their mean"),
    ("sum of m", "densification: density of the sum of m workers over that of one"),
    ("counted", "rows of tables, elements of other tensors"),
)
_NUMBER = re.compile(r"\d+")


def headline(profile: Profile) -> str:
    sizes = sorted(set(profile.num_examples))
    examples = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    steps = f"{profile.num_steps} step{'s' * (profile.num_steps != 1)}"
    workers = f"{profile.num_workers} worker{'s' * (profile.num_workers != 1)}"
    return f"gradients of {profile.step}: {workers}, {steps} of {examples} examples"


def columns(profile: Profile) -> tuple[str, ...]:
    return ("tensor", "shape", "density", "rows", "overlap", "skewness", *(f"sum of {m}" for m in _sums(profile)))


def tensor_rows(profile: Profile) -> tuple[tuple[str, ...], ...]:
    """The cells of every tensor, averaged over the steps: tables first. Tensors of equal blocks with equal cells are
    one line, and so are those without zeros, of which there is nothing to say, where there are many."""
    full = [one for one in profile.tensors if not one.is_table and one.density == 1.0]
    full = full if len(full) > _MAX_FULL else []
    told = set(map(id, full))
    several = {one.path for one in profile.tensors if sum(other.path == one.path for other in profile.tensors) > 1}
    folded: dict[tuple[str, ...], list[str]] = {}
    for one in sorted((one for one in profile.tensors if id(one) not in told), key=lambda one: not one.is_table):
        name = f"{one.path} ({one.loss})" if one.path in several else one.path
        folded.setdefault((_NUMBER.sub("*", name), str(one.shape), *_cells(profile, one)), []).append(name)
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
    """The first steps of every table: (table, step, rows in the mean over workers, fewest and most rows of a worker,
    overlap, skewness, sum of all)."""
    if profile.num_steps < 2:
        return ()
    rows = []
    for table in profile.tables:
        for number, one in enumerate(table.steps[:MAX_STEPS]):
            low, high = min(one.row_densities), max(one.row_densities)
            rows.append((
                "" if number else table.path, str(number), share_text(sum(one.row_densities) / len(one.row_densities)),
                share_text(low), share_text(high), ratio_text(one.overlap), ratio_text(one.skewness),
                ratio_text(one.densification(profile.num_workers)),
            ))  # fmt: skip
    return tuple(rows)


STEP_COLUMNS = ("table", "step", "rows", "least", "most", "overlap", "skewness", "sum of all")


def remarks(profile: Profile) -> tuple[tuple[str, str], ...]:
    """What to know besides: (title, text)."""
    found = [
        ("dense", f"{one.path}: its gradient has to stay dense: {one.dense_reason}")
        for one in profile.tables
        if one.dense_reason
    ]
    if profile.num_steps > MAX_STEPS and profile.tables:
        found.append(
            ("steps", f"the first {MAX_STEPS} of {profile.num_steps} are shown by themselves; `tensor.steps` has all")
        )
    return (*found, *(("note", note) for note in profile.notes))


def _sums(profile: Profile) -> Sequence[int]:
    return [m for m, _ in profile.tensors[0].steps[0].unions if m > 1] if profile.tensors else []


def _cells(profile: Profile, one: TensorProfile) -> tuple[str, ...]:
    mean, rows = one.mean, one.row_density
    overlap = ratio_text(mean.overlap) if profile.num_workers > 1 else ""
    return (
        share_text(mean.density), "" if rows is None else share_text(rows), overlap, ratio_text(mean.skewness),
        *(ratio_text(mean.densification(m)) for m in _sums(profile)),
    )  # fmt: skip
