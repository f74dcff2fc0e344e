"""`microbatches="auto"` and a number of them: numbers, budgets, what is refused, and what an error says would fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.display.figures import bytes_text
from splitjax.errors import BudgetError, MicrobatchError
from splitjax.step.microbatches import in_microbatches
from splitjax.step.options import OptionError
from tests.compile.test_choosing_state import DATA, decorated, loss_of, steps_of

BOTH = {"shard_state": "auto", "microbatches": "auto"}


def parts_of(plan):
    """The number of microbatches of the step's only boundary."""
    (boundary,) = plan.boundaries
    return boundary.num_parts if boundary.how == "microbatches" else 1


def compiled_bytes(made, args):
    """What XLA's program for CPUs needs of a device."""
    stats = made.lower(*args).compile().memory_analysis()
    written = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + written


COMBINATIONS = {
    "a number": (DATA | {"microbatches": 4}, 4),
    "a number, chosen rules": ({"mesh": "auto", "rules": "auto", "microbatches": 4}, 4),
    "alone": (DATA | {"microbatches": "auto", "memory_budget": "4MiB"}, None),
    "with state": (DATA | BOTH | {"memory_budget": "3MiB"}, None),
    "split layers": ({"mesh": {"data": 2, "model": 4}, "rules": "megatron", **BOTH, "memory_budget": "3MiB"}, None),
    "everything": ({"mesh": "auto", "rules": "auto", **BOTH, "memory_budget": "2500KiB"}, None),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_numbers_of_one_device(name):
    options, number = COMBINATIONS[name]
    make_state, step = steps_of("adam")
    with jax.enable_x64(True):
        batches = [np.random.default_rng(seed).normal(size=(2048, 64)) for seed in range(2)]
        made = splitjax.parallelize(step, **options)
        state = made.init(make_state, jax.random.key(0), example=(batches[0],))
        plan = made.plan(state, batches[0])
        assert parts_of(plan) == number or (number is None and parts_of(plan) > 1)
        assert made.choice is None or made.choice.best.microbatches == parts_of(plan)
        expected = make_state(jax.random.key(0))
        for batch in batches:
            expected, loss = step(expected, batch)
            state, found_loss = made(state, batch)
            np.testing.assert_allclose(found_loss, loss, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11), state, expected)
        # Another batch is taken in as many parts.
        assert parts_of(made.plan(state, np.ones((512, 64)))) == parts_of(plan)


def test_a_tighter_budget_leads_to_sharded_state_and_then_to_microbatches():
    plan_in = lambda budget: decorated("adam", 8192, **DATA, **BOTH, target="tpu:v5e:2x4", memory_budget=budget)
    free, plan, _ = plan_in(None)
    assert not free.choice.best.shards_state and parts_of(plan) == 1
    assert "microbatches: 1, as no budget asks for more, and each more takes time" in plan.notes
    tight, within, _ = plan_in(plan.memory.bound_bytes - 1)
    assert tight.choice.best.shards_state and parts_of(within) == 1
    assert any(note.startswith("microbatches: 1, which is within the budget") for note in within.notes)
    tighter, least, _ = plan_in(within.memory.bound_bytes - 1)
    assert parts_of(least) == tighter.choice.best.microbatches > 1
    assert least.memory.bound_bytes < within.memory.bound_bytes < plan.memory.bound_bytes
    # The last word has the program, as without microbatches.
    fitting = [each for each in tighter.choice.candidates if each.program_seconds is not None]
    assert tighter.choice.best.program_seconds == min(each.program_seconds for each in fitting)


def test_the_fewest_that_fit_are_taken_and_the_compiled_program_keeps_the_budget():
    bounds = {
        number: decorated("adam", 8192, **DATA, shard_state=False, microbatches=number)[1].memory.bound_bytes
        for number in (1, 2, 4, 8, 16)
    }
    assert sorted(bounds.values(), reverse=True) == list(bounds.values())
    for fewest, fitting in ((2, bounds[2]), (4, bounds[2] - 1), (16, bounds[16])):
        made, plan, args = decorated(
            "adam", 8192, **DATA, shard_state=False, microbatches="auto", memory_budget=fitting
        )
        assert parts_of(plan) == made.choice.best.microbatches == fewest
        assert plan.memory.bound_bytes == bounds[fewest] and compiled_bytes(made, args) <= fitting
        (reason,) = (note for note in plan.notes if note.startswith("microbatches: "))
        assert (
            f"microbatches: {fewest}, the fewest of this layout within" in reason
            and f"in 1 {bytes_text(bounds[1])}" in reason
        )
        assert "taken" in str(made.choice) and f"in {fewest} microbatches" in str(made.choice)


def test_each_more_takes_time():
    """By the sum, for layouts whose weights are whole, are gathered in each microbatch, and are computed in parts."""
    for mesh, rules in (({"data": 8}, "data_parallel"), ({"data": 8}, "fsdp"), ({"data": 2, "model": 4}, "megatron")):
        options = {"mesh": mesh, "rules": rules, "shard_state": False, "microbatches": "auto"}
        tight, _, _ = decorated("adam", 8192, **options, memory_budget="3MiB")
        tried = [each for each in tight.choice.candidates if each.bound_bytes is not None]
        assert len(tried) > 1 and [each.microbatches for each in tried] == sorted(each.microbatches for each in tried)
        assert tried[0].seconds < tried[-1].seconds and tried[-1].is_as(tight.choice.best)


