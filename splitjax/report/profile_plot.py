"""A profile as a picture: density and skewness by tensor, densification by number of workers, overlap of workers."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from splitjax.errors import ProfileError
from splitjax.report.profile_rows import headline
from splitjax.sync.analysis import Profile, TensorProfile

# So many tensors have a bar of their own: tables first, then the sparsest.
_MAX_TENSORS = 12
_NAME_CHARACTERS = 28
_TABLE, _OTHER = "tab:blue", "tab:gray"


def draw_profile(profile: Profile, path: str | os.PathLike[str] | None) -> Any:
    """The figure, also written to `path` if one is given. Raises `ProfileError` without matplotlib, and for a path that cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ProfileError(
            "a profile is drawn with matplotlib, which is not installed", place="Profile.plot", remedy="pip install 'splitjax[demo]'",
        ) from error
    shown = sorted(profile.tensors, key=lambda one: (not one.is_table, one.density))[:_MAX_TENSORS]
    figure = Figure(figsize=(13, max(6.5, 3.2 + 0.3 * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    left_out = len(profile.tensors) - len(shown)
    figure.suptitle(headline(profile) + (f"; {left_out} denser tensors not shown" if left_out else ""))
    (density, densification), (skewness, overlap) = figure.subplots(2, 2)
    _bars(density, shown, [100 * one.density for one in shown], "%.3g %%", "density of one worker's gradient", "% of elements not zero (log scale)")
    if any(one.density for one in shown):
        lowest = min(100 * one.density for one in shown if one.density)
        density.set_xscale("log")
        density.set_xlim(left=lowest / 3, right=1000)
    _bars(skewness, shown, [one.skewness for one in shown], "%.3g", "skewness", f"fullest of {profile.num_workers} equal ranges over their mean")
    skewness.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    skewness.margins(x=0.15)
    _densification(densification, profile, shown)
    _overlap(figure, overlap, shown)
    if path is not None:
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:  # ValueError: a file type that matplotlib does not write
            raise ProfileError(
                f"the plot cannot be written: {getattr(error, 'strerror', None) or error}", value=str(path), place="Profile.plot",
                remedy="give a .png, .svg or .pdf file in an existing, writable folder",
            ) from error
    return figure


def _bars(axes: Any, shown: list[TensorProfile], values: list[float], form: str, title: str, unit: str) -> None:
    places = range(len(shown))
    bars = axes.barh(places, values, color=[_TABLE if one.is_table else _OTHER for one in shown])
    axes.bar_label(bars, fmt=form, padding=3, fontsize=8)
    axes.set(title=title, xlabel=f"{unit}; blue: tables", yticks=list(places))
    axes.set_yticklabels([_short(one.path) for one in shown], fontsize=8)
    axes.invert_yaxis()


def _densification(axes: Any, profile: Profile, shown: list[TensorProfile]) -> None:
    sizes = [m for m, _ in shown[0].steps[0].unions] if shown else [1]
    axes.plot(sizes, sizes, color="black", linewidth=0.8, linestyle=":", label="no overlap")
    for one in shown:
        mean = one.mean
        if mean.densification(sizes[-1]) > 1.005 or one.is_table:
            axes.plot(sizes, [mean.densification(m) for m in sizes], marker="o", markersize=3.5, label=_short(one.path))
    axes.set(title="densification", xlabel="workers added up", ylabel="density of the sum over that of one", xscale="log", yscale="log")
    ticks = sizes
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(m) for m in ticks])
        axis.set_ticks([], minor=True)
    axes.legend(fontsize=8)


def _overlap(figure: Any, axes: Any, shown: list[TensorProfile]) -> None:
    """Of the sparsest table, else of the sparsest tensor."""
    if not shown or shown[0].num_workers < 2:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "overlap needs two workers", ha="center", va="center", transform=axes.transAxes)
        return
    one = shown[0]
    image = axes.imshow(np.asarray(one.overlaps), vmin=0.0, vmax=1.0, cmap="Blues")
    axes.set(title=f"overlap of two workers: {_short(one.path)}, mean {one.overlap:.3g}", xlabel="worker", ylabel="worker")
    figure.colorbar(image, ax=axes)
    if one.num_workers <= 8:
        for i, row in enumerate(one.overlaps):
            for j, value in enumerate(row):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if value > 0.6 else "black")


def _short(path: str) -> str:
    """The end of a path, which tells tensors apart."""
    return path if len(path) <= _NAME_CHARACTERS else "..." + path[-_NAME_CHARACTERS + 3 :]
