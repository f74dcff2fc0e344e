"""The decorator's interface: every way to write it, several states, init, place, like, lower, donation, pinning."""

from __future__ import annotations

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import splitjax
from splitjax.errors import DonatedStateError, PlanError
from tests.steps import attention_case, conv_case, train

MESH = {"data": 2, "model": 4}


@pytest.fixture(scope="module")
def case():
    return conv_case(batch_norm=False)


def toy(state, batch):
    loss, grad = splitjax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad}, {"loss": loss}


def toy_state():
    return {"w": np.ones((8, 8), np.float32)}


BATCH = np.ones((8, 8), np.float32)


def test_bare_called_and_as_a_function():
    bare = splitjax.parallelize(toy)
    assert bare.mesh.shape == {"data": 8}
    called = splitjax.parallelize(mesh=MESH)(toy)
    assert dict(called.mesh.shape) == MESH
    assert bare.__name__ == "toy" and bare.__wrapped__ is toy
    state, metrics = called(toy_state(), BATCH)
    assert set(metrics) == {"loss"} and state["w"].sharding.spec == PartitionSpec(None, "model")


def test_a_call_of_a_program_that_has_run_goes_through_few_functions():
    """What a call adds to `jax.jit`'s is microseconds (`python -m benchmarks overhead`): a sentence made for an error
    that does not come costs as much as all of them."""
    step, state = splitjax.parallelize(toy, donate=False), toy_state()
    step(state, BATCH)
    package, entered = os.path.dirname(splitjax.__file__), []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        step(state, BATCH)
    finally:
        sys.setprofile(None)
    assert 1 <= len(entered) <= 10, entered


def test_a_given_mesh_is_used_as_it_is():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = splitjax.parallelize(toy, mesh=mesh)
    assert step.mesh is mesh
    state, _ = step(toy_state(), BATCH)
    assert state["w"].sharding.mesh == mesh


