"""`remat="auto"` and a policy: numbers, budgets, several kinds of blocks, pinned plans, and what an error says fits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.choosing import Prices
from splitjax.errors import BudgetError, GradientError
from splitjax.plan import BlockRemat, Plan
from splitjax.planning.plan_lock import PlanLock
from splitjax.step.options import OptionError

DATA = {"mesh": {"data": 8}, "rules": "data_parallel"}
WIDTH = 32
DOTS = (BlockRemat("params/layers", "dots_saveable"),)
NOTHING = (BlockRemat("params/layers", "nothing_saveable"),)


def layer(x, params):
    return x + jax.nn.gelu(jnp.sin(x) @ params["up"]) @ params["down"], None


def loss_of(params, batch):
    x, _ = jax.lax.scan(layer, batch @ params["embed"], params["layers"])
    return jnp.mean(x**2)


def make_state(key, num_layers=6):
    normal = lambda name, *shape: jax.random.normal(jax.random.fold_in(key, name), shape) / 8
    return {
        "embed": normal(0, WIDTH, WIDTH),
        "layers": {"up": normal(1, num_layers, WIDTH, 4 * WIDTH), "down": normal(2, num_layers, 4 * WIDTH, WIDTH)},
    }


def step(params, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def planned(num_examples=4096, fn=step, state=None, **options):
    """A planned step, its plan, and its arguments as shapes."""
    state = jax.eval_shape(make_state, jax.random.key(0)) if state is None else state
    args = state, jax.ShapeDtypeStruct((num_examples, WIDTH), jnp.float32)
    made = splitjax.parallelize(fn, **DATA | {"remat": "auto"} | options)
    return made, made.plan(*args), args


@functools.cache
def bounds():
    """The upper bound of a device's memory by what is kept."""
    return {keeps: planned(remat=keeps)[1].memory.bound_bytes for keeps in (None, "dots_saveable", "nothing_saveable")}


COMBINATIONS = {
    "a policy": {"remat": "dots_saveable"},
    "a budget": {"memory_budget": "2MiB"},
    "everything": {"mesh": "auto", "rules": "auto", "shard_state": "auto", "memory_budget": "2MiB"},
    "in microbatches": {"remat": {"params/layers": "nothing_saveable"}, "microbatches": 4},
    "split layers": {"mesh": {"data": 2, "model": 4}, "rules": "megatron", "remat": "dots_saveable"},
}


@pytest.mark.parametrize("options", COMBINATIONS.values(), ids=COMBINATIONS)
def test_the_numbers_of_one_device(options):
    with jax.enable_x64(True):
        batches = [np.random.default_rng(seed).normal(size=(512, WIDTH)) for seed in range(2)]
        made = splitjax.parallelize(step, **DATA | {"remat": "auto"} | options)
        state = made.init(make_state, jax.random.key(0), example=(batches[0],))
        plan = made.plan(state, batches[0])
        assert plan.remat and "the backward pass computes the rest again" in str(plan)
        assert made.choice is None or made.choice.best.remat == plan.remat
        expected = make_state(jax.random.key(0))
        for batch in batches:
            expected, loss = step(expected, batch)
            state, found_loss = made(state, batch)
            np.testing.assert_allclose(found_loss, loss, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), state, expected)
        # Another batch keeps as much.
        assert made.plan(state, np.ones((256, WIDTH))).remat == plan.remat


