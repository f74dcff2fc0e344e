"""The decorator in a run of two processes with two devices each: one process's numbers, and an error where they
disagree."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import optax
import pytest

import splitjax
from splitjax import models
from splitjax.compile.step_programs import MET_EVENT, WAIT_EVENT
from splitjax.errors import BatchError
from splitjax.sync.analysis import Profile
from tests.processes import run_processes

# The two processes compile for a minute and more. What JAX does in several is tried on another release by
# test_checkpoint_processes.py and test_initialize.py.
pytestmark = pytest.mark.one_version


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, dict]]:
    """Per process: scenario -> what was said."""
    folder = str(tmp_path_factory.mktemp("run"))
    outputs = run_processes(
        pathlib.Path(__file__).with_name("processes_worker.py"), folder, num=2, devices=2, timeout_seconds=400
    )
    lines = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    return [{line["scenario"]: line for line in each} for each in lines]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of the same training on one device."""
    spec = models.build("mlp", input_shape=(32,), features=(64, 32), num_classes=4)
    init_fn, train_step, eval_step = models.make_step(spec, optax.adam(0.01))
    random = np.random.RandomState(0)
    batch = {"image": random.randn(8, 32).astype(np.float32), "label": random.randint(0, 4, 8).astype(np.int32)}
    state, losses = init_fn(jax.random.key(0)), []
    for _ in range(3):
        state, metrics = jax.jit(train_step)(state, batch)
        losses.append(float(metrics["loss"]))
    return [*losses, float(jax.jit(eval_step)(state, batch)["loss"])]


@pytest.mark.parametrize(
    "how", ["splitbrain init", "splitbrain place", "megatron host", "megatron global_batch", "fsdp global_batch"]
)
def test_two_processes_train_to_the_numbers_of_one_device(said, alone, how):
    for each in said:
        np.testing.assert_allclose(each[how]["losses"], alone, rtol=2e-5)


def test_a_program_runs_when_all_processes_have_compiled_it(said, alone):
    """Collectives give up after a while: a process that compiles for longer than the others would be their end."""
    for each in said:
        np.testing.assert_allclose(each["compiled slowly"]["losses"], alone, rtol=2e-5)
    events = [each["compiled slowly"]["events"] for each in said]
    # Of the step and of the evaluation: each waits once, and what was compiled to be waited for is not compiled again.
    assert [[name for name, _ in each if name != "compiled"] for each in events] == 2 * [[WAIT_EVENT, MET_EVENT] * 2]
    assert [[name for name, _ in each].count("compiled") for each in events] == [1, 1]
    (waits, met), (other_waits, other_met) = (
        [next(at for name, at in each if name == wanted) for wanted in (WAIT_EVENT, MET_EVENT)] for each in events
    )
    assert met - waits > 2.0 and met >= other_waits and abs(met - other_met) < 2.0


def test_nnx_steps_run_in_several_processes(said):
    assert said[0]["nnx"]["losses"] == said[1]["nnx"]["losses"]
    assert said[0]["nnx"]["losses"][-1] < said[0]["nnx"]["losses"][0]


def test_tables_are_synchronised_by_rows_and_all_processes_choose_alike(said):
    (expected, none), (found, schemes), (chosen, of_auto) = (
        said[0][f"sync {name}"]["found"] for name in ("dense", "row_exchange", "auto")
    )
    np.testing.assert_allclose([found, chosen], [expected, expected], rtol=1e-5)
    assert (none, schemes) == ([], ["row_exchange"]) and len(of_auto) == 1
    assert all(said[1][name] == said[0][name] for name in said[0] if name.startswith("sync"))


