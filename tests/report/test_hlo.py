"""Collectives read from compiled modules, against programs whose collectives are known by hand."""

from __future__ import annotations

import collections as collections_module
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.report.groups import axes_of, expand
from splitjax.report.hlo import _Context, compiled_collectives, read_collectives
from splitjax.report.loops import num_trips
from splitjax.report.protobuf import WireError
from splitjax.report.wire import Computation, GroupList, Instruction, MeshGroups, Module, Shape, read_module

SHAPE = MeshShape((("data", 2), ("model", 4)))


def collectives(fn, specs, shapes):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    jitted = jax.jit(fn, in_shardings=tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs))
    return compiled_collectives(jitted.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile(), SHAPE)


def test_a_gradient_is_summed_over_data():
    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    (one,) = collectives(gradient, [(None, "model"), ("data",)], [(16, 16), (8, 16)])
    assert (one.op, one.axis, one.group_size, one.trips) == ("all_reduce", "data", 2, 1)
    assert one.dtype == "float32" and sorted(one.shape) == [4, 16]
    assert one.bytes == 2 * 1 * 16 * 4 * 4 // 2  # 2(n-1)/n of the shard
    line = gradient.__code__.co_firstlineno + 1
    assert one.source.startswith(f"{__file__}:{line} ") and "dot_general" in one.op_name


def test_a_loop_counts_its_turns():
    def looped(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh((x @ w) @ w.T), None), x, None, length=5)[0]

    found = collectives(looped, [(None, "model"), ("data",)], [(16, 16), (8, 16)])
    (one,) = [c for c in found if c.trips == 5]
    assert (one.op, one.axis, one.trips_known) == ("all_reduce", "model", True)
    assert one.bytes == 5 * 2 * 3 * (4 * 16 * 4) // 4


def test_combined_collectives_are_taken_apart():
    """XLA joins the sums of both gradients and of the loss into one instruction over a tuple."""

    def step(w, v, x):
        def loss(w, v):
            return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v))

        return jax.value_and_grad(loss, argnums=(0, 1))(w, v)

    found = collectives(step, [(), (), ("data",)], [(16, 12), (12, 4), (8, 16)])
    assert {(one.op, one.axis, one.num_combined, one.name) for one in found} == {
        ("all_reduce", "data", 3, found[0].name)
    }
    assert [one.member for one in found] == [0, 1, 2]
    assert sorted(tuple(sorted(one.shape)) for one in found) == [(), (4, 12), (12, 16)]
    assert sum(one.bytes for one in found) == 4 * (12 * 16 + 4 * 12 + 1)  # 2(n-1)/n with n = 2
    first = step.__code__.co_firstlineno
    by_size = {max(one.shape, default=0): one.source.rsplit(":", 1)[1].split()[0] for one in found}
    assert by_size == {0: str(first + 2), 12: str(first + 2), 16: str(first + 2)}


def test_a_collective_in_a_branch_is_marked():
    def branching(w, x, choose):
        return jax.lax.cond(choose[0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)

    found = collectives(branching, [("model", None), ("data",), ()], [(16, 16), (8, 16), (1,)])
    assert found and all(one.conditional for one in found if one.axis == "model")
    assert not any(
        one.conditional
        for one in collectives(lambda w, x: jnp.tanh(x @ w), [("model", None), ("data", "model")], [(16, 16), (8, 16)])
    )


def test_a_loop_of_unknown_length_counts_one_turn():
    def looped(w, x, limit):
        return jax.lax.while_loop(lambda x: jnp.max(x) < limit[0], lambda x: jnp.tanh((x @ w) @ w.T), x)

    found = collectives(looped, [(None, "model"), ("data",), ()], [(16, 16), (8, 16), (1,)])
    assert found and any(one.axis == "model" and one.trips == 1 and not one.trips_known for one in found)


@pytest.mark.tpu_aot
def test_pairs_of_start_and_done_are_one_collective():
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(w, x):
        for layer in range(2):
            x = jnp.tanh(x @ jax.lax.all_gather(w[layer], "model", axis=1, tiled=True))
            x = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return x

    specs = (PartitionSpec(None, None, "model"), PartitionSpec("data"))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False))
    shapes = [(2, 512, 512), (256, 512)]
    compiled = run.lower(
        *(
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=True)
        )
    ).compile()
    modules = map(read_module, _compat.serialized_modules(compiled))
    opcodes = collections_module.Counter(
        one.opcode
        for module in modules
        for computation in module.computations.values()
        for one in computation.instructions.values()
    )
    # The permutations as pairs; the second gather hidden behind the first product, as fusions that start, carry on and
    # end it.
    assert opcodes["collective-permute-start"] == opcodes["collective-permute-done"] == 2 and opcodes["all-gather"] == 4
    found = compiled_collectives(compiled, SHAPE)
    assert sorted((one.op, one.axis, one.bytes) for one in found) == sorted(
        2 * [("all_gather", "model", 3 * 512 * 128 * 2), ("collective_permute", "data", 128 * 512 * 2)]
    )


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (GroupList(), ("data", "model")),
        (GroupList(((0, 4), (1, 5), (2, 6), (3, 7))), ("data",)),
        (GroupList((), (4, 2, (2, 4), (1, 0))), ("data",)),
        (GroupList((), (2, 4, (8,), ())), ("model",)),
        (GroupList((), None, MeshGroups((2, 4), (), None, ((0, 0, 0),))), ("data",)),
        (GroupList((), None, MeshGroups((8,), (), None, ((0, 2, 4),))), ("model",)),
        (GroupList(((0, 1), (2, 3), (4, 5), (6, 7))), ("model:(2)2",)),  # half of an axis
        (GroupList(((0, 2), (1, 3), (4, 6), (5, 7))), ("model:(1)2",)),
        (GroupList(((0, 1, 4, 5), (2, 3, 6, 7))), ("data", "model:(2)2")),
        (GroupList(((0, 1), (2, 3), (4, 6), (5, 7))), None),  # other halves in either row
        (GroupList(((0, 3), (1, 2), (4, 7), (5, 6))), None),
    ],
)
def test_groups_are_mesh_axes(groups, axes):
    assert axes_of(expand(groups, 8), SHAPE) == axes


