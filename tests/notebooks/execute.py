"""Runs the notebooks and keeps what they show: `python -m tests.notebooks.execute [NAME ...]`, as `make notebooks` does
once the cells are those of the paired scripts.

Each runs in its folder, in a kernel of its own, as a reader's does. One that fails, or says anything on its standard
error, is not written.
"""

from __future__ import annotations

import base64
import io
import os
import pathlib
import sys
import time
from typing import Any

import jupytext
import nbclient
import nbformat
import PIL.Image

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"


def executed(path: pathlib.Path, timeout_seconds: float = 600.0) -> Any:
    """Returns the notebook `path` with the outputs of a new run. Raises `CellExecutionError` where a cell fails."""
    notebook = jupytext.read(path)
    place = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=timeout_seconds, kernel_name="python3", resources=place, record_timing=False
    )
    client.execute()
    return notebook


def complaints(notebook: Any) -> list[str]:
    """Returns what a `notebook` says on its standard error, and its errors."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    return said + [output.ename for output in outputs if output.output_type == "error"]


def make_light(notebook: Any) -> None:
    """Gives the pictures of a `notebook` as many colours as a chart has: a fifth of the bytes."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = PIL.Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
                packed = io.BytesIO()
                picture.quantize(64).save(packed, "png", optimize=True)
                data["image/png"] = base64.b64encode(packed.getvalue()).decode()


def main() -> None:
    """Runs the notebooks that the command line names, or all."""
    # A reader without accelerators has no TPU's libraries either, which complain that there is none.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    for path in sorted(FOLDER.glob("*.ipynb")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        begin = time.monotonic()
        notebook = executed(path)
        if said := complaints(notebook):
            sys.exit(f"{path.name} complains: {said[0]}")
        make_light(notebook)
        notebook.metadata.pop("language_info", None)  # of the Python that ran it
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - begin:.0f} s, {path.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
