"""Draws simulations with matplotlib: completion times, and who computed on which device when.

Results of simulations come in; files, or drawings in matplotlib axes, come out.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax._files import replace_atomically
from splitjax.errors import ScheduleError
from splitjax.schedule.model.result import SimulationResult, Span

_COLUMNS = 1600  # moments of a Gantt chart
_COLOURS = 18
_FREE, _SHARED = 0, 1
# The largest unit of which there are two in what is drawn: fewer make labels of fractions.
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def write_plot(path: pathlib.Path, results: Sequence[SimulationResult]) -> None:
    """Writes a picture of `results` to `path`: the distribution of completion times, all policies in one, and below it
    a Gantt chart of each that kept its spans (`Options.spans`); the file's ending says how (PNG, SVG, PDF). Raises
    `ScheduleError` where matplotlib is not installed or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter
    except ImportError as error:
        raise ScheduleError("plots need matplotlib", place="plot", remedy='pip install "splitjax[demo]"') from error
    charts = [result for result in results if result.spans]
    figure = Figure(figsize=(11, 3.8 + 3.2 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(1 + len(charts), 1, squeeze=False)[:, 0]
    unit_seconds, unit = time_unit(max(float(result.completion_seconds.max()) for result in results))
    for result in results:
        seconds = np.sort(result.completion_seconds)
        axes.step(
            seconds / unit_seconds, (np.arange(len(seconds)) + 1) / len(seconds), where="post", label=result.policy
        )
    axes.set(title="completion time", xlabel=unit, ylabel="share of jobs done", ylim=(0, 1.01))
    if min(result.completion_seconds.min() for result in results) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())  # 20, not 2 x 10^1
        axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    axes.legend()
    for chart, result in zip(below, charts):
        draw_gantt(chart, result)
        chart.set(
            title=f"{result.policy}: colours are jobs, grey is shared (the darker, the more jobs share), white is idle",
            ylabel="device",
        )
    try:
        replace_atomically(pathlib.Path(path), lambda scratch: figure.savefig(scratch, dpi=120))
    except (OSError, ValueError) as error:
        raise ScheduleError(
            f"the plot cannot be written: {error}",
            value=str(path),
            place="plot",
            remedy="name a .png, .svg or .pdf file in a folder that is there",
        ) from error


def time_unit(seconds: float) -> tuple[float, str]:
    """Chooses the unit of an axis that spans so many `seconds`, as its length in seconds and its name: hours from two
    hours on, minutes from two minutes on."""
    return next(unit for unit in _UNITS if seconds >= 2 * unit[0] or unit is _UNITS[-1])


def draw_gantt(
    axes: Any, result: SimulationResult, end_seconds: float | None = None, num_moments: int = _COLUMNS
) -> None:
    """Draws who computed on which device when into matplotlib's `axes`: a colour for a job that has the device for
    itself, grey for jobs that share it, the darker the more they are.

    **Arguments:**

    - `axes`: where to draw.
    - `result`: a result that kept its spans.
    - `end_seconds`: where the axis ends, for charts side by side; by default where the run does.
    - `num_moments`: how many moments the picture has.
    """
    last = max((span.end_seconds for span in result.spans), default=1.0)
    end = last if end_seconds is None else end_seconds
    unit_seconds, unit = time_unit(end)
    picture = gantt_colours(result, num_moments)
    axes.imshow(
        picture, aspect="auto", interpolation="nearest", extent=(0, last / unit_seconds, len(picture) - 0.5, -0.5)
    )
    axes.set(xlabel=unit, xlim=(0, end / unit_seconds))
    axes.yaxis.get_major_locator().set_params(integer=True)


def gantt(result: SimulationResult, num_moments: int = _COLUMNS) -> NDArray[np.int64]:
    """Gives who has each device of `result` at `num_moments` evenly spaced moments, i64[num_devices, num_moments]: 0
    for an idle device, 1 for one that jobs share, else 2 and up by job."""
    picture = np.full((result.cluster.num_devices, num_moments), _FREE, np.int64)
    for span, devices, moments in _painted(result, num_moments):
        picture[devices, moments] = 2 + span.jobs[0] * 7 % _COLOURS if len(span.jobs) == 1 else _SHARED
    return picture


def gantt_colours(result: SimulationResult, num_moments: int = _COLUMNS) -> NDArray[np.float64]:
    """Gives the picture of `gantt` of `result` at `num_moments` moments in red, green and blue, 0 to 1,
    f64[num_devices, num_moments, 3]. However many jobs share a device, its grey is lighter than black."""
    hues = np.array(_colours())
    picture = np.ones((result.cluster.num_devices, num_moments, 3))
    for span, devices, moments in _painted(result, num_moments):
        picture[devices, moments] = (
            hues[span.jobs[0] * 7 % _COLOURS] if len(span.jobs) == 1 else 0.2 + 1.2 / len(span.jobs)
        )
    return picture


def _painted(result: SimulationResult, num_moments: int) -> Iterator[tuple[Span, list[int], slice]]:
    """Yields the spans that are wide enough to be seen, each with its devices and its moments."""
    end = max((span.end_seconds for span in result.spans), default=1.0)
    for span in result.spans:
        first, last = (int(np.ceil(time / end * num_moments - 0.5)) for time in (span.start_seconds, span.end_seconds))
        if last > first:
            yield span, list(span.devices), slice(first, last)


def _colours() -> list[tuple[float, float, float]]:
    from colorsys import hls_to_rgb

    return [hls_to_rgb(index / _COLOURS, 0.45 + 0.15 * (index % 3), 0.65) for index in range(_COLOURS)]
