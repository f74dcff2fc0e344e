"""The order of the axes of a mesh on slow and fast links: which orders are compared, and which axis crosses hosts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.choosing import AutoMesh, Prices, Pricing, choose_mesh, laid_out, other_orders
from splitjax.choosing.axis_orders import told
from splitjax.machines import parse_target
from splitjax.machines.links import Link
from splitjax.mesh import MeshShape
from splitjax.rules.ruleset import load_rules

HOSTS = parse_target("gpu:h200:2x8")
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def loss_of(state, batch):
    for block in state.values():
        batch = batch + jax.nn.relu(batch @ block["up"]) @ block["down"]
    return jnp.mean(batch**2)


def step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def arguments(width, hidden, *examples):
    """A tower of two blocks, and its examples: their number, and that of the positions of each."""
    block = {"up": f32(width, hidden), "down": f32(hidden, width)}
    return {"block0": block, "block1": block}, f32(*examples, width)


# Many activations beside small weights: eight examples, so that data parallelism alone does not do, and hidden dims
# that divide by 2 alone. And few activations beside large gradients.
LONG, SHORT = arguments(2048, 2 * 2503, 8, 4096), arguments(4096, 2 * 8191, 512)


@functools.cache
def chosen(kind):
    decorated = splitjax.parallelize(step, mesh="auto", rules="auto", target=str(HOSTS))
    args = {"long": LONG, "short": SHORT}[kind]
    return decorated.plan(*args), decorated.choice, decorated.mesh


def test_the_tensor_axis_stays_within_hosts_where_activations_outweigh_gradients():
    plan, choice, mesh = chosen("long")
    assert list(mesh.shape.items()) == list(dict(plan.mesh.axes).items()) == [("data", 8), ("model", 2)]
    assert choice.slow_axes == ("data",)
    (line,) = (note for note in plan.notes if note.startswith("order of the axes"))
    assert "data crosses the slow links, model stays within hosts; model crosses" in line
    assert in_the_other_order(choice) > 1.5 * choice.best.seconds
    assert "order of the axes" in str(choice)


def test_the_tensor_axis_crosses_hosts_where_gradients_outweigh_activations():
    plan, choice, mesh = chosen("short")
    assert list(mesh.shape.items()) == [("model", 8), ("data", 2)] == list(plan.mesh.axes)
    assert choice.slow_axes == ("model",)
    assert in_the_other_order(choice) > 1.2 * choice.best.seconds
    # Not the sum alone says so: as a program it is the fastest of those that were lowered, too.
    timed = [each.program_seconds for each in choice.candidates if each.program_seconds is not None]
    assert choice.best.program_seconds == min(timed)


def in_the_other_order(choice):
    """The seconds of what was chosen with its axes the other way round, which was compared."""
    other = MeshShape(choice.mesh.axes[::-1])
    (same,) = (each for each in choice.candidates if each.mesh == other and each.rules == choice.rules)
    return same.seconds


@pytest.mark.parametrize("args", [LONG, SHORT], ids=["long", "short"])
def test_the_order_is_as_alpha_and_beta_of_each_axis_say(args):
    graph = splitjax.parallelize(step, mesh={"data": 8}).graph(*args)
    rules = load_rules("megatron")
    seconds = {}
    for sizes in ({"data": 8, "model": 2}, {"model": 2, "data": 8}):
        mesh = MeshShape.of(sizes)
        pricing = Pricing(graph, mesh, Prices.of_target(HOSTS, mesh), {}, True)
        prediction = laid_out(pricing, rules)
        seconds[mesh.names[0]] = pricing.candidate(rules, prediction).seconds
        # By hand: the major axis crosses two hosts of eight links of 50 GB/s, with as many rings as there are devices
        # behind it in a host; the other has the switch's 450 GB/s.
        assert pricing.prices.slow_axes == {mesh.names[0]}
        rings = {"data": 2, "model": 8}[mesh.names[0]]
        rate = {axis: 450e9 for axis in mesh.names} | {mesh.names[0]: min(8 * 50e9 / rings, 450e9)}
        latency = {axis: pricing.prices.links[axis].latency_seconds for axis in mesh.names}
        sent = 0.0
        for each in prediction.collectives:
            steps = (2 if each.op == "all_reduce" else 1) * (mesh.size(each.axis.split("+")) - 1)
            axes = each.axis.split("+")
            sent += steps * max(map(latency.get, axes)) + each.bytes / min(map(rate.get, axes))
        assert sent == pytest.approx(pricing.prices.sending_seconds(prediction.collectives, mesh))
    assert (seconds["data"] < seconds["model"]) == (args is LONG)


def test_which_orders_are_compared():
    asked, shapes = AutoMesh(), AutoMesh().shapes(16)
    priced = lambda target: lambda mesh: Prices.of_target(parse_target(target), mesh)
    named = lambda found: [str(shape) for shape in found]
    assert named(other_orders(asked, shapes, priced("gpu:h200:2x8"))) == [
        "model=2 x data=8", "model=4 x data=4", "model=8 x data=2",
    ]  # fmt: skip
    # One fast network has no order, and neither have links of which nothing is known.
    for target in ("gpu:h200:16", "tpu:v5e:4x4"):
        assert named(other_orders(asked, shapes, priced(target))) == []
    assert named(other_orders(asked, shapes, lambda _: Prices(1e12, 1e12, Link(1e-6, 1e9)))) == []
    # Axes that a user named stay in their order.
    two = AutoMesh(axes=("model", "data"))
    assert named(other_orders(two, two.shapes(16), priced("gpu:h200:2x8"))) == []
    # Three axes: of those orders that lie alike on the links one is compared.
    third = [shape for shape in asked.further(16) if str(shape) == "data=4 x fsdp=2 x model=2"]
    found = list(other_orders(asked, third, priced("gpu:h200:2x8")))
    assert {shape.names[0] for shape in found} >= {"fsdp", "model"}
    carried = [Prices.of_target(HOSTS, shape).links for shape in (*third, *found)]
    assert all(one != other for i, one in enumerate(carried) for other in carried[:i])


def test_meshes_of_three_axes_are_compared_in_other_orders():
    graph = splitjax.parallelize(step, mesh={"data": 8}).graph(*arguments(2048, 8192, 8, 64))
    price = lambda mesh: Prices.of_target(HOSTS, mesh)
    free = choose_mesh(graph, 16, price)
    budget = 1.5 * min(each.peak_bytes for each in free.candidates)
    choice = choose_mesh(graph, 16, price, budget_bytes=budget)
    three = [each for each in choice.candidates if "fsdp" in each.mesh.names]
    orders = {each.mesh.names for each in three}
    assert ("data", "fsdp", "model") in orders and len(orders) > 1
    assert all(choice.best.seconds <= each.seconds for each in choice.candidates if each.fits(budget))
    # What has an order of its own is a mesh that was compared, and none is said to take no rules.
    assert {each.mesh for each in three} <= set(choice.meshes)
    assert not any("it takes no rules" in line for line in choice.lines())


def test_where_nothing_crosses_hosts_nothing_is_said_of_an_order():
    graph = splitjax.parallelize(step, mesh={"data": 8}).graph(*SHORT)
    choice = choose_mesh(graph, 8, lambda mesh: Prices.of_target(parse_target("gpu:h200:8"), mesh))
    assert choice.crossings == () and choice.slow_axes == ()
    assert not any("order of the axes" in line for line in (*choice.lines(), str(choice)))
    assert all(each.mesh.names[0] == "data" for each in choice.candidates)


def test_the_order_is_told_in_words():
    mesh = MeshShape.of({"data": 2, "fsdp": 4, "model": 1})
    assert told(mesh, ("data",)) == "data crosses the slow links, fsdp stays within hosts"
    assert told(dataclasses.replace(mesh, axes=mesh.axes[:1]), ("data",)) == "data crosses the slow links"
    assert told(mesh, ("data", "fsdp")) == "data and fsdp cross the slow links"
