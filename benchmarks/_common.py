"""What the benchmarks share: virtual devices, tables and result pages."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
_COUNT_FLAG = "--xla_force_host_platform_device_count"


def virtual_devices(count: int = 8) -> None:
    """Makes this process see `count` CPU devices. Has to come before JAX looks for devices; a count that is already set
    stays."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()  # JAX loads it where it is installed, whatever the platform
    flags = os.environ.get("XLA_FLAGS", "")
    if _COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_COUNT_FLAG}={count}".strip()


def quiet_tpu_compiler() -> None:
    """Keeps libtpu from looking for a TPU host's metadata, and lets two processes load it. Has to come before it is
    loaded."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [_row(titles), _row(["---"] * len(titles)), *(_row(row) for row in rows)]


def write_page(name: str, lines: Iterable[str], folder: pathlib.Path | None = None) -> pathlib.Path:
    """Writes `results/NAME.md` (or a page in `folder`) and returns its path."""
    path = (folder or RESULTS) / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.rstrip() for line in lines).rstrip() + "\n", encoding="utf-8")
    return path


def write_stored(
    name: str,
    found: Mapping[str, Any],
    lines_of: Callable[[Mapping[str, Any]], Iterable[str]],
    folder: pathlib.Path | None = None,
) -> pathlib.Path:
    """Writes what was measured as `NAME.json`, and the page that `lines_of` makes of it; returns the page's path.

    **Arguments:** `found`: JSON values, the page's header among them. `lines_of`: makes the lines of the page of what
    is read back, so that the page can say nothing that is not stored. `folder`: instead of `results`."""
    file = (folder or RESULTS) / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1)
    file.write_text(text + "\n", encoding="utf-8")
    return write_page(name, lines_of(json.loads(text)), folder)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
