# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Partial backpropagation: what it saves, and whether it pays
#
# A training step computes a loss, layer by layer (the forward pass), and then walks back from the loss through the
# layers for their gradients (the backward pass, about two thirds of the work). With N devices, each of which has its
# own examples, every layer gets N gradients, and their mean is used.
#
# Must it be all N? In *partial backpropagation* (Kumar et al., [arXiv 2111.10672](https://arxiv.org/abs/2111.10672))
# some workers stop on the way back: worker i walks the last (i+1)/N of it. The last layers still have the gradients of
# all workers, the first layers that of one. That saves time, bytes and memory, and it changes the numbers: the mean of
# fewer gradients is noisier.
#
# There is a simple rival that costs as much: full backpropagation with a smaller batch. So the question is not whether
# partial backpropagation saves anything, but whether it beats that. This notebook shows what each worker saves, trains
# both ways on images of digits, and lets `step.advise` answer for this model.
# [docs/partial_backpropagation.md](../docs/partial_backpropagation.md) has the rest. It takes up to two minutes on two
# cores.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)  # before JAX starts

# %%
# %matplotlib inline
import numpy as np
import optax
from flax import linen as nn

import splitjax
from splitjax import PartialBackprop
from splitjax.data import load_digits
from splitjax.report.advice.plot import draw_runs, draw_savings

NUM_WORKERS, BATCH_SIZE, NUM_STEPS, SEEDS = 4, 64, 60, range(3)

# %% [markdown]
# ## A step
#
# Six dense layers over images of digits, Adam. Nothing in the step knows about partial backpropagation, except that its
# gradient is taken by `splitjax.value_and_grad`.

# %%
digits = load_digits(image_size=None, channels=1)
images = {
    part: rows["image"].reshape(len(rows["image"]), -1) / 255.0
    for part, rows in (("train", digits.train), ("test", digits.test))
}
labels = {part: rows["label"] for part, rows in (("train", digits.train), ("test", digits.test))}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(5):
            x = nn.relu(nn.Dense(128, name=f"dense{number}")(x))
        return nn.Dense(10, name="logits")(x)


model, tx = Model(), optax.adam(4e-3)


def init_fn(key):
    params = model.init(key, images["train"][:1])["params"]
    return {"params": params, "opt": tx.init(params)}


def train_step(state, batch):
    def loss_fn(params):
        logits = model.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def make_batch(rng, size=BATCH_SIZE):
    chosen = rng.choice(len(labels["train"]), size, replace=False)
    return {"image": images["train"][chosen].astype(np.float32), "label": labels["train"][chosen].astype(np.int32)}


def parallel(backprop=None):
    return splitjax.parallelize(train_step, mesh={"data": NUM_WORKERS}, rules="data_parallel", backprop=backprop)


rng = np.random.default_rng(0)
batch = make_batch(rng)
steps = {
    "full": parallel(),
    "branches": parallel(PartialBackprop()),
    "programs": parallel(PartialBackprop(execution="program")),
}
starts = [jax.device_get(jax.jit(init_fn)(jax.random.key(seed))) for seed in SEEDS]
states = {name: step.place(starts[0], example=(batch,)) for name, step in steps.items()}

# %% [markdown]
# ## What the plan says
#
# There are two ways to run it. As *branches* of one program, each worker takes the branch of its depth; as *programs*
# of their own, workers need less memory too. Cuts stand between layers, placed by the predicted time of the backward
# pass. A layer's gradients are added up among the workers that computed them, and the sum is handed on to the others,
# who update their parameters too.

# %%
plan = steps["branches"].plan(states["branches"], batch)
for segment in plan.partial.segments:
    layers = ", ".join(layer.removeprefix("params/") for layer in segment.layers)
    print(
        f"{layers}: {segment.contributors} of {NUM_WORKERS} workers, {100 * segment.backward:.1f} % of the backward"
        f" pass, {segment.num_bytes:,} bytes;",
        end=" ",
    )
    print(
        f"a worker sends {segment.summed_bytes:,} to add them up and {segment.handed_bytes:,} to hand on the sum, on"
        " average"
    )

# %% [markdown]
# The report compares it with the compiled program, in which the exchange has a branch for every turn. Only the loss is
# not in the plan.

# %%
report = steps["branches"].report(states["branches"], batch)
for (op, axis), total in report.by_op.items():
    print(f"{op} over {axis}: {total.predicted_bytes:,} bytes planned, {total.compiled_bytes:,} compiled")
assert not report.missing and all(one.compiled.shape == () for one in report.unplanned)
for one in report.depths:
    print(
        f"worker {one.slot} differentiates from {one.layer} on: {100 * one.backward:.0f} % of the backward pass,"
        f" {one.num_products} products in its branch"
    )

# %% [markdown]
# ## What each worker saves
#
# Time and bytes from the plan, memory from the compiled programs. As branches of one program all workers have the
# memory of the deepest; with a program for each depth (`execution="program"`) shallow workers need less. Depths rotate,
# so that every worker is the deepest in its turn: memory falls on average, not at most.