def test_init_creates_the_state_already_sharded(case):
    step = splitjax.parallelize(case.step, mesh=MESH)
    state = step.init(case.init, jax.random.key(0), example=(case.batches[0],))
    plan = step.plan(state, case.batches[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        spec = plan.spec(jax.tree_util.keystr(path, simple=True, separator="/"))
        assert leaf.sharding.is_equivalent_to(NamedSharding(step.mesh, spec), leaf.ndim)
    kernel = state["params"]["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4
    want = case.init(jax.random.key(0))
    np.testing.assert_allclose(state["params"]["Dense_0"]["kernel"], want["params"]["Dense_0"]["kernel"], atol=1e-6)


def test_example_may_be_abstract(case):
    step = splitjax.parallelize(case.step, mesh=MESH)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), case.batches[0])
    state = step.init(case.init, jax.random.key(0), example=(abstract,))
    train(step, state, case.batches)
    assert len(step.compiles) == 1


def test_abstract_state_has_shardings_and_computes_nothing(case):
    step = splitjax.parallelize(case.step, mesh=MESH)
    shapes = step.abstract_state(case.init, jax.random.key(0), example=(case.batches[0],))
    kernel = shapes["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, jax.ShapeDtypeStruct) and kernel.sharding.spec == PartitionSpec(None, "model")
    assert shapes["opt"][0].trace["Dense_0"]["kernel"].sharding.spec == PartitionSpec(None, "model")


def test_place_copies(case):
    step = splitjax.parallelize(case.step, mesh=MESH)
    state = case.init(jax.random.key(0))
    placed = step.place(state, example=(case.batches[0],))
    step(placed, case.batches[0])
    assert np.isfinite(np.asarray(state["params"]["Dense_0"]["kernel"])).all()
    again = step.place(state, example=(case.batches[0],))
    kept = step.place(again, example=(case.batches[0],))  # already there: still a copy of its own
    step(kept, case.batches[0])
    assert not again["params"]["Dense_0"]["kernel"].is_deleted()


def test_several_states():
    tx = optax.adam(1e-2)

    def step(params, opt_state, batch, scale):
        loss, grads = splitjax.value_and_grad(lambda p: scale * ((batch @ p["w1"] @ p["w2"]) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    def init(key):
        params = {"w1": jax.random.normal(key, (8, 16)), "w2": jax.random.normal(key, (16, 4))}
        return params, tx.init(params)

    parallel = splitjax.parallelize(step, mesh=MESH, state_argnums=(0, 1), batch_argnums=2, rules="megatron")
    params, opt = parallel.init(init, jax.random.key(0), example=(BATCH, 1.0))
    plan = parallel.plan(params, opt, BATCH, 1.0)
    assert plan.spec("params/w1") == PartitionSpec(None, "model") and plan.spec("opt_state/0/mu/w2") == PartitionSpec(
        "model", None
    )
    want = jax.jit(step)(*init(jax.random.key(0)), BATCH, 1.0)
    got = parallel(params, opt, BATCH, 1.0)
    np.testing.assert_allclose(got[0]["w1"], want[0]["w1"], atol=1e-5)
    placed = parallel.place(*init(jax.random.key(0)), example=(BATCH, 1.0))
    assert isinstance(placed, tuple) and len(placed) == 2


def test_keyword_and_static_arguments():
    @functools.partial(splitjax.parallelize, mesh=MESH, static_argnames="power")
    def step(state, batch, key, power=2):
        assert isinstance(power, int)
        noise = jax.random.normal(key, batch.shape)
        return {"w": state["w"] + ((batch + noise) ** power @ state["w"]).mean()}, power * batch.sum()

    state = toy_state()
    a, first = step(state, batch=BATCH, key=jax.random.key(0))
    b, second = step(state, BATCH, jax.random.key(0), 3)
    assert float(second) == pytest.approx(1.5 * float(first)) and len(step.compiles) == 2
    assert "static argument 3" in step.compiles[1].reason
    step(b, BATCH, jax.random.key(1), 3)
    step(a, BATCH, jax.random.key(1), 2)
    assert len(step.compiles) == 2


def test_recompiles_are_counted_and_explained(case):
    step = splitjax.parallelize(toy, mesh=MESH)
    state, _ = step(toy_state(), BATCH)
    state, _ = step(state, BATCH[:4].repeat(4, 0))
    assert [record.reason for record in step.compiles] == ["first call", "batch: float32[8,8] -> float32[16,8]"]
    state, _ = step(state, BATCH)
    assert len(step.compiles) == 2 and step.compiles[0].number == 1


def test_like_evaluates_on_the_same_layouts(case):
    step = splitjax.parallelize(case.step, mesh=MESH)

    def evaluate(state, batch):
        return case.step(state, batch)[1]

    evaluation = step.like(evaluate)
    with pytest.raises(PlanError, match="no plan yet"):
        evaluation(case.init(jax.random.key(0)), case.batches[0])
    state = step.init(case.init, jax.random.key(0), example=(case.batches[0],))
    metrics = evaluation(state, case.batches[0])
    assert not state["params"]["Dense_0"]["kernel"].is_deleted()
    assert float(metrics["loss"]) == pytest.approx(
        float(jax.jit(evaluate)(case.init(jax.random.key(0)), case.batches[0])["loss"]), abs=1e-5
    )
    assert evaluation.plan(state, case.batches[0]).spec("params/Dense_1/kernel") == PartitionSpec(None, "model")


def test_like_may_take_the_parameters_alone(case):
    step = splitjax.parallelize(case.step, mesh=MESH)
    state = step.init(case.init, jax.random.key(0), example=(case.batches[0],))
    predict = step.like(lambda params, batch: batch["x"].sum() + params["Dense_0"]["kernel"].sum())
    predict(state["params"], case.batches[0])
    assert predict.plan(state["params"], case.batches[0]).spec("Dense_0/kernel") == PartitionSpec(None, "model")


def test_lower_compiles_ahead_of_time(case):
    step = splitjax.parallelize(case.step, mesh=MESH)
    shapes = step.abstract_state(case.init, jax.random.key(0), example=(case.batches[0],))
    compiled = step.lower(shapes, case.batches[0]).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert "all-reduce" in compiled.as_text()


def test_a_consumed_state_is_a_typed_error_that_names_the_call(case):
    step = splitjax.parallelize(toy, mesh=MESH)
    state = step.place(toy_state(), example=(BATCH,))
    step(state, BATCH)
    with pytest.raises(DonatedStateError, match=r"call 1 of the step, at .*test_parallel_step\.py") as caught:
        step(state, BATCH)
    assert "donate=False" in str(caught.value)
    # The same arrays in another container are recognised too, without the call's name.
    with pytest.raises(DonatedStateError):
        step({"w": state["w"]}, BATCH)


def test_donate_false_keeps_the_state(case):
    step = splitjax.parallelize(toy, mesh=MESH, donate=False)
    state = step.place(toy_state(), example=(BATCH,))
    step(state, BATCH)
    step(state, BATCH)
    assert not state["w"].is_deleted()


def test_a_plan_can_be_pinned(case, tmp_path):
    step = splitjax.parallelize(case.step, mesh=MESH)
    state = case.init(jax.random.key(0))
    plan = step.plan(state, case.batches[0])
    path = tmp_path / "plan.json"
    plan.save(path)
    for pinned in (plan, str(path)):
        again = splitjax.parallelize(case.step, mesh=MESH, rules="data_parallel", plan=pinned)
        assert again.plan(state, case.batches[0]).spec("params/Dense_0/kernel") == PartitionSpec(None, "model")
    other = attention_case()
    wrong = splitjax.parallelize(other.step, mesh=MESH, plan=plan)
    with pytest.raises(PlanError, match="does not fit this step"):
        wrong.plan(other.init(jax.random.key(0)), other.batches[0])
    with pytest.raises(PlanError, match="mesh"):
        splitjax.parallelize(case.step, mesh={"data": 8}, plan=plan).plan(state, case.batches[0])


def test_state_outnums_settle_states_of_equal_structure():
    def step(params, ema, batch):
        new = jax.tree.map(lambda p: p - 0.1 * batch.mean(), params)
        return new, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, new), batch.sum()

    parallel = splitjax.parallelize(
        step, mesh=MESH, state_argnums=(0, 1), batch_argnums=2, state_outnums=(0, 1), rules="data_parallel"
    )
    params, ema, _ = parallel(toy_state(), toy_state(), BATCH)
    assert float(params["w"][0, 0]) == pytest.approx(0.9) and float(ema["w"][0, 0]) == pytest.approx(0.99)


def test_the_boundary_is_an_equation_and_outside_it_is_jax():
    value, grad = splitjax.value_and_grad(lambda w: (w**2).sum())(jnp.arange(3.0))
    assert float(value) == 5.0 and np.allclose(grad, [0, 2, 4])
    step = splitjax.parallelize(toy, mesh=MESH)
    assert step.graph(toy_state(), BATCH).num_boundaries == 1


def test_keyword_only_arguments():
    @functools.partial(splitjax.parallelize, mesh=MESH, static_argnames="power")
    def step(state, batch, *, scale, power=2):
        assert isinstance(power, int)
        return {"w": state["w"] * scale}, (batch**power).sum()

    state, total = step(toy_state(), 2 * BATCH, scale=0.5)
    assert float(state["w"][0, 0]) == 0.5 and float(total) == 4 * 64
    state, total = step(state, 2 * BATCH, power=3, scale=0.5)
    assert float(total) == 8 * 64
    state, _ = step(state, 2 * BATCH, scale=0.25)
    assert len(step.compiles) == 2


def test_an_array_that_stands_in_the_state_twice():
    """Averaged parameters often start as the parameters themselves; donating one buffer twice crashes jax 0.10.2."""

    def step(state, batch):
        new = state["w"] - 0.1 * batch.mean()
        return {"w": new, "average": 0.5 * (state["average"] + new)}, batch.sum()

    parallel = splitjax.parallelize(step, mesh=MESH, rules="data_parallel")
    shared = jnp.ones((8, 8))
    state, _ = parallel({"w": shared, "average": shared}, BATCH)
    assert float(state["average"][0, 0]) == pytest.approx(0.95)
    shared = jnp.ones((8, 8))
    placed = parallel.place({"w": shared, "average": shared}, example=(BATCH,))
    parallel(placed, BATCH)


def test_defaults_that_a_call_leaves_alone_are_not_traced():
    """As under `jax.jit`: a schedule bound by `functools.partial`, a flag, an array that is None by default."""

    def step(state, batch, noise=None, train=True, scale=1.0, *, schedule, mean=np.mean):
        assert train is True and isinstance(scale, float) and mean is np.mean
        total = batch.sum() if noise is None else (batch + noise).sum()
        return {"w": state["w"] * schedule(0.5)}, total

    step = functools.partial(step, schedule=lambda rate: rate / 2)
    parallel = splitjax.parallelize(step, mesh=MESH)
    state, total = parallel(toy_state(), BATCH)
    assert float(state["w"][0, 0]) == 0.25 and float(total) == 64
    state, total = parallel(state, BATCH, noise=jnp.ones(()))
    assert float(total) == 128 and len(parallel.compiles) == 2

    @functools.partial(splitjax.parallelize, mesh=MESH, batch_argnums=3)
    def late(state, first=True, second=False, batch=None):
        assert first is True and second is False
        return state, batch.sum()

    assert float(late(toy_state(), batch=BATCH)[1]) == 64
