"""Writes a line a step, into files that a resumed run continues without a gap or a line twice."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from splitjax._files import write_atomically
from splitjax.errors import DataError
from splitjax.runtime.checkpoint.folder import set_aside

logger: logging.Logger = logging.getLogger("splitjax")

_MAX_DIGITS = 18  # of a step: a number of thousands of them is no number to Python

Row = Mapping[str, Any]  # "step" first; numbers, sometimes words; None for what this step does not have


class StepObserver(Protocol):
    """Hears about every step, in order, on process 0."""

    def step(self, row: Row) -> None:
        """Takes the `row` of a step."""
        ...

    def close(self) -> None:
        """Writes what is not written yet."""
        ...


class JsonLines:
    """Writes a JSON object a line: `{"step": 1, "loss": 2.3, ...}`.

    **Arguments:**

    - `path`: the file; made with its folder where it does not exist.
    - `resume_step`: the step that training goes on from. Lines of later steps, which will be done again, and a last
      line that was cut off are dropped; everything else stays. A file with damage in other lines is kept beside
      (`m.jsonl.damaged-1`).

    A disk that is full later does not stop the training: the lines are kept, and written once there is room.

    Raises `DataError` when the file cannot be written at first, and from `close` when lines are still unwritten then.
    """

    def __init__(self, path: pathlib.Path, resume_step: int = 0):
        self._file = _reopen(path, _json_step, resume_step, header=None)

    def step(self, row: Row) -> None:
        """Appends the `row` of a step, without what is None."""
        self._file.write(json.dumps({name: value for name, value in row.items() if value is not None}) + "\n")

    def close(self) -> None:
        """Closes the file. Raises `DataError` when lines are still unwritten."""
        self._file.close()


class Table:
    """Writes the same to the file `path` as CSV, with one column for each of `columns`. Arguments (`resume_step`) and
    errors as of `JsonLines`."""

    def __init__(self, path: pathlib.Path, columns: Sequence[str], resume_step: int = 0):
        self._columns = list(columns)
        self._file = _reopen(path, _csv_step, resume_step, header=",".join(columns))

    def step(self, row: Row) -> None:
        """Appends the `row` of a step; a cell is empty where it is None."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(
            ["" if row.get(name) is None else row[name] for name in self._columns]
        )
        self._file.write(line.getvalue())

    def close(self) -> None:
        """Closes the file. Raises `DataError` when lines are still unwritten."""
        self._file.close()


class TensorBoard:
    """Writes scalars for TensorBoard into a `folder`. Raises `DataError` where it is not installed."""

    def __init__(self, folder: pathlib.Path):
        try:
            from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]  # an optional package
        except ImportError as error:
            raise DataError(
                "TensorBoard is not installed", place="--tensorboard", remedy="pip install tensorboard"
            ) from error
        self._writer = Writer(str(folder))

    def step(self, row: Row) -> None:
        """Writes the numbers of the `row` of a step; words it leaves to the files."""
        for name, value in row.items():
            if name != "step" and value is not None and not isinstance(value, str):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Closes TensorBoard's files."""
        self._writer.close()


