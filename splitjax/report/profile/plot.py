"""Draws a profile: density and skewness by tensor, densification by number of workers, overlap of workers.

A `Profile` goes in, a figure of matplotlib comes out. matplotlib is imported when a profile is drawn: it is no
dependency of splitjax.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from splitjax.display.figures import ratio_text, share_text
from splitjax.display.pictures import new_figure, written
from splitjax.errors import ProfileError
from splitjax.report.profile.rows import headline
from splitjax.sync.analysis import Profile, TensorProfile

_PLACE = "Profile.plot"
# So many tensors are shown by themselves: tables first, then the sparsest.
_MAX_TENSORS = 12
_NAME_CHARACTERS = 28
# Sums of tensors other than tables that get no denser than this have no curve.
_FLAT = 1.05
_TABLE, _NO_TABLE = "tab:blue", "tab:gray"


def draw_profile(profile: Profile, path: str | os.PathLike[str] | None) -> Any:
    """Draws `profile` and returns the figure, which is also written to `path` if there is one.

    Raises `ProfileError` without matplotlib, and for a path that cannot be written.
    """
    # Of tensors without zeros there is nothing to see, unless there are no others.
    sparse = [tensor for tensor in profile.tensors if tensor.is_table or tensor.density < 1.0] or profile.tensors
    shown = sorted(sparse, key=lambda tensor: (not tensor.is_table, tensor.density))[:_MAX_TENSORS]
    figure = new_figure(13, max(7.0, 3.4 + 0.36 * len(shown)), ProfileError, _PLACE)
    left_out = len(profile.tensors) - len(shown)
    figure.suptitle(headline(profile) + (f"; {left_out} denser tensors not shown" if left_out else ""))
    (density, densification), (skewness, overlap) = figure.subplots(2, 2, width_ratios=(5, 4))
    _densities(density, shown)
    _skewness(skewness, profile, shown)
    _densification(densification, profile, shown)
    _overlap(figure, overlap, shown)
    return written(figure, path, ProfileError, _PLACE)


def _densities(axes: Any, shown: list[TensorProfile]) -> None:
    """Draws points, as lengths mean nothing on a logarithmic axis; a gradient that is all zero is said to be, at the
    left end."""
    values = [100 * tensor.density for tensor in shown]
    lowest = min([value for value in values if value], default=1.0)
    left = 10.0 ** np.floor(np.log10(lowest / 1.5))
    for place, (tensor, value) in enumerate(zip(shown, values, strict=True)):
        color = _TABLE if tensor.is_table else _NO_TABLE
        axes.plot([left, max(value, left)], [place, place], color=color, linewidth=1.0, alpha=0.5)
        if value:
            axes.plot([value], [place], marker="o", color=color)
        axes.annotate(
            share_text(tensor.density),
            (max(value, left), place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set(title="density of one worker's gradient", xscale="log", xlim=(left, 400))
    ticks = [10.0**power for power in range(round(np.log10(left)), 3)]
    axes.xaxis.set_ticks(ticks, [f"{tick:g} %" for tick in ticks])
    _names(axes, shown, "elements that are not zero")


def _skewness(axes: Any, profile: Profile, shown: list[TensorProfile]) -> None:
    """Draws a bar for each tensor."""
    bars = axes.barh(
        range(len(shown)),
        [tensor.skewness for tensor in shown],
        height=0.6,
        color=[_TABLE if tensor.is_table else _NO_TABLE for tensor in shown],
    )
    axes.bar_label(bars, labels=[ratio_text(tensor.skewness) for tensor in shown], padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set(title="skewness", xlim=(0, 1.15 * max([1.0, *(tensor.skewness for tensor in shown)])))
    _names(axes, shown, f"the fullest of {profile.num_workers} equal ranges over their mean; 1 is even")


def _names(axes: Any, shown: list[TensorProfile], unit: str) -> None:
    """Labels an axis with the tensors, and the other with its unit."""
    axes.set_yticks(range(len(shown)), [_short(tensor.path) for tensor in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(f"{unit} (blue: tables)", fontsize=9)


def _densification(axes: Any, profile: Profile, shown: list[TensorProfile]) -> None:
    """Draws a curve for each table, and for each further tensor that gets denser."""
    sizes = [m for m, _ in shown[0].steps[0].unions] if shown else [1]
    axes.plot(sizes, sizes, color="black", linewidth=0.8, linestyle=":", label="no overlap")
    curves: dict[tuple[str, ...], list[TensorProfile]] = {}  # tensors whose curves fall on each other share a curve
    for tensor in shown:
        if tensor.is_table or tensor.densification() > _FLAT:
            curves.setdefault(tuple(ratio_text(tensor.densification(m)) for m in sizes), []).append(tensor)
    for tensor, *equal in curves.values():
        label = _short(tensor.path) + (f" and {len(equal)} more" if equal else "")
        axes.plot(sizes, [tensor.densification(m) for m in sizes], marker="o", markersize=3.5, label=label)
    axes.set(
        title="densification", xlabel="workers added up", ylabel="density over that of one", xscale="log", yscale="log"
    )
    ticks = sizes
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_ticks(ticks, [str(m) for m in ticks])
        scale.set_ticks([], minor=True)
    axes.legend(fontsize=8)


def _overlap(figure: Any, axes: Any, shown: list[TensorProfile]) -> None:
    """Draws the matrix of the sparsest table, else of the sparsest tensor."""
    if not shown or shown[0].num_workers < 2:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "overlap needs two workers", ha="center", va="center", transform=axes.transAxes)
        return
    tensor = shown[0]
    image = axes.imshow(np.asarray(tensor.overlaps), vmin=0.0, vmax=1.0, cmap="Blues")
    axes.set(
        title=f"overlap of two workers, mean {ratio_text(tensor.overlap)}\n{_short(tensor.path)}",
        xlabel="worker",
        ylabel="worker",
    )
    ticks = range(0, tensor.num_workers, -(-tensor.num_workers // 8))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    figure.colorbar(image, ax=axes, shrink=0.9)
    if tensor.num_workers <= 8:
        for i, row in enumerate(tensor.overlaps):
            for j, value in enumerate(row):
                axes.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if value > 0.6 else "black",
                )


def _short(path: str) -> str:
    """Returns the end of a path, which tells tensors apart."""
    return path if len(path) <= _NAME_CHARACTERS else "..." + path[-_NAME_CHARACTERS + 3 :]
