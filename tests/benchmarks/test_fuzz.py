"""A thousand inputs for every parser, the kept ones first; and that the fuzzer would notice."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import random
import time

import pytest

from benchmarks.fuzz import main as fuzz
from benchmarks.fuzz.harness import Defect, try_input
from benchmarks.fuzz.main import run
from benchmarks.fuzz.parser import Parser
from benchmarks.fuzz.searching import CORPUS, Budget, Search, by_chance, joined, kept
from benchmarks.fuzz.strategies import STRATEGIES, changed
from benchmarks.fuzz.table import PARSERS
from splitjax.errors import DataError

NUM_INPUTS = 1000
GUARD_SECONDS = 600.0  # a search takes some ten; on a slow machine several times as long


@pytest.mark.parametrize("name", PARSERS)
def test_no_input_of_a_thousand_is_a_defect(name):
    search = by_chance(PARSERS[name], Budget(NUM_INPUTS, GUARD_SECONDS))
    assert search.inputs == NUM_INPUTS
    assert not search.defects, "\n".join(
        f"{defect.key} {defect.what} {defect.data[:200]!r}" for defect in search.defects
    )


def test_every_kept_input_belongs_to_a_parser_and_every_seed_is_valid(tmp_path):
    known = {name.replace(" ", "_") for name in PARSERS}
    assert {folder.name for folder in CORPUS.iterdir()} <= known
    assert sum(len(kept(parser)) for parser in PARSERS.values()) == sum(1 for file in CORPUS.glob("*/*"))
    for parser in PARSERS.values():
        good = 0
        for seed in parser.seeds():
            assert len(seed) <= parser.max_bytes, parser.name
            path = tmp_path / parser.file_name
            path.write_bytes(seed)
            try:
                parser.read(path)
                good += 1
            except parser.error:  # a set of images whose labels the harness made, and floats in place of images
                pass
        assert good, parser.name


def toy(read, multiple=10) -> Parser:
    return Parser("toy", DataError, read, lambda: [b"seed"], ("bytes",), multiple, 1 << 20)


def untyped(path):
    if path.read_bytes() != b"seed":
        raise KeyError("x")


def slow(path):
    end = time.process_time() + 1.2
    while time.process_time() < end:
        pass


def unprintable(path):
    raise type("Own", (DataError,), {"__str__": lambda self: "\ud800"})("x")


@pytest.mark.parametrize(
    ("read", "kind"),
    [(untyped, "error"), (slow, "time"), (lambda path: bytes(4 << 20), "memory"), (unprintable, "error")],
)
def test_defects_are_noticed(read, kind, tmp_path):
    parser = toy(read)
    found = [try_input(parser, data, tmp_path, measured=True) for data in (b"seed", b"other")]
    assert found[1] is not None and found[1].kind == kind and found[1].data == b"other"
    assert (found[0] is None) == (read is untyped)


def test_memory_that_is_taken_once_is_no_input_s(tmp_path):
    kept = []
    parser = toy(lambda path: kept or kept.append(bytes(4 << 20)))
    assert try_input(parser, b"seed", tmp_path, measured=True) is None and kept


@pytest.mark.parametrize("flags", [0, 0x40])  # zlib refuses the second, Python's gzip reads on
def test_what_an_input_unpacks_to_may_be_kept_in_memory(flags):
    member = bytearray(gzip.compress(bytes(100_000)))
    member[3] |= flags
    packed = bytes(member) * 2
    assert PARSERS["idx"].allows((4 << 20) + 60 * 200_000, packed)
    assert not PARSERS["idx"].allows((4 << 20) + 60 * 200_001, packed)


def test_the_same_seed_makes_the_same_inputs_and_no_strategy_fails():
    for name in STRATEGIES:
        for parser in PARSERS.values():
            if name in parser.mutations:
                first, second = random.Random(3), random.Random(3)
                data = again = parser.seeds()[0]
                for _ in range(20):
                    data = changed(data, (name,), 5000, first)
                    again = changed(again, (name,), 5000, second)
                    assert data == again and len(data) <= 5000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris (Linux)")
def test_coverage_leads_where_atheris_is_installed():
    searches = list(run(["checksums", "position"], Budget(NUM_INPUTS, GUARD_SECONDS)))
    assert [(search.parser, search.engine, search.inputs) for search in searches] == [
        ("checksums", "atheris", NUM_INPUTS),
        ("position", "atheris", NUM_INPUTS),
    ]
    assert not any(search.defects for search in searches)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris (Linux)")
def test_a_search_goes_on_in_several_processes_and_counts_them_together():
    (search,) = run(["position"], Budget(NUM_INPUTS, GUARD_SECONDS, process_inputs=300))
    assert (search.parser, search.engine, search.inputs) == ("position", "atheris", NUM_INPUTS) and not search.defects


def test_two_searches_are_one():
    defect = Defect("rules", "error", "ValueError", "there", b"x")
    other = dataclasses.replace(defect, place="elsewhere")
    first, second = Search("rules", "chance", 5, 0.5, (defect,)), Search("rules", "chance", 6, 0.25, (defect, other))
    whole = joined(first, second)
    assert (whole.inputs, whole.seconds, len(whole.defects)) == (11, 0.75, 2)


def test_a_search_that_dies_is_said(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "run", lambda *_, **__: iter([Search("rules", "chance", 5, 0.1)]))
    assert fuzz.main(["--only", "rules", "plan", "--no-page"]) == 1
    assert "the search of 'plan' ended without a result" in capsys.readouterr().err
