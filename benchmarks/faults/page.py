"""What the fault suite has measured so far: its records, and its page."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import fcntl
import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks import machine
from benchmarks._common import table
from benchmarks.faults import disk, false_alarms, hang, interrupts, kills, overhead
from benchmarks.faults.checks import Fault
from benchmarks.faults.run import TRAINING, Recipe

RECORDS = "faults.json"
TITLES = {
    "kills": "A worker is killed",
    "disks": "The disk fills up",
    "checkpoints": "Checkpoints and logs are damaged",
    "data": "Data are damaged",
    "hangs": "Workers cannot be reached",
    "stops": "The run is asked to end, or loses its launcher",
    "stuck": "A worker lives and is stuck",
    "slow": "A worker is slow, or stands still for a while",
    "outside": "The clock jumps, memory is over, a worker or the coordinator is gone",
    "numbers": "The loss is NaN",
    "interrupts": "Ctrl-C at random moments of a command",
}
_RANK = re.compile(r" (?:to|of) worker \d| worker \d")


@dataclasses.dataclass(frozen=True)
class Part:
    """Faults of one kind. `date`: ISO 8601, UTC; `seconds`: of all; `commit`: of the code that met them."""

    date: str
    seed: int
    seconds: float
    faults: tuple[Fault, ...]
    commit: str = ""


def read(records: pathlib.Path) -> dict[str, Part]:
    """The parts that were measured so far, in the order of the page."""
    stored = json.loads(records.read_text()) if records.exists() else {}
    fault = lambda row: Fault(**{**row, "problems": tuple(row["problems"])})
    return {
        name: Part(**{**stored[name], "faults": tuple(map(fault, stored[name]["faults"]))})
        for name in TITLES
        if name in stored
    }


def store(records: pathlib.Path, name: str, key: str, fault: Fault, seed: int, seconds: float) -> None:
    """Puts a fault in the place of that with its key; number 0 begins a part that is met in one go anew. Several may
    measure at once."""
    records.parent.mkdir(parents=True, exist_ok=True)
    with open(records.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        parts = read(records)
        before = parts.get(name, Part("", seed, 0.0, ()))
        kept = () if key == "0" else tuple(one for one in before.faults if one.key != key)
        commits = {machine.this_commit(), *(before.commit.split(", ") if kept and before.commit else ())}
        parts[name] = Part(
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            seed,
            seconds + (before.seconds if kept else 0.0),
            (*kept, dataclasses.replace(fault, key=key)),
            ", ".join(sorted(commits)),
        )
        text = json.dumps({name: dataclasses.asdict(parts[name]) for name in TITLES if name in parts}, indent=1)
        records.write_text(text + "\n")
    records.with_suffix(".lock").unlink(missing_ok=True)


def line(fault: Fault) -> str:
    """A fault in a line."""
    parts = [f"{'survived' if fault.survived else 'FAILED'}: {fault.kind} ({fault.moment})"]
    parts += [f"{fault.lost_steps} steps lost"] if fault.lost_steps is not None else []
    parts += [f"answered after {fault.end_seconds:.1f} s"] if fault.end_seconds is not None else []
    parts += [f"a step after {fault.again_seconds:.1f} s"] if fault.again_seconds is not None else []
    return "; ".join([*parts, *filter(None, [fault.note]), *fault.problems])


def lines(parts: Mapping[str, Part], folder: pathlib.Path) -> list[str]:
    """The page about `parts`, and about what else was measured into `folder`."""
    faults = [fault for name, part in parts.items() if name != "interrupts" for fault in part.faults]
    moments = parts["interrupts"].faults if "interrupts" in parts else ()
    survived = sum(fault.survived for fault in faults)
    lost = [fault.lost_steps - fault.steps_of_save for fault in faults if fault.lost_steps is not None]
    overdue = sum((fault.end_seconds or 0) > (fault.limit_seconds or float("inf")) for fault in faults)
    kinds = _by_kind(faults)
    found = [
        "# Faults: what training survives",
        "",
        f"**{survived} of {len(faults)} faults of {len(kinds)} kinds survived: the runs ended bit-identical to the"
        f" undisturbed one, and nothing that was saved was lost. At most {max(lost, default=0)} steps were lost, the"
        f" interval between checkpoints being at most {Recipe.checkpoint_every} (saves that were in progress apart);"
        f" {overdue or 'none'} took longer than stated.**",
        "",
    ]
    if moments:
        good = sum(fault.count for fault in moments if fault.survived)
        found += [
            f"**{good} of {sum(fault.count for fault in moments)} Ctrl-C at random moments of {len(moments)} commands"
            " ended cleanly: a message, no traceback, no crash, everything saved stayed.**",
            "",
        ]
    found += _quiet(false_alarms.read(folder / false_alarms.RECORDS))
    found += overhead.lines(folder)
    header = machine.header(
        machine.this_machine((*machine.PACKAGES, "orbax-checkpoint")), "python -m benchmarks faults"
    )
    seconds = sum(part.seconds for part in parts.values())
    found += [header.rstrip(), "", *_explained(seconds), "## By kind", "", *_kinds(kinds), ""]
    for name, part in parts.items():
        found += _part(name, part)
    return found


def _quiet(runs: Sequence[false_alarms.QuietRun]) -> list[str]:
    if not runs:
        return []
    hours = sum(run.seconds for run in runs) / 3600
    restarts, named = sum(run.restarts for run in runs), sum(run.stragglers for run in runs)
    loads = [run.load for run in runs]
    return [
        f"**{restarts or 'No'} false alarms in {hours:.1f} hours of {len(runs)} undisturbed runs beside heavy load:"
        f" {restarts} restarts, {sum(run.status != 0 for run in runs)} runs that failed; {named} of them named a"
        " straggler at the end.**",
        "",
        f"Those runs (`--only false_alarms`, commit {', '.join(sorted({run.commit for run in runs}))}): two processes,"
        f" {len({run.series for run in runs})} series of runs side by side, steps of {false_alarms.PACE_SECONDS:g} s, a"
        f" save every {false_alarms.CHECKPOINT_EVERY} steps"
        f" ({sum(run.num_saves for run in runs)} in all), half of them with the default deadlines and half with"
        f" `{' '.join(false_alarms.DEADLINES[1])}`; the machine's load was"
        f" {statistics.median(load[1] for load in loads):.0f} in the median ({min(load[0] for load in loads):.0f} to"
        f" {max(load[2] for load in loads):.0f}) on {runs[0].num_cores} cores, and the slowest p99 of a step"
        f" {max(run.worst_p99_seconds for run in runs):.2f} s. A straggler is a line of words and ends nothing: where"
        " both processes wait for data that come at the same pace, the one that has fewer batches ahead holds up the"
        " other.",
        "",
    ]


def _explained(seconds: float) -> list[str]:
    return [
        f"Runs: two processes (gloo), one thread each, `splitjax train {' '.join(TRAINING)} --data digits"
        f" --evaluate-every 100 --steps {Recipe.num_steps} --checkpoint-every {Recipe.checkpoint_every}`; those that"
        " are stuck, slow, out of memory or meet NaN: `benchmarks/faults/worker.py`. The whole suite took"
        f" {seconds / 60:.0f} min on a machine that other work shares.",
        "",
        "How it is counted:",
        "",
        "- Survived: the launcher (or, where none is left, the same command again) ended the run with exit status"
        " 0; the metrics have one line for every step, equal to the undisturbed run's but for times; the last"
        " checkpoint's arrays, with parameters, optimizer and PRNG key, are equal bit for bit, and so is its data"
        " position; every checkpoint that was complete before the fault is there, and every byte of it good (with"
        " few kept: the newest was resumed from); where a worker or the launcher was hit, no process was left."
        " Of a stuck worker the launcher's words also had to name its rank, where it was, its last collective, who"
        " waited, and in its stack the function that it was stuck in. Runs that meet NaN are compared with a loop"
        " by hand that knows which batch is bad.",
        "- Steps lost: the last step in the metrics when the fault struck, less the step of the checkpoint that the"
        " run went on from. A save that was in progress is lost with the attempt: the steps that were done while it"
        " was written come on top of the interval, and are in brackets. A start that had not done a step yet had"
        " none to lose (-).",
        "- Answered: from the fault until the launcher had ended the attempt, or the fault was reported; stated is"
        f" what the options and defaults promise for it: `--grace-seconds` {kills.GRACE_SECONDS:g},"
        f" {kills.DRAIN_SECONDS:g} s for last words; `--heartbeat-seconds` {hang.HEARTBEAT_SECONDS}, and one and a"
        " half times that for a worker that is cut off, which asks every half of that time whether the coordinator"
        f" is there; `--stop-timeout-seconds` {hang.STOP_SECONDS:g}, and {kills.SLACK_SECONDS:g} s for a busy"
        f" machine; {disk.REPORTED_WITHIN_SECONDS:g} s for a report of a failed save; the deadline that the line"
        " names for stuck workers, and what ends them.",
        "- A step again: from the fault (from the start by hand, where there was one) to the first step after it.",
        f"- Ctrl-C: SIGINT at {interrupts.NUM_MOMENTS} moments, drawn evenly between a command's entry point and its"
        " end; `train` and `launch` go on from what was saved, time after time, until runs are complete and compared.",
        "",
    ]


def _by_kind(faults: Iterable[Fault]) -> dict[str, list[Fault]]:
    kinds: dict[str, list[Fault]] = collections.defaultdict(list)
    for fault in faults:
        kind = _RANK.sub("", fault.kind)
        if kind.startswith("SIGKILL") and "launcher" not in kind:
            kind = f"SIGKILL in {fault.moment}"
        elif kind.startswith("damage to") and "checkpoint" in kind:
            kind = "damage to logs" if "no checkpoints" in kind else "damage to checkpoints"
        elif kind == "damage to data":
            kind = "damage to data while they are read" if fault.last_step is not None else kind
        kinds[re.sub(r" (?:for|by) [-+0-9.e]+ s$", "", kind)].append(fault)
    return kinds


def _kinds(kinds: Mapping[str, Sequence[Fault]]) -> list[str]:
    titles = ["kind", "faults", "survived, bit-identical", "detected within, s (median, most)"]
    titles += ["a step again after, s (median, most)"]
    rows = []
    for kind, faults in kinds.items():
        ends = [fault.end_seconds for fault in faults if fault.end_seconds is not None]
        agains = [fault.again_seconds for fault in faults if fault.again_seconds is not None]
        survived = sum(fault.survived for fault in faults)
        rows.append([kind, str(len(faults)), str(survived), _spread(ends), _spread(agains)])
    return table(titles, rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"


def _part(name: str, part: Part) -> list[str]:
    found = [
        f"## {TITLES[name]}",
        "",
        f"{part.date}, commit {part.commit or 'not noted'}, `--only {name} --seed {part.seed}`,"
        f" {part.seconds / 60:.1f} min.",
        "",
    ]
    if name == "kills":
        moments = collections.Counter(fault.moment for fault in part.faults)
        found += [
            f"At random moments: {', '.join(f'{count} in {moment}' for moment, count in moments.most_common())}"
            " (start: before the checkpoints are looked at; restore: while they are checked and read; compile:"
            " before the first step).",
            "",
        ]
    titles = ["fault", "moment", "at step", "resumed from", "steps lost", "answered, s", "stated, s", "a step again, s"]
    if name == "interrupts":
        titles = ["command", "moments", "ended after, s (most)", "stated, s", "clean", ""]
        return [*found, *table(titles, map(_interrupt_row, part.faults)), ""]
    return [*found, *table([*titles, "survived", ""], map(_row, part.faults)), ""]


def _interrupt_row(fault: Fault) -> list[str]:
    end = "-" if fault.end_seconds is None else f"{fault.end_seconds:.1f}"
    words = "; ".join(filter(None, [fault.note, *fault.problems]))
    name = fault.kind.removeprefix("Ctrl-C to ")
    return [name, str(fault.count), end, f"{fault.limit_seconds:.0f}", "yes" if fault.survived else "NO", words]


def _row(fault: Fault) -> list[str]:
    number = lambda value, digits=0: "-" if value is None else f"{value:.{digits}f}"
    lost = number(fault.lost_steps) + (f" ({fault.steps_of_save})" if fault.lost_steps and fault.steps_of_save else "")
    return [
        fault.kind,
        fault.moment,
        number(fault.last_step),
        number(fault.resumed_step),
        lost,
        number(fault.end_seconds, 1),
        number(fault.limit_seconds),
        number(fault.again_seconds, 1),
        "yes" if fault.survived else "NO",
        "; ".join(filter(None, [fault.note, *fault.problems])),
    ]
