"""What is kept of a recording in the repository: for each cell digests, figures, and the types of errors, a line
each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks._common import RESULTS
from benchmarks.corpus.canonical import digest
from benchmarks.corpus.record import Recording

FOLDER = "corpus"


class StoreError(RuntimeError):
    """There is no recording where one is looked for."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """A recording without its texts.

    **Attributes:**

    - `about`: of the recording: commit, releases, seconds.
    - `plans`: by the name of a cell the digest of its plan, or of both plans where its tables are observed first,
      joined by `+`; with `-` in front where the plan has not what the cell asks for; or its status and the type of the
      error.
    - `programs`: by the name of a compiled cell what was found of each of its programs: digests of modules and of the
      report, memory, collectives (how many, and bytes), what is missing.
    - `folder`: where the texts are; None where there are digests alone.
    """

    about: Mapping[str, Any]
    plans: Mapping[str, str]
    programs: Mapping[str, Any]
    folder: pathlib.Path | None = None


def summary_of(recording: Recording) -> Summary:
    """The summary of a recording."""
    of_plans, of_programs = recording.plans(), recording.programs()
    plans = {name: _plan(record) for name, record in of_plans.items()}
    programs = {name: _program(record) for name, record in sorted(of_programs.items())}
    seconds = {
        f"{what}_cpu_seconds": round(sum(record["cpu_seconds"] for record in records.values()), 1)
        for what, records in (("plan", of_plans), ("program", of_programs))
    }
    return Summary({**recording.about(), **seconds}, plans, programs, recording.folder)


def _plan(record: Mapping[str, Any]) -> str:
    if record["status"] != "ok":
        return f"{record['status']} {record['error']}"
    return ("" if record["takes_effect"] else "-") + "+".join(digest(text) for text in record["plans"].values())


def _program(record: Mapping[str, Any]) -> Any:
    if record["status"] != "ok":
        return f"{record['status']} {record['error']}"
    texts = ("module", "report")
    return {
        name: {key: digest(value) if key in texts else value for key, value in one.items()}
        for name, one in record["programs"].items()
    }


def baseline(results: pathlib.Path = RESULTS) -> pathlib.Path:
    """The folder of what is stored for this interpreter's release of JAX. Raises `StoreError` where nothing is."""
    import importlib.metadata

    folder = results / FOLDER / f"jax-{importlib.metadata.version('jax')}"
    if not folder.is_dir():
        raise StoreError(
            f"nothing is stored for this release of JAX: there is no {folder}; record the earlier checkout, too"
        )
    return folder


def load(folder: pathlib.Path) -> Summary:
    """The summary of a recording, or of what is stored. Raises `StoreError` for a folder that is neither."""
    if (folder / "programs").is_dir():
        return summary_of(Recording(folder))
    if not (folder / "about.json").is_file():
        raise StoreError(f"{folder} is no recording")
    plans: dict[str, str] = {}
    for file in sorted(folder.glob("plans-*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            plans[name] = value
    lines = (folder / "programs.jsonl").read_text(encoding="utf-8").splitlines()
    programs = {record.pop("cell"): record["found"] for record in map(json.loads, lines)}
    return Summary(json.loads((folder / "about.json").read_text(encoding="utf-8")), plans, programs)


def store(summary: Summary, results: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes a summary to the folder of its release of JAX, in place of what was there; returns the folder."""
    folder = results / FOLDER / f"jax-{summary.about['jax']}"
    folder.mkdir(parents=True, exist_ok=True)
    by_model: dict[str, list[str]] = {}
    for name, value in summary.plans.items():
        by_model.setdefault(name.partition("/")[0], []).append(f"{name} {value}\n")
    for file in folder.glob("plans-*.txt"):
        file.unlink()
    for model, lines in by_model.items():
        (folder / f"plans-{model}.txt").write_text("".join(sorted(lines)), encoding="utf-8")
    programs = [json.dumps({"cell": name, "found": found}) + "\n" for name, found in sorted(summary.programs.items())]
    (folder / "programs.jsonl").write_text("".join(programs), encoding="utf-8")
    (folder / "about.json").write_text(json.dumps(summary.about, indent=1) + "\n", encoding="utf-8")
    return folder
