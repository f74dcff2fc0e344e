"""Batches onto the mesh: the arrays are the global batch, whatever part a process reads."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import splitjax
from splitjax import models
from splitjax.errors import BatchError
from splitjax.runtime.training.placing import Placement, batch_layout


def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_alone_a_process_needs_every_row_and_the_arrays_are_the_batch():
    place = Placement.of(
        {
            "image": NamedSharding(mesh(), PartitionSpec(("data", "model"))),
            "label": NamedSharding(mesh(), PartitionSpec()),
        },
        16,
    )
    batch = {"image": np.arange(64.0).reshape(16, 4), "label": np.arange(16)}
    placed = place(batch)
    np.testing.assert_array_equal(place.rows["image"], np.arange(16))
    for name in batch:
        np.testing.assert_array_equal(placed[name], batch[name])
    assert placed["image"].sharding.spec == PartitionSpec(("data", "model")) and placed["image"].addressable_shards[
        3
    ].data.shape == (2, 4)


def test_what_maps_no_names_to_arrays_is_refused():
    place = Placement.of({"x": NamedSharding(mesh(), PartitionSpec("data"))}, 8)
    with pytest.raises(BatchError, match=r"maps names to arrays(?s:.*)place the second"):
        place((np.int64(1), {"x": np.arange(8)}))


def test_a_part_of_the_rows_goes_to_its_devices():
    # A mesh of some of the devices stands for one process's part.
    half = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))
    place = Placement({"x": NamedSharding(half, PartitionSpec("data"))}, 8, {"x": np.arange(8)})
    np.testing.assert_array_equal(place({"x": np.arange(8)})["x"], np.arange(8))


@pytest.mark.parametrize("rules", ["splitbrain", "megatron"])
def test_the_layout_is_the_plans(rules):
    spec = models.build("mlp", features=(64, 32))
    init_fn, train_step, _ = models.make_step(spec, optax.adam(0.1), value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(train_step, mesh={"data": 2, "model": 4}, rules=rules)
    example = spec.example(16)
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    place = batch_layout(step, shapes, example)
    plan = step.plan(shapes, example)
    assert {name: sharding.spec for name, sharding in place.shardings.items()} == {
        name: plan.spec(f"batch/{name}") for name in example
    }
    batch = {"image": np.ones((16, 32, 32, 3), np.float32), "label": np.zeros(16, np.int32)}
    state, metrics = step(step.init(init_fn, jax.random.key(0), example=(example,)), place(batch))
    assert np.isfinite(float(metrics["loss"]))


def test_rows_and_names_that_do_not_fit_are_refused():
    place = Placement.of({"x": NamedSharding(mesh(), PartitionSpec("data"))}, 8)
    with pytest.raises(BatchError, match="8 rows"):
        place({"x": np.arange(6)})
    with pytest.raises(BatchError, match="other arrays"):
        place({"y": np.arange(8)})
