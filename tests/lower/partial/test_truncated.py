"""The numbers of partial backpropagation: unbiased over the rotations, as the prototype's where asked for, and with
depths that change from step to step for all workers alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import splitjax
from splitjax import PartialBackprop
from tests.partial.steps import LAYERS, adam, loss_sum, make_batch, make_params, make_state, make_step

NAMES = [name.removeprefix("p/") for name in LAYERS]


@pytest.fixture(autouse=True, scope="module")
def float64():
    with jax.enable_x64(True):
        yield


def gradient_step(state, batch):
    """A step that only differentiates."""
    _, grads = splitjax.value_and_grad(lambda params: loss_sum(params, batch) / batch["m"].sum())(state)
    return jax.tree.map(lambda p, g: p - 0 * g, state, grads), grads


def own_gradients(params, batch, num_workers):
    """By worker the gradient of its part of the whole batch's loss."""
    share = len(batch["x"]) // num_workers
    parts = [
        {name: value[worker * share : (worker + 1) * share] for name, value in batch.items()}
        for worker in range(num_workers)
    ]
    return [
        jax.tree.map(np.asarray, jax.grad(lambda p, part=part: loss_sum(p, part) / batch["m"].sum())(params))
        for part in parts
    ]


def close(found, wanted, rtol=1e-11):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-13), found, wanted)


@pytest.fixture(scope="module")
def rotating():
    step = splitjax.parallelize(
        gradient_step,
        mesh={"data": 4},
        rules="data_parallel",
        backprop=PartialBackprop(),
        donate=False,
        state_outnums=0,
    )
    full = jax.jit(jax.grad(lambda params, batch: loss_sum(params, batch) / batch["m"].sum()))
    return step, full


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.floats(0.1, 3))
def test_the_mean_over_rotations_is_the_full_gradient(rotating, seed, masked, scale):
    step, full = rotating
    params = jax.tree.map(lambda leaf: leaf * scale, make_params())
    batch = make_batch(seed, masked=masked)
    gradients = [jax.tree.map(np.asarray, step(params, batch)[1]) for _ in range(4)]
    close(jax.tree.map(lambda *parts: np.mean(parts, axis=0), *gradients), full(params, batch))
    assert not np.allclose(gradients[0]["d0"]["w"], gradients[1]["d0"]["w"], rtol=1e-6), (
        "each step of the cycle by itself is another gradient"
    )


def test_fixed_depths_are_biased_where_shards_differ(rotating):
    """The claim above is about rotations: without them a layer only ever learns from its contributors' examples."""
    step, full = rotating
    params, batch = make_params(), make_batch()
    fixed = splitjax.parallelize(
        gradient_step,
        mesh={"data": 4},
        rules="data_parallel",
        backprop=PartialBackprop(rotate=False),
        donate=False,
        state_outnums=0,
    )
    first, again = (jax.tree.map(np.asarray, fixed(params, batch)[1]) for _ in range(2))
    close(first, again, rtol=0)
    assert not np.allclose(first["d0"]["w"], full(params, batch)["d0"]["w"], rtol=1e-3)
    close(first["d3"], full(params, batch)["d3"])


@pytest.mark.parametrize(
    ("mesh", "rules"), [({"data": 2, "model": 2}, "splitbrain"), ({"data": 4}, "fsdp")], ids=["splitbrain", "fsdp"]
)
def test_the_prototypes_mean_divides_by_all_workers(mesh, rules):
    step = splitjax.parallelize(
        gradient_step, mesh=mesh, rules=rules, backprop=PartialBackprop(estimator="mean"), donate=False, state_outnums=0
    )
    params, batch, workers = make_params(), make_batch(), mesh["data"]
    state = step.place(params, example=(batch,))
    depths, own = step._last.partial.depths, own_gradients(params, batch, workers)
    for cycle_step in range(2):
        found = step(state, batch)[1]
        for number, segment in enumerate(depths.segments):
            who = [
                worker for worker in range(workers) if depths.slot(worker, cycle_step) in depths.contributors(number)
            ]
            for name in (stage.name for stage in segment.stages):
                close(
                    found[name],
                    jax.tree.map(lambda *parts: np.sum(parts, axis=0), *(own[worker][name] for worker in who)),
                )


@pytest.mark.parametrize("execution", ["branch", "program"])
def test_depths_in_turn_keep_what_they_skip_and_scale_what_they_do_not(execution):
    step = splitjax.parallelize(
        make_step(with_gradient=True), mesh={"data": 2}, rules="data_parallel", donate=False,
        backprop=PartialBackprop(depths=(0.3, 1.0), assignment="temporal", execution=execution),
    )  # fmt: skip
    state, batch = step.place(make_state(), example=(make_batch(),)), make_batch()
    depths = step._last.partial.depths
    skipped = [stage.name.removeprefix("p/") for stage in depths.segments[0].stages]
    assert depths.num_cycle_steps == 2 and 0 < len(skipped) < len(NAMES)
    for step_number in range(4):
        before = jax.tree.map(np.asarray, state)
        full = jax.grad(lambda params, batch=batch: loss_sum(params, batch) / batch["m"].sum())(before["p"])
        state, metrics = step(state, batch)
        for name in NAMES:
            shallow, rare = step_number % 2 == 0, name in skipped
            now, moments = state["p"][name], [state["o"][0].mu[name], state["o"][0].nu[name]]
            if shallow and rare:
                close([now, *moments], [before["p"][name], before["o"][0].mu[name], before["o"][0].nu[name]], rtol=0)
                continue
            close(metrics["grads"][name], jax.tree.map(lambda g, rare=rare: g * (2 if rare else 1), full[name]))
            assert np.any(np.asarray(now["w"]) != before["p"][name]["w"])
    # Counters are no layer's: they go on in every step.
    assert int(state["o"][0].count) == 4 and isinstance(adam, optax.GradientTransformation)


def test_gradients_inside_a_branch_on_the_workers_number_are_right():
    """jax#40823: `lax.cond` on `axis_index` with replicated inputs under `check_vma=True` differentiates silently wrong
    (4 instead of 5). Branches of depths are such conditionals, with whole numbers here so that nothing rounds."""

    def step(state, batch):
        grads = splitjax.grad(lambda w: jnp.sum(jnp.square(batch["x"] * w["front"]) * w["back"]))(state)
        return jax.tree.map(lambda w, g: w - g, state, grads), grads

    parallel = splitjax.parallelize(
        step,
        mesh={"data": 2},
        rules="data_parallel",
        backprop=PartialBackprop(depths=(0.01, 1.0)),
        donate=False,
        state_outnums=0,
    )
    state, batch = {"front": np.float64(3.0), "back": np.float64(2.0)}, {"x": np.array([1.0, 2.0])}
    for cycle_step, deep in enumerate([2.0, 1.0]):  # the examples of the worker that goes to full depth
        _, grads = parallel(state, batch)
        depths = parallel._last.partial.depths
        assert [depths.slot(worker, cycle_step) for worker in range(2)] == ([0, 1] if cycle_step == 0 else [1, 0])
        assert float(grads["back"]) == 9 * (1 + 4)
        assert float(grads["front"]) == 2 * (2 * deep**2 * 3 * 2), "of one worker's example, counted for two"
    assert depths.segments[0].stages[0].name == "front"
