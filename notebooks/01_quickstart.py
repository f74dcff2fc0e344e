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
# # Quickstart: one training step, eight devices, the same numbers
#
# You have a training step that runs on one device. On eight devices it should need less memory on each, and its losses
# should stay the same. This notebook takes a small network there: where its arrays will lie, before anything runs; its
# losses beside those of one device; a test; and what a mistake says.
#
# The step is written for the whole batch, as for one device, and stays as it is: a decorator puts it on a mesh of
# devices. Here they are eight virtual ones on this machine's processor; on accelerators leave the first line out. It
# takes about a minute.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts

# %%
import jax.numpy as jnp
import numpy as np
import optax

import splitjax
from splitjax import data, models

# %% [markdown]
# ## The step
#
# A multi-layer perceptron on scikit-learn's handwritten digits, enlarged to 32x32 pixels. The model is ordinary Flax
# Linen.

# %%
digits = data.load_digits()
spec = models.build("mlp", num_classes=10, features=(512, 512), input_shape=(32, 32, 3))
tx = optax.adam(1e-3)


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


# %% [markdown]
# ## On a mesh
#
# A mesh arranges the devices along named axes: `{"data": 2, "model": 4}` are two groups of four. A rule set says what
# is split. Under `splitbrain` every device has examples of its own, and the four devices of a group share one copy of
# each dense layer, of which each holds a quarter. `init` makes the state already split: no device ever holds all of it.

# %%
parallel_step = splitjax.parallelize(train_step, mesh={"data": 2, "model": 4}, rules="splitbrain")
shapes = spec.example(64)
state = parallel_step.init(init_fn, jax.random.key(0), example=(shapes,))
state["params"]["dense1"]["kernel"].sharding

# %% [markdown]
# ## The plan
#
# Before anything is compiled, the plan says where every array will live and why. Its first lines are the summary: what
# the layout saves, what the devices send each other in a step, and what to try next. Then comes a row for each
# parameter, with its layout (`spec`: `P(None, 'model')` means that the second dim is split over the axis `model`) and
# the rule that decided it.

# %%
plan = parallel_step.plan(state, shapes)
plan

# %% [markdown]
# It is a value: it has fields, saves as JSON, compares with another, and can be pinned with `parallelize(plan=...)`.

# %%
for layer in plan.layers:
    print(layer.name, layer.spec, "by rule", layer.rule)
print(f"{plan.memory.state_bytes / 2**20:.1f} MiB of state per device")

# %% [markdown]
# ## The same numbers
#
# The undecorated step on one device and the parallel step see the same batches. Their losses agree to rounding.

# %%
alone, alone_step = init_fn(jax.random.key(0)), jax.jit(train_step)
losses = []
for batch in digits.train_batches(64):
    state, metrics = parallel_step(state, batch)
    alone, alone_metrics = alone_step(alone, batch)
    losses.append((float(metrics["loss"]), float(alone_metrics["loss"])))
for parallel_loss, alone_loss in losses[::5]:
    print(f"parallel {parallel_loss:.6f}   one device {alone_loss:.6f}")
np.testing.assert_allclose(*zip(*losses), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## More epochs, and a test
#
# A step that returns no state takes the layouts of the training step with `like`. The test batches are padded and
# masked, so that all have one size.

# %%
for epoch in range(1, 6):
    for batch in digits.train_batches(64, epoch=epoch):
        state, metrics = parallel_step(state, batch)
        loss = float(metrics["loss"])  # on virtual devices, look at a result in every step: see docs/troubleshooting.md
    print(f"epoch {epoch}: loss {loss:.4f}")


def count_correct(state, batch):
    logits = spec.apply({"params": state["params"]}, batch["image"])
    return jnp.sum((jnp.argmax(logits, -1) == batch["label"]) * batch["mask"])


evaluate = parallel_step.like(count_correct)
accuracy = sum(float(evaluate(state, batch)) for batch in digits.test_batches(64)) / len(digits.test["label"])
print(f"test accuracy {accuracy:.1%}, programs compiled for training: {len(parallel_step.compiles)}")
assert accuracy > 0.9

# %% [markdown]
# ## A mistake, and what it says
#
# A call consumes the state that goes in: its memory is used for the new one. Using it again is an error that names the
# call.

# %%
batch = next(digits.train_batches(64))
old_state = state
state, metrics = parallel_step(old_state, batch)
try:
    parallel_step(old_state, batch)
except splitjax.errors.DonatedStateError as error:
    print(error)

# %% [markdown]
# ## Another layout
#
# The numbers do not depend on the layout, so that it can be changed in one line. `fsdp` splits every parameter over all
# devices, and gathers each where it is used. The difference of two plans is a list of sentences.

# %%
fsdp_step = splitjax.parallelize(train_step, mesh={"data": 8}, rules="fsdp")
fsdp_plan = fsdp_step.plan(state, shapes)
print(f"{fsdp_plan.memory.state_bytes / 2**20:.1f} MiB of state per device")
for line in plan.diff(fsdp_plan)[:6]:
    print(line)
