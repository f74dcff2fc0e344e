"""Mistakes a user makes, each a typed error with value, place and remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import splitjax
from splitjax.errors import (
    BatchError,
    MeshError,
    RuleError,
    SplitjaxError,
    StateError,
    TraceError,
    UnknownPrimitiveError,
)
from splitjax.primitives.table import OPERATIONS

MESH = {"data": 2, "model": 4}
BATCH = np.ones((8, 8), np.float32)


def step(state, batch):
    loss, grad = splitjax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad}, loss


def fresh():
    return {"w": np.ones((8, 8), np.float32)}


def complains(error_type, pattern, call):
    with pytest.raises(error_type, match=pattern) as caught:
        call()
    assert isinstance(caught.value, SplitjaxError)
    assert caught.value.remedy and caught.value.place, "a typed error names place and remedy"
    return caught.value


def test_wrong_mesh_product():
    error = complains(
        MeshError,
        "needs 12 devices, and JAX sees 8",
        lambda: splitjax.parallelize(step, mesh={"data": 3, "model": 4})(fresh(), BATCH),
    )
    assert error.value == {"data": 3, "model": 4}


@pytest.mark.parametrize("mesh", [{"data": 0}, {"data": "two"}, {"": 8}, {3: 8}])
def test_malformed_mesh(mesh):
    complains(MeshError, "mesh axis|axis .* needs", lambda: splitjax.parallelize(step, mesh=mesh))


@pytest.mark.parametrize(
    ("mesh", "remedy"),
    [
        (8, "mesh={'data': 8}"),
        (np.int64(8), "mesh={'data': 8}"),
        ((2, 4), "mesh={'data': 2, 'model': 4}"),
        ([2, 4], "{'data': 2, 'model': 4}"),
        (np.array([2, 4]), "{'data': 2, 'model': 4}"),
        ((2, 2, 2), "jax.make_mesh((2, 2, 2), names)"),
        (8.0, "jax.make_mesh"),
        ({"data", "model"}, "jax.make_mesh"),
        (True, "jax.make_mesh"),
    ],
    ids=["number", "numpy-number", "tuple", "list", "array", "three-axes", "float", "set", "bool"],
)
def test_a_mesh_without_names(mesh, remedy):
    for decorate in (splitjax.parallelize, splitjax.nnx.parallelize, splitjax.equinox.parallelize):
        error = complains(MeshError, "named axes", lambda decorate=decorate: decorate(step, mesh=mesh))
        assert error.value is mesh and remedy in error.remedy


def test_a_mesh_of_devices_alone_and_one_without_devices():
    error = complains(MeshError, "named axes", lambda: splitjax.parallelize(step, mesh=jax.devices()))
    assert "jax.sharding.Mesh(devices" in error.remedy
    abstract = jax.sharding.AbstractMesh((8,), ("data",))
    complains(MeshError, "no devices", lambda: splitjax.parallelize(step, mesh=abstract)(fresh(), BATCH))


def test_unknown_rule_set_and_axis():
    complains(RuleError, "splitbrian", lambda: splitjax.parallelize(step, rules="splitbrian"))
    rules = splitjax.RuleSet("mine", (splitjax.Rule("all", shard=({"out": "modle"},)),))
    complains(MeshError, "modle", lambda: splitjax.parallelize(step, mesh=MESH, rules=rules)(fresh(), BATCH))


def test_rules_that_replicate_everything():
    rules = splitjax.RuleSet("mine", (splitjax.Rule("convs", kind="conv", shard=({"out": "model"},)),))
    complains(RuleError, "replicated|model", lambda: splitjax.parallelize(step, mesh=MESH, rules=rules)(fresh(), BATCH))


def test_state_that_does_not_come_back():
    complains(
        StateError,
        "does not come back",
        lambda: splitjax.parallelize(lambda state, batch: batch.sum(), mesh=MESH)(fresh(), BATCH),
    )

    def widened(state, batch):
        return {"w": state["w"].astype(jnp.float16)}, 0.0

    error = complains(
        StateError,
        "comes back changed: w goes in as float32",
        lambda: splitjax.parallelize(widened, mesh=MESH)(fresh(), BATCH),
    )
    assert error.value == "w"


def test_ambiguous_state():
    def twice(state, batch):
        new = {"w": state["w"] * 2}
        return new, new

    complains(StateError, "could be any of 2 results", lambda: splitjax.parallelize(twice, mesh=MESH)(fresh(), BATCH))
    a, b = splitjax.parallelize(twice, mesh=MESH, state_outnums=1, rules="data_parallel")(fresh(), BATCH)
    assert float(b["w"][0, 0]) == 2.0


def test_a_batch_that_does_not_divide_is_taken_with_a_note():
    plan = splitjax.parallelize(step, mesh=MESH).plan(fresh(), np.ones((12, 8), np.float32))
    assert any("12 examples do not divide by" in note for note in plan.notes)
    (warning,) = plan.warnings  # the devices along data repeat each other's work
    assert warning.ratio == 2 and "divide by data x model=8" in warning.remedy


def test_batch_arrays_with_leading_dims_of_their_own_are_taken():
    def two(state, batch):
        return state, batch["a"].sum() + batch["b"].sum()

    batch = {"a": np.ones((8, 2)), "b": np.ones((4, 2))}
    assert splitjax.parallelize(two, mesh=MESH)(fresh(), batch)[1] == 24


@pytest.mark.parametrize("called", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(
    ("batch", "place", "remedy"),
    [
        ({"x": BATCH.tolist()}, "batch/x", "numpy.asarray"),
        (BATCH.tolist(), "batch", "numpy.asarray"),
        ({"x": [1.0] * 8}, "batch/x", "numpy.asarray"),
        ({"x": list(np.ones(8))}, "batch/x", "numpy.asarray"),
        ({"x": [BATCH, [1, 2]]}, "batch/x/1", "numpy.asarray"),
        ("text", "batch", "ids of words"),
        ({"x": BATCH, "name": ["a", "b"]}, "batch/name/0", "ids of words"),
        ({"x": BATCH, "name": np.array(["a"] * 8)}, "batch/name", "ids of words"),
        ({"x": BATCH, "name": b"a"}, "batch/name", "ids of words"),
    ],
    ids=[
        "rows",
        "bare rows",
        "numbers",
        "numbers of NumPy",
        "beside an array",
        "text",
        "texts",
        "an array of text",
        "bytes",
    ],
)
def test_lists_of_numbers_and_text_in_a_batch(batch, place, remedy, called):
    def sums(state, batch):
        return state, sum(leaf.sum() for leaf in jax.tree.leaves(batch))

    parallel = splitjax.parallelize(sums, mesh=MESH, rules="data_parallel")
    if called:
        parallel(fresh(), BATCH)  # a later call goes another way, past the compiled step of the first
    error = complains(BatchError, "list of numbers|text", lambda: parallel(fresh(), batch))
    assert error.place == place and remedy in error.remedy


def test_lists_of_arrays_and_single_numbers_in_a_batch_are_legal():
    def sums(state, batch):
        return state, sum(leaf.sum() for leaf in batch["parts"]) * batch["scale"]

    parallel = splitjax.parallelize(sums, mesh=MESH, rules="data_parallel")
    assert float(parallel(fresh(), {"parts": [BATCH, BATCH], "scale": 0.5})[1]) == 64


def test_a_list_of_numbers_in_a_batch_of_a_step_over_modules():
    # Numbers are part of the program there: each batch would compile anew.
    parallel = splitjax.equinox.parallelize(lambda model, opt, batch: (model, opt, batch["x"][0]), mesh=MESH)
    error = complains(BatchError, "list of numbers", lambda: parallel(fresh(), {}, {"x": [1.0, 2.0], "name": "train"}))
    assert error.place == "batch/x"


def test_missing_and_overlapping_arguments():
    complains(
        StateError, "missing", lambda: splitjax.parallelize(step, mesh=MESH, state_argnums=(0, 3))(fresh(), BATCH)
    )
    complains(StateError, "state and batch at once", lambda: splitjax.parallelize(step, mesh=MESH, batch_argnums=0))
    complains(StateError, "static_argnames", lambda: splitjax.parallelize(step, mesh=MESH, static_argnames="nothing"))
    complains(
        StateError,
        "hashable",
        lambda: splitjax.parallelize(lambda s, b, c: (s, b.sum()), mesh=MESH, static_argnums=2)(fresh(), BATCH, [1]),
    )


def test_what_is_not_an_array():
    complains(
        TraceError,
        "not an array",
        lambda: splitjax.parallelize(lambda s, b, f: (s, b.sum()), mesh=MESH)(fresh(), BATCH, "text"),
    )


def test_collectives_of_pmap():
    def pmapped(state, batch):
        return {"w": jax.lax.pmean(state["w"], "batch")}, batch.sum()

    complains(TraceError, "global batch|pmap", lambda: splitjax.parallelize(pmapped, mesh=MESH)(fresh(), BATCH))


@pytest.mark.parametrize(
    "options",
    [{"group_comm": "all"}, {"sync": "denze"}, {"backprop": "linear"}, {"unknown": "ignore"}, {"mesh": "data=8"}],
    ids=str,
)
def test_undocumented_options(options):
    complains(ValueError, "no such value|no string", lambda: splitjax.parallelize(step, **options))


def test_state_on_the_wrong_devices():
    stray = jax.device_put(fresh(), jax.devices()[3])
    error = complains(StateError, "already lives on", lambda: splitjax.parallelize(step, mesh=MESH)(stray, BATCH))
    assert "place" in error.remedy


def _primitive(name):
    """A primitive that splitjax has never heard of: doubles its operand."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: 2 * x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    return primitive


