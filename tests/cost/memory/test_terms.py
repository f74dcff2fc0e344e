"""Predicted memory against numbers computed by hand."""

from __future__ import annotations

import dataclasses

from splitjax.cost import predict_memory
from splitjax.cost.flow import flows

ALL = ("data", "model")
COLUMN, ROW = (None, "model"), ("model", None)


def predicted(graph, plans, mesh, batch_axes, replicated_batch="all"):
    return predict_memory(graph, plans, flows(graph, plans, mesh, batch_axes, replicated_batch), mesh, batch_axes)


def test_state_is_exact_and_gradients_lie_like_parameters(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("d", ("x", 16), ("h", 32), COLUMN, ("model",))
    n.leaf("opt/mu", ("x", "h"), (16, 32), ("data", "model"), role="optimizer", follows="d/kernel")
    n.leaf("stats/mean", ("h",), (32,), (), role="statistic")
    n.leaf("batch/x", ("batch", "x"), (64, 16), (ALL,), role="batch")
    memory = predicted(n.graph(), n.plans, n.mesh, ("data",), "data")
    params = (16 * 32 + 32) * 4 // 4
    assert memory.state_bytes == params + 16 * 32 * 4 // 8 + 32 * 4
    assert memory.peak_bytes == memory.state_bytes + params + memory.activation_bytes


def test_a_whole_gradient_is_there_before_it_is_summed_into_parts(net):
    n = net(64, {"data": 4})
    n.dense("d1", ("x", 16), ("h", 32))
    n.dense("d2", ("h", 32), ("y", 8))
    plans = [
        dataclasses.replace(leaf, gradient=("data", *leaf.spec[1:])) if leaf.path.endswith("kernel") else leaf
        for leaf in n.plans
    ]
    memory = predicted(n.graph(), plans, n.mesh, ("data",), "data")
    kernels = (16 * 32 + 32 * 8) * 4
    assert memory.peak_bytes - memory.state_bytes - memory.activation_bytes == kernels // 4 + 16 * 32 * 4


def test_data_parallel_activations_are_divided(net):
    n = net(64, {"data": 8})
    n.dense("d1", ("x", 16), ("h", 32))
    assert predicted(n.graph(80_000), n.plans, n.mesh, ("data",)).activation_bytes == 10_000
    assert predicted(n.graph(80_000), n.plans, n.mesh, ()).activation_bytes == 80_000


def test_the_gathered_examples_of_a_group_count(net):
    """B = 8, K = 4: a device holds K B examples of each split layer's input instead of B."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("d1", ("e", 32), ("h", 128), COLUMN)
    n.dense("d2", ("h", 128), ("y", 64), COLUMN)
    memory = predicted(n.graph(800_000), n.plans, n.mesh, ALL)
    assert memory.activation_bytes == 100_000 + 3 * 8 * (32 + 128) * 4


def test_one_gathered_input_for_several_readers(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    for name in "qkv":
        n.dense(name, ("e", 32), ("heads", 128), COLUMN)
    assert predicted(n.graph(800_000), n.plans, n.mesh, ALL).activation_bytes == 100_000 + 3 * 8 * 32 * 4


def test_column_split_outputs_lie_on_several_devices(net):
    """The batch over data only: of 32 x 128 outputs per shard of the batch a device holds a quarter."""
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 128), COLUMN)
    n.dense("down", ("h", 128), ("y", 32), ROW)
    memory = predicted(n.graph(800_000), n.plans, n.mesh, ("data",), "data")
    assert memory.activation_bytes == 400_000 - 32 * 128 * 4 * 3 // 4


def test_activations_never_fall_below_an_even_share(net):
    n = net(64, {"data": 2, "model": 4})
    n.dense("first", ("x", 16), ("e", 32))
    n.dense("up", ("e", 32), ("h", 4096), COLUMN)
    assert predicted(n.graph(8_000), n.plans, n.mesh, ("data",), "data").activation_bytes == 1_000
