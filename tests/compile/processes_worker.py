"""One process of the run in test_step_programs.py: every scenario prints a line of JSON."""

from __future__ import annotations

import hashlib
import json
import sys
import time

import jax

RANK, NUM, PORT = (int(argument) for argument in sys.argv[1:4])
FOLDER = sys.argv[4]
jax.distributed.initialize(f"127.0.0.1:{PORT}", NUM, RANK)

import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import splitjax  # noqa: E402
from splitjax import models  # noqa: E402
from splitjax.compile.step_programs import MET_EVENT, WAIT_EVENT  # noqa: E402
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints  # noqa: E402
from splitjax.step.agreement import agree  # noqa: E402
from splitjax.sync import ByRows  # noqa: E402

MESH = {"data": 2, "model": 2}
SPEC = models.build("mlp", input_shape=(32,), features=(64, 32), num_classes=4)


def say(scenario: str, **values) -> None:
    print(json.dumps({"scenario": scenario, **values}), flush=True)


def batch_of(seed: int = 0) -> dict:
    random = np.random.RandomState(seed)
    return {"image": random.randn(8, 32).astype(np.float32), "label": random.randint(0, 4, 8).astype(np.int32)}


def steps(learning_rate: float = 0.01, **options):
    init_fn, train_step, eval_step = models.make_step(
        SPEC, optax.adam(learning_rate), value_and_grad=splitjax.value_and_grad
    )
    return init_fn, splitjax.parallelize(train_step, mesh=MESH, **options), eval_step


def train(rules: str, start: str, batch, **options) -> list[float]:
    init_fn, step, eval_step = steps(rules=rules, **options)
    key = jax.random.key(0)
    state = step.init(init_fn, key, example=(SPEC.example(8),)) if start == "init" else init_fn(key)
    if start == "place":
        state = step.place(state, example=(SPEC.example(8),))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    losses.append(float(step.like(eval_step)(state, batch)["loss"]))
    assert len(step.compiles) == 1
    return losses


def expect_error(scenario: str, run) -> None:
    try:
        run()
    except splitjax.errors.ProcessError as error:
        say(scenario, error=str(error))
    else:
        say(scenario, error=None)


def one_call(batch_seed: int = 0, **options):
    init_fn, step, _ = steps(**options)
    step(init_fn(jax.random.key(0)), batch_of(batch_seed))


