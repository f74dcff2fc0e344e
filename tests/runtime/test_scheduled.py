"""Decorated steps as jobs of the executor, in this process."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import TrainingError
from splitjax.runtime.scheduled import DecoratedJob, Training, one_core_environment, partial_steps
from splitjax.schedule import Cluster, Depth, ExecutionOptions, Job, JobProfile, Place, StepOrder, ThreadEngine, execute
from splitjax.schedule.model.jobs import CPU, STORAGE

PROFILE = JobProfile("tiny", 0.005, (Depth(1.0, 0.01),))
PLACE = Place("a", 0, 1, 0, 0)
TX = optax.adam(1e-2)


def init(key):
    params = {"w": jax.random.normal(key, (6, 3))}
    return {"params": params, "opt": TX.init(params)}


def train_step(state, batch):
    loss, grads = splitjax.value_and_grad(lambda params: jnp.square(batch["x"] @ params["w"] - batch["y"]).mean())(
        state["params"]
    )
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def batch(number: int):
    random = np.random.default_rng(number)
    return {"x": random.normal(size=(8, 6)).astype(np.float32), "y": random.normal(size=(8, 3)).astype(np.float32)}


def build(place: Place) -> Training:
    return Training(
        splitjax.parallelize(train_step, mesh={"data": 1}, rules="data_parallel"), init, jax.random.key(0), batch
    )


def final_loss(num_iterations: int) -> float:
    step, state = jax.jit(train_step), init(jax.random.key(0))
    for number in range(1, num_iterations + 1):
        state, metrics = step(state, batch(number))
    return float(metrics["loss"])


def test_a_preempted_job_ends_with_the_loss_of_one_that_was_left_alone(tmp_path) -> None:
    jobs = [Job("long", 0.0, 1, 400, PROFILE), Job("short", 1.0, 1, 5, PROFILE)]
    programs = {job.name: DecoratedJob(build, tmp_path / job.name) for job in jobs}
    execution = execute(
        jobs, programs, Cluster(1, 1), "gang-srtf", ThreadEngine(), ExecutionOptions(checkpoint_every_seconds=5.0)
    )
    assert execution.result.records[0].num_starts >= 1 and not execution.failed
    for job in jobs:
        assert execution.metrics[job.name]["loss"] == pytest.approx(final_loss(job.num_iterations), rel=1e-5)


def test_input_is_read_in_its_stage_or_else_by_the_step(tmp_path) -> None:
    reads = []

    def read(number: int):
        reads.append(number)
        return batch(number)

    training = Training(build(PLACE).step, init, jax.random.key(0), lambda number, found: found, read, warm_up=())
    task = DecoratedJob(lambda place: training, tmp_path).begin(PLACE)
    assert task.restore() == 0
    reads.clear()
    task.stage(1, STORAGE)
    task.stage(1, CPU)
    assert reads == [1]
    for number in (1, 2):
        metrics = task.step(StepOrder(number, (1.0,)), lambda: None)
    assert reads == [1, 2] and metrics["loss"] == pytest.approx(final_loss(2), rel=1e-5)
    trained, _ = jax.jit(train_step)(jax.jit(train_step)(init(jax.random.key(0)), batch(1))[0], batch(2))
    np.testing.assert_allclose(task.state["params"]["w"], trained["params"]["w"], rtol=1e-5)
    task.save(2)
    again = DecoratedJob(lambda place: training, tmp_path).begin(PLACE)
    assert again.restore() == 2
    assert again.step(StepOrder(3, (1.0,)), lambda: None)["loss"] == pytest.approx(final_loss(3), rel=1e-5)


def test_a_step_without_a_loss_is_an_error(tmp_path) -> None:
    silent = splitjax.parallelize(
        lambda state, batch: (state, {"x": batch["x"].mean()}), mesh={"data": 1}, rules="data_parallel"
    )
    task = DecoratedJob(lambda place: Training(silent, init, jax.random.key(0), batch), tmp_path).begin(PLACE)
    task.restore()
    with pytest.raises(TrainingError, match="no loss"):
        task.step(StepOrder(1, (1.0,)), lambda: None)


class Recorded:
    """Stands for a decorated step: only which one is called when is looked at."""

    def __init__(self, backprop):
        self.backprop, self.turn = backprop, None

    def resume(self, carried) -> None:
        self.turn = carried.num_steps


def test_depths_choose_the_turn_of_a_step_with_partial_backpropagation() -> None:
    full, at_depths, warm_up = partial_steps(Recorded, 4)
    assert full.backprop is None and at_depths((1.0,) * 4) is full and warm_up == ((1.0,) * 4, (0.25, 0.5, 0.75, 1.0))
    partial = at_depths((0.25, 0.5, 0.75, 1.0))
    assert partial.backprop == splitjax.PartialBackprop() and partial.turn == 0
    for turn in (3, 1, 2):
        depths = tuple(((worker + turn) % 4 + 1) / 4 for worker in range(4))
        assert at_depths(depths) is partial and partial.turn == turn
        assert at_depths(tuple(depth - 0.2 for depth in depths)) is partial and partial.turn == turn
    # no rotation of the linear depths is as deep: never shallower than asked
    assert at_depths((1.0, 1.0, 0.25, 0.25)) is full
    alone, at_depths, warm_up = partial_steps(Recorded, 1)
    assert at_depths((0.5,)) is alone and warm_up == ((1.0,),)


def test_depths_that_all_workers_share_choose_the_turn_of_a_temporal_assignment() -> None:
    full, at_depths, warm_up = partial_steps(Recorded, 4, assignment="temporal")
    assert full.backprop is None and warm_up == ((0.25,) * 4, (0.5,) * 4, (0.75,) * 4, (1.0,) * 4)
    partial = at_depths((0.25,) * 4)
    assert (
        partial.backprop == splitjax.PartialBackprop(assignment="temporal", execution="program") and partial.turn == 0
    )
    # full depth is a turn, too: its gradients are divided by the share of steps that compute them
    assert at_depths((1.0,) * 4) is partial and partial.turn == 3
    assert at_depths((0.25, 0.25, 0.5, 0.25)) is partial and partial.turn == 1, "never shallower than asked"
    alone, at_depths, _ = partial_steps(Recorded, 1, assignment="temporal")
    assert at_depths((0.5,)) is alone


WATCHED = """
import threading, time
from splitjax.runtime.training.idle import noticing_idle

def compute(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))

waits = threading.Event()
with noticing_idle(waits.set):
    compute(0.05)
    print("waits", waits.wait(30))
busy = threading.Event()
with noticing_idle(busy.set):
    compute(0.3)  # its own time: on a loaded machine much longer by the clock
print("busy", busy.is_set())
never = threading.Event()
with noticing_idle(never.set):
    time.sleep(0.1)  # it has not begun
print("never", never.is_set())
"""


def test_waiting_is_told_from_computing_and_from_being_kept_from_it() -> None:
    # In a process of its own: threads that other tests have left here compute too, now and then.
    found = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["waits", "True", "busy", "False", "never", "False"]


def test_one_core_is_one_thread_and_one_device() -> None:
    found = one_core_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=/x"})
    assert found["NPROC"] == "1" and found["JAX_NUM_CPU_DEVICES"] == "1"
    assert found["XLA_FLAGS"].split() == [
        "--xla_dump_to=/x",
        "--xla_cpu_multi_thread_eigen=false",
        "intra_op_parallelism_threads=1",
    ]
