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
# # Sparse embeddings: sending the rows that were touched
#
# A model that predicts clicks keeps a row of numbers for every user and every item, in tables called embeddings. A
# batch looks up a few hundred of these rows. The gradient of a table nevertheless has the size of the table, nearly all
# of it zeros, and ordinary data-parallel training sends and applies all of it, in every step.
#
# With `sync=` the same step exchanges only the rows that were touched. There are several ways to do so, called
# *schemes*, and which is best depends on the data and on the network. This notebook measures how sparse the gradients
# of a small click model are, trains it both ways to the same losses, counts the bytes of every scheme, and asks which
# of them a network would want. Each of the eight devices is a *worker*, with its own share of the batch.
# [docs/sparse.md](../docs/sparse.md) has the rest. It takes up to four minutes on two cores.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts
jax.config.update("jax_disable_most_optimizations", True)  # little is run here: compile it fast

# %%
# %matplotlib inline
import numpy as np
import optax
from flax import linen as nn

import splitjax
from splitjax import sync
from splitjax.report.profile.scheme_plot import draw_bytes, draw_seconds
from splitjax.sync.choose import choose

# %% [markdown]
# ## A model, and clicks
#
# Three tables: users, items, and countries, which are few. A few users and items are very frequent and most are rare,
# as with words and products (Zipf's law: the second is half as frequent as the first, the third a third as frequent).
# Items are numbered by popularity, users in no order. Whether somebody clicks depends on both.

# %%
NUM_ROWS = {"user": 6000, "item": 10_000, "country": 24}
rng = np.random.default_rng(0)
shuffled = rng.permutation(NUM_ROWS["user"])
taste = {name: rng.normal(size=(rows, 3)) for name, rows in NUM_ROWS.items()}


def zipf(num_rows, size):
    weights = 1.0 / np.arange(1, num_rows + 1)
    return rng.choice(num_rows, size, p=weights / weights.sum()).astype(np.int32)


def make_batch(num_examples=256):
    ids = {
        "user": shuffled[zipf(NUM_ROWS["user"], num_examples)].astype(np.int32),
        "item": zipf(NUM_ROWS["item"], (num_examples, 4)),
        "country": zipf(NUM_ROWS["country"], num_examples),
    }
    score = (
        np.sum(taste["user"][ids["user"]] * taste["item"][ids["item"]].mean(1), -1)
        + taste["country"][ids["country"], 0]
    )
    return {**ids, "click": (score > 0).astype(np.float32)}


class ClickModel(nn.Module):
    @nn.compact
    def __call__(self, batch):
        tables = {name: nn.Embed(rows, 16, name=name) for name, rows in NUM_ROWS.items()}
        seen = [
            tables["user"](batch["user"]),
            tables["item"](batch["item"]).mean(1),
            tables["country"](batch["country"]),
        ]
        hidden = nn.relu(nn.Dense(32)(jax.numpy.concatenate([*seen, seen[0] * seen[1]], -1)))
        return nn.Dense(1)(hidden)[:, 0]


model = ClickModel()
batches = [make_batch() for _ in range(16)]


def make_step(tx):
    def init_fn(key):
        params = model.init(key, batches[0])["params"]
        return {"params": params, "opt": tx.init(params)}

    def train_step(state, batch):
        def loss_fn(params):
            return optax.sigmoid_binary_cross_entropy(model.apply({"params": params}, batch), batch["click"]).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return train_step, init_fn


def train(step, init_fn, batches):
    state = step.init(init_fn, jax.random.key(0), example=(batches[0],))
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


# %% [markdown]
# ## How sparse the gradients are
#
# A profile cuts some batches over the workers and looks at which rows have a gradient on which of them. It updates
# nothing. The lines below its table say what its columns mean.

# %%
adagrad = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))
train_step, init_fn = make_step(adagrad)
options = {"mesh": {"data": 8}, "rules": "data_parallel"}
dense_step = splitjax.parallelize(train_step, **options)
state = dense_step.init(init_fn, jax.random.key(0), example=(batches[0],))
profile = dense_step.profile(state, batches[:2])
profile

# %%
profile.plot()

