"""Draws advices, and trainings side by side: where gradients are noisy for their time, what each way takes, what each
worker saves, what came of several seeds.

An `Advice`, or figures by name, come in; figures of matplotlib come out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from splitjax.display.pictures import new_figure, without_frame, written
from splitjax.errors import PartialError
from splitjax.partial.advice import Advice

_PLACE = "Advice.plot"


def draw_advice(advice: Advice, path: str | os.PathLike[str] | None) -> Any:
    """Draws `advice` and returns the figure, which is also written to `path` if there is one: each layer's noise beside
    its time, and what each way takes to the same progress.

    Raises `PartialError` without matplotlib, and for a path that cannot be written.
    """
    figure = new_figure(11, 3.6, PartialError, _PLACE)
    left, right = figure.subplots(1, 2)
    _layers(left, advice)
    _ways(right, advice)
    return written(figure, path, PartialError, _PLACE)


def _layers(axes: Any, advice: Advice) -> None:
    names = [stage.name.removeprefix("params/") for stage in advice.stages]
    noise = np.array([stage.noise for stage in advice.stages])
    cost = np.array([stage.backward_seconds for stage in advice.stages])
    cost[-1] += advice.forward_seconds
    places = np.arange(len(names))
    for shift, values, label in (
        (-0.2, noise, "noise of the gradient"),
        (0.2, cost, "time, the forward pass with the last layer"),
    ):
        axes.bar(places + shift, 100 * values / (values.sum() or 1.0), 0.4, label=label)
    axes.set(ylabel="% of all layers", title="who should contribute where: where noise is high for its time")
    axes.set_xticks(places, names, rotation=20)
    axes.legend(frameon=False, fontsize=9)
    without_frame(axes)


def _ways(axes: Any, advice: Advice) -> None:
    found = [(row, advice.compute(row), advice.alone(row)) for row in advice.rows]
    shown = [(row, compute, alone) for row, compute, alone in found if compute is not None and alone is not None]
    places = np.arange(len(shown))
    gigabits = 8 * advice.bytes_per_second / 1e9
    for shift, values, label in (
        (-0.2, [100 * compute for _, compute, _ in shown], "compute to go"),
        (0.2, [100 * alone for _, _, alone in shown], f"time to go, at {gigabits:.3g} Gbit/s"),
    ):
        bars = axes.barh(places + shift, values, 0.4, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=3)
    axes.axvline(100, color="black", linestyle=":")
    axes.set(xlabel="% of full backpropagation, to the same progress", title="what it takes")
    axes.set_yticks(places, [row.name for row, _, _ in shown])
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    without_frame(axes)


def draw_savings(shares: Mapping[str, Sequence[float]]) -> Any:
    """Draws what each worker has to do, as shares of what it has to do in full backpropagation, and returns the figure.

    **Arguments:** `shares`: title of a panel -> a share by worker, such as of the time, 1.0 for all of it.

    Raises `PartialError` where matplotlib is not installed.
    """
    figure = new_figure(11, 3.4, PartialError, "draw_savings")
    panels = figure.subplots(1, len(shares), squeeze=False)[0]
    for number, (axes, (title, values)) in enumerate(zip(panels, shares.items(), strict=True)):
        percent, color = 100 * np.asarray(values), f"C{number}"
        bars = axes.bar(range(len(percent)), percent, color=color, alpha=0.85)
        axes.bar_label(bars, [f"{value:.0f} %" for value in percent], fontsize=9)
        axes.axhline(100, color="black", linestyle=":", linewidth=1)
        mean = percent.mean()
        axes.axhline(mean, color=color, linestyle="--", linewidth=1, label=f"mean {mean:.0f} %")
        axes.set(title=title, xlabel="worker, in the first step", ylim=(0, max(118, 1.12 * percent.max())))
        axes.set_xticks(range(len(percent)))
        without_frame(axes)
        axes.legend(loc="lower right", frameon=True, fontsize=9)
    panels[0].set_ylabel("% of full backpropagation")
    return figure


def draw_runs(results: Mapping[str, Mapping[str, Sequence[float]]], title: str) -> Any:
    """Draws what trainings came to, a panel for each figure and a line of points for each way to train, with a bar at
    their mean; returns the figure.

    **Arguments:** `results`: way to train -> what a figure is called -> its value by seed; all ways have the same
    figures. `title`: above them.

    Raises `PartialError` where matplotlib is not installed.
    """
    names = list(next(iter(results.values())))
    figure = new_figure(11, 1.6 + 0.4 * len(results), PartialError, "draw_runs")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        for place, found in enumerate(results.values()):
            values = np.asarray(found[name])
            axes.plot(values, [place] * len(values), "o", color=f"C{place}", alpha=0.45)
            axes.plot([values.mean()] * 2, [place - 0.28, place + 0.28], color=f"C{place}", linewidth=3)
        axes.set_yticks(range(len(results)), list(results) if axes is panels[0] else [])
        axes.set_xlabel(name)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        without_frame(axes)
    panels[0].set_title(title, loc="left", fontsize=10)
    return figure
