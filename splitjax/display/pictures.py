"""Figures of matplotlib, which is imported when something is drawn: it is no dependency of splitjax.

What is drawn comes from the room that knows the values; here a figure is made without a window, and written whole or
not at all.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

from splitjax._files import replace_atomically
from splitjax.errors import SplitjaxError

# Makes an error of a room of its message, value, place and remedy.
Fails = Callable[..., SplitjaxError]


def new_figure(width: float, height: float, fails: Fails, place: str) -> Any:
    """Returns an empty `matplotlib.figure.Figure` of `width` x `height` inches. Without matplotlib it raises what
    `fails` makes, which says that it happened at `place`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise fails(
            "this is drawn with matplotlib, which is not installed", place=place, remedy="pip install 'splitjax[demo]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def written(figure: Any, path: str | os.PathLike[str] | None, fails: Fails, place: str) -> Any:
    """Writes a `figure` to `path`, unless that is None, and returns it. A file that cannot be written raises what
    `fails` makes, which says that it happened at `place`."""
    if path is None:
        return figure
    try:
        replace_atomically(pathlib.Path(path), lambda scratch: figure.savefig(scratch, dpi=120))
    except (OSError, ValueError) as error:  # ValueError: a file type that matplotlib does not write
        raise fails(
            f"the plot cannot be written: {getattr(error, 'strerror', None) or error}",
            value=str(path),
            place=place,
            remedy="give a .png, .svg or .pdf file in an existing, writable folder",
        ) from error
    return figure


def without_frame(axes: Any) -> None:
    """Takes away the lines above and at the right of matplotlib's `axes`."""
    axes.spines[["top", "right"]].set_visible(False)
