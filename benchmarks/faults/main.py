"""Whether training survives faults: killed workers, full disks, damaged files, cut networks, requests to stop; bit for
bit.

    python -m benchmarks faults   everything (an hour on two idle cores; Linux, root), and its page
    python -m benchmarks faults --only kills --seed 1
            one part, with other moments; the page keeps the others as they were
    python -m benchmarks faults --only stuck --cells python-0 save-1
            some faults of a part whose faults are met one by one; `--missing`: those that the page does not have
    python -m benchmarks faults --only false_alarms --hours 2
            undisturbed runs; and `--only tracking`: what recording where a process is costs

Most faults meet a run of `splitjax launch -n 2 -- splitjax train` on two processes, others one of a script of one's own
(`benchmarks.faults.worker`), which has to end as the undisturbed run did: one line of metrics for every step, equal
but for times, and a last checkpoint of equal arrays, PRNG key and data position.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from benchmarks._common import RESULTS, virtual_devices, write_page
from benchmarks.faults import (
    bad_numbers,
    damage,
    disk,
    false_alarms,
    hang,
    hardships,
    interrupts,
    kills,
    overhead,
    page,
    stuck,
)
from benchmarks.faults.checks import Fault
from benchmarks.faults.run import Recipe
from splitjax.runtime.checkpoint.folder import checkpoint_folders

NUM_KILLS = 26
FEW_KEPT = 3  # the default of `splitjax train`
DATA_DAMAGES = (
    ("data_batch_1.bin", "truncated"),
    ("data_batch_4.bin", "bit flipped"),
    ("test_batch.bin", "bit flipped"),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the runs of a suite lie, the undisturbed one, how many kills there are, and interruptions of a command."""

    folder: pathlib.Path
    reference: Recipe
    num_kills: int = NUM_KILLS
    num_interrupts: int = interrupts.NUM_MOMENTS
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    made: dict[str, Recipe] = dataclasses.field(default_factory=dict)

    def done(self, name: str) -> Recipe:
        """A finished run to compare with, made when it is first asked for: `train`, `script`, or the script's loop by
        hand (`skip`, `rollback`)."""
        if name not in self.made:
            if name == "train":
                kills.undisturbed(self.reference)
                self.made[name] = self.reference
            elif name == "script":
                self.made[name] = self.script(name)
                kills.undisturbed(self.made[name])
            else:
                self.made[name] = bad_numbers.by_hand(self.script(name), name)
        return self.made[name]

    def script(self, name: str) -> Recipe:
        """The script of one's own anew in a folder of its own."""
        return stuck.script(self.new_folder(name), self.reference.cache)

    def recipe(self, name: str, **changes: object) -> Recipe:
        """The same run anew in a folder of its own."""
        return dataclasses.replace(self.reference, folder=self.new_folder(name), **changes)

    def new_folder(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}-{next(self.numbers)}"


def main(argv: list[str] | None = None) -> int:
    """Injects the chosen faults; returns 1 where one was not survived."""
    virtual_devices(1)
    # A shell's background jobs ignore Ctrl-C, and so would all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        "faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=(*page.TITLES, "false_alarms", "tracking"), default=[])
    parser.add_argument("--cells", nargs="*", default=[], help="of parts whose faults are met one by one: only these")
    parser.add_argument("--missing", action="store_true", help="of those parts: only what was not met yet")
    parser.add_argument("--hours", type=float, default=2.0, help="of false_alarms, which runs only if it is named")
    parser.add_argument("--series", type=int, default=0, help="number of this one among those side by side")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the bytes")
    parser.add_argument("--quick", action="store_true", help="one fault of each part, printed only (or to --output)")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=RESULTS,
        help="folder of the page and of faults.json, which it is made from",
    )
    options = parser.parse_args(argv)
    for name in dict.fromkeys(options.only):
        if name == "false_alarms":
            false_alarms.measure(options.hours, options.output, options.series)
        elif name == "tracking":
            print(overhead.measure(options.output), flush=True)
    names = [name for name in options.only if name in page.TITLES] if options.only else list(page.TITLES)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitjax-faults-") as folder:
        place = Place(
            pathlib.Path(folder),
            Recipe(pathlib.Path(folder) / "undisturbed", pathlib.Path(folder) / "compiled"),
            num_kills=1 if options.quick else NUM_KILLS,
            num_interrupts=2 if options.quick else interrupts.NUM_MOMENTS,
        )
        output = pathlib.Path(folder) / "page" if options.quick and options.output == RESULTS else options.output
        records = output / page.RECORDS
        for name in names:
            met = _meet(name, place, options, page.read(records))
            for key, fault, seconds in itertools.islice(met, 1 if options.quick else None):
                print(f"{time.monotonic() - begin:5.0f} s  {page.line(fault)}", flush=True)
                # After each: an interruption loses one fault.
                page.store(records, name, key, fault, options.seed, seconds)
        parts = page.read(records)
        print("wrote", write_page("faults", page.lines(parts, output), output))
    return 0 if all(fault.survived for part in parts.values() for fault in part.faults) else 1