# %% [markdown]
# A worker touches one row in a hundred of the items, one in two hundred of the users, and more than half of the
# countries. Three things decide how well a scheme does:
#
# - **Skewness.** The popular items are neighbours in the table, so that equal ranges of it would be busy unequally. The
#   users are numbered in no order, and their ranges are much more alike.
# - **Overlap.** Popular rows are touched by several workers at once.
# - **Densification.** A sum over more workers has more rows; the more they overlap, the more slowly it grows.
#
# ## What the plan says
#
# Nothing in the step changes. With `sync="auto"` each table gets the scheme that is predicted to be fastest; before the
# first call nobody knows the sparsity, so that the first steps are observed.

# %%
auto_step = splitjax.parallelize(train_step, sync="auto", **options)
for one in auto_step.plan(state, batches[0]).syncs:
    print(f"{one.param:26} {one.scheme:12} {one.why}")

# %% [markdown]
# ## The same numbers
#
# Both steps train on the same batches. The losses agree to rounding, with the clipping norm and Adagrad's accumulators
# computed from rows.

# %%
_, dense_losses = train(dense_step, init_fn, batches)
auto_state, auto_losses = train(auto_step, init_fn, batches)
np.testing.assert_allclose(auto_losses, dense_losses, rtol=1e-5)
for number in range(0, len(batches), 5):
    print(f"step {number:2}   dense {dense_losses[number]:.6f}   auto {auto_losses[number]:.6f}")

# %% [markdown]
# After the third step the schemes were chosen, each table's by itself, and the step was compiled once more:

# %%
print([record.reason for record in auto_step.compiles])
for one in auto_step.plan(auto_state, batches[0]).syncs:
    print(
        f"\n{one.param}: {one.scheme}, {one.bytes:,} bytes a step of each worker, dense {one.dense_bytes:,}\n "
        f" {one.why}"
    )

# %% [markdown]
# What is chosen has the least predicted time, not the fewest bytes. All of the 24 countries have a gradient somewhere,
# so by rows more is sent than an all-reduce would send; but an all-reduce over eight workers is fourteen messages one
# after the other, and here a message costs more than a few kilobytes. The reason says so, with the figures of both. Of
# schemes that are within 2 % of each other the one with fewer parts is kept, though the one that is named next may be a
# little faster.
#
# ## Bytes of every scheme
#
# One step with a copy of a table for each scheme, all of them looked up alike: `sync=` takes a dict from patterns of
# paths to schemes. Whatever the scheme, the copies must stay equal.

# %%
copies = list(sync.SCHEMES)


def copies_step(tables, batch):
    def loss_fn(tables):
        return sum(jax.numpy.sin(table[batch["item"]]).mean() for table in tables.values())

    grads = splitjax.grad(loss_fn)(tables)
    return jax.tree.map(lambda table, grad: table - 10.0 * grad, tables, grads), None


scheme_step = splitjax.parallelize(copies_step, sync={f"**/{name}": name for name in copies}, **options)
table = np.asarray(jax.random.normal(jax.random.key(1), (NUM_ROWS["item"], 16)))
tables = scheme_step.place(dict.fromkeys(copies, table), example=(batches[0],))
for batch in batches[:4]:
    tables, _ = scheme_step(tables, batch)
for name in copies:
    np.testing.assert_allclose(tables[name], tables["dense"], rtol=1e-5, atol=1e-6)
plan = scheme_step.plan(tables, batches[0])
report = scheme_step.report(tables, batches[0])
planned = {one.param: one.bytes for one in plan.syncs}
compiled = {name: sum(one.bytes for one in report.collectives if one.layer == name) for name in copies}
assert planned == compiled and not report.missing
sparsity = profile.sparsity("params/item/embedding")
draw_bytes(planned, compiled, sparsity.bound_bytes(), "The gradient of a table of 10,000 x 16 over 8 workers")

