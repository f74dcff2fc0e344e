"""Pictures of simulations: completion times, and who held which device when."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitjax.errors import ScheduleError
from splitjax.schedule.result import SimulationResult

_COLUMNS = 1600  # moments of a Gantt chart
_COLOURS = 18


def write_plot(path: pathlib.Path, results: Sequence[SimulationResult]) -> None:
    """Writes the distribution of completion times, all policies in one, and below it a Gantt chart of each that kept its spans (`Options.spans`); the
    file's ending says how (PNG, SVG, PDF). Raises `ScheduleError` where matplotlib is not installed or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScheduleError("plots need matplotlib", place="plot", remedy='pip install "splitjax[demo]"') from error
    charts = [result for result in results if result.spans]
    figure = Figure(figsize=(11, 3.8 + 3.2 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(1 + len(charts), 1, squeeze=False)[:, 0]
    for result in results:
        seconds = np.sort(result.completion_seconds)
        axes.step(seconds / 3600, (np.arange(len(seconds)) + 1) / len(seconds), where="post", label=result.policy)
    axes.set(title="completion time", xlabel="hours", ylabel="share of jobs done", ylim=(0, 1.01))
    if min(result.completion_seconds.min() for result in results) > 0:
        axes.set_xscale("log")
    axes.legend()
    palette = ListedColormap(["white", "0.35", *_colours()])
    for chart, result in zip(below, charts):
        end = max(span.end_seconds for span in result.spans)
        picture = gantt(result)
        chart.imshow(
            picture, aspect="auto", interpolation="nearest", cmap=palette, vmin=0, vmax=_COLOURS + 1, extent=(0, end / 3600, picture.shape[0] - 0.5, -0.5)
        )
        chart.set(title=f"{result.policy}: colours are jobs, grey is shared, white is free", xlabel="hours", ylabel="device")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ScheduleError(f"the plot cannot be written: {error}", value=str(path), place="plot", remedy="name a .png, .svg or .pdf file in a folder that is there") from error


def gantt(result: SimulationResult, num_moments: int = _COLUMNS) -> NDArray[np.int64]:
    """i64[num_devices, num_moments], at evenly spaced moments: 0 for a free device, 1 for one that jobs share, else 2 and up by job."""
    end = max((span.end_seconds for span in result.spans), default=1.0)
    picture = np.zeros((result.cluster.num_devices, num_moments), np.int64)
    for span in result.spans:
        first, last = (int(np.ceil(time / end * num_moments - 0.5)) for time in (span.start_seconds, span.end_seconds))
        if last > first:
            picture[list(span.devices), first:last] = 1 if len(span.jobs) > 1 else 2 + span.jobs[0] * 7 % _COLOURS
    return picture


def _colours() -> list[tuple[float, float, float]]:
    from colorsys import hls_to_rgb

    return [hls_to_rgb(index / _COLOURS, 0.45 + 0.15 * (index % 3), 0.65) for index in range(_COLOURS)]
