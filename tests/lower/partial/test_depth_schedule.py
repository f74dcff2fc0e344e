"""Workers of different depths: the numbers of a reference that differentiates every worker's examples apart, whatever
the execution."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax import PartialBackprop
from splitjax.errors import PartialError, PlanError
from splitjax.partial import Measured

NUM_LAYERS, NUM_EXAMPLES = 4, 16
OPTIMIZER = optax.adam(1e-2)


def parameters(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    sizes = [6, 32, 32, 32, 4]
    return {
        f"d{k}": {"w": random.normal(size=(a, b)) * 0.3, "b": random.normal(size=(b,)) * 0.1}
        for k, (a, b) in enumerate(zip(sizes, sizes[1:]))
    }


def examples(seed: int = 1) -> dict:
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(NUM_EXAMPLES, 6)),
        "y": random.normal(size=(NUM_EXAMPLES, 4)),
        "mask": random.integers(0, 3, NUM_EXAMPLES).astype(float),
    }


def forward(params: dict, x):
    for k in range(NUM_LAYERS):
        x = x @ params[f"d{k}"]["w"] + params[f"d{k}"]["b"]
        x = jnp.tanh(x) if k < NUM_LAYERS - 1 else x
    return x


def summed_loss(params: dict, batch: dict):
    losses = jnp.square(forward(params, batch["x"]) - batch["y"]).sum(-1) * batch["mask"]
    return losses.sum(), losses


def train_step(state: dict, batch: dict):
    def loss_fn(params):
        total, losses = summed_loss(params, batch)
        return total / batch["mask"].sum(), losses

    (loss, losses), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
        "loss": loss,
        "losses": losses,
        "grads": grads,
    }


def run(backprop: PartialBackprop, mesh: dict, rules: str, num_steps: int = 2):
    """The step, and per call the gradients, the loss and the losses of all examples."""
    step = splitjax.parallelize(train_step, mesh=mesh, rules=rules, backprop=backprop)
    state = {"params": parameters(), "opt": OPTIMIZER.init(parameters())}
    found = []
    for number in range(num_steps):
        before = jax.tree.map(np.asarray, state["params"])
        state, metrics = step(state, examples(number))
        found.append((before, jax.tree.map(np.asarray, metrics)))
    return step, found


def reference(params: dict, batch: dict, shares: list[int], firsts: list[int]) -> dict:
    """Every worker's gradient of its part of the loss; by layer the sum of those that reach it, over the share of the
    examples that they have."""
    total, start, gradients = batch["mask"].sum(), 0, []
    for share in shares:
        part = {name: value[start : start + share] for name, value in batch.items()}
        gradients.append(jax.grad(lambda p, part=part: summed_loss(p, part)[0] / total)(params))
        start += share
    found = {}
    for layer in range(NUM_LAYERS):
        who = [worker for worker, first in enumerate(firsts) if first <= layer]
        covered = sum(shares[worker] for worker in who) / sum(shares)
        found[f"d{layer}"] = jax.tree.map(
            lambda *parts, covered=covered: np.sum(parts, axis=0) / covered, *(gradients[w][f"d{layer}"] for w in who)
        )
    return found


@pytest.mark.parametrize(
    ("mesh", "rules", "options"),
    [
        ({"data": 4}, "data_parallel", {}),
        ({"data": 2, "model": 2}, "splitbrain", {"execution": "program"}),
        ({"data": 4}, "fsdp", {"execution": "program", "rebalance": True}),
        ({"data": 2, "model": 2}, "megatron", {"rebalance": True, "rotate": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)  # fmt: skip
def test_gradients_are_those_of_the_workers_that_reach_a_layer(mesh, rules, options):
    with jax.enable_x64(True):
        step, found = run(PartialBackprop(**options), mesh, rules)
        entry = step._last.partial
        depths, workers = entry.depths, range(mesh["data"])
        layer_of = [int(segment.stages[0].name[-1]) for segment in depths.segments]
        for step_number, (params, metrics) in enumerate(found):
            slots = [depths.slot(worker, step_number) for worker in workers]
            shares = [entry.examples[slot] if entry.examples else NUM_EXAMPLES // len(slots) for slot in slots]
            expected = reference(
                params, examples(step_number), shares, [layer_of[depths.first[slot]] for slot in slots]
            )
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), metrics["grads"], expected
            )
            total, losses = summed_loss(params, examples(step_number))
            np.testing.assert_allclose(metrics["losses"], losses, rtol=1e-12)
            np.testing.assert_allclose(metrics["loss"], total / examples(step_number)["mask"].sum(), rtol=1e-12)
    assert len({tuple(depths.slot(worker, cycle_step) for worker in workers) for cycle_step in range(2)}) == (
        2 if depths.request.rotate else 1
    )
    if options.get("rebalance"):
        assert len(set(entry.examples)) > 1 and entry.examples[0] > entry.examples[-1]


@pytest.mark.parametrize("execution", ["branch", "program"])
def test_devices_that_share_a_worker_divide_its_examples(execution):
    """Convolutions of each device's examples, dense layers split over the group, random bits, unequal shares: multiples
    of the group."""
    random = np.random.default_rng(0)
    shapes = {"conv": (3, 3, 3, 8), "hidden": (8 * 16, 64), "head": (64, 4)}
    params = {name: random.normal(size=shape) * 0.1 for name, shape in shapes.items()}
    batch = {
        "x": random.normal(size=(24, 4, 4, 3)),
        "y": random.normal(size=(24, 4)),
        "mask": random.integers(0, 3, 24).astype(float),
    }
    key = jax.random.key(0)

    def losses(params, batch, key):
        x = jnp.tanh(
            jax.lax.conv_general_dilated(
                batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0.0).reshape(len(x), -1)
        return jnp.square(jnp.tanh(x @ params["hidden"]) @ params["head"] - batch["y"]).sum(-1) * batch["mask"]

    def conv_step(params, batch, key):
        (_, own), grads = splitjax.value_and_grad(
            lambda p: ((found := losses(p, batch, key)).sum() / batch["mask"].sum(), found), has_aux=True
        )(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (own, grads)

    backprop = PartialBackprop((0.01, 1.0), rebalance=True, execution=execution)
    with jax.enable_x64(True):
        step = splitjax.parallelize(
            conv_step, mesh={"data": 2, "model": 2}, rules="splitbrain", backprop=backprop, donate=False
        )
        _, (own, grads) = step(params, batch, key)
        shallow, deep = step.plan(params, batch, key).partial.examples
        assert shallow > deep and shallow + deep == 24 and shallow % 2 == 0
        of_worker = lambda low, high: jax.grad(lambda p: losses(p, batch, key)[low:high].sum() / batch["mask"].sum())(
            params
        )
        parts, whole = (of_worker(0, shallow), of_worker(shallow, 24)), losses(params, batch, key)
        assert step._last.partial.skipped(step._last.partial.depths.first[0]) == {"conv", "hidden"}
        np.testing.assert_allclose(own, whole, rtol=1e-9)
        np.testing.assert_allclose(grads["head"], parts[0]["head"] + parts[1]["head"], rtol=1e-9, atol=1e-12)
        for name in ("conv", "hidden"):
            np.testing.assert_allclose(grads[name], parts[1][name] * 24 / deep, rtol=1e-9, atol=1e-12)
        report = step.report(params, batch, key)
    assert not report.missing, "exchanges of both workers' examples, which the plan has as those of a mean worker"


def test_a_program_of_its_own_saves_a_shallow_worker_memory():
    step = splitjax.parallelize(
        train_step, mesh={"data": 4}, rules="data_parallel", backprop=PartialBackprop(execution="program")
    )
    state = {"params": parameters(), "opt": OPTIMIZER.init(parameters())}
    wide = {name: np.repeat(value, 64, axis=0) for name, value in examples().items()}
    compiled = step.lower(state, wide).compile()
    temporaries = [compiled.parts[f"worker {slot}"].memory_analysis().temp_size_in_bytes for slot in range(4)]
    assert temporaries[0] < 0.8 * temporaries[3] and temporaries == sorted(temporaries)
    assert "all-reduce" not in "".join(compiled.parts[f"worker {slot}"].as_text() for slot in range(4)), (
        "between workers, before they are done"
    )
    assert "all-reduce" in compiled.parts["after"].as_text()


def normed_step(state: dict, batch: dict):
    """Batch norm: the loss is no sum over examples, and the running mean is among the results."""

    def loss_fn(params):
        hidden = batch["x"] @ params["first"]
        mean = hidden.mean(0)
        hidden = jnp.tanh((hidden - mean) / jnp.sqrt(hidden.var(0) + 1e-3))
        return jnp.square(hidden @ params["second"] - batch["y"]).sum(-1).mean(), mean

    (loss, mean), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": new, "mean": 0.9 * state["mean"] + 0.1 * mean}, {"loss": loss, "grads": grads}


@pytest.mark.parametrize("execution", ["branch", "program"])
def test_workers_with_statistics_of_their_own(execution):
    random = np.random.default_rng(0)
    params = {"first": random.normal(size=(6, 32)), "second": random.normal(size=(32, 4))}
    options = {"mesh": {"data": 4}, "rules": "data_parallel", "donate": False}
    state = {"params": params, "mean": np.zeros(32)}
    with jax.enable_x64(True):
        with pytest.raises(PartialError, match='statistics="local"'):
            splitjax.parallelize(normed_step, backprop=PartialBackprop(), **options)(state, examples())
        step = splitjax.parallelize(
            normed_step,
            backprop=PartialBackprop((0.01, 0.01, 1, 1), statistics="local", execution=execution),
            **options,
        )
        new, metrics = step(state, examples())
        alone = [
            {name: value[4 * worker : 4 * worker + 4] for name, value in examples().items()} for worker in range(4)
        ]
        own = [normed_step(state, part) for part in alone]
    np.testing.assert_allclose(metrics["loss"], np.mean([m["loss"] for _, m in own]), rtol=1e-9)
    np.testing.assert_allclose(new["mean"], np.mean([s["mean"] for s, _ in own], axis=0), rtol=1e-9)
    reaches = [worker for worker in range(4) if step._last.partial.depths.first[worker] == 0]
    assert reaches == [2, 3]
    np.testing.assert_allclose(
        metrics["grads"]["first"], np.mean([own[w][1]["grads"]["first"] for w in reaches], axis=0), rtol=1e-9
    )
    np.testing.assert_allclose(
        metrics["grads"]["second"], np.mean([m["grads"]["second"] for _, m in own], axis=0), rtol=1e-9
    )


def test_layers_that_nobody_reaches_stay_and_the_first_steps_are_full():
    def differs(backprop: PartialBackprop) -> list[list[bool]]:
        step = splitjax.parallelize(train_step, mesh={"data": 2}, rules="data_parallel", backprop=backprop)
        params = jax.tree.map(jnp.float32, parameters())
        state, found = {"params": params, "opt": OPTIMIZER.init(params)}, []
        for number in range(2):
            before = jax.tree.map(np.asarray, state)
            state, _ = step(state, examples(number))
            moments = lambda one, layer: (one["params"][layer]["w"], one["opt"][0].mu[layer]["w"])
            found.append(
                [
                    bool(np.any(np.asarray(a) != b))
                    for a, b in zip(moments(state, "d0"), moments(before, "d0"), strict=True)
                ]
            )
            assert np.any(np.asarray(state["params"]["d3"]["w"]) != before["params"]["d3"]["w"])
        return found

    assert differs(PartialBackprop(depths=(0.3, 0.5))) == [[False, False], [False, False]]
    assert differs(PartialBackprop(depths=(0.3, 0.5), warmup_steps=1)) == [[True, True], [False, False]]


def test_rows_that_a_worker_did_not_compute_are_not_sent():
    def step(state, batch):
        def loss_fn(params):
            return (
                jnp.square(
                    jnp.tanh(params["table"][batch["ids"]].mean(1) @ params["first"]) @ params["second"] - batch["y"]
                )
                .sum(-1)
                .mean()
            )

        _, grads = splitjax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {}

    random = np.random.default_rng(0)
    state = {
        "table": random.normal(size=(400, 8)),
        "first": random.normal(size=(8, 32)),
        "second": random.normal(size=(32, 4)),
    }
    batches = [{"ids": random.integers(0, 400, (16, 3)), "y": random.normal(size=(16, 4))} for _ in range(5)]
    results, sent = {}, {}
    for sync in ("dense", "all_gather"):
        run_step = splitjax.parallelize(
            step, mesh={"data": 4}, rules="data_parallel", sync=sync, backprop=PartialBackprop(), donate=False
        )
        now = state
        for batch in batches:
            now, _ = run_step(now, batch)
        results[sync], sent[sync] = now, run_step.plan(state, batches[0]).syncs
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results["dense"], results["all_gather"]
    )
    assert "density" in sent["all_gather"][0].why
    observed = float(sent["all_gather"][0].why.rpartition("density ")[2])
    assert observed < 12.5 / 400, "the rows of one worker of four, of 12 lookups, not those of 48"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": {"data": 1}}, "there is one"),
        ({"mesh": {"data": 4}, "backprop": PartialBackprop(depths=(0.5, 1.0))}, "2 fractions for 4 workers"),
    ],
)
def test_what_cannot_be_is_an_error(options, words):
    options = {"rules": "data_parallel", "backprop": PartialBackprop(), **options}
    step = splitjax.parallelize(train_step, **options)
    with pytest.raises(PartialError, match=words) as caught:
        step.plan({"params": parameters(), "opt": OPTIMIZER.init(parameters())}, examples())
    assert caught.value.remedy


def test_a_pinned_plan_has_its_depths():
    params = jax.tree.map(jnp.float32, parameters())
    state = {"params": params, "opt": OPTIMIZER.init(params)}
    make = lambda **options: splitjax.parallelize(
        train_step, mesh={"data": 4}, rules="data_parallel", donate=False, **options
    )
    asked = make(backprop=PartialBackprop((0.2, 0.4, 0.4, 1.0)))
    pinned = splitjax.Plan.from_json(asked.plan(state, examples()).to_json())
    again = make(plan=pinned)
    jax.tree.map(np.testing.assert_array_equal, again(state, examples())[1], asked(state, examples())[1])
    assert again.plan(state, examples()).partial == pinned.partial
    seconds = Measured(tuple(f"params/d{k}" for k in range(4)), (1.0, 1.0, 1.0, 9.0), 2.0, (1.0,) * 4)
    balanced = make(backprop=PartialBackprop(rebalance=True, measured=seconds))
    timed = balanced.plan(state, examples())
    assert (
        timed.partial.times == "measured"
        and timed.partial.examples
        != make(backprop=PartialBackprop(rebalance=True)).plan(state, examples()).partial.examples
    )
    timed_again = make(plan=splitjax.Plan.from_json(timed.to_json()))
    assert timed_again.plan(state, examples()).partial == timed.partial
    jax.tree.map(np.testing.assert_array_equal, timed_again(state, examples())[1], balanced(state, examples())[1])
    segments = pinned.partial.segments
    other = dataclasses.replace(
        pinned.partial, segments=(dataclasses.replace(segments[0], layers=("params/d9",)), *segments[1:])
    )
    with pytest.raises(PlanError, match="params/d9"):
        make(plan=dataclasses.replace(pinned, partial=other)).plan(state, examples())


def test_a_resumed_run_goes_on_with_the_assignment():
    make = lambda: splitjax.parallelize(
        train_step, mesh={"data": 4}, rules="data_parallel", backprop=PartialBackprop(), donate=False
    )
    params = jax.tree.map(jnp.float32, parameters())
    start = {"params": params, "opt": OPTIMIZER.init(params)}
    first = make()
    for number in range(3):
        start, _ = first(start, examples(number))
    carried = first.carried()
    assert carried.num_steps == 3
    _, metrics = first(start, examples(3))
    second, third = make(), make()
    second.resume(type(carried).parse(carried.to_json(), carried.arrays()))
    np.testing.assert_array_equal(metrics["grads"]["d0"]["w"], second(start, examples(3))[1]["grads"]["d0"]["w"])
    assert np.any(
        np.asarray(metrics["grads"]["d0"]["w"]) != np.asarray(third(start, examples(3))[1]["grads"]["d0"]["w"])
    )


def test_convolutions_in_branches_are_in_the_layout_of_the_fast_kernel():
    """XLA's CPU compiler transposes those of the entry computation only; elsewhere other layouts run through a loop
    nest."""

    def conv_step(state, batch):
        def loss_fn(params):
            x = batch["x"]
            for name in ("a", "b"):
                x = jnp.tanh(
                    jax.lax.conv_general_dilated(
                        x, params[name], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
                    )
                )
            return jnp.square(x).sum((1, 2, 3)).mean()

        _, grads = splitjax.value_and_grad(loss_fn, **({} if state.get("whole") is None else {"microbatches": 2}))(
            state["params"]
        )
        return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, grads

    random = np.random.default_rng(0)
    params = {
        "a": random.normal(size=(5, 3, 3, 3)).astype(np.float32),
        "b": random.normal(size=(4, 5, 3, 3)).astype(np.float32),
    }
    batch = {"x": random.normal(size=(8, 3, 6, 6)).astype(np.float32)}
    options = {"mesh": {"data": 2}, "rules": "data_parallel", "donate": False}
    full = splitjax.parallelize(conv_step, **options)({"params": params}, batch)[1]
    for extra, state in (
        ({"backprop": PartialBackprop((0.1, 1.0))}, {"params": params}),
        ({"backprop": PartialBackprop((0.1, 1.0), assignment="temporal")}, {"params": params}),
        ({}, {"params": params, "whole": np.ones(())}),
    ):
        step = splitjax.parallelize(conv_step, **options, **extra)
        # which all workers differentiate
        np.testing.assert_allclose(step(state, batch)[1]["b"], full["b"], rtol=1e-4, atol=1e-5)
        labels = set(re.findall(r"dim_labels=([^\s,]+)", step.lower(state, batch).compile().as_text()))
        assert labels == {"b01f_01io->b01f"}
