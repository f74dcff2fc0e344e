"""Collectives read from compiled modules, against programs whose collectives are known by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from splitjax.mesh import MeshShape
from splitjax.report.groups import axes_of, expand
from splitjax.report.hlo import compiled_collectives
from splitjax.report.wire import GroupList, MeshGroups, WireError, read_module

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


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (GroupList(), ("data", "model")),
        (GroupList(((0, 4), (1, 5), (2, 6), (3, 7))), ("data",)),
        (GroupList((), (4, 2, (2, 4), (1, 0))), ("data",)),
        (GroupList((), (2, 4, (8,), ())), ("model",)),
        (GroupList((), None, MeshGroups((2, 4), (), None, ((0, 0, 0),))), ("data",)),
        (GroupList((), None, MeshGroups((8,), (), None, ((0, 2, 4),))), ("model",)),
        (GroupList(((0, 1), (2, 3), (4, 5), (6, 7))), None),  # half of an axis
    ],
)
def test_groups_are_mesh_axes(groups, axes):
    assert axes_of(expand(groups, 8), SHAPE) == axes


def test_what_is_no_module_is_refused():
    with pytest.raises(WireError):
        read_module(b"\xff\xff")
