"""What flows into and out of a compiled module's operations, through fusions, loops, branches and tuples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.report.dataflow import Dataflow
from splitjax.report.hlo import read_collectives
from splitjax.report.wire import read_module

SHAPE = MeshShape((("data", 2), ("model", 4)))


def flow_of(fn, specs, shapes):
    """The dataflow of a compiled function, and its collectives."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    jitted = jax.jit(fn, in_shardings=tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs))
    compiled = jitted.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    (module,) = map(read_module, _compat.serialized_modules(compiled))
    return Dataflow(module), read_collectives(module, SHAPE)


def ancestors(flow, node):
    """The arguments that a node is made from."""
    return {name for _, one in flow.walk([node], flow.sources) if (name := flow.argument(one))}


def test_arguments_and_results():
    flow, _ = flow_of(lambda w, x: (jnp.tanh(x @ w), x + 1), [(), ("data",)], [(4, 4), (8, 4)])
    assert {name for name, _ in flow.arguments()} == {"w", "x"}
    assert len(flow.results) == 2
    assert {frozenset(ancestors(flow, one)) for one in flow.results} == {frozenset({"w", "x"}), frozenset({"x"})}


def test_a_gathered_weight_is_traced_to_its_argument():
    flow, found = flow_of(lambda w, x: jnp.tanh(x @ w.T), [("data",), ("data",)], [(16, 64), (256, 64)])
    (one,) = [one for one in found if one.op == "all_gather"]
    (source,) = flow.sources(flow.collective(one.name, one.member))
    assert flow.origin(source) == "w"


def test_what_was_computed_has_no_origin_and_constants_do_not_count():
    flow, _ = flow_of(lambda m, g: (0.9 * m + 0.1, m * g), [(), ()], [(64,), (64,)])
    scaled = {flow.scaled_origin(one) for one in flow.results}
    assert scaled == {"m", None}
    assert {flow.origin(one) for one in flow.results} == {None}


def test_members_of_a_combined_collective_flow_apart():
    def step(w, v, x):
        gw, gv = jax.grad(lambda w, v: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v)), argnums=(0, 1))(w, v)
        return w - gw, v - gv

    flow, found = flow_of(step, [(), (), ("data",)], [(16, 12), (12, 4), (8, 16)])
    assert {one.num_combined for one in found} == {2}
    for one in found:
        node = flow.collective(one.name, one.member)
        partners = {
            flow.origin(source) for _, user in flow.walk([node], flow.users) for source in flow.sources(user)
        } - {None}
        assert partners == {"w" if 16 in one.shape else "v"}


def test_values_flow_through_loops():
    def looped(w, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0]

    flow, found = flow_of(looped, [(None, None, "model"), ("data",)], [(5, 16, 16), (8, 16)])
    (one,) = [one for one in found if one.trips == 5]
    node = flow.collective(one.name, one.member)
    # Its operand is a slice of the argument, or what the turn before left, which began as the other argument.
    assert ancestors(flow, node) & {"w", "x"}
    assert flow.results & {user for _, user in flow.walk([node], flow.users)}
    assert flow.decisions


def test_a_branch_is_decided_by_its_predicate():
    def branching(w, x):
        return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ w), lambda x: 2 * x, x)

    flow, found = flow_of(branching, [("model", None), ("data",)], [(16, 16), (8, 16)])
    (scalar,) = [one for one in found if one.shape == ()]
    cone = {user for _, user in flow.walk([flow.collective(scalar.name, scalar.member)], flow.users)}
    assert flow.decisions & cone and not flow.results & cone
    (result,) = {frozenset(ancestors(flow, one)) for one in flow.results if "w" in ancestors(flow, one)}
    assert result == {"w", "x"}


def test_a_collective_that_the_module_lacks():
    flow, _ = flow_of(lambda x: x + 1, [("data",)], [(8, 4)])
    assert flow.collective("all-reduce.99", 0) is None


@pytest.mark.parametrize("depth", [1, 3])
def test_lines_are_the_users(depth):
    def inner(x):
        return jnp.tanh(x)

    def outer(x):
        return inner(x) if depth == 1 else inner(inner(inner(x)))

    flow, _ = flow_of(outer, [("data",)], [(8, 4)])
    (result,) = flow.results
    assert flow.lines(result)[0] == f"{__file__}:{inner.__code__.co_firstlineno + 1} (inner)"
