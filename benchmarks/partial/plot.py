"""The picture of where partial backpropagation pays."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

_COLORS = {"sgd": "tab:blue", "adam": "tab:orange"}
_STYLES = {"alone": ("-", "o"), "two jobs": ("--", "s")}


def draw(links: Sequence[str], ratios: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """An SVG: time to the loss over the smaller batch's, by link. `ratios`: by jobs and optimizer, one per link. The
    same values give the same text."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    places = range(len(links))
    every = [value for by_name in ratios.values() for values in by_name.values() for value in values]
    bottom, top = min([0.9, *every]) - 0.05, max([1.1, *every]) + 0.05
    with matplotlib.rc_context({"svg.hashsalt": "splitjax", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.axhspan(bottom, 1.0, color="tab:green", alpha=0.15, lw=0)
        axes.axhline(1.0, color="gray", lw=0.8)
        axes.text(
            0.99,
            0.02,
            "partial backpropagation is sooner",
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            color="tab:green",
        )
        for how, by_name in ratios.items():
            for name, values in by_name.items():
                line, marker = _STYLES[how]
                axes.plot(places, values, line, marker=marker, color=_COLORS[name], label=f"{name}, {how}")
                axes.fill_between(
                    places,
                    values,
                    1.0,
                    where=[value < 1 for value in values],
                    interpolate=True,
                    color="tab:green",
                    alpha=0.3,
                    lw=0,
                )
        axes.set_xticks(places, [link.replace("mbit", " Mb/s") for link in links])
        axes.set(
            xlabel="link of a worker",
            ylabel="time to the loss over that of the smaller batch",
            xlim=(-0.3, len(links) - 0.7),
            ylim=(bottom, top),
        )
        axes.legend(frameon=False, ncols=2)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
