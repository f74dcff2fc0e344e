"""Draws what schemes that exchange rows send, and how long they take on links of all rates.

Bytes and messages by scheme come in; figures of matplotlib come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.display.pictures import new_figure, without_frame
from splitjax.errors import ProfileError

_SLOWEST, _FASTEST, _NUM_RATES = 1e7, 1e11, 200  # bits a second


def draw_bytes(planned: Mapping[str, int], compiled: Mapping[str, int], bound_bytes: float, title: str) -> Any:
    """Draws the bytes that each worker sends in a step by scheme, planned beside compiled, and returns the figure.

    **Arguments:** `planned`, `compiled`: bytes by scheme, of the same schemes, among them `dense`, with which the
    others are compared. `bound_bytes`: the least that any scheme sends for the values alone. `title`: above it.

    Raises `ProfileError` where matplotlib is not installed.
    """
    figure = new_figure(9, 1.2 + 0.38 * len(compiled), ProfileError, "draw_bytes")
    axes, order = figure.subplots(), sorted(compiled, key=lambda name: compiled[name])
    places = np.arange(len(order))
    axes.barh(places - 0.2, [planned[name] / 1000 for name in order], 0.4, label="predicted by the plan")
    bars = axes.barh(places + 0.2, [compiled[name] / 1000 for name in order], 0.4, label="in the compiled program")
    ratio = lambda name: f", 1/{compiled['dense'] / compiled[name]:.1f}" if name != "dense" else ""
    axes.bar_label(bars, [f"{compiled[name] / 1000:,.1f} kB{ratio(name)}" for name in order], padding=4, fontsize=9)
    axes.axvline(bound_bytes / 1000, color="black", linestyle=":", label="least for the values alone")
    axes.set(xlabel="kB that each worker sends in a step", xlim=(0, 1.17 * max(compiled.values()) / 1000), title=title)
    axes.set_yticks(places, order)
    axes.invert_yaxis()
    without_frame(axes)
    axes.legend(loc="upper right", frameon=False)
    return figure


def draw_seconds(tables: Mapping[str, Mapping[str, tuple[float, int]]], latency_seconds: float) -> Any:
    """Draws how long each scheme takes on links of 10 Mbit/s to 100 Gbit/s, a panel for each table, with a band that
    has the colour of the fastest; returns the figure.

    **Arguments:** `tables`: title of a panel -> scheme -> the bytes that a worker sends in a step, and the messages
    that wait for each other; all tables have the same schemes. `latency_seconds`: of a message.

    Raises `ProfileError` where matplotlib is not installed.
    """
    figure = new_figure(12, 4.6, ProfileError, "draw_seconds")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    rates = np.geomspace(_SLOWEST, _FASTEST, _NUM_RATES)
    names = list(next(iter(tables.values())))  # a scheme has one colour in all panels, whatever the order of a table
    for axes, (title, schemes) in zip(panels, tables.items(), strict=True):
        seconds = {name: schemes[name][0] * 8 / rates + schemes[name][1] * latency_seconds for name in names}
        _curves(axes, rates, seconds)
        axes.set(xscale="log", yscale="log", xlabel="link rate, bit/s", title=title, xlim=(_SLOWEST, _FASTEST))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms a step, predicted")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=9, frameon=False
    )
    return figure


def _curves(axes: Any, rates: NDArray[np.float64], seconds: Mapping[str, NDArray[np.float64]]) -> None:
    """Draws a curve for each scheme, and below them which is the fastest."""
    names = list(seconds)
    for number, name in enumerate(names):
        # Two schemes may have the same bytes and messages: every other line has gaps, through which one sees.
        style = "-" if number % 2 else "--"
        axes.plot(rates, 1000 * seconds[name], label=name, color=f"C{number}", linestyle=style)
    fastest = np.argmin([seconds[name] for name in names], axis=0)
    starts = [0, *(1 + np.flatnonzero(fastest[1:] != fastest[:-1])), len(rates)]
    low = 400 * min(values.min() for values in seconds.values())
    for first, last in zip(starts, starts[1:], strict=False):
        ends = rates[[first, last - 1]]
        axes.plot(ends, [low, low], linewidth=8, color=f"C{fastest[first]}", solid_capstyle="butt")
    axes.text(rates[0], low * 1.25, " the fastest", fontsize=9)
