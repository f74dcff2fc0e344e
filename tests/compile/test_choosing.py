"""`rules="auto"` in a whole step: its numbers, what its plan says, and the budget."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.errors import BudgetError
from splitjax.rules.ruleset import TO_BE_CHOSEN, parse_rules
from splitjax.rules.writing import write_rules

MESH = {"data": 2, "model": 4}


def loss_of(state, batch):
    return jnp.mean((jax.nn.relu(batch @ state["up"]) @ state["down"]) ** 2)


def step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def arguments(num_examples=16):
    keys = jax.random.split(jax.random.key(0), 3)
    state = {"up": jax.random.normal(keys[0], (64, 512)) / 8, "down": jax.random.normal(keys[1], (512, 64)) / 23}
    return state, jax.random.normal(keys[2], (num_examples, 64))


def test_the_numbers_of_one_device():
    decorated = splitjax.parallelize(step, mesh=MESH, rules="auto", donate=False)
    expected, loss = step(*arguments())
    found, found_loss = decorated(*arguments())
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    plan = decorated.plan(*arguments())
    assert any("certified gap of 0 %" in note for note in plan.notes)
    assert splitjax.Plan.from_json(plan.to_json()) == plan
    assert decorated.rules != TO_BE_CHOSEN
    # Its rules, written to a file, are the same plan.
    written = parse_rules(write_rules(decorated.rules), "chosen.toml")
    again = splitjax.parallelize(step, mesh=MESH, rules=written).plan(*arguments())
    assert again.leaves == plan.leaves and again.collectives == plan.collectives
    # Another size of batch keeps the rules, and with them where the states are.
    other = decorated.plan(*arguments(64))
    assert other.rules == plan.rules and [leaf.spec for leaf in other.leaves[:2]] == [
        leaf.spec for leaf in plan.leaves[:2]
    ]


def test_a_budget_that_nothing_fits_into():
    decorated = splitjax.parallelize(step, mesh=MESH, rules="auto", memory_budget="10KiB")
    with pytest.raises(BudgetError, match="no layout that was found fits"):
        decorated.plan(*arguments())


def most_bytes(plan):
    return plan.memory.bound_bytes


def test_what_is_chosen_fits_by_the_upper_bound_of_the_plan():
    free = splitjax.parallelize(step, mesh=MESH, rules="auto").plan(*arguments())
    state, batch = arguments()
    budget = most_bytes(free) - 1
    tight = splitjax.parallelize(step, mesh=MESH, rules="auto", memory_budget=budget).plan(state, batch)
    assert most_bytes(tight) <= budget
    assert any(note.startswith("faster, and not within") for note in tight.notes)
    with pytest.raises(BudgetError) as caught:
        splitjax.parallelize(step, mesh=MESH, rules="auto", memory_budget=80 << 10).plan(state, batch)
    # The remedy is exact: with the bytes that it names there is a plan, and it keeps them.
    allowed = int(caught.value.remedy.split()[1])
    plan = splitjax.parallelize(step, mesh=MESH, rules="auto", memory_budget=allowed).plan(state, batch)
    assert most_bytes(plan) == allowed


@pytest.mark.parametrize(
    "options", [{"memory_budget": "lots"}, {"memory_budget": -1}, {"memory_budget": "1GiB", "rules": "fsdp"}], ids=str
)
def test_budgets_that_are_none(options):
    with pytest.raises(BudgetError) as caught:
        splitjax.parallelize(step, **{"mesh": MESH, "rules": "auto"} | options)
    assert caught.value.remedy
