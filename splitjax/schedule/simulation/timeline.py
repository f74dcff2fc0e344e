"""The document of a simulation's result: its figures, and who computed on which device when.

What goes in is a `SimulationResult`; `splitjax.display` lays the document out as text or HTML, without matplotlib,
which `plot` needs.
"""

from __future__ import annotations

from splitjax.display.document import Document, Pairs, Paragraph, Part, Section, Stretch, Timeline
from splitjax.schedule.model.result import SimulationResult
from splitjax.schedule.simulation.plot import time_unit

# More devices than this are not shown, and nothing that takes less of the axis than one part in so many.
_MAX_DEVICES, _MOMENTS = 64, 1600


def result_document(result: SimulationResult) -> Document:
    """Makes the document of `result`; with a timeline where it kept its spans (`Options.spans`)."""
    times = {
        "mean completion": result.avg_jct,
        "99th percentile of completion": result.p99_jct,
        "makespan": result.makespan,
        "mean time without devices": result.queueing,
    }
    figures = Pairs(
        (
            *((title, (_time_text(seconds),)) for title, seconds in times.items()),
            ("devices busy", (f"{100 * result.busy:.1f} %",)),
        )
    )
    parts: list[Part] = [figures]
    if result.spans:
        num_hidden = result.cluster.num_devices - _MAX_DEVICES
        hidden = Paragraph(f"{num_hidden} more devices are not shown" if num_hidden > 0 else "")
        parts.append(Section("who computed when", (timeline(result), hidden)))
    return Document(f"{result.policy}: {len(result.records)} jobs on {result.cluster} devices", tuple(parts))


def timeline(result: SimulationResult) -> Timeline:
    """Makes the timeline of the spans of `result`, a lane for each of the first 64 devices. Spans that follow each
    other with the same jobs are joined; those too short to be seen are left out."""
    end_seconds = max(span.end_seconds for span in result.spans)
    unit_seconds, unit = time_unit(end_seconds)
    # by device: [jobs, start, end] in order of time
    runs: dict[int, list[tuple[tuple[int, ...], float, float]]] = {}
    for span in sorted(result.spans, key=lambda span: span.start_seconds):
        for device in span.devices:
            lane = runs.setdefault(device, [])
            gap_seconds = span.start_seconds - lane[-1][2] if lane else end_seconds
            if lane and lane[-1][0] == span.jobs and gap_seconds < end_seconds / _MOMENTS:
                lane[-1] = (span.jobs, lane[-1][1], span.end_seconds)
            else:
                lane.append((span.jobs, span.start_seconds, span.end_seconds))
    names = _names(result)
    lanes = []
    for device in range(min(result.cluster.num_devices, _MAX_DEVICES)):
        stretches = tuple(
            _stretch([names[job] for job in jobs], start / unit_seconds, end / unit_seconds, unit)
            for jobs, start, end in runs.get(device, [])
            if end - start >= end_seconds / _MOMENTS
        )
        lanes.append((f"device {device}", stretches))
    return Timeline(tuple(lanes), end_seconds / unit_seconds, unit)


def _names(result: SimulationResult) -> list[str]:
    """What the jobs are called: by their names; by their numbers where names are numbers or not unique."""
    names = [record.name for record in result.records]
    are_numbers = len(set(names)) < len(names) or any(name.isdigit() or not name for name in names)
    return [f"job {number}" for number in range(len(names))] if are_numbers else names


def _stretch(names: list[str], start: float, end: float, unit: str) -> Stretch:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return Stretch(start, end, tuple(names), f"{shown}: {start:.3g} to {end:.3g} {unit}")


def _time_text(seconds: float) -> str:
    unit_seconds, unit = time_unit(seconds)
    return f"{seconds / unit_seconds:.3g} {unit}"
