"""The process that tries inputs: loads the parsers with their branches counted, and forks for each of them.

    python -m benchmarks.fuzz.worker INPUTS SECONDS SEED PROCESS_INPUTS ENGINE NAME...

prints a JSON object for each parser, when it is done. libFuzzer ends its process, so that each parser has its own; it
is forked, because to load and instrument everything takes longer than a thousand inputs.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gc
import itertools
import json
import logging
import os
import pathlib
import sys
import tempfile

from benchmarks.fuzz.harness import Defect
from benchmarks.fuzz.parser import Parser
from benchmarks.fuzz.searching import Budget, Search, by_chance, by_coverage, instrumented, joined, scratch_folder

_NEXT_SEED = 1_000_003
# What reads the bytes of inputs in Python: the package, and of the standard library and numpy what it hands them to.
_COUNTED = (
    "splitjax",
    "tomllib",
    "tarfile",
    "zipfile",
    "gzip",
    "csv",
    "json",
    "pickletools",
    "numpy.lib.format",
    "numpy.lib._format_impl",
)


def main(arguments: list[str]) -> None:
    """Runs the searches that `arguments` name."""
    inputs, seconds, seed, process_inputs, engine, *names = arguments
    budget = Budget(int(inputs), float(seconds), int(seed), int(process_inputs))
    logging.disable(logging.CRITICAL)
    table = instrumented(_table, _COUNTED if engine == "atheris" else ())
    gc.collect()
    gc.freeze()  # what is loaded stays: collections look through what inputs make alone
    for name in names:
        print(json.dumps(_values(_in_turns(table[name], budget, engine))), flush=True)


def _in_turns(parser: Parser, budget: Budget, engine: str) -> Search:
    """Searches in one process after the other, each of which goes on with the inputs of those before."""
    whole = Search(parser.name, engine, 0, 0.0)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made, scratch_folder() as corpus:
        result, log = pathlib.Path(made, "result"), pathlib.Path(made, "log")
        for turn in itertools.count():
            most = budget.process_inputs if engine == "atheris" else budget.inputs
            left = Budget(
                min(budget.inputs - whole.inputs, most), budget.seconds - whole.seconds, budget.seed + turn * _NEXT_SEED
            )
            result.unlink(missing_ok=True)
            child = os.fork()
            if not child:
                _in_child(log)
                if engine == "atheris":
                    by_coverage(parser, left, functools.partial(_write, result), pathlib.Path(corpus))
                _write(result, by_chance(parser, left))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            part = _read(result) if result.is_file() else Search(parser.name, engine, 0, 0.0)
            whole = joined(whole, part)
            if status:
                last = log.read_text(errors="replace")[-1500:]
                crash = Defect(parser.name, "crash", f"the process ended with {status}", last, b"")
                return joined(whole, dataclasses.replace(part, inputs=0, seconds=0.0, defects=(crash,)))
            if whole.inputs >= budget.inputs or whole.seconds >= budget.seconds or not part.inputs:
                return whole
    raise AssertionError("turns end by their budget")


def search_of(line: str) -> Search:
    """Returns the search that a line of the worker's output says."""
    values = json.loads(line)
    defects = tuple(Defect(**{**defect, "data": base64.b64decode(defect["data"])}) for defect in values["defects"])
    return Search(**{**values, "defects": defects})


def _table() -> dict:
    from benchmarks.fuzz.table import PARSERS

    return PARSERS


def _in_child(log: pathlib.Path) -> None:
    """Sends what libFuzzer and the parsers print to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _values(search: Search) -> dict:
    values = dataclasses.asdict(search)
    for defect in values["defects"]:
        defect["data"] = base64.b64encode(defect["data"]).decode()
    return values


def _write(file: pathlib.Path, search: Search) -> None:
    scratch = file.with_name("scratch")
    scratch.write_text(json.dumps(_values(search)))
    os.replace(scratch, file)


def _read(file: pathlib.Path) -> Search:
    return search_of(file.read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
