"""Whether training survives faults: killed workers, full disks, damaged files, cut networks, requests to stop; bit for
bit.

    python -m benchmarks faults   everything (12 minutes on two idle cores; Linux, root), and its page
    python -m benchmarks faults --only kills --seed 1
            one part, with other moments; the page keeps the others as they were

Every fault meets a run of `splitjax launch -n 2 -- splitjax train` on two processes, which has to end as the
undisturbed run did: one line of metrics for every step, equal but for times, and a last checkpoint of equal arrays,
PRNG key and data position.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks import machine
from benchmarks._common import RESULTS, table, virtual_devices, write_page
from benchmarks.faults import damage, disk, false_alarms, hang, kills
from benchmarks.faults.checks import Fault
from benchmarks.faults.run import Recipe
from splitjax.runtime.checkpoint.folder import checkpoint_folders

NUM_KILLS = 20
FEW_KEPT = 3  # the default of `splitjax train`
DATA_DAMAGES = (
    ("data_batch_1.bin", "truncated"),
    ("data_batch_4.bin", "bit flipped"),
    ("test_batch.bin", "bit flipped"),
)
TITLES = {
    "kills": "A worker is killed",
    "disks": "The disk fills up",
    "checkpoints": "Checkpoints and logs are damaged",
    "data": "Data are damaged",
    "hangs": "Workers cannot be reached",
    "stops": "The run is asked to end, or loses its launcher",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the runs of a suite lie, and the undisturbed one."""

    folder: pathlib.Path
    reference: Recipe
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def recipe(self, name: str, **changes: object) -> Recipe:
        """The same run anew in a folder of its own."""
        return dataclasses.replace(self.reference, folder=self.new_folder(name), **changes)

    def new_folder(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}-{next(self.numbers)}"


@dataclasses.dataclass(frozen=True)
class Part:
    """The faults of one kind that were injected in one go. `date`: ISO 8601, UTC; `commit`: of the code that met
    them."""

    date: str
    seed: int
    seconds: float
    faults: tuple[Fault, ...]
    commit: str = ""


def main(argv: list[str] | None = None) -> int:
    """Injects the chosen faults; returns 1 where one was not survived."""
    virtual_devices(1)
    parser = argparse.ArgumentParser(
        "faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=(*TITLES, "false_alarms"), default=[])
    parser.add_argument("--hours", type=float, default=2.0, help="of false_alarms, which runs only if it is named")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the bytes")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=RESULTS,
        help="folder of the page and of faults.json, which it is made from",
    )
    options = parser.parse_args(argv)
    if "false_alarms" in options.only:
        quiet = false_alarms.measure(options.hours, options.output)
        options.only.remove("false_alarms")
        if not options.only:
            return 1 if any(run.status or run.restarts for run in quiet) else 0
    records = options.output / "faults.json"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitjax-faults-") as folder:
        reference = Recipe(pathlib.Path(folder) / "undisturbed", pathlib.Path(folder) / "compiled")
        place = Place(pathlib.Path(folder), reference)
        undisturbed_seconds = kills.undisturbed(reference)
        print(f"the undisturbed run took {undisturbed_seconds:.1f} s", flush=True)
        for name in options.only or TITLES:
            found: list[Fault] = []
            part_begin = time.monotonic()
            for fault in PARTS[name](place, random.Random(options.seed)):
                found.append(fault)
                print(f"{time.monotonic() - begin:5.0f} s  {_line(fault)}", flush=True)
                # After each: an interruption loses one fault.
                today = datetime.datetime.now(datetime.UTC).date().isoformat()
                part_seconds = time.monotonic() - part_begin
                _write(records, name, Part(today, options.seed, part_seconds, tuple(found), machine.this_commit()))
    parts = _read(records)
    print("wrote", write_page("faults", _page(parts, reference, undisturbed_seconds), options.output))
    return 0 if all(fault.survived for part in parts.values() for fault in part.faults) else 1


def _kills(place: Place, rng: random.Random) -> Iterator[Fault]:
    left = NUM_KILLS
    for number in itertools.count():
        aims = [kills.AIMS[index % len(kills.AIMS)] for index in range(min(left, len(kills.AIMS)))]
        kept = {"keep_last": FEW_KEPT} if number % 2 else {}
        faults = kills.kill_workers(place.recipe("kills", **kept), place.reference, aims, rng)
        yield from faults
        left -= len(faults)
        if not left or not faults:
            return