def test_groups_along_two_axes_are_along_none():
    cube = MeshShape((("a", 2), ("b", 2), ("c", 2)))
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), cube) == ("c",)
    assert axes_of(((0, 1), (2, 3), (4, 6), (5, 7)), cube) is None


def test_what_is_no_module_is_refused():
    with pytest.raises(WireError):
        read_module(b"\xff\xff")


@pytest.mark.tpu_aot
def test_turns_of_a_loop_are_read_off_its_condition():
    """A TPU's compiler does not write down how often a loop runs."""
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(jax.lax.psum(x @ x, "model") / 7), None), x, None, length=5)[0]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False))
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    (one,) = compiled_collectives(run.lower(shape).compile(), SHAPE)
    assert (one.op, one.axis, one.trips, one.trips_known) == ("all_reduce", "model", 5, True)
    assert one.bytes == 5 * 2 * 256 * 256 * 4 * 3 // 4


def test_branches_count_by_how_often_they_are_taken():
    branch = types.SimpleNamespace(op_name="jit(step)/splitjax:depths:1.3/cond", called=(7, 8), name="cond.1")
    context = _Context(trips=2, share=0.5)
    assert [context.into(branch, number).share for number in range(2)] == [0.125, 0.375]
    assert [context.into(branch, number).branch for number in range(2)] == ["cond.1:0", "cond.1:1"]
    users = types.SimpleNamespace(op_name="jit(step)/cond", called=(7, 8), name="cond.2")
    assert context.into(users, 1).share == 0.5 and context.into(users, 1).conditional


def instruction(number, opcode, dims, operands=(), called=()):
    along_model = GroupList(((0, 1, 2, 3), (4, 5, 6, 7)))
    return Instruction(
        number, f"{opcode}.{number}", opcode, Shape(11, dims), "", 0, ("", 0), operands, called, 0, 0, "", along_model,
        (), None, None, "",
    )  # fmt: skip


@pytest.mark.parametrize(("step", "trips"), [(1, 8), (2, 4), (3, 3), (0, None)])
def test_turns_of_a_loop_that_counts_in_steps_are_read_off_its_condition_and_body(step, trips):
    """XLA counts in twos where it hands the parts of a product round in both directions."""
    counter = dataclasses.replace(instruction(2, "get-tuple-element", (), (1,)), tuple_index=0)
    condition = [
        instruction(1, "parameter", ()),
        counter,
        dataclasses.replace(instruction(3, "constant", ()), literal=8),
        dataclasses.replace(instruction(4, "compare", (), (2, 3)), direction="LT"),
    ]
    body = [
        instruction(1, "parameter", ()),
        counter,
        dataclasses.replace(instruction(3, "constant", ()), literal=step),
        instruction(4, "add", (), (2, 3)),
        instruction(5, "tuple", (), (4,)),
    ]
    loop = instruction(3, "while", (), (2,), (20, 30))
    entry = [
        dataclasses.replace(instruction(1, "constant", ()), literal=0),
        instruction(2, "tuple", (), (1,)),
        loop,
    ]
    computations = {
        number: Computation(number, each[-1].id, {one.id: one for one in each})
        for number, each in ((10, entry), (20, condition), (30, body))
    }
    assert num_trips(Module(10, computations, (), {}), computations[10], loop) == trips


@pytest.mark.parametrize(
    ("reads_all", "op", "sent"), [(False, "reduce_scatter", 3 * 64 * 16), (True, "all_reduce", 2 * 3 * 64 * 16)]
)
def test_a_fused_sum_of_which_a_part_is_kept_is_sent_as_a_reduce_scatter(reads_all, op, sent):
    """A TPU's compiler writes a reduce-scatter so: an all-reduce and the slice of it in one fusion."""
    body = [
        instruction(1, "parameter", (64, 16)),
        instruction(2, "all-reduce", (64, 16), (1,)),
        instruction(3, "partition-id", ()),
        instruction(4, "dynamic-slice", (16, 16), (2, 3, 3)),
        *([instruction(5, "negate", (64, 16), (2,))] if reads_all else []),
    ]
    entry = [instruction(6, "parameter", (64, 16)), instruction(7, "fusion", (16, 16), (6,), (20,))]
    computations = {
        20: Computation(20, 4, {each.id: each for each in body}),
        10: Computation(10, 7, {each.id: each for each in entry}),
    }
    (one,) = read_collectives(Module(10, computations, ()), SHAPE)
    assert (one.op, one.axis, one.group_size, one.bytes) == (op, "model", 4, sent)