def test_workers_of_different_depths_in_several_processes(said):
    """The losses of one process with as many devices, whichever process a worker is in."""
    spec = models.build("mlp", input_shape=(32,), features=(64, 32), num_classes=4)
    init_fn, train_step, eval_step = models.make_step(spec, optax.adam(0.01), value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(train_step, mesh={"data": 2, "model": 2}, backprop=splitjax.PartialBackprop())
    random = np.random.RandomState(0)
    batch = {"image": random.randn(8, 32).astype(np.float32), "label": random.randint(0, 4, 8).astype(np.int32)}
    state, losses = init_fn(jax.random.key(0)), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    losses.append(float(step.like(eval_step)(state, batch)["loss"]))
    for each in said:
        for execution in ("branch", "program"):
            np.testing.assert_allclose(each[f"partial {execution}"]["losses"], losses, rtol=2e-5)


def test_every_process_gets_the_advice_of_the_first(said):
    assert said[0]["advice"] == said[1]["advice"] and not said[0]["advice"]["consumed"]
    advice = splitjax.Advice.from_json(said[0]["advice"]["json"])
    assert advice.num_workers == 4 and advice.bytes_per_second > 0 and advice.recommendation.option
    spec = models.build("mlp", input_shape=(32,), features=(64, 32), num_classes=4)
    init_fn, train_step, _ = models.make_step(spec, optax.adam(0.01), value_and_grad=splitjax.value_and_grad)
    batches = [
        {"image": random.randn(8, 32).astype(np.float32), "label": random.randint(0, 4, 8).astype(np.int32)}
        for random in map(np.random.RandomState, (0, 1))
    ]
    step = splitjax.parallelize(train_step, mesh={"data": 4}, rules="data_parallel")
    alone = step.advise(
        init_fn(jax.random.key(0)), batches, splitjax.PartialBackprop(), link=splitjax.sync.Link(1e-4, 1e8)
    )
    np.testing.assert_allclose([one.noise for one in advice.stages], [one.noise for one in alone.stages], rtol=1e-4)


def test_residuals_are_saved_and_resumed_bit_for_bit_by_all_processes(said):
    whole, resumed = said[0]["rounded"]["digests"]
    assert whole == resumed and said[1]["rounded"]["digests"] == [whole, resumed]


def test_every_process_gets_the_profile_of_one(said):
    assert said[0]["profile"] == said[1]["profile"]
    spec = models.build("mlp", input_shape=(32,), features=(64, 32), num_classes=4)
    init_fn, train_step, _ = models.make_step(spec, optax.adam(0.01), value_and_grad=splitjax.value_and_grad)
    random = np.random.RandomState(0)
    batch = {"image": random.randn(8, 32).astype(np.float32), "label": random.randint(0, 4, 8).astype(np.int32)}
    step = splitjax.parallelize(train_step, mesh={"data": 2, "model": 2})
    alone = step.profile(init_fn(jax.random.key(0)), [batch, batch], num_workers=8)
    together = Profile.from_json(said[0]["profile"]["json"])
    assert {one.path: one.steps for one in together.tensors} == {one.path: one.steps for one in alone.tensors}
    assert 0.1 < min(one.density for one in alone.tensors) < 0.9  # relu: there is something to agree on


@pytest.mark.parametrize(
    ("scenario", "every", "other"),
    [
        ("plan", "process 1 made another plan", "rules: 'splitbrain' -> 'data_parallel'"),
        ("program", "process 1 made another program", "mul -0.0199"),
        (
            "batch",
            "process 1 passes another value of 'batch/image' than process 0",
            "splitjax.global_batch(local_batch)",
        ),
        ("lengths", "process 1 made another plan", "shape"),
    ],
)
def test_a_difference_is_an_error_in_every_process(said, scenario, every, other):
    assert all(every in each[scenario]["error"] for each in said)
    assert other in said[1][scenario]["error"]


def test_a_process_that_does_not_come_is_an_error_in_time(said):
    assert "not every process came" in said[0]["absent"]["error"]


def test_alone_a_global_batch_is_the_batch():
    batch = {"image": np.ones((4, 2)), "label": np.zeros(4)}
    assert splitjax.global_batch(batch) is batch


@pytest.mark.parametrize("batch", [{"a": np.ones(3), "b": np.ones(4)}, {"a": np.float32(1)}])
def test_a_batch_of_unequal_arrays_is_refused(batch):
    with pytest.raises(BatchError, match="same number of examples"):
        splitjax.global_batch(batch)
