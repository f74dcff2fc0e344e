"""The best few layouts, compiled for their machine before one is taken."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.choosing import Candidate, CompiledFigures
from splitjax.compile.choosing import compiled, deciding
from splitjax.compile.choosing.compiled import best_compiled
from splitjax.compile.choosing.document import choice_of, document_of
from splitjax.errors import BudgetError, CompilerError, TargetError
from splitjax.mesh import MeshShape
from splitjax.rules import RuleSet
from splitjax.step.options import OptionError

MESH = MeshShape((("data", 8),))
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
STATE, BATCH = {"up": f32(64, 512), "down": f32(512, 64)}, f32(256, 64)


def step(state, batch):
    loss_of = lambda state: jnp.mean((jax.nn.relu(batch @ state["up"]) @ state["down"]) ** 2)
    loss, grads = splitjax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def chosen(**options):
    decorated = splitjax.parallelize(step, **{"mesh": "auto", "rules": "auto", "target": "cpu:8"} | options)
    decorated.plan(STATE, BATCH)
    return decorated


def candidate(seconds):
    return Candidate(RuleSet(f"of {seconds} s", ()), MESH, seconds, 1, 10, 10, seconds)


def compiler(found):
    """A compiler that says, by the seconds of a candidate, (bytes that a device needs, seconds that it takes longer);
    None of one that it refuses. Second comes whom it was asked for."""
    asked = []

    def compile_one(candidate):
        asked.append(candidate.seconds)
        if found[candidate.seconds] is None:
            return None
        needed, more = found[candidate.seconds]
        return dataclasses.replace(candidate, compiled=CompiledFigures(needed, needed <= 20, 5, 5, more, 0.1))

    return compile_one, asked


CASES = {
    # what the compiler says of those of 1, 2 and 3 s; how many at most; who is compiled; who is taken
    "it holds": ({1: (10, 0.0)}, 3, [1], 1),
    "it holds, nearly": ({1: (10, 0.9)}, 3, [1], 1),
    "it sends more than the second takes": ({1: (10, 1.5), 2: (10, 0.0)}, 3, [1, 2], 2),
    "the second sends more, too": ({1: (10, 1.5), 2: (10, 0.6), 3: (10, 0.0)}, 3, [1, 2], 1),
    "more than the limit": ({1: (10, 9.0), 2: (10, 7.0), 3: (10, 0.0)}, 2, [1, 2], 2),
    "it does not fit": ({1: (30, 0.0), 2: (10, 0.0)}, 3, [1, 2], 2),
    "until one fits": ({1: (30, 0.0), 2: (30, 0.0), 3: (10, 0.0)}, 1, [1, 2, 3], 3),
    "it is refused": ({1: None, 2: (10, 0.0)}, 1, [1, 2], 2),
    "none fits": ({1: (30, 0.0), 2: None, 3: (30, 0.0)}, 3, [1, 2, 3], None),
}


@pytest.mark.parametrize("case", CASES)
def test_candidates_are_compiled_until_one_cannot_be_beaten(case):
    found, most, order, taken = CASES[case]
    compile_one, asked = compiler(found)
    best, tried = best_compiled([candidate(seconds) for seconds in (3, 1, 2)], most, 20, compile_one)
    assert asked == order and (None if best is None else best.seconds) == taken
    assert [each.seconds for each in tried] == [seconds for seconds in order if found[seconds] is not None]


def test_for_processors_the_figures_are_those_of_the_check():
    decorated = chosen(compile_best=2)
    choice, check = decorated.choice, decorated.check_target(STATE, BATCH, on="cpu:8")
    (only,) = choice.compiled  # it holds what it promised
    assert only.is_as(choice.best) and choice.best.compiled == only.compiled
    assert only.compiled.needed_bytes == check.needed_bytes == only.needed_bytes
    assert only.compiled.sent_bytes == check.report.total.compiled_bytes
    assert only.compiled.planned_bytes == check.report.total.predicted_bytes
    assert only.compiled.fits is None and only.compiled.compile_seconds > 0  # nothing says what a processor has
    text = str(choice)
    assert "compiled ahead of time" in text and "not known" in text
    (line,) = [line for line in decorated.plan(STATE, BATCH).notes if "compiled ahead of time" in line]
    assert "(taken)" in line and only.name in line
    document = document_of(choice, "")
    assert choice_of(document, {}, choice.budget_bytes) == choice
    assert "compiled ahead of time" not in str(chosen().choice)


def test_what_does_not_fit_as_compiled_is_not_taken(monkeypatch):
    first = chosen(memory_budget="1GiB").choice.best
    real, checked = compiled.check_on_target, []

    def check(recipe, entry, target, budget_bytes):
        """Says of the first layout that is compiled that it needs 2 GiB."""
        found = real(recipe, entry, target, budget_bytes)
        checked.append(found)
        if len(checked) > 1:
            return found
        return dataclasses.replace(found, run=dataclasses.replace(found.run, needed_bytes=2**31), report=None)

    monkeypatch.setattr(compiled, "check_on_target", check)
    decorated = chosen(memory_budget="1GiB", compile_best=2)
    choice = decorated.choice
    assert len(checked) == 2 and not choice.best.is_as(first) and choice.best.compiled.fits
    (refused,) = [each for each in choice.compiled if not each.is_as(choice.best)]
    assert refused.is_as(first) and choice.verdict(refused) == "needs more than there is, as compiled"
    assert decorated.rules == choice.best.rules
    monkeypatch.setattr(compiled, "check_on_target", lambda *args: (checked.clear(), check(*args))[1])
    with pytest.raises(BudgetError, match=r"the least that a device needs is 2\.0 GiB"):
        chosen(memory_budget="1GiB", compile_best=1)


def test_a_layout_that_its_compiler_refuses_is_not_taken(monkeypatch):
    real, refused = compiled.check_on_target, []

    def check(*args):
        if not refused:
            refused.append(1)
            raise CompilerError("it crashes")
        return real(*args)

    monkeypatch.setattr(compiled, "check_on_target", check)
    choice = chosen(compile_best=1).choice
    assert choice.best.compiled is not None
    assert [each.why for each in choice.refused if each.why.startswith("it crashes")]


def test_options_that_ask_for_nothing_are_refused(monkeypatch):
    for value in (-1, True, 1.5, "2"):
        with pytest.raises(OptionError, match="how many layouts are compiled at most"):
            splitjax.parallelize(step, mesh="auto", compile_best=value, target="cpu:8")
    with pytest.raises(OptionError, match="rules and mesh are said already"):
        splitjax.parallelize(step, mesh={"data": 8}, compile_best=2, target="cpu:8")
    with pytest.raises(TargetError, match="the machine to compile for is not said"):
        splitjax.parallelize(step, mesh="auto", compile_best=2)
    # A compiler that is not here is told before anything is searched.
    monkeypatch.setattr(deciding, "compiler_version", lambda target: (_ for _ in ()).throw(CompilerError("not here")))
    monkeypatch.setattr(deciding, "rank", lambda *args, **options: pytest.fail("searched"))
    with pytest.raises(CompilerError, match="not here"):
        chosen(compile_best=1)


@pytest.mark.tpu_aot
def test_for_a_tpu_they_are_compiled_by_its_own_compiler():
    decorated = chosen(target="tpu:v5e:2x2", compile_best=3, memory_budget="64MiB")
    best, check = decorated.choice.best, decorated.check_target(STATE, BATCH)
    assert best.compiled.fits is True and best.compiled.needed_bytes == check.needed_bytes <= 64 * 2**20
    assert best.compiled.sent_bytes == check.report.total.compiled_bytes
    assert best.best_known_seconds == min(each.best_known_seconds for each in decorated.choice.compiled)
    # What is sent beyond the plan takes time: a few bytes of a loss here.
    beyond = best.compiled.sent_bytes - best.compiled.planned_bytes
    assert (best.compiled.more_seconds > 0) == (beyond > 0) and abs(best.compiled.more_seconds) < 1e-4