def test_a_tighter_budget_keeps_less_and_the_compiled_program_keeps_the_budget():
    free = planned()[1]
    assert free.remat == () and any("as no budget asks for less" in note for note in free.notes)
    whole, dots, nothing = bounds().values()
    assert nothing < dots < whole
    for budget, kept in ((whole, ()), (whole - 1, DOTS), (dots, DOTS), (dots - 1, NOTHING), (nothing, NOTHING)):
        made, plan, args = planned(memory_budget=budget)
        assert plan.remat == made.choice.best.remat == kept and plan.memory.bound_bytes <= budget
        stats = made.lower(*args).compile().memory_analysis()
        written = stats.output_size_in_bytes - stats.alias_size_in_bytes
        assert stats.argument_size_in_bytes + stats.temp_size_in_bytes + written <= budget
        (reason,) = (note for note in plan.notes if note.startswith("remat: "))
        assert ("remat: products of params/layers kept: " in reason) == (kept == DOTS)
        assert ("remat: nothing of params/layers kept: " in reason) == (kept == NOTHING)
        # The choice has what was tried, which takes more time the less it keeps.
        tried = [each for each in made.choice.candidates if each.bound_bytes is not None]
        assert [each.remat for each in tried] == [(), DOTS, NOTHING][: len(tried)]
        assert not kept or "kept" in str(made.choice)


def test_on_a_named_machine_the_fastest_program_that_fits_is_taken():
    whole = planned(target="tpu:v5e:2x4")[1].memory.bound_bytes
    made, plan, args = planned(target="tpu:v5e:2x4", memory_budget=whole - 1)
    timed = [each for each in made.choice.candidates if each.program_seconds is not None]
    assert plan.remat and made.choice.best.program_seconds == min(each.program_seconds for each in timed)
    # It is the roofline's figure of the program with what it computes again.
    assert made.time(*args, on="tpu:v5e:2x4").seconds == made.choice.best.program_seconds


def test_what_is_computed_again_takes_time():
    """By the sum: products that are computed again, for layers that are whole, gathered, and computed in parts."""
    for mesh, rules in (({"data": 8}, "data_parallel"), ({"data": 8}, "fsdp"), ({"data": 2, "model": 4}, "megatron")):
        least = planned(mesh=mesh, rules=rules, remat="nothing_saveable")[1].memory.bound_bytes
        made, _, _ = planned(mesh=mesh, rules=rules, memory_budget=least)
        seconds = {each.remat: each.seconds for each in made.choice.candidates if each.rules.name == rules}
        assert seconds[()] < seconds[DOTS] < seconds[NOTHING]
        # A product of each layer at least: what `nothing` repeats and `dots` does not.
        flops = 2 * 4096 * WIDTH * 4 * WIDTH * 6 / 8
        assert seconds[NOTHING] - seconds[DOTS] > 0.99 * flops / Prices.of_platform("cpu").flops_per_second


