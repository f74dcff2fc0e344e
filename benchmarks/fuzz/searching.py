"""Searches for defects of one parser, led by coverage where atheris is installed, by chance alone otherwise.

A parser, a number of inputs and a number of seconds go in; a `Search` comes out: how many inputs were tried, and the
defects that they showed, each once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from benchmarks.fuzz.harness import Defect, limit_memory, try_input
from benchmarks.fuzz.parser import Parser
from benchmarks.fuzz.strategies import changed

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"
_HEADROOM_BYTES = 3 << 30
# Most inputs are no longer than so many of the longest seed, and these bytes: one of 32 KiB takes longer to change, as
# JSON, than a hundred short ones to read. One in so many may have any length that the parser's inputs have.
_TIMES_THE_SEEDS, _USUAL_BYTES, _LONG_ONE_IN = 4, 4096, 50
# libFuzzer's own limit, for what no signal of Python interrupts. By the wall clock, so a machine that was put to sleep
# for less must not look like an endless input.
_STALE_SECONDS = 7200


@dataclasses.dataclass(frozen=True)
class Budget:
    """Says when a search ends: after `inputs`, or `seconds` of processor time, whichever comes first; `seed` decides
    its chances. One that coverage leads begins a process for every `process_inputs`: libFuzzer keeps what a mutator in
    Python hands it, a kilobyte with every input, and meets the limit of its memory."""

    inputs: int
    seconds: float
    seed: int = 0
    process_inputs: int = 200_000


@dataclasses.dataclass(frozen=True)
class Search:
    """Holds what a search found.

    - `parser`: its name. `engine`: `"atheris"` or `"chance"`.
    - `inputs`, `seconds`: tried, and the processor time that took.
    - `defects`: each once.
    """

    parser: str
    engine: str
    inputs: int
    seconds: float
    defects: tuple[Defect, ...] = ()


def joined(first: Search, second: Search) -> Search:
    """Returns two searches of a parser as one, each defect once."""
    defects = {each.key: each for each in (*second.defects, *first.defects)}
    return dataclasses.replace(
        first, inputs=first.inputs + second.inputs, seconds=first.seconds + second.seconds,
        defects=tuple(defects.values()),
    )  # fmt: skip


def has_atheris() -> bool:
    """Tells whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None


def kept(parser: Parser) -> list[bytes]:
    """Returns the inputs that once showed a defect of the `parser`."""
    return [file.read_bytes() for file in sorted((CORPUS / parser.name.replace(" ", "_")).glob("*"))]


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for inputs, in memory where the system has that."""
    memory = pathlib.Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None)


def _longest(parser: Parser) -> int:
    """Returns how long most inputs of the `parser` may be, in bytes."""
    seeds = max(map(len, parser.seeds()), default=0)
    return min(parser.max_bytes, max(_TIMES_THE_SEEDS * seeds, _USUAL_BYTES))


def by_chance(parser: Parser, budget: Budget) -> Search:
    """Tries what is kept, the seeds, and changes of all of them by chance; the same inputs for the same seed."""
    draw = random.Random(f"{parser.name} {budget.seed}")
    corpus = [*kept(parser), *(seed[: parser.max_bytes] for seed in parser.seeds())]
    found: dict[str, Defect] = {}
    usual = _longest(parser)
    began = time.process_time()
    with scratch_folder() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = pathlib.Path(made)
        count = 0
        for number in range(budget.inputs):
            data = corpus[number] if number < len(corpus) else draw.choice(corpus)
            if number >= len(corpus):
                most = parser.max_bytes if draw.randrange(_LONG_ONE_IN) == 0 else usual
                data = data[:most]
                for _ in range(draw.choice((1, 1, 2, 3))):
                    data = changed(data, (*parser.mutations, "bytes"), most, draw)
            defect = try_input(parser, data, folder, measured=True if number < len(corpus) else None)
            if defect is not None:
                found.setdefault(defect.key, defect)
            count += 1
            if time.process_time() - began > budget.seconds:
                break
    return Search(parser.name, "chance", count, time.process_time() - began, tuple(found.values()))


def by_coverage(
    parser: Parser, budget: Budget, report: Callable[[Search], None], inputs: pathlib.Path | None = None
) -> NoReturn:
    """Searches with atheris, in a process of its own that ends with it. `report` is called with the search so far, now
    and then and at the end. `inputs`: the folder with the inputs that earlier processes went on with, to which new ones
    are added; where it is empty or None, it begins with what is kept and the seeds."""
    import atheris

    found: dict[str, Defect] = {}
    draw = random.Random(f"{parser.name} {budget.seed}")
    usual = _longest(parser)
    made = scratch_folder()
    folder = pathlib.Path(made.name, "scratch")
    folder.mkdir()
    if inputs is None:
        inputs = pathlib.Path(made.name, "corpus")
        inputs.mkdir()
    if not any(inputs.iterdir()):
        for number, data in enumerate([*kept(parser), *(seed[: parser.max_bytes] for seed in parser.seeds())]):
            (inputs / f"{number:04}").write_bytes(data)
    state = {"count": 0}
    warnings.simplefilter("ignore")
    limit_memory(_HEADROOM_BYTES)
    began = time.process_time()

    def try_this(data: bytes) -> None:
        state["count"] += 1
        defect = try_input(parser, data, folder)
        if defect is not None and defect.key not in found:
            found[defect.key] = defect
        count, seconds = state["count"], time.process_time() - began
        is_over = count >= budget.inputs or seconds >= budget.seconds
        if is_over or defect is not None or not count % 1000:
            report(Search(parser.name, "atheris", count, seconds, tuple(found.values())))
        if is_over:
            made.cleanup()
            sys.stdout.flush()
            os._exit(0)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        most = max_size if draw.randrange(_LONG_ONE_IN) == 0 else min(usual, max_size)
        if draw.random() < 0.4:
            return atheris.Mutate(data[:most], most)
        return changed(data[:most], parser.mutations, most, draw)

    arguments = [
        "fuzz",
        str(inputs),
        f"-seed={budget.seed + 1}",
        f"-max_len={parser.max_bytes}",
        "-len_control=0",
        f"-timeout={_STALE_SECONDS}",
        "-rss_limit_mb=0",
        f"-artifact_prefix={made.name}/",
        "-print_final_stats=0",
        "-verbosity=0",
    ]
    atheris.Setup(arguments, try_this, custom_mutator=change)
    atheris.Fuzz()
    raise AssertionError("libFuzzer ends the process")


def instrumented(load: Callable[[], Any], packages: Sequence[str]) -> Any:
    """Calls `load`, which imports; of what it imports, `packages` are instrumented if atheris is there."""
    if not has_atheris():
        return load()
    import atheris

    with atheris.instrument_imports(include=list(packages)):
        return load()
