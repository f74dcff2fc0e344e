"""The search for what XLA's partitioner computes wrongly: a hundred programs under splitjax, and whether the search
finds what is planted."""

from __future__ import annotations

import collections
import dataclasses
import json

import jax
import numpy as np
import pytest

import splitjax
from benchmarks.partitioner import main as partitioner
from benchmarks.partitioner import page as pages
from benchmarks.partitioner.draw import Draw, case_of
from benchmarks.partitioner.families import draw, families
from benchmarks.partitioner.layouts import RUN, fits, mesh_of
from benchmarks.partitioner.primitives import NOT_DRAWN
from benchmarks.partitioner.references import References
from benchmarks.partitioner.run import (
    Outcome,
    Ready,
    fault_of_reference,
    on_one_device,
    prepare,
    relative_error,
    run_by_hand,
)
from benchmarks.partitioner.search import run_numbers, run_one, same_kind, shrink, simpler
from benchmarks.partitioner.values import every_elementwise
from benchmarks.partitioner.worker import Died, Settings, Worker
from splitjax.primitives.table import OPERATIONS
from splitjax.trace import tracer  # noqa: F401  (it fills the registry)

# Other programs with every release, so that in time more of them are tried than any one run could.
SEED = f"{splitjax.__version__} {jax.__version__}"
HUNDRED = 100


@pytest.fixture
def worker(request):
    started = Worker(getattr(request, "param", Settings()))
    yield started
    started.close()


@pytest.mark.parametrize("worker", [Settings(way="splitjax")], indirect=True)
def test_a_hundred_programs_are_right_or_refused(worker):
    """In a process of its own: what kills the compiler is a failure of this test, and not of the run."""
    outcomes = [
        outcome
        for start in range(0, HUNDRED, RUN)
        for outcome in run_numbers(worker, SEED, range(start, min(start + RUN, HUNDRED)))
    ]
    bad = [
        f"{outcome.number} {outcome.family}: {outcome.status} {outcome.message} {outcome.wrong}"
        for outcome in outcomes
        if outcome.status not in ("right", "refused")
    ]
    assert not bad, (
        f"repeat with `python -m benchmarks partitioner --way splitjax --program {SEED!r}:NUMBER`:\n" + "\n".join(bad)
    )
    assert sum(outcome.status == "right" for outcome in outcomes) > 0.8 * HUNDRED  # refusing is not the way to be right


@pytest.mark.parametrize("worker", [Settings(planted="move")], indirect=True)
def test_what_is_planted_is_found_and_shrunk(worker):
    """Results of this family are spoiled where there is more than one example: all of its programs are found, the
    others are right, and the least form has two examples and nothing else."""
    numbers = [number for number in range(4) if draw("planted", number, "move").settings["batch"] > 1]
    wrong = {
        outcome.number: outcome
        for outcome in run_numbers(worker, "planted", numbers, "move")
        if outcome.status == "wrong"
    }
    assert numbers and set(wrong) == set(numbers)
    assert {outcome.status for outcome in run_numbers(worker, "planted", range(4), "slice")} == {"right"}
    program = draw("planted", numbers[0], "move")
    least = shrink(
        program, lambda candidate: same_kind(run_one(worker, candidate), wrong[numbers[0]]), limit_seconds=60
    )
    assert least.settings["batch"] == 2
    assert (least.wrapper, least.reuse, least.pinned) == ("plain", "once", False)
    assert not least.used_axes


