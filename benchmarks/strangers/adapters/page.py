"""Write the strangers' results as a Markdown page and as JSON."""

from __future__ import annotations

import json
import pathlib
from typing import Any


def write(result: dict[str, Any], folder: pathlib.Path) -> None:
    """Write `strangers.md` and `strangers.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for record in result["strangers"]:
        for run in (record.get("baseline", {}), *record["runs"].values()):
            run.pop("traceback", None)
    (folder / "strangers.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "strangers.md").write_text(text(result))


def text(result: dict[str, Any]) -> str:
    """Return the page."""
    environment, counts, records = result["environment"], result["counts"], result["strangers"]
    commits = ", ".join(f"{name} `{commit[:12]}`" for name, commit in environment["commits"].items())
    frameworks = ", ".join(f"{name} {passed} of {total}" for name, (passed, total) in counts["per_framework"].items())
    lines = [
        "# Strangers: other people's training steps",
        "",
        (
            f"**{counts['passed']} of {counts['total']} pass**, {counts['split']} of them with arrays split over the"
            f" model axis: {frameworks}."
        ),
        "",
        (
            f"A step passes where every rule set ({', '.join(environment['rules'])}) plans it and runs it on a mesh of"
            f" {environment['mesh']} (data x model), and the losses of {environment['num_steps']} steps are those of"
            " one device (1e-4, relative above one and absolute below). The steps are read from public checkouts,"
            " unchanged but for their own jit; `benchmarks/strangers/main.py` says how."
        ),
        "",
        environment["header"].rstrip(),
        f"- checkouts: {commits}",
    ]
    lines += [f"- missing checkout: {name}" for name in result["missing_checkouts"]]
    lines += ["", "Sharded: arrays of the state split over the `model` axis, of all. Time: to trace and plan.", ""]
    titles = ["step", "has", *(f"{rules}: {what}" for rules in environment["rules"]
                               for what in ("loss difference", "sharded", "seconds"))]  # fmt: skip
    lines += [_row(titles), _row(["---"] * len(titles))]
    for record in records:
        cells = [f"{'' if record['ok'] else '**fails** '}{record['name']}", ", ".join(record["features"])]
        for rules in environment["rules"]:
            cells += _cells(record["runs"].get(rules, {}))
        lines.append(_row(cells))
    failures = [record for record in records if not record["ok"]]
    if failures:
        lines += ["", "## What fails, and why", ""]
        lines += [f"- `{record['name']}` ({record['source']}): {record['reason']}" for record in failures]
    lines += ["", "## Where each comes from", ""]
    lines += [f"- `{record['name']}`: {record['source']}" for record in records]
    return "\n".join(lines) + "\n"


def _cells(run: dict[str, Any]) -> list[str]:
    if "loss_difference" not in run:
        return ["error" if run else "", "", ""]
    sharded = f"{run['num_sharded']} of {run['num_leaves']}"
    return [f"{run['loss_difference']:.0e}", sharded, f"{run['plan_seconds']:.1f}"]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
