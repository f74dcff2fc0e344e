"""Meshes with a third axis, for storage or for experts: which are searched, and what layouts they have."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest

import splitjax
from benchmarks.modern.models import Decoder, make_step, state_of
from splitjax.choosing import AutoMesh, Prices, Pricing, choose_mesh, num_experts, rank
from splitjax.choosing.domain import batch_modes, groups_of, speaks_of
from splitjax.choosing.layering import answers, laid_out
from splitjax.machines.links import Link
from splitjax.mesh import MeshShape
from splitjax.roles import Role
from splitjax.rules.ruleset import load_rules
from splitjax.search.effort import Effort

FAST, SLOW = Link(1e-6, 1e11), Link(1e-5, 1e9)


@functools.cache
def graph_of(experts):
    """The graph of a small decoder in a scan, with or without experts."""
    decoder = Decoder(layers=2, width=64, hidden=128, heads=4, head_dim=16, kv_heads=4, experts=experts, examples=64)
    decorated = splitjax.parallelize(make_step(decoder, splitjax.value_and_grad), mesh={"data": 8})
    return decorated.graph(state_of(decoder), decoder.batch())


def test_which_meshes_have_a_third_axis():
    named = lambda shapes: [str(shape) for shape in shapes]
    assert named(AutoMesh().further(4)) == [
        "data=2 x fsdp=2 x model=1", "data=1 x fsdp=4 x model=1", "data=1 x fsdp=2 x model=2",
    ]  # fmt: skip
    with_experts = AutoMesh().further(8, (4,))
    sizes = {shape.size(("expert",)) for shape in with_experts if "expert" in shape.names}
    assert sizes == {2, 4} and all(shape.num_devices == 8 for shape in with_experts)
    assert AutoMesh(axes=("data", "fsdp")).further(8, (4,)) == ()
    assert num_experts(graph_of(4)) == (4,) and num_experts(graph_of(0)) == ()


def test_which_rules_speak_of_a_third_axis():
    speaks = lambda role: {name for name in ("data_parallel", "fsdp", "splitbrain", "megatron", "transformer")
                           if speaks_of(load_rules(name), (role,))}  # fmt: skip
    assert speaks(Role.STORAGE) == {"megatron"} and speaks(Role.EXPERT) == {"transformer"}


@pytest.mark.parametrize(
    ("rules", "experts", "sizes"),
    [
        ("transformer", 0, {"data": 2, "fsdp": 2, "model": 2}),
        ("megatron", 0, {"data": 2, "fsdp": 2, "model": 2}),
        ("transformer", 4, {"data": 2, "expert": 2, "model": 2}),
        ("transformer", 4, {"data": 2, "fsdp": 2, "expert": 2}),
        ("transformer", 4, {"data": 4, "expert": 2}),
    ],
    ids=str,
)
def test_three_dimensional_layouts_are_points_of_the_domain(rules, experts, sizes):
    graph, mesh = graph_of(experts), MeshShape.of(sizes)
    pricing = Pricing(graph, mesh, Prices(1e11, 1e11, FAST, {"data": SLOW}), {}, True)
    by_hand = pricing.candidate(load_rules(rules), laid_out(pricing, load_rules(rules)))
    found = [
        each.candidate
        for mode in batch_modes(mesh)
        for each in answers(pricing, groups_of(graph, mesh, mode), mode, math.inf, Effort())
    ]
    assert min(each.seconds for each in found) <= by_hand.seconds * (1 + 1e-9)


def on_hosts(mesh):
    """The prices of hosts of four devices, which slow links join: the last axes are within a host."""
    links, stride = {}, 1
    for axis, size in reversed(mesh.axes):
        stride *= size
        links[axis] = FAST if stride <= 4 else SLOW
    return Prices(1e14, 1e11, FAST, links)


def dense_graph():
    def loss_of(state, batch):
        return jnp.mean(jax.nn.relu(batch @ state["up"]) @ state["down"])

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    state = {"up": shape(2048, 8192), "down": shape(8192, 2048)}
    return splitjax.parallelize(step, mesh={"data": 8}).graph(state, shape(2**20, 2048))


def test_weights_are_stored_within_hosts_where_links_between_them_are_slow():
    graph = dense_graph()
    chosen = choose_mesh(graph, 16, on_hosts)
    assert str(chosen.mesh) == "data=4 x fsdp=4 x model=1"
    answers_there = [each for each in chosen.answers if each.candidate.mesh == chosen.mesh]
    assert min(each.candidate.seconds for each in answers_there) == pytest.approx(chosen.best.seconds)
    assert all(each.gap == 0 for each in answers_there)
    two_axes = [each for each in chosen.candidates if "fsdp" not in each.mesh.names]
    assert chosen.best.seconds < 0.8 * min(each.seconds for each in two_axes)


def test_where_links_are_alike_storage_has_an_axis_of_its_own_only_for_a_budget():
    graph, alike = graph_of(0), Prices(1e12, 1e11, FAST)
    free = choose_mesh(graph, 16, lambda _: alike)
    assert not any("fsdp" in each.candidate.mesh.names for each in free.answers)
    budget = min(each.peak_bytes for each in free.candidates)
    tight = choose_mesh(graph, 16, lambda _: alike, budget_bytes=budget)
    assert any("fsdp" in each.candidate.mesh.names for each in tight.answers) and tight.best.fits(budget)


def test_the_number_of_meshes_that_are_searched_is_limited():
    graph = graph_of(4)
    priced = lambda shapes: [Pricing(graph, shape, on_hosts(shape), {}, True) for shape in shapes]
    asked = AutoMesh()
    choice = rank(priced(asked.shapes(16)), further=priced(asked.further(16, (4,))))
    searched = {each.candidate.mesh for each in choice.answers}
    for axis in ("fsdp", "expert"):
        assert 0 < sum(axis in mesh.names for mesh in searched) <= 4
    assert not searched & set(choice.passed_over)
    assert any("meshes with a third axis were not searched" in line for line in choice.lines())
    # Whatever is searched, no shipped set is faster as a sum.
    assert choice.best.seconds == choice.candidates[0].seconds