class Dying:
    """A worker that dies of one number, and if `alone` also where one device runs it."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone

    def ask(self, **request):
        numbers = (
            request["numbers"] if "numbers" in request else [Draw.from_json(text).number for text in request["draws"]]
        )
        if 5 in numbers and (self.alone or not request.get("reference")):
            raise Died("SIGABRT", "Check failed: here")
        return {
            "outcomes": [dataclasses.asdict(Outcome(number, "dot", "right", primitives=("add",))) for number in numbers]
        }


def test_a_death_is_told_and_halved():
    """A worker that dies of one number answers for all the others."""
    outcomes = run_numbers(Dying(alone=False), "any", range(8))
    assert [outcome.number for outcome in outcomes] == list(range(8))
    assert [outcome.number for outcome in outcomes if outcome.status == "crash"] == [5]
    assert "Check failed: here" in outcomes[5].message and outcomes[5].primitives == ("add",)


def test_what_ends_one_device_too_is_no_program():
    outcomes = run_numbers(Dying(alone=True), "any", range(8))
    assert [outcome.number for outcome in outcomes if outcome.status == "invalid"] == [5]
    assert outcomes[5].message.startswith("one device alone: SIGABRT")


def test_what_one_device_does_not_repeat_is_no_program():
    """A reference that changes from run to run says nothing of the partitioner."""
    calls = iter(range(100))
    changing = lambda: jax.pure_callback(lambda: np.float64(next(calls)), jax.ShapeDtypeStruct((), np.float64))
    with jax.enable_x64(True):
        ready = prepare(draw("planted", 0, "slice"))
        assert not fault_of_reference(ready)
        assert "asked again" in fault_of_reference(dataclasses.replace(ready, function=changing, arguments=()))
        chaotic = dataclasses.replace(ready, function=lambda x: jax.numpy.cos(x * 1e40), arguments=(np.ones(4),))
        assert "by a rounding" in fault_of_reference(chaotic)


def test_a_worker_that_dies_says_of_what_and_starts_again(worker):
    with pytest.raises(Died, match="exit status"):
        worker.ask(draws=["no draw"])
    answer = worker.ask(seed="again", numbers=[0])
    assert answer["outcomes"][0]["status"] in ("right", "wrong")


def test_draws_are_the_same_every_time():
    for number in range(0, 2000, 37):
        program = draw("same", number)
        assert program == draw("same", number)
        assert Draw.from_json(program.to_json()) == program
        assert program.mesh == mesh_of(number)
    assert draw("same", 0) != draw("another", 0)


def test_draws_fit_and_half_are_partly_replicated():
    programs = [draw("fit", number) for number in range(400)]
    assert all(fits(program, case_of(program, families())) for program in programs)
    assert sum(program.is_partly_replicated for program in programs) >= 200
    assert {program.family for program in programs} == {name for name, family in families().items() if family.share}
    assert {draw("fit", number, "fourier").family for number in range(3)} == {"fourier"}
    assert len({program.wrapper for program in programs}) >= 12
    meshes = collections.Counter(len(program.mesh) for program in programs)
    assert meshes[2] and meshes[3]


def test_simpler_programs_can_be_built():
    for number in (3, 40, 77):
        program = draw("simpler", number)
        candidates = list(simpler(program))
        assert candidates and program not in candidates
        assert all(fits(candidate, case_of(candidate, families())) for candidate in candidates)


def test_every_primitive_is_drawn_or_has_a_reason_not_to_be():
    """By the page's own counts, and by those elementwise functions of which any one run may miss some."""
    drawn = {name for run in pages.load() for name in run.primitives}
    elementwise = draw("every", 0, "elementwise")
    for params in every_elementwise():
        ready = prepare(plainest(dataclasses.replace(elementwise, dtype="float32").with_params(params)))
        assert not isinstance(ready, Outcome), ready
        drawn.update(ready.primitives)
    missing = [name for name in OPERATIONS.with_dims() if name not in drawn and name not in NOT_DRAWN]
    assert not missing
    assert all(len(reason) > 10 for reason in NOT_DRAWN.values())
    assert set(NOT_DRAWN) <= set(OPERATIONS.with_dims())


def plainest(program: Draw) -> Draw:
    return dataclasses.replace(program, wrapper="plain", reuse="fixed", layouts=((("data",),), ((),)))


def test_relative_error():
    import numpy as np

    assert relative_error(np.ones(3), np.ones(3), 1e-5) == 0
    assert relative_error(np.array([1.0, 2.0]), np.array([1.0, 3.0]), 1e-5) == 0.5
    assert relative_error(np.array([1, 2]), np.array([1, 3]), 1e-5) == float("inf")
    assert relative_error(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), 1e-5) == 0
    assert relative_error(np.array([np.nan, 1.0]), np.array([0.0, 1.0]), 1e-5) == float("inf")
    assert relative_error(np.zeros(2), np.full(2, 1e-14), 1e-5) < 1e-8


