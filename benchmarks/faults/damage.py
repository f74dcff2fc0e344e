"""Files of a run that stands still, truncated and with flipped bits: its checkpoints, its logs, its data; then the run
goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import random
import shutil
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.faults.checks import Fault, compare, lost, with_problems
from benchmarks.faults.kills import START_SECONDS
from benchmarks.faults.run import TRAINING, Launched, Overdue, Recipe, last_step
from splitjax.runtime.checkpoint.folder import checkpoint_folders

Harm = Callable[[bytes, random.Random], bytes]
# What `train` and `launch` return for input that is no good; both workers meet it, or the launcher ends the second.
REFUSED = 2
_CIFAR_RECORDS, _RECORD_BYTES = 96, 3073


def flip(data: bytes, rng: random.Random) -> bytes:
    """One bit of one byte changed."""
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


HARMS: dict[str, Harm] = {"truncated": truncate, "bit flipped": flip}


def kinds(checkpoint: pathlib.Path) -> dict[str, pathlib.Path]:
    """One file of every kind in a checkpoint: by its name, names that are digests being alike; the longest of a
    kind."""
    found: dict[str, pathlib.Path] = {}
    for path in sorted(checkpoint.rglob("*"), key=lambda path: path.stat().st_size):
        if path.is_file():
            parts = path.relative_to(checkpoint).parts
            found["/".join("*" if len(part) == 32 else part for part in parts).replace("process_1", "process_0")] = path
    return dict(sorted(found.items()))


def stop_at(recipe: Recipe, step: int) -> None:
    """Runs it up to a step and kills it there, launcher and all. Raises `Overdue` where it does not get there."""
    with Launched(recipe) as run:
        run.until(f"step {step}", lambda: run.last_step() >= step and run.saving() is None, START_SECONDS)


def damage_checkpoints(
    stopped: Recipe,
    reference: Recipe,
    damages: Iterable[tuple[int, str, str]],
    rng: random.Random,
    folder: pathlib.Path,
    also: Callable[[Recipe], str] = lambda recipe: "",
) -> Fault:
    """Damages files in the newest checkpoints of a copy of a stopped run, and starts it again.

    **Arguments:**

    - `damages`: (which checkpoint, from the newest: 0; the kind of file; the name of the harm).
    - `also`: further damage to the copy; says what it did.
    """
    shutil.copytree(stopped.folder, folder)
    recipe = dataclasses.replace(stopped, folder=folder)
    steps = sorted(checkpoint_folders(recipe.checkpoints), reverse=True)
    bad: dict[int, tuple[str, bytes]] = {}
    words = []
    for which, kind, harm in damages:
        file = kinds(recipe.checkpoints / str(steps[which]))[kind]
        data = HARMS[harm](file.read_bytes(), rng)
        file.write_bytes(data)
        bad[steps[which]] = (file.relative_to(recipe.checkpoints / str(steps[which])).as_posix(), data)
        words.append(f"{kind} {harm}")
    words += filter(None, [also(recipe)])
    good = [step for step in steps if step not in bad]
    fault = Fault(
        f"damage to {len(bad) or 'no'} checkpoint{'s' if len(bad) != 1 else ''}",
        "stopped",
        recipe.checkpoint_every,
        note="; ".join(words),
    )
    problems = []
    try:
        with Launched(recipe) as run:
            again = run.until("a step", run.has_stepped, START_SECONDS)
            resumed = run.resumed_step()
            status = run.end(START_SECONDS)
        fault = dataclasses.replace(fault, resumed_step=resumed, again_seconds=again - run.began)
        if resumed != good[0]:
            problems.append(f"resumed from {resumed}, the newest good one is {good[0]}")
        for step, (name, data) in bad.items():
            if not any(f"checkpoint of step {step} is damaged" in line and name in line for _, line in run.lines):
                problems.append(f"nothing was said about {name} of step {step}: {run.text[-800:]}")
            if not any(path.read_bytes() == data for path in recipe.checkpoints.glob(f"{step}*/{name}")):
                problems.append(f"the damaged {name} of step {step} was not kept")
        problems += (
            [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference) + lost(recipe, good)
        )
    except Overdue as error:
        problems.append(str(error))
    return with_problems(fault, problems)


def damage_logs(recipe: Recipe) -> str:
    """Cuts off the last line of the metrics and half of the ledger."""
    lines = recipe.metrics.read_bytes().splitlines(keepends=True)
    recipe.metrics.write_bytes(b"".join(lines)[:-10])
    ledger = recipe.checkpoints / "goodput.json"
    text = ledger.read_bytes() if ledger.exists() else b'{"attempts": []}'
    ledger.write_bytes(text[: len(text) // 2])
    return "last line of the metrics torn, goodput.json truncated"


# Data.


def make_cifar(folder: pathlib.Path, seed: int = 0) -> None:
    """Files as of CIFAR-10's binary version, of random pixels, with their SHA256SUMS."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    sums = []
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = rng.integers(0, 256, (_CIFAR_RECORDS, _RECORD_BYTES), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
        sums.append(f"{hashlib.sha256(records.tobytes()).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums))


def cifar_recipe(recipe: Recipe, data: pathlib.Path, num_steps: int = 150) -> Recipe:
    training = (*TRAINING, "--data", "cifar10", "--data-dir", str(data), "--evaluate-every", "100")
    return dataclasses.replace(recipe, training=training, num_steps=num_steps)


def damage_data(stopped: Recipe, name: str, harm: str, rng: random.Random, *, label: bool = False) -> Fault:
    """Damages a file of a stopped run's data: the next start is refused, and trains nothing. The file is whole again
    afterwards.

    **Arguments:**

    - `label`: the damage is a label that there is none of, and there are no SHA256SUMS to tell.
    """
    data = pathlib.Path(stopped.training[stopped.training.index("--data-dir") + 1])
    file, sums = data / name, data / "SHA256SUMS"
    whole, listed = file.read_bytes(), sums.read_bytes()
    place = f"{file}, record 7" if label else str(file)
    if label:
        sums.unlink()
        file.write_bytes(
            whole[: 7 * _RECORD_BYTES] + bytes([whole[7 * _RECORD_BYTES] | 0x80]) + whole[7 * _RECORD_BYTES + 1 :]
        )
    else:
        file.write_bytes(HARMS[harm](whole, rng))
    fault, problems = Fault("damage to data", "stopped", stopped.checkpoint_every), []
    step, before = last_step(stopped.metrics), sorted(checkpoint_folders(stopped.checkpoints))
    try:
        with Launched(stopped) as run:
            status = run.end(START_SECONDS)
            refused = time.monotonic() - run.began
        if status != REFUSED or place not in run.text or "Traceback" in run.text:
            problems.append(f"exit status {status}, and not a short error at {place}: {run.text[-800:]}")
        if last_step(stopped.metrics) != step or sorted(checkpoint_folders(stopped.checkpoints)) != before:
            problems.append("it trained on damaged data")
        file.write_bytes(whole)
        sums.write_bytes(listed)
        fault = dataclasses.replace(
            fault,
            note=f"{name} {harm}: exit status {status}, naming {place.replace(str(data) + '/', '')}",
            end_seconds=refused,
        )
        problems += lost(stopped, before)
    except Overdue as error:
        problems.append(str(error))
    finally:
        file.write_bytes(whole)
        sums.write_bytes(listed)
    return with_problems(fault, problems)


def repaired(stopped: Recipe, reference: Recipe, faults: Iterable[Fault]) -> list[Fault]:
    """Runs it to its end now that its data are whole again; what is wrong then counts for all faults that it met."""
    problems = []
    try:
        with Launched(stopped) as run:
            again = run.until("a step", run.has_stepped, START_SECONDS) - run.began
            resumed = run.resumed_step()
            status = run.end(START_SECONDS)
        problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(stopped, reference)
    except Overdue as error:
        again, resumed = None, None
        problems.append(str(error))
    return [
        with_problems(dataclasses.replace(fault, again_seconds=again, resumed_step=resumed), problems)
        for fault in faults
    ]


def cut_data_in_a_run(recipe: Recipe, reference: Recipe) -> Fault:
    """A file of the data gets shorter while a run reads it; put back, the run goes on."""
    data = pathlib.Path(recipe.training[recipe.training.index("--data-dir") + 1])
    file = data / "data_batch_3.bin"
    whole = file.read_bytes()
    fault, problems = Fault("damage to data", "step", recipe.checkpoint_every), []
    try:
        with Launched(recipe) as run:
            wanted = 2 * recipe.checkpoint_every
            run.until(f"step {wanted}", lambda: run.last_step() >= wanted and run.saving() is None, START_SECONDS)
            sight = run.sight()
            with open(file, "r+b") as cut:
                cut.truncate(1000)
            status = run.end(START_SECONDS)
            over = time.monotonic()
        if status != REFUSED or str(file) not in run.text or "Traceback" in run.text:
            problems.append(f"exit status {status}, and not a short error that names {file}: {run.text[-800:]}")
        last, before = run.last_step(), run.complete()
        file.write_bytes(whole)
        with Launched(recipe) as run:
            again = run.until("a step", run.has_stepped, START_SECONDS)
            resumed = run.resumed_step()
            second = run.end(START_SECONDS)
        problems += (
            [f"exit status {second}: {run.text[-800:]}"]
            if second
            else compare(recipe, reference) + lost(recipe, before)
        )
        fault = dataclasses.replace(
            fault,
            moment=sight.phase,
            last_step=last,
            saving_step=None,
            resumed_step=resumed,
            end_seconds=over - sight.at,
            again_seconds=again - run.began,
            note=f"{file.name} cut while it is read: exit status {status}; put back, the same command went on",
        )
    except Overdue as error:
        problems.append(str(error))
    finally:
        file.write_bytes(whole)
    return with_problems(fault, problems)
