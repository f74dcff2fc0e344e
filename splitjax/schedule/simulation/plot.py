"""Draws simulations with matplotlib: completion times, and who computed on which device when.

Results of simulations come in; files, or drawings in matplotlib axes, come out.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitjax.display.pictures import new_figure, without_frame, written
from splitjax.errors import ScheduleError
from splitjax.schedule.model.result import SimulationResult, Span

if TYPE_CHECKING:
    from splitjax.schedule.simulation.compare import Comparison

_PLACE = "plot"

_COLUMNS = 1600  # moments of a Gantt chart
_COLOURS = 18
_FREE, _SHARED = 0, 1
# The largest unit of which there are two in what is drawn: fewer make labels of fractions.
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def write_plot(path: pathlib.Path, results: Sequence[SimulationResult]) -> None:
    """Writes the picture of `results` (`draw_results`) to `path`; the file's ending says how (PNG, SVG, PDF). Raises
    `ScheduleError` where matplotlib is not installed or the file cannot be written."""
    written(draw_results(results), path, ScheduleError, _PLACE)


def draw_results(results: Sequence[SimulationResult], charts: Collection[str] | None = None) -> Any:
    """Draws `results` and returns the figure: the distribution of completion times, all policies in one, and below it
    who computed on which device when, of each policy that kept its spans (`Options.spans`), over one axis of time.

    **Arguments:** `results`: of policies. `charts`: the policies whose devices are shown; all if None.

    Raises `ScheduleError` where matplotlib is not installed.
    """
    shown = [result for result in results if result.spans and (charts is None or result.policy in charts)]
    figure = new_figure(11, 3.8 + 3.2 * len(shown), ScheduleError, _PLACE)
    axes, *below = figure.subplots(1 + len(shown), 1, squeeze=False)[:, 0]
    _completion(axes, results)
    end_seconds = max((result.makespan for result in shown), default=0.0)
    for chart, result in zip(below, shown):
        draw_gantt(chart, result, end_seconds)
        chart.set(
            title=(
                f"{result.policy}, devices busy {result.busy:.0%}: colours are jobs, grey is shared (the darker, the"
                " more jobs share), white is idle"
            ),
            ylabel="device",
        )
    return figure


def _completion(axes: Any, results: Sequence[SimulationResult]) -> None:
    """Draws which share of the jobs was done after which time, a line for each policy."""
    from matplotlib.ticker import LogFormatter

    unit_seconds, unit = time_unit(max(float(result.completion_seconds.max()) for result in results))
    for number, result in enumerate(results):
        seconds = np.sort(result.completion_seconds)
        # Of policies that have the same times both lines are seen.
        style = "--" if any(_same_times(result, earlier) for earlier in results[:number]) else "-"
        axes.step(
            seconds / unit_seconds,
            (np.arange(len(seconds)) + 1) / len(seconds),
            where="post",
            label=result.policy,
            linestyle=style,
        )
    axes.set(title="completion time", xlabel=unit, ylabel="share of jobs done", ylim=(0, 1.01))
    if min(result.completion_seconds.min() for result in results) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())  # 20, not 2 x 10^1
        axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    axes.legend()


def _same_times(result: SimulationResult, other: SimulationResult) -> bool:
    return np.allclose(np.sort(result.completion_seconds), np.sort(other.completion_seconds))


def draw_efficiency(comparison: Comparison) -> Any:
    """Draws what the policies of a `comparison` gain over gang scheduling in their own order, and returns the figure:
    iteration efficiency with its bound, and cost efficiency; gang policies themselves are left out.

    Raises `ScheduleError` where matplotlib is not installed.
    """
    # What was never asked for more than the cluster has, has no efficiency.
    figures = {
        name: found
        for name, found in comparison.to_json().items()
        if found["baseline"] not in (None, name) and found["iteration_efficiency"] is not None
    }
    figure = new_figure(9, 3.2, ScheduleError, _PLACE)
    axes, places = figure.subplots(), np.arange(len(figures))
    for shift, key, label in ((-0.2, "iteration_efficiency", "iterations"), (0.2, "cost_efficiency", "cost")):
        bars = axes.bar(places + shift, [found[key] for found in figures.values()], 0.38, label=label, alpha=0.9)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    bounds = [found["bound"] for found in figures.values()]
    axes.plot(places - 0.2, bounds, "k_", markersize=26, markeredgewidth=1.6, label="bound")
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    top = 1.3 * max([1.0, *bounds])
    axes.set(ylabel="over gang scheduling in the same order", ylim=(0, top))
    axes.set_xticks(places, list(figures))
    axes.legend(frameon=False, ncols=3, loc="upper left")
    without_frame(axes)
    return figure


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
