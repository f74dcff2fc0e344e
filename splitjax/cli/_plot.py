"""Draws the demo's picture: how training went, and what a device had to hold."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from splitjax._files import replace_atomically
from splitjax.cli._memory import MemoryUse


def write_plot(
    path: pathlib.Path, losses: Sequence[float], accuracies: Sequence[float], memory: Sequence[MemoryUse], title: str
) -> bool:
    """Writes the PNG `path` with `losses` and `accuracies` by step, `memory` per device, and a `title` above; returns
    False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss_axes, accuracy_axes, memory_axes = figure.subplots(1, 3)
    steps = range(1, len(losses) + 1)
    loss_axes.plot(steps, losses)
    loss_axes.set(title="training loss", xlabel="step", ylabel="nats", yscale="log")
    accuracy_axes.plot(steps, [100 * accuracy for accuracy in accuracies])
    accuracy_axes.set(title="training accuracy", xlabel="step", ylabel="% of the batch", ylim=(0, 102))
    for offset, use in enumerate(memory):
        places = [row + 0.4 * offset for row in range(2)]
        bars = memory_axes.bar(places, [use.state_bytes / 2**20, use.step_bytes / 2**20], width=0.38, label=use.name)
        memory_axes.bar_label(bars, fmt="%.1f")
    memory_axes.set(title="memory per device", ylabel="MiB", xticks=[0.2, 1.2], xticklabels=["state", "whole step"])
    memory_axes.margins(y=0.15)
    memory_axes.legend()
    replace_atomically(path, lambda scratch: figure.savefig(scratch, dpi=120))
    return True
