"""Makes the texts of an advice's document: the ways to train side by side, the layers, and what to do.

An `Advice` goes in; titles, rows and remarks come out that say nothing of how they are laid out.
"""

from __future__ import annotations

from splitjax.display.figures import bytes_text, ratio_text, seconds_text
from splitjax.partial.advice import Advice, StageAdvice

COLUMNS = (
    "way",
    "device time",
    "compute",
    "busiest",
    "sent",
    "exchange",
    "step",
    "memory",
    "most",
    "variance",
    "compute to go",
    "time to go",
)
LAYER_COLUMNS = ("layers", "backward", "share", "gradient", "noise", "noise / cost", "squared norm", "memory to here")
LEGEND = (
    (
        "device time",
        (
            "compute of all workers over that of full backpropagation; compute: of a worker, mean, and of the busiest,"
            " for which the others wait"
        ),
    ),
    (
        "sent",
        (
            "bytes of gradients that a worker sends in a step, mean; exchange: predicted time on the link; step:"
            " busiest and exchange"
        ),
    ),
    ("memory", "temporaries and results of a worker's program, mean and most over workers"),
    ("variance", "of the gradient, over that of full backpropagation"),
    (
        "compute to go",
        (
            "device time x variance: what the progress of one full step takes, over what it takes in full; time to go:"
            " the same of steps, exchange included"
        ),
    ),
    (
        "noise",
        (
            "variance of one worker's gradient around the mean over workers, summed over its elements; noise / cost:"
            " over its share of the time, mean 1"
        ),
    ),
)
# Layers are joined to at most so many lines.
_MAX_LAYERS = 16


def headline(advice: Advice) -> str:
    """Returns what `advice` was measured on, in a line."""
    batches = f"{advice.num_batches} batch{'es' * (advice.num_batches != 1)}"
    link = f"{8 * advice.bytes_per_second / 1e6:,.0f} Mbit/s and {1e6 * advice.latency_seconds:,.0f} us"
    return (
        f"partial backpropagation of {advice.step}: {advice.num_workers} workers with {advice.num_examples} examples,"
        f" {batches} measured on {advice.platform}, link {link}; forward pass {seconds_text(advice.forward_seconds)}"
    )


def rows(advice: Advice) -> tuple[tuple[str, ...], ...]:
    """Returns the cells of every way to train that `advice` compares."""
    full, cells = advice.rows[0], []
    for way in advice.rows:
        variance = (
            "never" if way.variance is None else ratio_text(way.variance / full.variance) if full.variance else ""
        )
        cells.append(
            (
                way.name,
                f"{100 * way.device_time:.1f} %",
                seconds_text(way.compute_seconds),
                seconds_text(way.busiest_seconds),
                bytes_text(round(way.sent_bytes)),
                seconds_text(way.communication_seconds),
                seconds_text(way.step_seconds),
                bytes_text(round(way.mean_memory_bytes)),
                bytes_text(round(way.max_memory_bytes)),
                variance,
                _share(advice.compute(way)),
                _share(advice.alone(way)),
            )
        )
    return tuple(cells)


def layer_rows(advice: Advice) -> tuple[tuple[str, ...], ...]:
    """Returns the cells of the layers of `advice`, neighbours joined where there are many."""
    stages, whole = advice.stages, sum(stage.backward_seconds for stage in advice.stages)
    count = max(-(-len(stages) // _MAX_LAYERS), 1)
    groups = [stages[start : start + count] for start in range(0, len(stages), count)]
    charged = whole + advice.forward_seconds
    noise = sum(stage.noise for stage in stages)
    cells = []
    for group in groups:
        seconds, own = sum(stage.backward_seconds for stage in group), sum(stage.noise for stage in group)
        cost = seconds + (advice.forward_seconds if group is groups[-1] else 0.0)
        share = cost / charged if charged else 0.0
        relative = own / noise / share if noise and share else 0.0
        cells.append(
            (
                _names(group),
                seconds_text(seconds),
                f"{100 * seconds / whole:.1f} %" if whole else "",
                bytes_text(sum(stage.num_bytes for stage in group)),
                f"{own:.3g}",
                ratio_text(relative),
                f"{sum(stage.squared_norm for stage in group):.3g}",
                bytes_text(group[0].memory_bytes),
            )
        )
    return tuple(cells)


def ways(advice: Advice) -> tuple[tuple[str, str], ...]:
    """Returns (title, text) of what each way to train of `advice` is."""
    return tuple((way.name, way.what) for way in advice.rows)


def recommendation(advice: Advice) -> str:
    """Returns which way `advice` recommends, and why."""
    said = advice.recommendation
    return f"recommended: {said.option}. {' '.join(said.reasons)}"


def remarks(advice: Advice) -> tuple[tuple[str, str], ...]:
    """Returns (title, text) of what else to know of `advice`."""
    said = advice.recommendation
    unless = (("unless", said.unless),) if said.unless else ()
    return (
        *unless,
        *(("besides", win) for win in said.wins),
        *(("note", note) for note in advice.notes),
    )


def _share(value: float | None) -> str:
    return "never" if value is None else f"{100 * value:.1f} %"


def _names(group: tuple[StageAdvice, ...]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"
