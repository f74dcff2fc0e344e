"""One line a step, in files that a resumed run continues without a gap or a line twice."""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from splitjax._files import write_atomically
from splitjax.errors import DataError

Row = Mapping[str, Any]  # "step" first; numbers, or None for what this step does not have


class Observer(Protocol):
    """What is told about every step, in order, on process 0."""

    def step(self, row: Row) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A JSON object a line: `{"step": 1, "loss": 2.3, ...}`.

    **Arguments:**

    - `path`: the file; made with its folder where it does not exist.
    - `resume_step`: the step that training goes on from. Lines of later steps, which will be done again, and a last line that
      was cut off are dropped; everything else stays.

    Raises `DataError` when the file cannot be written.
    """

    def __init__(self, path: pathlib.Path, resume_step: int = 0):
        self._file = _reopen(path, lambda line: _json_step(line), resume_step, header=None)

    def step(self, row: Row) -> None:
        self._file.write(json.dumps({name: value for name, value in row.items() if value is not None}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Table:
    """The same as CSV, with one column for each of `columns`. Arguments and errors as of `JsonLines`."""

    def __init__(self, path: pathlib.Path, columns: Sequence[str], resume_step: int = 0):
        self._columns = list(columns)
        self._file = _reopen(path, _csv_step, resume_step, header=",".join(columns))

    def step(self, row: Row) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(["" if row.get(name) is None else row[name] for name in self._columns])
        self._file.write(line.getvalue())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard. Raises `DataError` where it is not installed."""

    def __init__(self, folder: pathlib.Path):
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise DataError("TensorBoard is not installed", place="--tensorboard", remedy="pip install tensorboard") from error
        self._writer = Writer(str(folder))

    def step(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file that `JsonLines` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _json_step(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _csv_step(line: str) -> int | None:
    first = line.split(",", 1)[0]
    return int(first) if first.isdecimal() else None


def _reopen(path: pathlib.Path, step_of: Any, resume_step: int, header: str | None) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in old if line.endswith("\n") and (step := step_of(line)) is not None and step <= resume_step]
        if header is not None:
            kept.insert(0, header + "\n")
        if kept != old:
            write_atomically(path, "".join(kept))
        return open(path, "a", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the metrics cannot be written: {getattr(error, 'strerror', None) or error}", value=os.fspath(path), place="metrics file",
            remedy="give a file in a folder that may be written to",
        ) from error
