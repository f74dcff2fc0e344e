"""The pictures of the loss curves: one a model, drawn the same from the same values."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from benchmarks.curves.compare import distance, spread

_COLORS = {
    "splitbrain": "tab:blue", "megatron": "tab:orange", "fsdp": "tab:green", "data_parallel": "tab:red",
    "embedding_owner": "tab:purple",
}  # fmt: skip


Curves = Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]]


def draw(title: str, curves: Curves) -> str:
    """An SVG: for each dtype a column of two panels, losses and, on a log axis, distances to the nearest one-device
    run.

    `curves`: by dtype, losses of the one-device runs [runs, steps], of which the first is the step as it is, and of the
    run under each rule set [steps]."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with matplotlib.rc_context({"svg.hashsalt": "splitjax", "svg.fonttype": "none"}):
        text = io.StringIO()
        FigureCanvasSVG(drawn(title, curves)).print_svg(text, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def drawn(title: str, curves: Curves):
    """The picture as a `matplotlib.figure.Figure`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(5 * len(curves), 6.5), layout="constrained")
        figure.suptitle(title)
        panels = figure.subplots(2, len(curves), sharex=True, squeeze=False, height_ratios=(1, 1.2))
        for column, (dtype, (controls, runs)) in enumerate(curves.items()):
            losses, distances = panels[0][column], panels[1][column]
            _draw_losses(losses, controls, runs)
            _draw_distances(distances, controls, runs)
            losses.set_title(dtype)
            distances.set_xlabel("step")
        panels[0][0].set_ylabel("loss (nats)")
        panels[1][0].set_ylabel("distance to the nearest\none-device run (nats)")
        handles, labels = panels[0][0].get_legend_handles_labels()
        more, others = panels[1][0].get_legend_handles_labels()
        figure.legend(
            [*handles, *more], [*labels, *others], loc="outside lower center", ncols=4, frameon=False, markerscale=3
        )
    return figure


def _draw_losses(axes, controls, runs):
    steps = np.arange(controls.shape[1])
    axes.fill_between(
        steps, controls.min(0), controls.max(0), color="gray", alpha=0.5, lw=0, label="one device, sums in other orders"
    )
    axes.plot(steps, controls[0], color="black", lw=1.8, label="one device")
    for number, (rules, losses) in enumerate(runs.items()):
        # Dashes of different phase, so that curves that lie on each other are all seen.
        axes.plot(steps, losses, color=_COLORS[rules], lw=1.0, ls=(3 * number, (3, 3 * (len(runs) - 1))))


def _draw_distances(axes, controls, runs):
    steps, allowed = np.arange(controls.shape[1]), spread(controls)
    floor = allowed.min() / 10  # equal losses have no logarithm: they lie on the lower edge
    axes.fill_between(
        steps, floor, allowed, color="gray", alpha=0.25, lw=0, label="within the spread of one-device runs"
    )
    for rules, losses in runs.items():
        axes.plot(steps, np.maximum(distance(losses, controls), floor), ".", ms=3, color=_COLORS[rules], label=rules)
    axes.set_yscale("log")
    axes.set_ylim(floor, allowed.max() * 10)