def two_kinds(params, batch):
    def loss_of_both(params, batch):
        x, _ = jax.lax.scan(layer, batch @ params["embed"], params["layers"])
        x, _ = jax.lax.scan(layer, x, params["more"])
        return jnp.mean(x**2)

    loss, grads = splitjax.value_and_grad(loss_of_both)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_blocks_of_several_kinds_keep_what_each_may():
    state = jax.eval_shape(lambda key: make_state(key) | {"more": make_state(key, 12)["layers"]}, jax.random.key(0))
    least = planned(fn=two_kinds, state=state, remat="nothing_saveable")[1].memory.bound_bytes
    most = planned(fn=two_kinds, state=state, remat=None)[1].memory.bound_bytes
    made, plan, _ = planned(fn=two_kinds, state=state, memory_budget=(least + most) // 2)
    mixed = {each.name: each.keeps for each in plan.remat}
    assert mixed and mixed != {"params/layers": "nothing_saveable", "params/more": "nothing_saveable"}
    # What was chosen is what its name says: the same bytes where it is asked for.
    again = planned(fn=two_kinds, state=state, remat=mixed)[1]
    assert again.remat == plan.remat and again.memory.bound_bytes == plan.memory.bound_bytes
    # No way to keep less time is within the budget: all that were tried before it are not.
    tried = [each for each in made.choice.candidates if each.bound_bytes is not None]
    faster = [each for each in tried if each.seconds < made.choice.best.seconds]
    assert faster and not any(each.fits(made.choice.budget_bytes) for each in faster)


def test_a_pinned_plan_replays_it_and_a_lock_notices_it(tmp_path):
    _, plan, args = planned(memory_budget=bounds()[None] - 1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for asked in (None, "auto"):
        pinned = splitjax.parallelize(step, mesh={"data": 8}, plan=tmp_path / "plan.json", remat=asked)
        assert pinned.plan(*args).remat == plan.remat and pinned.choice is None
        assert pinned.plan(*args).memory.bound_bytes == plan.memory.bound_bytes
    without = splitjax.parallelize(step, mesh={"data": 8}, plan=tmp_path / "plan.json", remat={})
    assert without.plan(*args).remat == ()
    lock, other = PlanLock.of(plan), PlanLock.of(planned(remat="nothing_saveable")[1])
    assert PlanLock.from_json(lock.to_json()) == lock
    assert lock.changed_decisions(other) == ("block params/layers: keeps dots_saveable -> nothing_saveable",)
    assert PlanLock.of(planned(remat=None)[1]).changed_decisions(lock) == ("block params/layers: is new",)


def test_an_error_says_with_which_policy_it_fits():
    def error_of(**options):
        with pytest.raises(BudgetError) as caught:
            planned(**options)
        return caught.value

    _, dots, nothing = bounds().values()
    said = error_of(remat=None, shard_state="auto", memory_budget=dots)
    assert 'say remat="dots_saveable", with which it fits in' in said.remedy
    assert 'say remat="nothing_saveable"' in error_of(remat=None, shard_state="auto", memory_budget=nothing).remedy
    assert planned(remat="dots_saveable")[1].memory.bound_bytes == dots
    # What was left to be chosen is no remedy.
    assert "remat=" not in error_of(memory_budget=nothing // 4).remedy


def test_a_given_number_of_microbatches_may_have_blocks_computed_again():
    bound = lambda **options: planned(microbatches=2, **options)[1].memory.bound_bytes
    whole, nothing = bound(remat=None), bound(remat="nothing_saveable")
    assert nothing < whole
    _, plan, _ = planned(microbatches=2, memory_budget=(whole + nothing) // 2)
    assert plan.remat and plan.memory.bound_bytes <= (whole + nothing) // 2
    # Where it is not left to be chosen, it is a remedy.
    with pytest.raises(BudgetError) as caught:
        planned(microbatches=2, remat=None, shard_state="auto", memory_budget=nothing)
    assert 'say remat="nothing_saveable", with which it fits in' in caught.value.remedy


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "model": 4}], ids=["one axis", "two axes"])
def test_rules_with_blocks_computed_again_are_proven_by_their_own_answer(mesh):
    whole = planned(mesh=mesh, rules="auto", remat=None)[1].memory.bound_bytes
    made, plan, _ = planned(mesh=mesh, rules="auto", memory_budget=whole // 2)
    choice = made.choice
    assert choice.best.remat and choice.best.rules in [each.candidate.rules for each in choice.answers]
    # Its values, its gap and its solver are those of the search's answer with these rules, however it runs.
    assert choice.proof.candidate.rules == choice.best.rules
    assert not any("a shipped rule set is taken" in note for note in plan.notes)


def plain(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_what_cannot_be_computed_again_says_why():
    made, plan, _ = planned(fn=plain)
    assert plan.remat == () and made.choice.options == ("remat",)
    assert any("remat: nothing is computed again: the step takes its gradient with JAX's own" in n for n in plan.notes)
    with pytest.raises(GradientError, match="JAX's own functions"):
        planned(fn=plain, remat="dots_saveable")
    with pytest.raises(GradientError, match="no such repeated block") as caught:
        planned(remat={"params/blocks": "dots_saveable"})
    assert "params/layers" in caught.value.remedy
    for wrong in ("dots", True, {"params/layers": "auto"}, 3):
        with pytest.raises(OptionError, match="remat is what repeated blocks keep"):
            splitjax.parallelize(step, **DATA, remat=wrong)