# %% [markdown]
# The bytes that the plan predicts are those of the compiled program, to the byte. The program's sizes are fixed, with
# some room above what the first steps needed; a step for which they do not suffice gathers all rows instead, in the
# same program, and loses nothing. The dotted line is what any scheme has to send, the values alone. Two schemes do
# badly on such ids: `blocks`, which sends 256 values (here 16 rows) where one was touched, and `parameter_server`,
# which gives each worker a range of the table, so that the owner of the popular range gets most of the traffic.
#
# ## Seconds, on which network?
#
# The time of a step says nothing here: eight devices of one machine send through its memory. But what a scheme takes on
# a link can be predicted: its bytes over the link's rate, and a latency for each message that waits for another.
# `sync="auto"` measures the links and takes the least. Here are links of all rates, with a latency of 50 microseconds;
# on the left for the table above, on the right for one of a million items with the same law, 16 workers and 2048
# examples on each. Sparsity comes from the ids alone, so no device is needed for it.

# %%
large = sync.measure(
    [[zipf(1_000_000, 2048 * 4) for _ in range(16)] for _ in range(2)], num_rows=1_000_000, row_size=64
)
latency = 50e-6


def bytes_and_messages(sparsity):
    """By scheme; they do not depend on the link."""
    found = choose(sparsity, sync.Link(latency, 1e9 / 8), [sync.by_name(name) for name in copies])
    return {one.scheme.name: (one.sent_bytes, one.num_messages) for one in found.table}


draw_seconds(
    {
        "10,000 x 16, 8 workers": bytes_and_messages(sparsity),
        "1,000,000 x 64, 16 workers": bytes_and_messages(large),
    },
    latency,
)

# %%
for rate in (1e9, 1e11):
    choice = choose(large, sync.Link(latency, rate / 8))
    print(f"{rate / 1e9:5.1f} Gbit/s: {choice.scheme.name}, {choice.reason}")

# %% [markdown]
# On slow links bytes count, and `row_exchange` sends the fewest. On fast ones messages count. Of the small table three
# schemes send everything in three messages: `hierarchical` and `recursive_doubling`, which are alike for 8 and 16
# workers, and `all_gather`. Of the large one the swaps go in parts, 56 messages, and `all_gather` has the fewest, 15.
# Links of memory, as between the devices here, are fast ones: hence the choices above.
#
# ## What stays dense, and why
#
# An update runs on touched rows alone where that gives the same numbers: SGD, Adagrad, clipping. Adam's moments decay
# in rows without gradient, too. A table that the loss also reads as a whole has a dense gradient. The plan says so,
# with the line:

# %%
adam_step, adam_init = make_step(optax.adam(0.01))


def decayed_step(state, batch):
    def loss_fn(params):
        loss = optax.sigmoid_binary_cross_entropy(model.apply({"params": params}, batch), batch["click"]).mean()
        return loss + 1e-4 * (params["item"]["embedding"] ** 2).sum()

    grads = splitjax.grad(loss_fn)(state["params"])
    return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, None


def print_reasons(name, fn, init_fn, **more):
    step = splitjax.parallelize(fn, sync="auto", **options, **more)
    abstract = step.abstract_state(init_fn, jax.random.key(0), example=(batches[0],))
    one = next(one for one in step.plan(abstract, batches[0]).syncs if "item" in one.param)
    print(f"{name}: {one.scheme}, {one.why}\n")


print_reasons("Adam", adam_step, adam_init)
print_reasons("weight decay in the loss", decayed_step, init_fn)
print_reasons("sharded state", train_step, init_fn, shard_state=True)

# %% [markdown]
# ## Lazy Adam
#
# Adam changes a row in every step, also where it has no gradient, since its averages decay. `lazy=True` leaves rows
# alone until they have a gradient again, as PyTorch's `SparseAdam` does. These are other numbers than Adam's: they come
# only on request, and the plan says so.

# %%
lazy_step = splitjax.parallelize(adam_step, sync={"**/item/**": sync.ByRows("row_exchange", lazy=True)}, **options)
lazy_state, lazy_losses = train(lazy_step, adam_init, batches)
one = next(one for one in lazy_step.plan(lazy_state, batches[0]).syncs if "item" in one.param)
print(f"{one.param}: {one.scheme}, {one.bytes:,} bytes instead of {one.dense_bytes:,}\n{one.why}")
print(f"loss {lazy_losses[0]:.4f} -> {lazy_losses[-1]:.4f}")
