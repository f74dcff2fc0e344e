"""`step.job_profile`: a decorated step as a job of the scheduler, and the simulation that follows from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax import PartialBackprop, schedule
from splitjax.errors import BatchError, DonatedStateError, ProfileError
from splitjax.measure import worker_costs
from splitjax.partial.request import Measured
from splitjax.schedule import Cluster, Job, JobProfile
from splitjax.sync import Link
from tests.partial.steps import LAYERS, loss_sum, make_batch, make_state, make_step

OPTIONS = {"mesh": {"data": 4}, "rules": "data_parallel"}
BATCH = make_batch(0, np.float32)
LINK = Link(latency_seconds=1e-6, bytes_per_second=1e9)


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def profiled():
    step = splitjax.parallelize(make_step(), **OPTIONS)
    state = step.place(make_state(dtype=np.float32), example=(BATCH,))
    return step, state, step.job_profile(state, BATCH, name="mine", link=LINK, input_seconds=1e-5, stages=True)


def test_bytes_are_those_of_the_step(profiled):
    _, state, profile = profiled
    sizes = [bytes_of(state["p"][layer[2:]]) for layer in LAYERS]
    assert [depth.layer for depth in profile.depths] == list(LAYERS) and profile.name == "mine"
    assert [depth.gradient_bytes for depth in profile.depths] == [sum(sizes[k:]) for k in range(len(sizes))]
    assert profile.state_bytes == bytes_of(state)
    memory = [depth.memory_bytes for depth in profile.depths]
    # The gradients of all layers are there at every depth: the update wants them.
    assert (
        memory == sorted(memory, reverse=True) and memory[-1] >= profile.state_bytes + sum(sizes) + bytes_of(BATCH) // 4
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_times_are_measured_and_the_exchange_is_the_plans(profiled):
    step, state, profile = profiled
    backward = [depth.backward_seconds for depth in profile.depths]
    assert (
        backward == sorted(backward, reverse=True)
        and backward[-1] >= 0 < profile.forward_seconds
        and profile.update_seconds >= 0
    )
    sent = sum(collective.bytes for collective in step.plan(state, BATCH).collectives)
    assert profile.exposed_seconds == pytest.approx(sent / 1e9 + 6e-6)
    assert profile.stages.seconds == pytest.approx((0, 1e-5, profile.task_seconds(0), profile.exposed_seconds))


def test_its_depths_are_the_cuts_of_the_decorated_step(profiled):
    _, state, profile = profiled
    plan = splitjax.parallelize(make_step(), backprop=PartialBackprop(), **OPTIONS).plan(state, BATCH).partial
    for slot, first in enumerate(plan.first):
        depth = profile.depths[profile.depth_at((slot + 1) / 4)]
        assert depth.layer == plan.segments[first].layers[0] and depth.fraction >= (slot + 1) / 4 - 1e-9
        assert depth.fraction == pytest.approx(sum(segment.backward for segment in plan.segments[first:]))


def test_it_goes_through_a_file_into_a_simulation(profiled, tmp_path):
    *_, measured = profiled
    schedule.write_profiles(tmp_path / "p.json", [measured])
    profile = schedule.read_profiles(tmp_path / "p.json")["mine"]
    assert profile == measured
    (tmp_path / "jobs.csv").write_text(
        "name,arrival_seconds,num_workers,num_iterations,profile\n" + "".join(f"{k},0,4,1000,mine\n" for k in range(4))
    )
    jobs = schedule.read_trace(tmp_path / "jobs.csv", profiles={"mine": profile}).jobs
    comparison = schedule.compare(
        jobs, Cluster(1, 4), ["gang-fifo", "jigsaw-fifo"], schedule.Options(restart_seconds=0.0)
    )
    gang, packed = comparison.results
    assert gang.makespan == pytest.approx(4000 * profile.iteration_seconds)
    figures = comparison.to_json()["jigsaw-fifo"]
    assert packed.makespan < gang.makespan and 1 < figures["iteration_efficiency"] <= figures["bound"] * (1 + 1e-9)
    # What JigSaw grants goes as deep as partial backpropagation wants, or deeper.
    state = schedule.model.iterations.start_state(
        group := schedule.Group((schedule.Member(0, (0, 1, 2, 3)),), "jigsaw"), jobs[:1]
    )
    granted = schedule.policies.jigsaw.jigsaw_iteration(group, jobs[:1], state)
    deep = sorted(
        profile.depths[task.depth].fraction for task in granted.tasks if task.resource == schedule.model.jobs.DEVICE
    )
    assert len(deep) == 4 and all(have >= (k + 1) / 4 - 1e-9 for k, have in enumerate(deep))


def test_microbatches_and_workers_without_devices(monkeypatch):
    def step(state, batch):
        _, grads = splitjax.value_and_grad(lambda p: loss_sum(p, batch) / batch["m"].sum(), microbatches=2)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), None

    seconds = {None: 1.0, 0: 4.0, 1: 3.5, 2: 3.0, 3: 2.0, "step": 4.25}
    monkeypatch.setattr(worker_costs, "_timed", lambda programs, *rounds: {name: seconds[name] for name in programs})
    state = make_state(dtype=np.float32)["p"]
    parallel = splitjax.parallelize(step, mesh={"data": 1}, rules="data_parallel")
    profile = parallel.job_profile(state, BATCH, num_workers=2)
    # Forward and backward twice, once for each microbatch; the update once.
    assert (
        profile.forward_seconds == 2.0
        and [depth.backward_seconds for depth in profile.depths] == [6.0, 5.0, 4.0, 2.0]
        and profile.update_seconds == 0.25
    )
    assert profile.exposed_seconds == 0 and profile.stages is None and profile.name == "step"
    gradients = bytes_of(state)
    assert profile.depths[0].memory_bytes >= profile.state_bytes + 2 * gradients  # those of a microbatch, and their sum
    assert parallel.job_profile(state, BATCH, num_workers=2, link=LINK).stages is None
    told = parallel.job_profile(state, BATCH, num_workers=2, link=LINK, input_seconds=10.0)
    # a ring of two: 2 (N - 1) / N of the bytes, 2 (N - 1) messages
    assert told.stages.network_seconds == pytest.approx(gradients / 1e9 + 2e-6)
    # Input is scarce, so the stages are told without having been asked for.
    # all of it takes as long as the input, behind which the rest hides
    assert told.stages.cpu_seconds == told.iteration_seconds == 10.0


def test_a_step_that_is_cut_by_measured_times(profiled, monkeypatch):
    _, state, profile = profiled
    backprop = PartialBackprop(measured=Measured(LAYERS, (5.0, 3.0, 1.0, 1.0), 2.0, (1.0,) * 4))
    seconds = dict(zip((None, 0, 1, 2, 3, "step"), (1.0, 4.0, 3.5, 3.0, 2.0, 4.0)))
    monkeypatch.setattr(worker_costs, "_timed", lambda programs, *rounds: {name: seconds[name] for name in programs})
    measured = splitjax.parallelize(make_step(), backprop=backprop, **OPTIONS).job_profile(state, BATCH, link=LINK)
    assert [depth.fraction for depth in measured.depths] == pytest.approx([1.0, 0.5, 0.2, 0.1])
    assert [depth.backward_seconds for depth in measured.depths] == [
        3.0,
        2.5,
        2.0,
        1.0,
    ] and measured.update_seconds == 0
    assert [depth.layer for depth in measured.depths] == [
        depth.layer for depth in profile.depths
    ] and measured.partial_depths(4) == (0, 0, 1, 1)


def test_of_nnx_objects():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def step(model, batch):
        loss, grads = splitjax.nnx.value_and_grad(
            lambda m: jnp.square(m.b(jnp.tanh(m.a(batch["x"]))) - batch["y"]).mean()
        )(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))
        return loss

    profile = splitjax.nnx.parallelize(step, mesh={"data": 2}, rules="data_parallel").job_profile(
        Model(nnx.Rngs(0)), BATCH, link=LINK
    )
    assert (
        isinstance(profile, JobProfile)
        and profile.name == "step"
        and profile.state_bytes == 4 * (6 * 8 + 8 + 8 * 4 + 4)
    )
    assert [depth.layer.rpartition("/")[2] for depth in profile.depths] == ["a", "b"]
    assert Job("x", 0.0, 2, 10, profile).exclusive_seconds > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"plain": True}, ProfileError, "plain JAX"),
        ({"mesh": {"data": 2, "model": 2}, "rules": "megatron"}, ProfileError, "whole devices"),
        ({"num_workers": 3}, BatchError, "does not divide among 3"),
        ({"num_workers": 0}, ProfileError, "positive whole number"),
        ({"link": 5}, ProfileError, "link between workers"),
        ({"input_seconds": -1.0}, ProfileError, "0 or more"),
        ({"batch": jax.eval_shape(lambda: BATCH)}, ProfileError, "needs values"),
        ({"twice": True}, ProfileError, "2 gradients"),
        ({"consumed": True}, DonatedStateError, "consumed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_profiled(change, error, words):
    change = dict(change)

    def step(state, batch):
        grad = jax.grad if change.get("plain") else splitjax.grad
        loss = lambda p: loss_sum(p, batch) / batch["m"].sum()
        grads = grad(loss)(state)
        if change.get("twice"):
            grads = jax.tree.map(jnp.add, grads, grad(loss)(state))
        return jax.tree.map(lambda p, g: p - g, state, grads), None

    options = {name: change.pop(name) for name in ("mesh", "rules") if name in change}
    parallel = splitjax.parallelize(step, **{**OPTIONS, **options})
    state, batch = jax.tree.map(jnp.asarray, make_state(dtype=np.float32)["p"]), change.pop("batch", BATCH)
    if change.pop("consumed", False):
        jax.tree.map(lambda leaf: leaf.delete(), state)
    with pytest.raises(error, match=words):
        parallel.job_profile(
            state, batch, **{name: value for name, value in change.items() if name not in ("plain", "twice")}
        )
