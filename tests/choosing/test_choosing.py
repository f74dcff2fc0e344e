"""The choice of rules and meshes, against exhaustive search, shipped rule sets and budgets."""

from __future__ import annotations

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax.choosing import Prices, choose_mesh, choose_rules, mesh_shapes, rank
from splitjax.choosing.domain import batch_modes, groups_of, rule_set
from splitjax.choosing.layering import Pricing, answers, changes, laid_out, network_of
from splitjax.errors import BudgetError
from splitjax.machines.links import Link
from splitjax.machines.targets import parse_target
from splitjax.mesh import MeshShape
from splitjax.models import build, make_step
from splitjax.search.effort import Effort

MESH = MeshShape.of({"data": 2, "model": 4})
# Slow arithmetic over fast links makes splitting pay, the reverse makes it not.
MACHINES = {"fast links": Prices(1e9, 1e10, Link(1e-6, 1e10)), "slow links": Prices(1e12, 1e10, Link(1e-4, 1e8))}


@functools.cache
def graph_of(widths, num_examples=64):
    """The graph of a chain of dense layers; `widths`: their features, from the input on."""

    def loss_of(state, batch):
        x = batch
        for number in range(len(widths) - 1):
            x = jax.nn.relu(x @ state[f"dense{number}"]["kernel"] + state[f"dense{number}"]["bias"])
        return jnp.mean(x**2)

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    state = {
        f"dense{i}": {"kernel": shape(*pair), "bias": shape(pair[1])}
        for i, pair in enumerate(itertools.pairwise(widths))
    }
    decorated = splitjax.parallelize(step, mesh=jax.sharding.AbstractMesh((2, 4), ("data", "model")))
    return decorated.graph(state, shape(num_examples, widths[0]))


def check_exhaustively(seed):
    """Compares a search with all assignments of a drawn chain, each predicted as a whole. Returns what was chosen."""
    draws = random.Random(seed)
    graph = graph_of(tuple(draws.choice((16, 40, 64, 256, 1024)) for _ in range(draws.choice((3, 3, 4)))))
    prices = Prices(10 ** draws.uniform(8, 12), 1e10, Link(10 ** draws.uniform(-6, -4), 10 ** draws.uniform(8, 11)))
    pricing, chosen = Pricing(graph, MESH, prices, {}, True), []
    for mode in batch_modes(MESH):
        groups = groups_of(graph, MESH, mode)
        (found,) = answers(pricing, groups, mode, float("inf"), Effort())
        every = itertools.product(*(range(len(group.ways)) for group in groups))
        least = min(prices.seconds(laid_out(pricing, rule_set(groups, values, mode))) for values in every)
        assert found.candidate.seconds == pytest.approx(least, rel=1e-9), (seed, mode)
        assert found.bound_seconds == pytest.approx(found.network_seconds, rel=1e-9)
        chosen.append(tuple(variable.chosen for variable in found.variables))
    return tuple(chosen)


def test_exhaustive_search_agrees():
    assert len({check_exhaustively(seed) for seed in (0, 3)}) == 2


def test_costs_of_pairs_add_up_to_those_of_a_recurrence_and_its_tables():
    """What a projection's columns meet of a table's rows depends on both, with layers between them in the program."""
    spec = build("lstm")
    init, step, _ = make_step(spec, optax.sgd(0.1), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), spec.example(64)
    decorated = splitjax.parallelize(step, mesh=jax.sharding.AbstractMesh((2, 4), ("data", "model")))
    pricing, draws = Pricing(decorated.graph(*arguments), MESH, MACHINES["slow links"], {}, True), random.Random(0)
    for mode in batch_modes(MESH):
        groups = groups_of(pricing.graph, MESH, mode)
        base = laid_out(pricing, rule_set(groups, [0] * len(groups), mode))
        problem = network_of(pricing, groups, mode, base, changes(pricing, groups, mode, base))
        for _ in range(20):
            values = [draws.randrange(len(group.ways)) for group in groups]
            alone = sum(costs[value] for costs, value in zip(problem.network.costs, values, strict=True))
            meeting = sum(pair.costs[values[pair.first], values[pair.second]] for pair in problem.network.pairs)
            whole = pricing.prices.seconds(laid_out(pricing, rule_set(groups, values, mode)))
            assert problem.base_seconds + alone + meeting == pytest.approx(whole, rel=1e-9), (mode, values)


@pytest.mark.slow
def test_exhaustive_search_agrees_on_many_graphs():
    assert len({check_exhaustively(seed) for seed in range(2, 24)}) > 5


@pytest.mark.parametrize("machine", MACHINES)
def test_never_worse_than_a_shipped_set(machine):
    choice = choose_rules(graph_of((64, 256, 1024, 16)), MESH, MACHINES[machine])
    shipped = {each.name: each.seconds for each in choice.candidates if each.name != "auto"}
    assert {"data_parallel", "fsdp", "megatron", "splitbrain"} <= {*shipped, *(each.rules for each in choice.refused)}
    assert choice.best.seconds <= min(shipped.values()) and choice.gap == 0.0
    assert any("certified gap of 0 %" in line for line in choice.lines())