def test_an_error_says_with_which_options_it_fits():
    def error_of(**options):
        with pytest.raises(BudgetError) as caught:
            decorated("adam", 8192, **options)
        return caught.value

    whole = decorated("adam", 8192, **DATA, shard_state=False)[1].memory.bound_bytes
    chosen = {**DATA, "microbatches": "auto", "shard_state": False}
    assert "say shard_state=True" not in error_of(**DATA, memory_budget="3MiB").remedy
    said = error_of(**DATA, memory_budget="3MiB").remedy
    assert "say microbatches=8, with which it fits in 2.8 MiB" in said and "with sharded state" in said
    followed = decorated("adam", 8192, **DATA, shard_state=True, microbatches=8)[1]
    assert followed.memory.bound_bytes <= 3 * 2**20
    # Without either it names sharded state where that is enough, and both where that is what it takes.
    rules = {"mesh": {"data": 8}, "rules": "auto", "shard_state": False}
    both = error_of(**rules, memory_budget="1800KiB")
    assert "say microbatches=" in both.remedy or "say shard_state=True and microbatches=" in both.remedy
    assert decorated("adam", 8192, **chosen, memory_budget=whole)[0].choice.best.microbatches == 1
    # The bytes that it names do.
    least = error_of(**chosen, memory_budget="1500KiB")
    assert "of these are states" in least.message
    made = decorated("adam", 8192, **chosen, memory_budget=int(least.remedy.split()[1]))[1]
    assert made.memory.bound_bytes == int(least.remedy.split()[1])


def test_an_error_names_sharded_state_where_that_does():
    whole = decorated("adam", 64, **DATA, shard_state=False)[1].memory.bound_bytes
    sharded = decorated("adam", 64, **DATA, shard_state=True)[1].memory.bound_bytes
    with pytest.raises(BudgetError) as caught:
        decorated("adam", 64, **DATA, shard_state=False, microbatches="auto", memory_budget=sharded)
    assert sharded < whole and "say shard_state=True, with which it fits in" in caught.value.remedy


def plain_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def said_step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of, microbatches=2)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def mixing_step(state, batch):
    loss, grads = splitjax.value_and_grad(lambda state, batch: jnp.log(loss_of(state, batch)))(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def marked_step(state, batch):
    marked = splitjax.per_microbatch(lambda up, batch: jnp.mean(batch @ up) ** 2)
    loss_and_balance = lambda state, batch: loss_of(state, batch) + marked(state["up"], batch)
    loss, grads = splitjax.value_and_grad(loss_and_balance)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


REFUSED = {
    "JAX's gradient": (plain_step, "take it with splitjax.value_and_grad"),
    "said": (said_step, "splitjax.value_and_grad says how many"),
    "mixing": (mixing_step, "because of log"),
    "marked": (marked_step, "splitjax.per_microbatch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_numbers_is_no_candidate(name):
    step, why = REFUSED[name]
    args = jax.eval_shape(steps_of("sgd")[0], jax.random.key(0))[0], jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    made = splitjax.parallelize(step, **DATA, microbatches="auto", memory_budget="3MiB")
    with pytest.raises(BudgetError) as caught:
        made.plan(*args)
    assert why in caught.value.message
    free = splitjax.parallelize(step, **DATA, microbatches="auto", memory_budget="1GiB")
    plan = free.plan(*args)
    assert free.choice.best.microbatches == 1 and parts_of_any(plan) == (2 if name == "said" else 1)
    # A number that is asked for is an error where the loss does not take it, and leaves alone what says its own.
    asked = splitjax.parallelize(step, **DATA, microbatches=4)
    if name == "mixing":
        with pytest.raises(MicrobatchError, match="log"):
            asked.plan(*args)
    else:
        assert parts_of_any(asked.plan(*args)) == {"JAX's gradient": 1, "said": 2, "marked": 4}[name]


def parts_of_any(plan):
    return max((each.num_parts for each in plan.boundaries if each.how == "microbatches"), default=1)


def test_a_number_is_that_of_the_gradient():
    """What the option says is what `splitjax.value_and_grad` would say."""
    args = jax.eval_shape(steps_of("sgd")[0], jax.random.key(0))[0], jax.ShapeDtypeStruct((64, 64), jnp.float32)
    by_hand = splitjax.parallelize(said_step, **DATA)
    nested = lambda state, batch: jax.jit(lambda s, b: step_of_nothing(s, b))(state, batch)

    def step_of_nothing(state, batch):
        loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    for step in (step_of_nothing, nested):
        option = splitjax.parallelize(step, **DATA, microbatches=2)
        assert parts_of(option.plan(*args)) == parts_of(by_hand.plan(*args)) == 2
        assert option.plan(*args).memory.bound_bytes == by_hand.plan(*args).memory.bound_bytes
    jaxpr = jax.make_jaxpr(nested)(*args)
    assert in_microbatches(jaxpr, None) is jaxpr and "microbatches=3" in str(in_microbatches(jaxpr, 3))


def test_what_was_chosen_is_kept_pinned_and_verified(tmp_path):
    budget = {**BOTH, "memory_budget": "3MiB"}
    made, plan, args = decorated("adam", 8192, **DATA, **budget)
    plan.save(tmp_path / "plan.json")
    pinned, again, _ = decorated("adam", 8192, **DATA, plan=tmp_path / "plan.json", microbatches="auto")
    assert pinned.choice is None and again.boundaries == plan.boundaries and again.leaves == plan.leaves
    made.verify(*args).raise_if_wrong()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        first, kept = (decorated("adam", 8192, **DATA, **budget)[0].choice for _ in range(2))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert kept == first == made.choice and len(list(tmp_path.glob("splitjax-choice-*.json"))) == 1


@pytest.mark.parametrize("value", ["many", 0, -1, 2.0, True, [2]], ids=str)
def test_values_that_are_none(value):
    with pytest.raises(OptionError) as caught:
        splitjax.parallelize(steps_of("sgd")[1], microbatches=value)
    assert "auto" in caught.value.remedy and caught.value.place.endswith("microbatches")