mine = jax.tree.map(lambda array: array[RANK * 8 // NUM : (RANK + 1) * 8 // NUM], batch_of())
say("splitbrain init", losses=train("splitbrain", "init", batch_of()))
say("splitbrain place", losses=train("splitbrain", "place", batch_of()))
say("megatron host", losses=train("megatron", "host", batch_of()))
say("megatron global_batch", losses=train("megatron", "init", splitjax.global_batch(mine)))
say("fsdp global_batch", losses=train("fsdp", "init", splitjax.global_batch(mine)))

nnx_init, nnx_step, _ = models.make_nnx_step(
    models.build("mlp", library="nnx", input_shape=(32,), features=(64, 32), num_classes=4),
    optax.adam(0.01),
    value_and_grad=splitjax.nnx.value_and_grad,
)
nnx_step = splitjax.nnx.parallelize(nnx_step, mesh=MESH)
model, optimizer = nnx_init(jax.random.key(0))
say("nnx", losses=[float(nnx_step(model, optimizer, batch_of())["loss"]) for _ in range(3)])
assert isinstance(model, nnx.Module)

init_fn, step, _ = steps()
state = step.init(init_fn, jax.random.key(0), example=(SPEC.example(8),))
say("profile", json=step.profile(state, [splitjax.global_batch(mine), batch_of()], num_workers=8).to_json())


def lookups(sync: str) -> tuple[list[float], list[str]]:
    """Losses of a step with a table, and how it was synchronised."""

    def step(state, batch):
        loss_fn = lambda params: ((params["table"][batch["ids"]] @ params["w"]) ** 2).mean()
        loss, grads = splitjax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.5 * g, state, grads), loss

    step = splitjax.parallelize(step, mesh=MESH, rules="data_parallel", sync=sync)
    state = {"table": np.linspace(-1, 1, 300 * 8, dtype=np.float32).reshape(300, 8), "w": np.ones((8, 3), np.float32)}
    losses = []
    for number in range(5):
        batch = {"ids": np.random.RandomState(number).randint(0, 300, (8, 4)).astype(np.int32)}
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, [one.scheme for one in step.plan(state, batch).syncs]


for sync in ("dense", "row_exchange", "auto"):
    say(f"sync {sync}", found=lookups(sync))

init_fn, advised, _ = steps(rules="data_parallel")  # a state of another layout would pin that layout
state = advised.init(init_fn, jax.random.key(0), example=(SPEC.example(8),))
advice = advised.advise(state, [splitjax.global_batch(mine), batch_of(1)], splitjax.PartialBackprop())
say("advice", json=advice.to_json(), consumed=any(leaf.is_deleted() for leaf in jax.tree.leaves(state)))

for execution in ("branch", "program"):
    say(
        f"partial {execution}",
        losses=train("splitbrain", "init", batch_of(), backprop=splitjax.PartialBackprop(execution=execution)),
    )


def rounded(checkpoints: Checkpoints, resumed: bool) -> str:
    """The digest of a table after six steps with values rounded on the wire: of a whole run, which saves after five, or
    of its last step."""

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda params: (params["table"][batch["ids"]] * 1.003).mean())(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), loss

    step = splitjax.parallelize(
        step, mesh={"data": 4}, rules="data_parallel", sync=ByRows("row_exchange", wire_dtype="bfloat16")
    )
    first, state = 0, {"table": np.zeros((50, 4), np.float32)}
    batch_at = lambda number: {"ids": np.random.RandomState(number).randint(0, 50, (8, 4)).astype(np.int32)}
    if resumed:
        restored = checkpoints.restore(step.abstract_state(lambda: state, example=(batch_at(0),)))
        step.resume(restored.carried)
        first, state = restored.step, restored.state
        assert not restored.carried.residuals["table"].is_fully_addressable
    for number in range(first, 6):
        state, _ = step(state, batch_at(number))
        if number == 4 and not resumed:
            checkpoints.save(5, state, carried=step.carried(), wait=True)
    residuals = step.carried().residuals["table"]
    assert any(np.asarray(shard.data).any() for shard in residuals.addressable_shards)
    return hashlib.sha256(np.asarray(state["table"]).tobytes()).hexdigest()


with Checkpoints(CheckpointOptions(FOLDER)) as checkpoints:
    say("rounded", digests=[rounded(checkpoints, resumed) for resumed in (False, True)])

expect_error("plan", lambda: one_call(rules="splitbrain" if RANK == 0 else "data_parallel"))
compiled: list[tuple[str, float]] = []


def slowly(event: str, seconds: float, fun_name: str = "", **_) -> None:
    """Process 1 takes three seconds longer, where XLA begins to compile the step."""
    if "jaxpr_to_mlir_module" in event and "train_step" in fun_name and RANK == 1:
        time.sleep(3.0)
    if "backend_compile" in event and "train_step" in fun_name:
        compiled.append(("compiled", time.monotonic()))


def waits(event: str, **_) -> None:
    if event in (WAIT_EVENT, MET_EVENT):
        compiled.append((event, time.monotonic()))


jax.monitoring.register_event_duration_secs_listener(slowly)
jax.monitoring.register_event_listener(waits)
losses = train("megatron", "init", batch_of())
jax.monitoring.unregister_event_duration_listener(slowly)
jax.monitoring.unregister_event_listener(waits)
say("compiled slowly", losses=losses, events=compiled)

expect_error("program", lambda: one_call(learning_rate=0.01 * (1 + RANK)))
expect_error("batch", lambda: one_call(batch_seed=RANK))
expect_error(
    "lengths",
    lambda: steps()[1](
        steps()[0](jax.random.key(0)),
        splitjax.global_batch(
            {"image": np.zeros((4 + 4 * RANK, 32), np.float32), "label": np.zeros(4 + 4 * RANK, np.int32)}
        ),
    ),
)
plan = steps()[1].plan(jax.eval_shape(steps()[0], jax.random.key(0)), SPEC.example(8))
if RANK == 0:
    expect_error("absent", lambda: agree("alone", plan, "", (), timeout_seconds=0.5))