def test_a_budget_is_kept_or_explained():
    graph, prices = graph_of((64, 256, 1024, 16)), MACHINES["slow links"]
    free = choose_rules(graph, MESH, prices)
    least = min(each.peak_bytes for each in free.candidates)
    assert least < free.best.peak_bytes
    tight = choose_rules(graph, MESH, prices, budget_bytes=least)
    assert tight.best.peak_bytes <= least and tight.best.seconds > free.best.seconds
    with pytest.raises(BudgetError) as caught:
        choose_rules(graph, MESH, prices, budget_bytes=1000)
    assert caught.value.value == 1000 and " bytes a device" in caught.value.remedy


def test_meshes_are_compared():
    names = ["data=8 x model=1", "data=4 x model=2", "data=2 x model=4", "data=1 x model=8"]
    assert [str(mesh) for mesh in mesh_shapes(8)] == names
    graph, prices = graph_of((64, 256, 1024, 16)), MACHINES["fast links"]
    chosen = choose_mesh(graph, 8, lambda _: prices)
    assert chosen.best.mesh.num_devices == 8
    for mesh in mesh_shapes(8):
        assert chosen.best.seconds <= choose_rules(graph, mesh, prices).best.seconds


def tied_graph():
    """The graph of three layers of which the first two are tied, with Adam's moments."""

    def loss_of(params, batch):
        hidden = jax.nn.relu(jnp.take(params["table"], batch, axis=0) @ params["dense"])
        return jnp.mean((hidden @ params["table"].T) ** 2)

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_of)(state["params"], batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        return {"params": jax.tree.map(lambda p, m: p - m, state["params"], moments), "moments": moments}, loss

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = {"table": shape(256, 64), "dense": shape(64, 64)}
    batch = jax.ShapeDtypeStruct((64, 8), jnp.int32)
    decorated = splitjax.parallelize(step, mesh=jax.sharding.AbstractMesh((2, 4), ("data", "model")))
    return decorated.graph({"params": params, "moments": params}, batch)


@pytest.mark.parametrize("graph", [graph_of((64, 256, 1024, 16)), tied_graph()], ids=["chain", "tied"])
def test_groups_that_are_laid_out_together_lie_as_each_would_alone(graph):
    pricing = Pricing(graph, MESH, MACHINES["fast links"], {}, True)
    for mode in batch_modes(MESH):
        groups = groups_of(graph, MESH, mode)
        base = laid_out(pricing, rule_set(groups, [0] * len(groups), mode))
        found = changes(pricing, groups, mode, base)
        for number, group in enumerate(groups):
            for value in range(1, len(group.ways)):
                rules = rule_set(groups, [value * (i == number) for i in range(len(groups))], mode)
                alone = laid_out(pricing, rules).leaves
                assert found[number][value] == tuple(new for new, old in zip(alone, base.leaves) if new != old)
    assert any(any(found[number][1:]) for number in range(len(groups)))


def test_gates_that_a_product_reads_together_are_one_variable():
    spec = splitjax.models.build("lstm", vocab_size=64, max_len=4, embedding_width=8, hidden_width=16, negatives=4)
    init, step, _ = splitjax.models.make_step(spec, optax.sgd(0.1), value_and_grad=splitjax.value_and_grad)
    state = jax.eval_shape(init, jax.random.key(0))
    graph = splitjax.parallelize(step, mesh={"data": 2}).graph(state, spec.example(8))
    groups = groups_of(graph, MESH, "data")
    cells = [{layer.name.rpartition("/")[2] for layer in group.layers} for group in groups if "cell" in group.name]
    assert cells == [{"hf", "hg", "hi", "ho"}, {"if", "ig", "ii", "io"}]
    # So no layout has some of them split and others whole, of which a plan could not say what is sent.
    rules = rule_set(groups, [int("cell/h" in group.name) for group in groups], "data")
    leaves = laid_out(Pricing(graph, MESH, MACHINES["slow links"], {}, True), rules).leaves
    assert len({leaf.spec for leaf in leaves if "cell/h" in leaf.path and leaf.path.endswith("kernel")}) == 1


def test_where_no_sum_fits_the_search_still_answers():
    graph, prices = graph_of((64, 256, 1024, 16)), MACHINES["slow links"]
    free = rank([Pricing(graph, MESH, prices, {}, True)])
    tight = rank([Pricing(graph, MESH, prices, {}, True)], budget_bytes=1000)
    # Lifetimes may show that one fits after all: the fastest is there, and what stores least of all assignments.
    found = [each.candidate.rules for each in tight.answers]
    assert free.answers and all(each.candidate.rules in found for each in free.answers)
    least = min(each.candidate.peak_bytes for each in tight.answers)
    assert least <= min(each.peak_bytes for each in free.candidates)


def test_the_same_twice():
    first, again = (choose_rules(graph_of((64, 256, 1024, 16)), MESH, MACHINES["fast links"]) for _ in range(2))
    assert first == again


def test_prices_of_machines():
    target = parse_target("tpu:v5e:2x4")
    prices = Prices.of_target(target, MESH)
    assert prices.flops_per_second == target.kind.flops_per_second("bfloat16") and set(prices.links) == {
        "data",
        "model",
    }
    assert Prices.of_target(parse_target("cpu:8"), MESH) == Prices.of_platform("cpu")
    assert prices.least_seconds(8 * prices.flops_per_second, 8) == 1.0