# %%
compiled = steps["programs"].lower(states["programs"], batch).compile()
memory = [compiled.parts[f"worker {worker}"].memory_analysis() for worker in range(NUM_WORKERS)]
memory_bytes = [one.temp_size_in_bytes + one.output_size_in_bytes for one in memory]
partial = plan.partial
backward_share = [sum(segment.backward for segment in partial.segments[first:]) for first in partial.first]
# Who contributes to a segment sends 2 (n - 1) / n of it, and hands on what the plan says, in equal parts.
sent_bytes = [
    sum(
        (segment.summed_bytes + segment.handed_bytes) * NUM_WORKERS / segment.contributors
        for segment in partial.segments[first:]
    )
    for first in partial.first
]
full_plan = steps["full"].plan(states["full"], batch)
full_bytes = sum(one.bytes for one in full_plan.collectives)

draw_savings(
    {
        "time of the backward pass": backward_share,
        "bytes sent": np.array(sent_bytes) / full_bytes,
        "memory of its program": np.array(memory_bytes) / max(memory_bytes),
    }
)

# %% [markdown]
# The bytes of the deepest worker do not fall: front layers that few workers compute are summed among these few, and
# then handed on by them.
#
# ## Quality at equal cost
#
# With the forward pass, which all workers do in full, the whole costs this share of the device time of full
# backpropagation:

# %%
fraction = partial.device_time
smaller_size = round(fraction * BATCH_SIZE / NUM_WORKERS) * NUM_WORKERS
print(
    f"{100 * fraction:.1f} % of the device time; the batch of equal cost has {smaller_size} instead of {BATCH_SIZE}"
    " examples"
)
ways = {
    "full": (steps["full"], BATCH_SIZE),
    "smaller batch": (steps["full"], smaller_size),
    "depths by worker": (steps["branches"], BATCH_SIZE),
    "all workers in turn": (parallel(PartialBackprop(assignment="temporal")), BATCH_SIZE),
}


@jax.jit
def evaluate(params, image, label):
    logits = model.apply({"params": params}, image)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), (logits.argmax(-1) == label).mean()


def train(step, size, seed):
    draw = np.random.default_rng(seed)
    state = step.place(starts[seed], example=(make_batch(draw, size),))
    for _ in range(NUM_STEPS):
        state, metrics = step(state, make_batch(draw, size))
        metrics["loss"].block_until_ready()  # virtual devices share their threads: one step at a time
    params = jax.device_get(state["params"])
    return float(evaluate(params, images["train"], labels["train"])[0]), float(
        evaluate(params, images["test"], labels["test"])[1]
    )


results = {name: np.array([train(step, size, seed) for seed in SEEDS]) for name, (step, size) in ways.items()}
for name, found in results.items():
    print(
        f"{name:20} train loss {found[:, 0].mean():.4f} +- {found[:, 0].std(ddof=1):.4f}, test accuracy"
        f" {100 * found[:, 1].mean():.1f} %"
    )


# %%
draw_runs(
    {name: {"train loss": found[:, 0], "test accuracy, %": 100 * found[:, 1]} for name, found in results.items()},
    f"after {NUM_STEPS} steps, {len(SEEDS)} seeds; bars are means; all but full cost {100 * fraction:.0f} %",
)

# %% [markdown]
# Three seeds on a small problem settle nothing; `python -m benchmarks partial` has more of both, the published
# prototype's estimator, and examples balanced among the workers. They do show what to expect: at equal cost, depths by
# worker and a smaller batch are close to each other, and neither is as good as full.
#
# ## Ask first
#
# `step.advise` measures a step instead of guessing. On one device it times the backward pass to each depth and compiles
# its memory; over some batches it measures how much the workers' gradients differ, layer by layer. How noisy a mean is,
# its variance, falls with the number of workers that contribute. A way is then judged by its *compute to go*: device
# time times variance, relative to full backpropagation. A smaller batch always comes out at 100 %: half of the batch,
# half of the cost, twice the variance. What is above 100 % is worse.

# %%
batches = [make_batch(rng) for _ in range(8)]
advice = steps["full"].advise(
    states["full"],
    batches,
    PartialBackprop(execution="program"),
    link=splitjax.sync.Link(latency_seconds=1e-4, bytes_per_second=1e9 / 8),
)
advice

# %%
print(advice.recommendation)


# %%
advice.plot()

# %% [markdown]
# How to read it: the advice recommends the smaller batch here. The gradients of the front layers are as noisy for their
# time as those of the last ones, so that nothing is gained by leaving them out more often. The other lines are no
# further recommendations. They say in which respects partial backpropagation does better whatever is recommended:
# bytes, the memory of the mean worker, and workers that wait, on whose devices another job can run.
#
# What was measured also serves whoever decides for partial backpropagation: for cuts by time, or for the best depths
# within a budget.

# %%
best = parallel(PartialBackprop(depths="optimal", measured=advice.measured, budget=0.8))
for segment in best.plan(states["full"], batch).partial.segments:
    print(
        f"{segment.contributors} of {NUM_WORKERS} workers:"
        f" {', '.join(layer.removeprefix('params/') for layer in segment.layers)}"
    )