def test_page_and_kept_runs(tmp_path):
    """Two runs are kept beside each other, a second of the same kind replaces the first, and the page shows what was
    found with its least form."""
    program = draw("page", 0)
    outcome = Outcome(0, program.family, "wrong", (("['w0']", 3.0),), primitives=("dot_general",))
    least = {
        pages.kind_of(program, outcome): [{"draw": program.to_json(), "outcome": "wrong ['w0'] 3", "number": "page:0"}]
    }
    for jax_version, partitioner_name in (("0.10.2", "shardy"), ("0.10.2", "gspmd"), ("0.10.2", "shardy")):
        pages.store(
            pages.summary(jax_version, partitioner_name, "hand", "page", "- here", [(program, outcome)], least),
            tmp_path,
        )
    assert len(pages.load(tmp_path)) == 2
    text = "\n".join(pages.page(pages.load(tmp_path)))
    assert "least form" in text and "page:0" in text and "dot_general" in text
    json.loads((tmp_path / pages.STORE).read_text())


def test_kept_outcomes_are_not_run_again(tmp_path, monkeypatch):
    calls = []

    def answer(worker, seed, numbers, only=""):
        calls.extend(numbers)
        return [Outcome(number, "dot", "right") for number in numbers]

    monkeypatch.setattr(partitioner, "run_numbers", answer)
    path = tmp_path / "kept.jsonl"
    assert len(list(partitioner.run_kept(Settings(), "kept", range(40), path))) == 40
    assert calls == list(range(40))
    path.write_text(path.read_text() + '{"number": 40, "fam')  # cut off
    again = list(partitioner.run_kept(Settings(), "kept", range(41), path))
    assert calls[40:] == [40] and [outcome.number for outcome in again] == list(range(41))


def test_kept_references_come_back_as_they_were(tmp_path):
    """Also in bfloat16, which `np.load` does not know; and the second time nothing is evaluated."""
    references = References(str(tmp_path))
    programs = [dataclasses.replace(draw("kept", 3, "dot"), dtype=dtype) for dtype in ("float32", "bfloat16")]
    ready = [program for program in map(prepare, programs) if isinstance(program, Ready)]
    assert len(ready) == 2
    first = references.of(ready, on_one_device)

    def never(programs):
        raise AssertionError(f"{len(programs)} programs are evaluated again")

    jax.tree.map(np.testing.assert_array_equal, first, references.of(ready, never))
    dtypes = lambda results: [leaf.dtype for leaf in jax.tree.leaves(results)]
    assert dtypes(first) == dtypes(references.of(ready, never))


def test_gradients_of_integers_are_kept_too(tmp_path):
    """Their dtype, float0, has no bytes."""
    ready = prepare(dataclasses.replace(draw("kept", 3, "dot"), dtype="float32"))
    assert isinstance(ready, Ready)
    function = jax.jit(lambda *arguments: np.zeros((2, 3), jax.dtypes.float0))
    program = dataclasses.replace(ready, function=function)
    references = References(str(tmp_path))
    (first,) = references.of([program], lambda programs: [np.zeros((2, 3), jax.dtypes.float0)])
    (second,) = references.of([program], lambda programs: [])
    assert (first.shape, first.dtype) == (second.shape, second.dtype) == ((2, 3), jax.dtypes.float0)


def test_a_kept_reference_alone_makes_nothing_wrong(tmp_path):
    """What differs from kept numbers, which another version may have written, is compared with this one's."""
    references = References(str(tmp_path))
    with jax.enable_x64(True):
        program = draw("kept", 0, "dot")
        ready = prepare(program)
        assert isinstance(ready, Ready) and run_by_hand([program])[0].status == "right"
        references.of([ready], lambda programs: jax.tree.map(lambda x: np.asarray(x) + 1, on_one_device(programs)))
        assert run_by_hand([program], references=references)[0].status == "right"
        assert run_by_hand([program], "dot", references)[0].status == "wrong"  # spoiled on the mesh


def test_what_cannot_be_traced_is_no_program():
    program = draw("valid", 1)
    broken = dataclasses.replace(program, family="dot", params=(), wrapper="plain")
    assert isinstance(prepare(broken), Outcome) and prepare(broken).status == "invalid"
