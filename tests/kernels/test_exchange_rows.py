"""Rows sent to their owners: the kernel against the oracle on virtual devices, what it leaves unsent, and the TPU's own
compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from splitjax.errors import KernelError
from splitjax.kernels import decode, encode, exchange_counts, exchange_rows, gather_rows, scatter_rows, segment_sum
from splitjax.kernels.exchange_rows import exchange_reference, exchange_tpu, push_tpu
from tests.kernels.interpreting import TOPOLOGIES, by_mode, interpreting, tpu_mesh


def mesh_of(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))


def operands(devices, num_rows, capacity, width, dtype=jnp.float32):
    """Values, row numbers with some outside, and counts between nothing (of the first device) and everything (for the
    last)."""
    rng = np.random.default_rng(devices)
    counts = rng.integers(0, capacity + 1, (devices, devices))
    counts[0], counts[:, -1] = 0, capacity
    rows = rng.integers(-1, num_rows + 1, (devices, devices, capacity))
    return (
        jnp.asarray(rng.normal(size=(devices, num_rows, width)), dtype),
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(counts, jnp.int32),
    )


def everywhere(function, mesh, *arrays, check_vma=False):
    """`function(values, rows, counts, incoming)` on each device, on its own part of the arrays; the results side by
    side."""
    names = mesh.axis_names

    def local(values, rows, counts):
        values, rows, counts = (one.reshape(one.shape[len(names) :]) for one in (values, rows, counts))
        return function(values, rows, counts, exchange_counts(counts, "x"))[(None,) * len(names)]

    spec = PartitionSpec(*names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))(*arrays)


def expected_of(values, rows, counts):
    devices, num_rows, width = values.shape
    received = np.zeros((devices, devices, rows.shape[2], width), np.float32)
    for source in range(devices):
        for target in range(devices):
            for slot, row in enumerate(np.asarray(rows)[source, target, : counts[source, target]]):
                if 0 <= row < num_rows:
                    received[target, source, slot] = values[source, row]
    return received


@by_mode
@pytest.mark.parametrize(
    ("devices", "capacity", "width", "dtype"),
    [(1, 5, 16, jnp.float32), (3, 20, 33, jnp.bfloat16), (5, 9, 130, jnp.float32)],
)
def test_tpu_kernel(devices, capacity, width, dtype, mode):
    values, rows, counts = operands(devices, 10, capacity, width, dtype)
    arrays = values, rows, jnp.where(counts == capacity, capacity + 30, counts)  # nothing is written behind the end
    with interpreting(mode) as interpret:
        kernel = functools.partial(exchange_tpu, axis="x", chunk=8, interpret=interpret)
        received = everywhere(kernel, mesh_of(devices), *arrays)
    np.testing.assert_array_equal(np.asarray(received, np.float32), expected_of(*arrays))


def test_tpu_kernel_along_one_axis_of_two():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    groups = [operands(3, 10, 9, 16) for _ in range(2)]
    arrays = [jnp.stack([groups[0][i], groups[1][i] + (i == 0)], axis=1) for i in range(3)]
    with interpreting("on_wait") as interpret:
        received = everywhere(
            functools.partial(exchange_tpu, axis="x", chunk=8, interpret=interpret), mesh, *arrays, check_vma=True
        )
    for group in range(2):
        np.testing.assert_array_equal(received[:, group], expected_of(*(one[:, group] for one in arrays)))


def test_what_is_not_counted_is_not_sent():
    values, rows, counts = operands(4, 10, 20, 16)
    with interpreting("eager") as interpret:
        push = functools.partial(push_tpu, axis="x", chunk=8, interpret=interpret)
        pushed = np.asarray(everywhere(push, mesh_of(4), values, rows, counts))
    sent = -(-np.asarray(counts).T // 8) * 8  # whole chunks; the interpreter's memory is NaN until something is written
    is_sent = np.arange(24) < sent[..., None]
    assert is_sent.any() and not is_sent.all()
    np.testing.assert_array_equal(np.isnan(pushed).all(-1), ~is_sent)
    np.testing.assert_array_equal(np.isnan(pushed).any(-1), ~is_sent)


def test_oracle_and_dispatch():
    arrays = operands(4, 10, 6, 3)
    for function in (functools.partial(exchange_reference, axis="x"), lambda *operands: exchange_rows(*operands, "x")):
        np.testing.assert_array_equal(everywhere(function, mesh_of(4), *arrays, check_vma=True), expected_of(*arrays))


def test_axes_of_a_vmap_have_no_kernel():
    arrays = operands(3, 10, 6, 4)
    run = jax.vmap(lambda v, r, c: exchange_rows(v, r, c, exchange_counts(c, "x"), "x"), axis_name="x")
    np.testing.assert_array_equal(jax.jit(run)(*arrays), expected_of(*arrays))


def test_nothing_to_send():
    values, rows, counts = operands(2, 4, 3, 5)
    whole = lambda *operands: exchange_rows(*operands, "x")
    assert not everywhere(whole, mesh_of(2), values, rows, jnp.zeros_like(counts)).any()
    assert everywhere(whole, mesh_of(2), values, rows[..., :0], jnp.zeros_like(counts)).shape == (2, 2, 0, 5)


def test_derivative_sends_cotangents_back():
    values, rows, counts = operands(3, 10, 6, 4)
    weights = jnp.arange(3 * 3 * 6 * 4.0).reshape(3, 3, 6, 4)
    mesh = mesh_of(3)

    def cost(function, values):
        return (everywhere(function, mesh, values, rows, counts) * weights).sum()

    own = jax.grad(functools.partial(cost, lambda *operands: exchange_rows(*operands, "x")))(values)
    oracle = jax.grad(functools.partial(cost, functools.partial(exchange_reference, axis="x")))(values)
    assert oracle.any()
    np.testing.assert_allclose(own, oracle, rtol=1e-6)


def test_what_does_not_fit_the_mesh_is_refused():
    values, rows, counts = operands(2, 4, 3, 5)
    with pytest.raises(KernelError, match="has 2 devices"):
        everywhere(lambda v, r, c, i: exchange_rows(v, r[:1], c, i, "x"), mesh_of(2), values, rows, counts)
    with pytest.raises(KernelError, match="wrong dtype"):
        everywhere(
            lambda v, r, c, i: exchange_rows(v, r.astype(jnp.float32), c, i, "x"), mesh_of(2), values, rows, counts
        )


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("topology", "dtype"), [*zip(TOPOLOGIES, (jnp.float32, jnp.float32, jnp.bfloat16), strict=True)]
)
def test_tpu_programs_of_several_chips_contain_every_kernel(topology, dtype):
    """A step's local work and exchange, and its derivative, in one program over four chips."""
    mesh = tpu_mesh(topology, 4)

    def local(table, ids, rows, counts):
        table, ids, rows, counts = table[0], ids[0], rows[0], counts[0]
        incoming = exchange_counts(counts, "x")

        def cost(table):
            looked_up = gather_rows(table, ids)
            sums = segment_sum(ids, looked_up.astype(dtype)).sums
            return jnp.square(exchange_rows(sums, rows, counts, incoming, "x").astype(jnp.float32)).sum()

        grad = jax.grad(cost)(table)
        found, _ = decode(encode(grad[:, 0] != 0), 64)
        return scatter_rows(table, found, gather_rows(grad, found))[None]

    spec = PartitionSpec("x")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    types = ((4, 500, 96), jnp.float32), ((4, 200), jnp.int32), ((4, 4, 64), jnp.int32), ((4, 4), jnp.int32)
    text = (
        run.lower(*(jax.ShapeDtypeStruct(*one, sharding=NamedSharding(mesh, spec)) for one in types))
        .compile()
        .as_text()
    )
    for name in ("exchange_rows", "gather_rows", "scatter_rows", "segment_sum", "bitmap_encode", "bitmap_ranks"):
        assert f"splitjax_{name}" in text