class WeightsAndBiases:
    """Writes scalars to a run of Weights & Biases. Where and how is said as everywhere with it: `WANDB_MODE=offline`
    writes to the folder alone, `WANDB_API_KEY`, `WANDB_ENTITY` and so on.

    **Arguments:**

    - `project`: its name.
    - `folder`: where its files lie, in `wandb/` of it. The run's id is kept there, in `wandb-run.txt`, so that a
      resumed training goes on with the same run; of steps that are done again the first values stay.

    Raises `DataError` where the package is not installed, and where it cannot start a run: not logged in, no network.
    """

    def __init__(self, project: str, folder: pathlib.Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]  # an optional package
        except ImportError as error:
            raise DataError("Weights & Biases is not installed", place="--wandb", remedy="pip install wandb") from error
        kept = folder / "wandb-run.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run_id = kept.read_text(encoding="ascii").strip() if kept.exists() else secrets.token_hex(4)
            self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(folder))
            write_atomically(kept, run_id + "\n")
        except (OSError, UnicodeDecodeError, wandb.Error) as error:
            raise DataError(
                f"Weights & Biases cannot start a run: {error}",
                value=project,
                place="--wandb",
                remedy="log in (wandb login), or set WANDB_MODE=offline and sync later (wandb sync)",
            ) from error

    def step(self, row: Row) -> None:
        """Writes the numbers of the `row` of a step."""
        values = {name: value for name, value in row.items() if name != "step" and value is not None}
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        """Ends the run; waits until what is to be uploaded is."""
        self._run.finish()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of the file `path` that `JsonLines` wrote. Raises `DataError`, which names the line, for one
    that is damaged, and for a file that cannot be read."""
    rows: list[dict[str, Any]] = []
    remedy = "leave the damaged line out, or resume the run: it keeps the other lines"
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is no JSON object")
            rows.append(row)
    except OSError as error:
        raise DataError(
            f"the metrics cannot be read: {error.strerror or error}",
            place=str(path),
            remedy="give a file that may be read, or another name for the metrics of this run",
        ) from error
    except (ValueError, RecursionError) as error:
        message = f"a damaged line of metrics: {error}"
        raise DataError(message, place=f"{path}:{len(rows) + 1}", remedy=remedy) from error
    return rows


def _json_step(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _csv_step(line: str) -> int | None:
    first = line.split(",", 1)[0]
    return int(first) if first.isdecimal() and len(first) <= _MAX_DIGITS else None


class _Lines:
    """A file that is appended to, past failures of its disk: what could not be written is written before what comes
    next."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        # Unbuffered: of a buffer that could not be flushed nobody knows how much was written.
        self._file = open(path, "ab", buffering=0)
        self._unwritten = b""

    def write(self, text: str) -> None:
        was_behind = bool(self._unwritten)
        self._unwritten += text.encode("utf-8")
        error = self._flush()
        if error is not None and not was_behind:
            logger.warning(
                "%s cannot be written (%s): its lines are kept until it can be", self._path, error.strerror or error
            )

    def close(self) -> None:
        error = self._flush()
        count = self._unwritten.count(b"\n")
        with contextlib.suppress(OSError):  # some file systems tell only now; what was said above is enough
            self._file.close()
        if error is not None:
            raise _unwritable(self._path, error, f"the last {count} lines of the metrics are not written") from error

    def _flush(self) -> OSError | None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            return error
        return None


def _reopen(path: pathlib.Path, step_of: Any, resume_step: int, header: str | None) -> _Lines:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A log: a byte that is no text any more is no reason not to train.
        old = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
        steps = [step_of(line) if line.endswith("\n") else None for line in old]
        kept = [line for line, step in zip(old, steps) if step is not None and step <= resume_step]
        # The last line may have been cut off, and the first be the header.
        damaged = [
            number
            for number, step in enumerate(steps)
            if step is None and number != len(old) - 1 and (number or header is None)
        ]
        if damaged:
            aside = set_aside(path, "damaged")
            logger.warning(
                "%s: line %d is damaged; the file is kept as %s, and its other lines go on",
                path,
                damaged[0] + 1,
                aside.name,
            )
        if header is not None:
            kept.insert(0, header + "\n")
        if kept != old or damaged:
            write_atomically(path, "".join(kept))
        return _Lines(path)
    except OSError as error:
        raise _unwritable(path, error, "the metrics cannot be written") from error


def _unwritable(path: pathlib.Path, error: OSError, what: str) -> DataError:
    return DataError(
        f"{what}: {error.strerror or error}",
        value=os.fspath(path),
        place="metrics file",
        remedy="give a file in a folder that may be written to, on a disk with room",
    )
