"""Draws memory timelines as an SVG file: the picture of their document, with a title."""

from __future__ import annotations

import os
import pathlib

from splitjax._files import write_atomically
from splitjax.display.areas_svg import areas_svg
from splitjax.display.document import Areas
from splitjax.errors import PlanError
from splitjax.report.memory.document import timelines_document
from splitjax.report.memory.value import MemoryTimelines


def draw_timelines(timelines: MemoryTimelines, path: str | os.PathLike[str] | None) -> str:
    """Returns the picture of `timelines` as the text of an SVG file, and writes it to `path` unless that is None.
    Raises `PlanError` where the file cannot be written."""
    document = timelines_document(timelines)
    (areas,) = (part for part in document.parts if isinstance(part, Areas))
    text = areas_svg(areas, document.title)
    if path is not None:
        try:
            write_atomically(pathlib.Path(path), text)
        except OSError as error:
            raise PlanError(
                f"the picture cannot be written: {error.strerror or error}",
                value=str(path),
                place="MemoryTimelines.svg, path",
                remedy="give a path in a folder that exists and may be written to",
            ) from error
    return text