def _disks(place: Place, rng: random.Random) -> Iterator[Fault]:
    meetings: list[tuple[Callable[[Recipe], Fault], bool]] = [
        (lambda recipe: disk.fill_for_a_while(recipe, place.reference, "step", rng), False),
        (lambda recipe: disk.fill_for_a_while(recipe, place.reference, "save", rng), False),
        (lambda recipe: disk.fill_for_a_while(recipe, place.reference, "save", rng), True),
        (lambda recipe: disk.full_to_the_end(recipe, place.reference), True),
        (lambda recipe: disk.full_to_the_end(recipe, place.reference, killed=True), False),
    ]
    for meet, metrics_too in meetings:
        with disk.small_disk(place.new_folder("disk")) as mounted:
            yield meet(disk.on_disk(place.recipe("full"), mounted, metrics_too=metrics_too))


def _checkpoints(place: Place, rng: random.Random) -> Iterator[Fault]:
    """Every kind of file, truncated and flipped: one kind in each of the checkpoints but the oldest, then in the newest
    alone."""
    stopped = place.recipe("stopped")
    damage.stop_at(stopped, stopped.num_steps * 3 // 4)
    folders = sorted(checkpoint_folders(stopped.checkpoints).items())
    every = [(kind, harm) for harm in damage.HARMS for kind in damage.kinds(folders[-1][1])]
    rng.shuffle(every)
    some = len(folders) - 1
    while every:
        chosen, every = every[:some], every[some:]
        damages = [(which, kind, harm) for which, (kind, harm) in enumerate(chosen)]
        yield damage.damage_checkpoints(stopped, place.reference, damages, rng, place.new_folder("damaged"))
    newest = [(0, "state/ocdbt.process_0/d/*", "bit flipped"), (0, "state/manifest.ocdbt", "truncated")]
    for one in newest:
        yield damage.damage_checkpoints(stopped, place.reference, [one], rng, place.new_folder("damaged"))
    yield damage.damage_checkpoints(stopped, place.reference, [], rng, place.new_folder("damaged"), damage.damage_logs)


def _data(place: Place, rng: random.Random) -> Iterator[Fault]:
    data = place.new_folder("data")
    damage.make_cifar(data)
    reference = damage.cifar_recipe(place.recipe("undisturbed"), data)
    kills.undisturbed(reference)
    stopped = dataclasses.replace(reference, folder=place.new_folder("stopped"))
    damage.stop_at(stopped, reference.num_steps // 2)
    faults = [damage.damage_data(stopped, name, harm, rng) for name, harm in DATA_DAMAGES]
    faults.append(
        damage.damage_data(
            stopped, "data_batch_2.bin", "with a label of 128 and more, without SHA256SUMS", rng, label=True
        )
    )
    yield from damage.repaired(stopped, reference, faults)
    yield damage.cut_data_in_a_run(dataclasses.replace(reference, folder=place.new_folder("cut")), reference)


def _hangs(place: Place, rng: random.Random) -> Iterator[Fault]:
    for seconds in (1.0, 2.0):
        yield hang.short_cut(place.recipe("cut"), place.reference, seconds, rng)
    for how in ("cut", "cut", "stop"):
        yield hang.unreachable(place.recipe(how), place.reference, how, rng)


def _stops(place: Place, rng: random.Random) -> Iterator[Fault]:
    for how in ("worker", "ctrl-c", "kill"):
        yield hang.asked(place.recipe("asked"), place.reference, how, rng)


PARTS: dict[str, Callable[[Place, random.Random], Iterator[Fault]]] = {
    "kills": _kills, "disks": _disks, "checkpoints": _checkpoints, "data": _data, "hangs": _hangs, "stops": _stops,
}  # fmt: skip


def _line(fault: Fault) -> str:
    parts = [f"{'survived' if fault.survived else 'FAILED'}: {fault.kind} ({fault.moment})"]
    parts += [f"{fault.lost_steps} steps lost"] if fault.lost_steps is not None else []
    parts += [f"answered after {fault.end_seconds:.1f} s"] if fault.end_seconds is not None else []
    parts += [f"a step after {fault.again_seconds:.1f} s"] if fault.again_seconds is not None else []
    return "; ".join([*parts, *filter(None, [fault.note]), *fault.problems])


def _read(records: pathlib.Path) -> dict[str, Part]:
    """The parts that were measured so far, in the order of the page."""
    stored = json.loads(records.read_text()) if records.exists() else {}
    read = lambda fault: Fault(**{**fault, "problems": tuple(fault["problems"])})
    return {
        name: Part(**{**stored[name], "faults": tuple(map(read, stored[name]["faults"]))})
        for name in TITLES
        if name in stored
    }


def _write(records: pathlib.Path, name: str, part: Part) -> None:
    records.parent.mkdir(parents=True, exist_ok=True)
    parts = {**_read(records), name: part}
    records.write_text(json.dumps({name: dataclasses.asdict(part) for name, part in parts.items()}, indent=1) + "\n")


def _page(parts: dict[str, Part], reference: Recipe, undisturbed_seconds: float) -> list[str]:
    everything = [fault for part in parts.values() for fault in part.faults]
    survived = sum(fault.survived for fault in everything)
    lost = [fault.lost_steps - fault.steps_of_save for fault in everything if fault.lost_steps is not None]
    in_all = max((fault.lost_steps for fault in everything if fault.lost_steps is not None), default=0)
    overdue = sum((fault.end_seconds or 0) > (fault.limit_seconds or float("inf")) for fault in everything)
    kills_only = parts["kills"].faults if "kills" in parts else ()
    recovered = [fault.again_seconds for fault in kills_only if fault.again_seconds is not None]
    seconds = sum(part.seconds for part in parts.values())
    lines = [
        "# Faults: what training survives",
        "",
        (
            f"**{survived} of {len(everything)} faults survived: the runs ended bit-identical to the undisturbed one,"
            f" and nothing that was saved was lost. At most {max(lost, default=0)} steps were lost, the interval"
            f" between checkpoints being {reference.checkpoint_every} ({in_all} with those that were done while a save"
            f" was in progress, which was lost too); {overdue or 'none'} took longer than stated.**"
        ),
        "",
        machine.header(
            machine.this_machine((*machine.PACKAGES, "orbax-checkpoint")), "python -m benchmarks faults"
        ).rstrip(),
        "",
        f"Runs: two processes (gloo), one thread each, `splitjax train {' '.join(reference.training)} --steps"
        f" {reference.num_steps} --checkpoint-every {reference.checkpoint_every}`; undisturbed"
        f" {undisturbed_seconds:.0f} s, the whole suite {seconds / 60:.0f} min on a machine that other work shares."
        + (
            f" From a kill to the next step: {statistics.median(recovered):.0f} s in the median, which is a start of"
            " Python and JAX."
            if recovered
            else ""
        ),
        "",
        "How it is counted:",
        "",
        (
            "- Survived: the launcher (or, where none is left, the same command again) ended the run with exit status"
            " 0; the metrics have one line for every step, equal to the undisturbed run's but for times; the last"
            " checkpoint's arrays, with parameters, optimizer and PRNG key, are equal bit for bit, and so is its data"
            " position; every checkpoint that was complete before the fault is there, and every byte of it good (with"
            " few kept: the newest was resumed from); where a worker or the launcher was hit, no process was left."
        ),
        (
            "- Steps lost: the last step in the metrics when the fault struck, less the step of the checkpoint that the"
            " run went on from. A save that was in progress is lost with the attempt: the steps that were done while it"
            " was written come on top of the interval, and are in brackets (the interval of these runs is half a"
            " second, and a save takes as long on a busy machine). A start that had not done a step yet had none to"
            " lose (-)."
        ),
        (
            "- Answered: from the fault until the launcher had ended the attempt, or the fault was reported; stated is"
            f" what the options and defaults promise for it: `--grace-seconds` {kills.GRACE_SECONDS:g},"
            f" {kills.DRAIN_SECONDS:g} s for last words; `--heartbeat-seconds` {hang.HEARTBEAT_SECONDS}, and one and a"
            " half times that for a worker that is cut off, which asks every half of that time whether the coordinator"
            f" is there; `--stop-timeout-seconds` {hang.STOP_SECONDS:g}, and {kills.SLACK_SECONDS:g} s for a busy"
            f" machine; {disk.REPORTED_WITHIN_SECONDS:g} s for a report of a failed save."
        ),
        "- A step again: from the fault (from the start by hand, where there was one) to the first step after it.",
        "",
    ]
    for name, part in parts.items():
        faults = part.faults
        lines += [
            f"## {TITLES[name]}",
            "",
            f"{part.date}, `--only {name} --seed {part.seed}`, {part.seconds / 60:.1f} min.",
            "",
        ]
        if name == "kills":
            moments = collections.Counter(fault.moment for fault in faults)
            lines += [
                (
                    f"At random moments: {', '.join(f'{count} in {moment}' for moment, count in moments.most_common())}"
                    " (start: before the checkpoints are looked at; restore: while they are checked and read; compile:"
                    " before the first step)."
                ),
                "",
            ]
        titles = [
            "fault",
            "moment",
            "at step",
            "resumed from",
            "steps lost",
            "answered, s",
            "stated, s",
            "a step again, s",
            "survived",
            "",
        ]
        lines += [*table(titles, map(_row, faults)), ""]
    return lines


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


if __name__ == "__main__":
    sys.exit(main())
