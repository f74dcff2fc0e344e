"""`shard_state="auto"`: alone and together with rules and mesh: its numbers, reasons and budgets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
import splitjax.nnx
from splitjax.errors import BudgetError
from splitjax.step.options import OptionError

OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-3)}
DATA = {"mesh": {"data": 8}, "rules": "data_parallel"}


def loss_of(params, batch):
    return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"]) ** 2)


def steps_of(optimizer):
    """The functions that make the state of a step with an optimizer, and that make the step."""

    def make_state(key):
        up, down = jax.random.split(key)
        params = {"up": jax.random.normal(up, (64, 512)) / 8, "down": jax.random.normal(down, (512, 64)) / 23}
        return params, OPTIMIZERS[optimizer].init(params)

    def step(state, batch):
        params, memory = state
        loss, grads = splitjax.value_and_grad(loss_of)(params, batch)
        updates, memory = OPTIMIZERS[optimizer].update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    return make_state, step


def decorated(optimizer, num_examples=64, **options):
    """A planned step, its plan, and its arguments as shapes."""
    make_state, step = steps_of(optimizer)
    args = jax.eval_shape(make_state, jax.random.key(0)), jax.ShapeDtypeStruct((num_examples, 64), jnp.float32)
    made = splitjax.parallelize(step, **{"shard_state": "auto"} | options)
    return made, made.plan(*args), args


def is_sharded(plan):
    return any("sharded state" in leaf.rule or leaf.gradient is not None for leaf in plan.leaves)


COMBINATIONS = {
    "alone": DATA,
    "alone, budget": DATA | {"memory_budget": "1600KiB"},
    "mesh": {"mesh": "auto", "rules": "data_parallel"},
    "rules": {"mesh": {"data": 2, "model": 4}, "rules": "auto"},
    "mesh and rules, budget": {"mesh": "auto", "rules": "auto", "memory_budget": "700KiB"},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_numbers_of_one_device(name):
    make_state, step = steps_of("adam")
    with jax.enable_x64(True):
        batches = [np.random.default_rng(seed).normal(size=(64, 64)) for seed in range(2)]
        made = splitjax.parallelize(step, shard_state="auto", **COMBINATIONS[name])
        state = made.init(make_state, jax.random.key(0), example=(batches[0],))
        expected = make_state(jax.random.key(0))
        for batch in batches:
            expected, loss = step(expected, batch)
            state, found_loss = made(state, batch)
            np.testing.assert_allclose(found_loss, loss, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), state, expected)
        plan = made.plan(state, batches[0])
        assert is_sharded(plan) == made.choice.best.shards_state
        assert any(note.startswith("shard_state: ") for note in plan.notes)
        assert 'shard_state="auto"' in plan.notes[[" chose " in note for note in plan.notes].index(True)]


def test_a_tighter_budget_leads_to_sharded_state():
    """Where both take the same time, state stays whole; a budget that this does not keep has it sharded."""
    free, plan, args = decorated("sgd", **DATA)
    assert not free.choice.best.shards_state and not is_sharded(plan)
    tight, within, _ = decorated("sgd", **DATA, memory_budget=plan.memory.bound_bytes - 1)
    assert tight.choice.best.shards_state and is_sharded(within)
    assert within.memory.bound_bytes < plan.memory.bound_bytes
    whole = next(each for each in tight.choice.candidates if not each.shards_state)
    assert tight.choice.verdict(whole) == "needs more than the budget"
    (reason,) = (note for note in within.notes if note.startswith("shard_state: "))
    assert "a device at most" in reason and "needs more than the budget" in reason
    # XLA's program keeps the budget as well.
    stats = tight.lower(*args).compile().memory_analysis()
    written = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert stats.argument_size_in_bytes + stats.temp_size_in_bytes + written <= plan.memory.bound_bytes - 1
    with pytest.raises(BudgetError) as caught:
        decorated("sgd", **DATA, memory_budget="64KiB")
    assert int(caught.value.remedy.split()[1]) == within.memory.bound_bytes


def test_state_that_passes_through_memory_is_cheaper_in_parts():
    """By the nominal figures of a processor each device updates its part faster than all of it."""
    made, plan, _ = decorated("adam", **DATA)
    sharded, whole = made.choice.candidates
    assert sharded.shards_state and not whole.shards_state and sharded.seconds < whole.seconds
    assert made.choice.best == sharded and is_sharded(plan)
    said, by_hand, _ = decorated("adam", **DATA | {"shard_state": True})
    assert said.choice is None and by_hand.leaves == plan.leaves
    assert sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.is_state) == sharded.state_bytes


def test_a_machine_has_the_last_word():
    """Two collectives for each weight take longer than the one that a TPU's compiler makes of all gradients."""
    made, plan, args = decorated("adam", **DATA, target="tpu:v5e:2x4")
    sharded, whole = sorted(made.choice.candidates, key=lambda each: not each.shards_state)
    assert made.choice.best == whole and whole.program_seconds < sharded.program_seconds
    assert made.time(*args, on="tpu:v5e:2x4").seconds == whole.program_seconds
    tight, within, _ = decorated("adam", **DATA, target="tpu:v5e:2x4", memory_budget=plan.memory.bound_bytes - 1)
    assert tight.choice.best.shards_state and within.memory.bound_bytes < plan.memory.bound_bytes


def test_nothing_to_shard():
    made, plan, _ = decorated("adam", mesh={"data": 8}, rules="fsdp")
    (only,) = made.choice.candidates
    assert not only.shards_state and any("it changes nothing" in note for note in plan.notes)


def test_the_search_knows_of_sharded_state():
    """Every candidate with sharded state is predicted as its plan is laid out."""
    made, plan, args = decorated("adam", mesh={"data": 2, "model": 4}, rules="auto", num_examples=1024)
    assert {each.shards_state for each in made.choice.candidates} == {True, False}
    _, step = steps_of("adam")
    for each in made.choice.candidates:
        by_hand = splitjax.parallelize(
            step, mesh={"data": 2, "model": 4}, rules=each.rules, shard_state=each.shards_state
        ).plan(*args)
        held = sum(leaf.bytes_per_device for leaf in by_hand.leaves if leaf.is_state)
        assert held == each.state_bytes == by_hand.memory.state_bytes


def test_steps_over_modules_keep_it():
    from flax import nnx

    def train(model, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    made = splitjax.nnx.parallelize(train, state_argnums=(0,), batch_argnums=(1,), shard_state="auto", **DATA)
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    batch = np.ones((16, 64), np.float32)
    alone = float(jnp.mean(model(batch) ** 2))
    np.testing.assert_allclose(made(model, batch), alone, rtol=1e-5)
    assert made.choice.also == ("shard_state",)


@pytest.mark.parametrize("value", ["yes", 1, None, ["auto"]], ids=str)
def test_values_that_are_none(value):
    with pytest.raises(OptionError) as caught:
        splitjax.parallelize(steps_of("sgd")[1], shard_state=value)
    assert "auto" in caught.value.remedy and caught.value.place.endswith("shard_state")
