"""`step.advise`: its measurements against plain JAX, its table against plans, what it recommends, and what it
refuses."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax import Advice, PartialBackprop
from splitjax.errors import BatchError, PartialError, SplitjaxError
from splitjax.measure.worker_costs import WorkerCosts, choose_cuts, next_cut
from splitjax.partial.advice import compute_to_progress
from splitjax.partial.depths import choose_depths
from splitjax.partial.recommending import recommend, uniform_is_optimal
from splitjax.partial.ways import Measurements, PredictedExchange
from splitjax.sync import Link
from tests.partial.steps import LAYERS, loss_sum, make_batch, make_state, make_step
from tests.partial.test_depths import stages

LINK = Link(latency_seconds=1e-4, bytes_per_second=1e6)
OPTIONS = {"mesh": {"data": 4}, "rules": "data_parallel"}
BATCHES = [make_batch(seed, np.float32) for seed in range(3)]


@pytest.fixture(scope="module")
def advised():
    step = splitjax.parallelize(make_step(), **OPTIONS)
    state = step.place(make_state(dtype=np.float32), example=(BATCHES[0],))
    return step, state, step.advise(state, iter(BATCHES), PartialBackprop(execution="program"), link=LINK)


def test_noise_is_the_unbiased_variance_between_workers(advised):
    *_, advice = advised
    params, noise, norms = make_state(dtype=np.float32)["p"], dict.fromkeys(LAYERS, 0.0), dict.fromkeys(LAYERS, 0.0)
    for batch in BATCHES:
        grad = jax.jit(jax.grad(lambda p, part, total: 4 * loss_sum(p, part) / total))
        own = [grad(params, {k: v[4 * w : 4 * w + 4] for k, v in batch.items()}, batch["m"].sum()) for w in range(4)]
        for name in LAYERS:
            flat = np.stack(
                [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(one[name[2:]])]) for one in own]
            ).astype(float)
            noise[name] += flat.var(axis=0, ddof=1).sum() / len(BATCHES)
            norms[name] += ((flat.mean(0) ** 2).sum() - flat.var(axis=0, ddof=1).sum() / 4) / len(BATCHES)
    for one in advice.stages:
        assert one.noise == pytest.approx(noise[one.name], rel=1e-4)
        assert one.squared_norm == pytest.approx(max(norms[one.name], 0), rel=1e-3, abs=1e-5)


def test_the_table_sends_what_plans_say(advised):
    step, state, advice = advised
    full = sum(one.bytes for one in step.plan(state, BATCHES[0]).collectives)
    assert advice.row("full").sent_bytes == advice.row("smaller batch").sent_bytes == full
    asked = splitjax.parallelize(make_step(), backprop=PartialBackprop(measured=advice.measured), **OPTIONS)
    plan = asked.plan(state, BATCHES[0])
    assert plan.partial.times == "measured"
    assert advice.row("spatial").device_time == pytest.approx(plan.partial.device_time)
    assert advice.row("spatial").sent_bytes == pytest.approx(
        sum(one.summed_bytes + one.handed_bytes for one in plan.partial.segments)
    )
    best = splitjax.parallelize(
        make_step(),
        backprop=PartialBackprop(depths="optimal", measured=advice.measured, budget=plan.partial.device_time),
        **OPTIONS,
    )
    assert best.plan(state, BATCHES[0]).partial.device_time == pytest.approx(advice.row("optimal").device_time)
    # A full exchange is a ring: 2 (N - 1) messages that wait for each other, and its bytes over the rate.
    assert advice.row("full").communication_seconds == pytest.approx(full / 1e6 + 6e-4)


def test_the_ways_are_compared_at_equal_cost(advised):
    *_, advice = advised
    full, smaller, spatial, best, temporal = (
        advice.row(name) for name in ("full", "smaller batch", "spatial", "optimal", "temporal")
    )
    assert smaller.device_time == spatial.device_time == temporal.device_time >= best.device_time * (1 - 1e-9)
    assert advice.compute(full) == 1.0 and advice.compute(smaller) == pytest.approx(1.0)
    assert spatial.variance == pytest.approx(temporal.variance) and best.variance <= spatial.variance * (1 + 1e-9)
    # All workers go the same way in turn: nobody waits, where depths by worker wait for the deepest.
    assert (
        full.busiest_seconds
        == spatial.busiest_seconds
        > spatial.compute_seconds
        == pytest.approx(temporal.busiest_seconds)
    )
    assert spatial.max_memory_bytes == full.max_memory_bytes and spatial.mean_memory_bytes < full.mean_memory_bytes
    memory = [one.memory_bytes for one in advice.stages]
    assert memory == sorted(memory, reverse=True) and memory[-1] < memory[0]
    assert [one.name for one in advice.stages] == list(LAYERS) and min(
        one.backward_seconds for one in advice.stages
    ) >= 0 < advice.forward_seconds
    assert len(spatial.cuts) == 4 and spatial.cuts[-1] == LAYERS[0]


def test_it_prints_and_serialises_and_consumes_nothing(advised):
    _, state, advice = advised
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    text = str(advice)
    for words in (
        "smaller batch",
        "optimal",
        "temporal",
        "noise / cost",
        "p/d2",
        "recommended",
        "8 Mbit/s",
        "execution program",
    ):
        assert words in text, words
    assert "<table" in advice._repr_html_() and "recommended" in advice._repr_html_() and "recommends" in repr(advice)
    assert Advice.from_json(advice.to_json()) == advice and json.loads(advice.to_json())["num_workers"] == 4
    for wrong in ("", "[]", "{}", '{"format": 1}', '{"format": 99}'):
        with pytest.raises(PartialError, match="not the JSON of an advice"):
            Advice.from_json(wrong)
    with pytest.raises(PartialError, match="no such row"):
        advice.row("fast")


def test_a_loss_with_batch_statistics_says_so():
    def step(state, batch):
        def loss_fn(p):
            hidden = batch["x"] @ p["a"]
            return jnp.square(jnp.tanh(hidden - hidden.mean(0)) @ p["b"] - batch["y"]).mean()

        return jax.tree.map(lambda p, g: p - g, state, splitjax.grad(loss_fn)(state)), None

    state = {"a": np.ones((6, 8), np.float32), "b": np.ones((8, 4), np.float32)}
    parallel = splitjax.parallelize(
        step, mesh={"data": 2}, rules="data_parallel", backprop=PartialBackprop(statistics="local", rebalance=False)
    )
    advice = parallel.advise(state, BATCHES[:1], link=LINK)
    assert any("examples alone" in note for note in advice.notes) and any(
        'statistics="local"' in note for note in advice.notes
    )
    assert any("one batch" in note for note in advice.notes)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"batches": []}, PartialError, "no batch to measure"),
        ({"batches": BATCHES[0]}, BatchError, "several batches"),
        ({"mesh": {"data": 1}}, PartialError, "there is one"),
        ({"backprop": "linear"}, PartialError, "takes what parallelize takes"),
        ({"link": 5}, PartialError, "link between workers"),
        ({"plain": True}, PartialError, "plain JAX"),
        ({"batches": [make_batch(0, np.float32, num_examples=14)]}, BatchError, "14 examples do not divide"),
        ({"batches": [BATCHES[0], make_batch(0, np.float32, num_examples=8)]}, PartialError, "different shapes"),
        ({"batches": [jax.eval_shape(lambda: BATCHES[0])]}, PartialError, "needs values"),
        ({"one_layer": True}, PartialError, "no legal cut"),
        ({"backprop": PartialBackprop(depths=(0.5, 1.0))}, PartialError, "2 fractions for 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_advised_on(change, error, words):
    def step(state, batch):
        gradient = jax.grad if change.get("plain") else splitjax.grad
        layers = {"d0": state["p"]["d0"]} if change.get("one_layer") else state["p"]

        def loss_fn(p):
            return jnp.square(batch["x"] @ p["d0"]["w"]).sum() if change.get("one_layer") else loss_sum(p, batch)

        grads = {**state["p"], **gradient(loss_fn)(layers)}
        return {"p": jax.tree.map(lambda p, g: p - g, state["p"], grads), "o": state["o"]}, None

    parallel = splitjax.parallelize(step, mesh=change.get("mesh", {"data": 4}), rules="data_parallel")
    with pytest.raises(error, match=words) as caught:
        parallel.advise(
            make_state(dtype=np.float32),
            change.get("batches", BATCHES),
            backprop=change.get("backprop"),
            link=change.get("link", LINK),
        )
    assert isinstance(caught.value, SplitjaxError) and caught.value.place and caught.value.remedy


# ---- the pure parts


def made(noise, forward=1.5):
    found, names = stages(1, 1, 1, forward=forward), ("l0", "l1", "l2")
    measurements = Measurements(4, dict(zip(names, noise, strict=True)), {"l0": 300.0, "l1": 200.0, "l2": 100.0})
    full = measurements.full(choose_depths(found, PartialBackprop(), 4, "here"), PredictedExchange(600, 1.0))
    return found, measurements, full


def spatial(found, measurements, shares=None, **options):
    return measurements.spatial(
        "spatial",
        "as asked",
        choose_depths(found, PartialBackprop(**options), 4, "here"),
        PredictedExchange(450, 1.2),
        shares,
    )


def test_rows_by_hand():
    found, measurements, full = made((1.0, 2.0, 3.0))
    assert (full.compute_seconds, full.variance, full.mean_memory_bytes) == (4.5, 1.5, 300)
    one = spatial(found, measurements, execution="program")  # contributors 2 (rounded up), 3, 4
    assert one.cuts == ("l2", "l1", "l0", "l0")
    assert one.variance == pytest.approx(1 / 2 + 2 / 3 + 3 / 4) and one.device_time == pytest.approx(
        (2.5 + 3.5 + 4.5 + 4.5) / 18
    )
    assert one.busiest_seconds == 4.5 and one.mean_memory_bytes == 225 and one.max_memory_bytes == 300
    assert spatial(found, measurements).mean_memory_bytes == 300, "one program is as large as its largest branch"
    assert one.step_seconds == pytest.approx(5.7)
    never = spatial(found, measurements, depths=(0.3, 0.3, 0.3, 0.3))
    assert never.variance is None and compute_to_progress(never, full) is None
    rates = [1 / 2.5, 1 / 3.5, 1 / 4.5, 1 / 4.5]
    even = spatial(found, measurements, [rate / sum(rates) for rate in rates])
    assert even.busiest_seconds == pytest.approx(even.compute_seconds) == pytest.approx(4 / sum(rates))
    assert even.variance > one.variance, "shallow workers take examples away from the front layers"


def recommended(noise, **options):
    found, measurements, full = made(noise, **options)
    one = spatial(found, measurements)
    smaller = measurements.smaller(one.device_time, full, 250.0)
    charged = [1.0, 1.0, 1.0 + found.forward]
    return recommend((full, smaller, one), uniform_is_optimal(noise, charged)), one, full


def test_the_smaller_batch_is_recommended_where_it_is_better():
    said, one, full = recommended((1.0, 1.0, 1.0))
    assert said.option == "smaller batch" and compute_to_progress(one, full) > 1
    assert "square-root rule gives every layer the same contributors" in str(said)
    assert "25 % fewer bytes sent, though in more time" in str(said) and "room for another job" in str(said)


def test_it_recommends_one_way_and_says_under_which_other_aim_another_is_better():
    found, measurements, full = made((1.0, 1.0, 1.0))
    slow_link = dataclasses.replace(full, communication_seconds=20.0)  # most of a step, however small the batch
    smaller = measurements.smaller(0.75, slow_link, 250.0)
    said = recommend((slow_link, smaller, spatial(found, measurements)), False)
    assert said.option == "smaller batch" and said.fastest != said.option
    recommended, unless, *besides = str(said).split("\n")
    assert (
        recommended.startswith("Recommended: smaller batch.")
        and said.fastest not in recommended.removeprefix("Recommended: smaller batch.").split()
    )
    assert (
        unless == said.unless
        and unless.startswith("This goes by the device time")
        and "Only if" in unless
        and said.fastest in unless
        and "% of the time of the smaller batch" in unless
    )
    assert len(besides) == 1 and "Recommended" not in besides[0]


def test_partial_backpropagation_is_recommended_where_noise_is_in_the_last_layers():
    said, one, full = recommended((0.01, 0.01, 10.0))
    assert said.option == "spatial" and compute_to_progress(one, full) < 0.9
    assert "worth its compute" in str(said)


def test_the_uniform_rule_is_that_no_cut_helps():
    assert uniform_is_optimal([3.0, 2.0, 1.0], [1.0, 1.0, 1.0]) and uniform_is_optimal([1.0, 1.0], [1.0, 1.0])
    assert not uniform_is_optimal([1.0, 2.0], [1.0, 1.0])
    assert uniform_is_optimal([1.0, 2.0], [1.0, 3.0]), "by cost"
    assert not uniform_is_optimal([3.0, 1.0, 9.0], [1.0, 1.0, 1.0])


def test_times_between_compiled_cuts_are_divided_by_predicted_time():
    found = stages(*range(1, 21))
    cuts = choose_cuts(found, 5)
    assert 3 <= len(cuts) <= 5 and cuts[0] == 0 and cuts[-1] == 19 and choose_cuts(stages(1, 1, 1), 5) == (0, 1, 2)
    four = stages(3, 1, 2, 2)
    found = stages(1, 1, 1, 1, 4, 4, 4)
    costs = WorkerCosts(8, 1.0, (0, 4, 6), (9.0, 4.0, 3.0), (300, 200, 100))
    assert next_cut(costs, found) == 2, "where measured time is, which is not where it was predicted"
    assert next_cut(WorkerCosts(8, 1.0, (0, 4, 6), (6.0, 4.0, 1.1), (300, 200, 100)), found) == 5
    assert next_cut(WorkerCosts(8, 1.0, tuple(range(7)), (1.0,) * 7, (300,) * 7), found) is None, "all are cut"
    seconds, timed = WorkerCosts(8, 1.0, (0, 2, 3), (9.0, 5.0, 3.0), (300, 200, 100)).backward(four)
    assert seconds == pytest.approx((3.0, 1.0, 2.0, 2.0)) and timed == (False, False, True, True)
    costs = WorkerCosts(8, 1.0, (0, 1, 2, 3), (9.0, 4.0, 4.5, 3.0), (300, 250, 200, 100))
    seconds, timed = costs.backward(four)
    assert sum(seconds) == pytest.approx(8.0) and timed == (False, False, True, True), (
        "cut 1 in less time than cut 2 is noise"
    )
    seconds, timed = WorkerCosts(8, 1.0, (0, 1, 2, 3), (5.0, 6.0, 5.5, 3.0), (300, 250, 200, 100)).backward(four)
    assert seconds == pytest.approx((1.0, 1 / 3, 2 / 3, 2.0)) and timed == (False, False, False, True), (
        "the whole takes no less than its part"
    )
    assert [costs.bytes_from(stage) for stage in range(4)] == [300, 250, 200, 100]
    assert WorkerCosts(8, 1.0, (0, 3), (9.0, 3.0), (300, 100)).bytes_from(2) == 300
