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
# # Planning for a pod, from a laptop
#
# You have a model of eight billion parameters, no accelerator, and an hour to decide whether sixteen TPU chips will do.
# Will it fit? Which layout is fastest, and on which mesh? How long is a step? Nothing of that needs the chips: a step
# is *traced* from the shapes of its arguments, and everything else is predicted from the trace and from what the vendor
# says of the machine.
#
# This notebook asks those questions for a Transformer with the sizes of LLaMA-8B and a slice of sixteen TPU v5e chips,
# which have 16 GiB each. No array of the model is ever made. It takes about a
# minute.

# %%
import os

# libtpu, where it is installed, looks for a TPU's host unless it is told that there is none.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax

jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import optax

import splitjax

# %% [markdown]
# ## The model
#
# A decoder in plain JAX: its blocks are alike, so their weights are stacked and `jax.lax.scan` runs over them, and
# `jax.checkpoint` recomputes a block's activations in the backward pass. Weights and Adam's moments are float32,
# products are in bfloat16.

# %%
LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 32, 4096, 32, 14336, 32768, 2048


def init_fn(key):
    weight = lambda *sizes: 0.02 * jax.random.normal(key, sizes)
    attention = {name: weight(LAYERS, WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
    mlp = {name: weight(LAYERS, WIDTH, HIDDEN) for name in ("gate", "up")} | {"down": weight(LAYERS, HIDDEN, WIDTH)}
    blocks = {"attention": attention, "mlp": mlp}
    params = {"embedding": weight(VOCABULARY, WIDTH), "blocks": blocks, "head": weight(WIDTH, VOCABULARY)}
    return {"params": params, "opt": tx.init(params)}


def norm(x):
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
    return (x * scale).astype(x.dtype)


def attend(weights, x):
    heads = lambda name: (x @ weights[name]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
    mixed = jax.nn.dot_product_attention(heads("query"), heads("key"), heads("value"), is_causal=True)
    return mixed.reshape(x.shape) @ weights["output"]


def block(x, weights):
    weights = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)
    x = x + attend(weights["attention"], norm(x))
    mlp, y = weights["mlp"], norm(x)
    return x + (jax.nn.silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"], None


def loss_fn(params, tokens):
    x = params["embedding"].astype(jnp.bfloat16)[tokens]
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    logits = (norm(x) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


tx = optax.adam(1e-4)


def train_step(state, tokens):
    loss, grads = splitjax.value_and_grad(loss_fn)(state["params"], tokens)
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


state = jax.eval_shape(init_fn, jax.random.key(0))  # shapes, no arrays
num_params = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
print(f"{num_params / 1e9:.2f} billion parameters; with Adam's moments {num_bytes / 2**30:.0f} GiB")

# %% [markdown]
# ## Will it fit?
#
# `target` names the machine, `rules="auto"` and `mesh="auto"` leave the layout of every layer and the sizes of the mesh
# to splitjax, and `memory_budget` is what a chip may need: 15 of its 16 GiB, as the runtime keeps some. A layout is
# taken only if the upper bound of its memory is within. How many sequences of 2048 tokens may a step have?

# %%
TARGET = "tpu:v5e:4x4"


def planned(num_sequences, **options):
    """The decorated step, and the plan for so many sequences."""
    step = splitjax.parallelize(train_step, target=TARGET, **options)
    tokens = jax.ShapeDtypeStruct((num_sequences, LENGTH), jnp.int32)
    return step, step.plan(state, tokens), tokens


chosen = {"mesh": "auto", "rules": "auto", "memory_budget": "15GiB"}
for num_sequences in (16, 32, 128):
    try:
        step, plan, _ = planned(num_sequences, **chosen)
    except splitjax.SplitjaxError as error:
        print(f"{num_sequences} sequences: {error.message}")
    else:
        best, most = step.choice.best, plan.memory.bound_bytes / 2**30
        takes = f"{best.program_seconds:.2f} s, at most {most:.1f} GiB"
        print(f"{num_sequences} sequences: {best.name} on {best.mesh}: {takes}")

# %% [markdown]
# Sixteen sequences fit with layers that are split over four chips, whose weights are stored in parts over the other
# axis and gathered where they are used. Of 32 the budget leaves only a layout that takes longer than two steps of
# sixteen: the layers are split over all chips, and send what crosses between them. 128 do not fit, and the error says
# what the smallest layout that was found would need. So sixteen it is:

# %%
step, plan, tokens = planned(16, **chosen)
print(f"expected {plan.memory.peak_bytes / 2**30:.1f} GiB, at most {plan.memory.bound_bytes / 2**30:.1f} GiB a chip")

# %% [markdown]
# ## What was weighed
#
# The choice is a value. Every mesh of sixteen chips was compared, on each of them what a search over the layers found
# and every rule set that comes with splitjax. *parts* is what the search goes by: seconds of arithmetic, memory traffic
# and collectives by the published figures of the chip, added up. The best few of them that fit were lowered, and
# *program* is what decides among these: the time of the whole program, in which collectives go on while the chip
# computes. *sum* is a quick sum of all that the step stores, which knows nothing of recomputation; *at most* is the
# upper bound by the lifetimes of arrays, of those candidates that it was asked of.

# %%
step.choice

# %%
for note in plan.notes[:4]:
    print(note)

# %% [markdown]
# ## What it sends, and how long it takes
#
# The plan lists every collective with its reason. `step.time` is what the choice asked of the programs: operation by
# operation, with what `jax.checkpoint` computes again, and with collectives that go on while the chip computes. Nothing
# reaches its published peak, so this is a lower bound.

# %%
sent = sum(collective.bytes for collective in plan.collectives)
print(f"a chip sends {sent / 2**30:.1f} GiB a step, mostly:")
for collective in sorted(plan.collectives, key=lambda each: -each.bytes)[:4]:
    print(f"  {collective.bytes / 2**30:5.1f} GiB  {collective.op:15} over {collective.axis:6} {collective.why}")
seconds = step.time(state, tokens, on=TARGET).seconds
print(f"a step takes at least {seconds:.2f} s: at most {16 * LENGTH / seconds:,.0f} tokens a second")

# %% [markdown]
# ## More chips
#
# What would 64 chips do? The same step, another target, and four times the sequences. The budget stays.

# %%
larger = splitjax.parallelize(train_step, target="tpu:v5e:8x8", **chosen)
more_tokens = jax.ShapeDtypeStruct((64, LENGTH), jnp.int32)
larger_plan = larger.plan(state, more_tokens)
print(f"{larger_plan.rules} on {larger_plan.mesh}: at most {larger_plan.memory.bound_bytes / 2**30:.1f} GiB a chip")

# %% [markdown]
# ## Keeping it
#
# What was chosen is a mesh and a rule set. Written to a file it can be read, changed and reviewed, and gives the same
# plan without any search:

# %%
from splitjax.rules.ruleset import parse_rules
from splitjax.rules.writing import write_rules

sizes = dict(plan.mesh.axes)
text = write_rules(step.rules)
again = splitjax.parallelize(train_step, mesh=sizes, rules=parse_rules(text, "chosen.toml"), target=TARGET)
assert again.plan(state, tokens).leaves == plan.leaves
print(text[:600])

# %% [markdown]
# ## The real compiler
#
# `pip install libtpu` brings the compiler of TPUs, which needs no TPU. On a mesh of a *topology*, `report` compiles the
# step and puts the compiled program beside the plan. For the whole model that takes minutes; the feed-forward layer of
# one block takes seconds, and is compiled here where libtpu is installed.

# %%
import importlib.util


def feed_forward_step(weights, x):
    def loss_of(weights):
        mlp = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)
        y = (jax.nn.silu(x @ mlp["gate"]) * (x @ mlp["up"])) @ mlp["down"]
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    loss, grads = splitjax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, grad: weight - 1e-3 * grad, weights, grads), loss


if importlib.util.find_spec("libtpu") is None:
    print("libtpu is not installed: nothing is compiled")
else:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
    mesh = topologies.make_mesh(topology, (4, 4), ("data", "model"))
    weights = {name: jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32) for name in ("gate", "up")}
    weights["down"] = jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.bfloat16)
    report = splitjax.parallelize(feed_forward_step, mesh=mesh, rules="auto").report(weights, x)
    memory = report.memory
    expected, bound = memory.predicted.peak_bytes / 2**20, memory.predicted.bound_bytes / 2**20
    print(f"memory: expected {expected:.0f} MiB a chip, at most {bound:.0f} MiB", end=", ")
    print(f"compiled {memory.compiled.total_bytes / 2**20:.0f} MiB")
    sent = report.total
    print(f"sent: predicted {sent.predicted_bytes / 2**20:.0f} MiB, compiled {sent.compiled_bytes / 2**20:.0f} MiB")