def _meet(
    name: str, place: Place, options: argparse.Namespace, before: Mapping[str, page.Part]
) -> Iterator[tuple[str, Fault, float]]:
    """Injects the faults of a part: of each its key (a number where they are met in one go), and how long it took."""
    if name in PARTS:
        place.done("train")
        begin = time.monotonic()
        for number, fault in enumerate(PARTS[name](place, random.Random(options.seed))):
            yield str(number), fault, time.monotonic() - begin
            begin = time.monotonic()
        return
    there = {fault.key for fault in before[name].faults} if options.missing and name in before else set()
    for key, meet in CELLS[name].items():
        if key in there or (options.cells and key not in options.cells):
            continue
        begin = time.monotonic()
        fault = meet(place, random.Random(f"{options.seed}:{key}"))
        yield key, fault, time.monotonic() - begin


def _kills(place: Place, rng: random.Random) -> Iterator[Fault]:
    left = place.num_kills
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


Meet = Callable[[Place, random.Random], Fault]
# Faults that are met in one go.
PARTS: dict[str, Callable[[Place, random.Random], Iterator[Fault]]] = {
    "kills": _kills, "disks": _disks, "checkpoints": _checkpoints, "data": _data, "hangs": _hangs, "stops": _stops,
}  # fmt: skip


def _stuck(what: str, rank: int) -> Meet:
    return lambda place, rng: stuck.stuck(place.script(what), place.done("script"), what, rank, rng)


def _bad(action: str, kill: bool) -> Meet:
    return lambda place, rng: bad_numbers.not_finite(
        place.script("bad"), place.done("skip" if action == "stop" else action), action, kill, rng
    )


def _interrupt(name: str) -> Meet:
    def meet(place: Place, rng: random.Random) -> Fault:
        reference = place.done("train") if name in interrupts.SAVING else place.reference
        moments = interrupts.Moments(rng.randrange(2**32), place.num_interrupts)
        return interrupts.interrupt(name, place.new_folder(name), reference, moments)

    return meet


# Faults that are met one by one.
CELLS: dict[str, dict[str, Meet]] = {
    "stuck": {f"{what}-{rank}": _stuck(what, rank) for what in stuck.SAYS for rank in (0, 1)},
    "slow": {
        **{
            f"slow-{rank}": (lambda place, rng, rank=rank: stuck.slow(place.script("slow"), place.done("script"), rank))
            for rank in (0, 1)
        },
        **{
            f"stop-{seconds}-{rank}": (
                lambda place, rng, rank=rank, seconds=seconds: stuck.stopped_for_a_while(
                    place.recipe("stop"), place.done("train"), rank, seconds, rng
                )
            )
            for seconds in (3, 8)
            for rank in (0, 1)
        },
    },
    "outside": {
        **{
            f"clock{seconds:+d}": (
                lambda place, rng, seconds=seconds: hardships.clock_jumps(
                    place.script("clock"), place.done("script"), seconds, rng
                )
            )
            for seconds in (3600, -3600, 86400 * 365)
        },
        **{
            f"memory-{rank}": (
                lambda place, rng, rank=rank: hardships.out_of_memory(
                    place.script("memory"), place.done("script"), rank, rng
                )
            )
            for rank in (0, 1)
        },
        **{
            f"gone-{rank}": (
                lambda place, rng, rank=rank: hardships.gone_for_good(
                    place.script("gone"), place.done("script"), rank, rng
                )
            )
            for rank in (0, 1)
        },
        **{
            f"coordinator-{number.name}": (
                lambda place, rng, number=number: hardships.coordinator_gone(
                    place.script("coordinator"), place.done("script"), number, rng
                )
            )
            for number in (signal.SIGKILL, signal.SIGSTOP)
        },
    },
    "numbers": {
        **{action: _bad(action, False) for action in ("stop", "skip", "rollback")},
        **{f"{action}-killed": _bad(action, True) for action in ("skip", "rollback")},
    },
    "interrupts": {name: _interrupt(name) for name in interrupts.ALL},
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
