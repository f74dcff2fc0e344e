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
# # Reading a plan, and what became of it
#
# How much memory will a step need on each device, and what will the devices send each other? A *plan* answers that
# before anything is compiled. Then XLA, JAX's compiler, makes a program of the step, and it may decide otherwise. A
# *report* puts the compiled program beside the plan, line by line.
#
# This notebook reads both for a small VGG, a network of convolutions in front of large dense layers: what is whole and
# what is split, why, what that costs in memory and in bytes sent, and how to change it. Nothing in it is trained. It
# takes about a minute.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts

# %%
import jax.numpy as jnp
import optax

import splitjax
from splitjax import models

# %% [markdown]
# ## A step
#
# Shapes are enough: nothing here is allocated or run. The dense layers are wide, as in the original VGG.

# %%
spec = models.build("vgg11", width=0.25)
tx = optax.sgd(0.1, momentum=0.9)


def init_fn(key):
    params = spec.init(key)["params"]
    return {"params": params, "opt": tx.init(params)}


def train_step(state, batch):
    def loss_fn(params):
        logits = spec.apply({"params": params}, batch["image"], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


batch = spec.example(512)
mesh = {"data": 1, "model": 8}


def planned(**options):
    """The decorated step with an abstract state for it."""
    step = splitjax.parallelize(train_step, mesh=options.pop("mesh", mesh), **options)
    return step, step.abstract_state(init_fn, jax.random.key(0), example=(batch,))


# %% [markdown]
# ## The plan
#
# The first lines say what the layout saves and sends. Then there is one row for each parameter: its layer and kind, its
# shape, its `PartitionSpec`, the rule that decided, and its bytes on each device. Below stand the memory of a step,
# what lives at its peak, what is sent, and under *exceptions* whatever is not as the rules would have it, with the
# reason.

# %%
step, state = planned(rules="splitbrain")
plan = step.plan(state, batch)
plan

# %% [markdown]
# Convolutions are whole on every device (`replicated`), dense layers split by columns. The last layer has 10 outputs,
# which eight devices do not divide: its rule goes on to the next alternative, rows. Everything is a value:

# %%
plan.spec("params/dense1/kernel"), plan.spec("params/logits/kernel"), plan.spec("params/conv1_1/kernel")

# %%
for layer in plan.layers[-3:]:
    print(f"{layer.name:16} {layer.kind:6} rule {layer.rule:8} {layer.spec}")

# %% [markdown]
# ## What it saves, and what it sends
#
# The same step under data parallelism is the yardstick.

# %%
base, base_state = planned(rules="data_parallel", mesh={"data": 8})
for name, one in {"data_parallel": base.plan(base_state, batch), "splitbrain": plan}.items():
    memory = one.memory
    sent = sum(collective.bytes for collective in one.collectives)
    print(
        f"{name:14} state {memory.state_bytes / 2**20:6.1f} MiB   peak {memory.peak_bytes / 2**20:6.1f} MiB   sends"
        f" {sent / 2**20:6.1f} MiB a step"
    )

# %% [markdown]
# Every collective is listed with its layer and its reason. The largest:

# %%
for one in sorted(plan.collectives, key=lambda one: -one.bytes)[:6]:
    print(f"{one.bytes / 2**20:6.2f} MiB  {one.op:14} over {one.axis:10} {one.layer:16} {one.why}")

# %% [markdown]
# ## Another decision, and what it changes
#
# Convolutions have each device's own examples; the dense layers of a group want the examples of all its devices. So
# examples have to cross from the one into the other, and `group_comm` says how: `gather` collects them all at once,
# `modulo` a part at a time. The difference of two plans is a list of sentences.

# %%
plans = {}
for kind in ("gather", "modulo"):
    other, other_state = planned(rules="splitbrain", group_comm=kind)
    plans[kind] = other.plan(other_state, batch)
for line in plans["gather"].diff(plans["modulo"]):
    print(line)

# %% [markdown]
# In `modulo` the dense layers run in eight turns, so that their activations are alive for an eighth of the examples at
# a time; `"auto"`, the default, weighs that against `gather`. What it took here:

# %%
plan.group_comm

# %% [markdown]
# ## The report: the plan against what XLA compiled
#
# Nothing is run. The report compiles the step, reads the compiled program, and finds for every collective the layer,
# the line, and the planned one that it realises.

# %%
report = step.report(state, batch)
report

# %%
assert not report.unattributed
compiled = report.memory.compiled
print(
    f"predicted peak {report.memory.predicted.peak_bytes / 2**20:.1f} MiB, compiled"
    f" {compiled.total_bytes / 2**20:.1f} MiB"
)
print(
    f"predicted {report.total.predicted_bytes / 2**20:.2f} MiB sent, compiled"
    f" {report.total.compiled_bytes / 2**20:.2f} MiB"
)

# %% [markdown]
# ## When the two differ
#
# What a plan cannot know is what a step asks for besides its layers. Here somebody sorts the losses of the batch, to
# look at the hardest examples. The report names the line.


# %%
def curious_step(state, batch):
    def loss_fn(params):
        logits = spec.apply({"params": params}, batch["image"], train=True)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return each.mean(), jnp.sort(each)[-8:]

    (loss, hardest), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, "hardest": hardest}


curious = splitjax.parallelize(curious_step, mesh={"data": 8}, rules="data_parallel")
for one in curious.report(base_state, batch).unplanned:
    print(f"{one.bytes:6} B  {one.op:12} {one.cause}  [{one.source.rsplit('/', 1)[-1]}]")

# %% [markdown]
# ## Keeping it
#
# A plan is text that belongs beside the training script. Pinned, it is what the step gets, whatever the rules would say
# later; a step that it does not fit is an error naming the first difference.

# %%
text = plan.to_json()
pinned, pinned_state = planned(plan=splitjax.Plan.from_json(text))
assert pinned.plan(pinned_state, batch) == plan
print(text[:400])