def test_unknown_primitive():
    strange = _primitive("strange")

    def uses(state, batch):
        return {"w": state["w"] + 1}, strange.bind(batch @ state["w"]).sum()

    error = complains(UnknownPrimitiveError, "'strange'", lambda: splitjax.parallelize(uses, mesh=MESH)(fresh(), BATCH))
    assert "test_parallelize.py" in error.place and "register_dims" in error.remedy
    gathered = splitjax.parallelize(uses, mesh=MESH, unknown="gather")
    plan = gathered.plan(fresh(), BATCH)
    assert len(plan.gathered) == 1 and "strange at" in plan.gathered[0] and "strange" in str(plan)
    _, got = gathered(fresh(), BATCH)
    assert float(got) == pytest.approx(float(2 * (BATCH @ fresh()["w"]).sum()))


def test_a_registered_primitive_is_known():
    known = _primitive("well_known")

    def uses(state, batch):
        return {"w": state["w"] + 1}, known.bind(batch @ state["w"]).sum()

    splitjax.register_dims(known, "b f -> b f")
    try:
        splitjax.parallelize(uses, mesh=MESH)(fresh(), BATCH)
    finally:
        OPERATIONS.forget("well_known")


def test_an_unknown_primitive_off_every_sharded_path_is_no_error():
    strange = _primitive("aside")

    def uses(state, batch):
        return {"w": state["w"] + 1, "n": strange.bind(state["n"])}, (batch @ state["w"]).sum()

    splitjax.parallelize(uses, mesh=MESH)({**fresh(), "n": np.ones((3,), np.float32)}, BATCH)


def test_a_step_says_what_it_is():
    @splitjax.parallelize(mesh={"data": 2, "model": 4}, rules="megatron")
    def train_step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state)
        return state - grads, loss

    assert repr(train_step).startswith("<step train_step on data=2 x model=4, rules megatron, not called yet; print(")
    train_step.plan(jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32))
    assert "planned 1 time;" in repr(train_step)
    assert repr(splitjax.parallelize(train_step.__wrapped__)).startswith("<step train_step on all devices, rules split")
