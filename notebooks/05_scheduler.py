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
# # Many jobs on one cluster
#
# A cluster is shared by many training jobs. Each wants a number of devices at once, and a *scheduling policy* decides
# who gets them when. Mostly devices are given whole: a job has its devices for itself until it is done or has to make
# way. That is simple, and it leaves devices idle whenever a job waits, for its slowest worker or for the network.
#
# This notebook asks what sharing devices among jobs can gain. One way to have something to share is *partial
# backpropagation* ([notebook 04](04_partial_backprop.ipynb)): workers of a job stop at different depths of the backward
# pass, so that some are done early. JigSaw (Kumar et al., [arXiv 2111.10672](https://arxiv.org/abs/2111.10672)) fills
# their time with other jobs' work. We measure a training step as a job, look at the holes and at what fills them, let
# policies compete on a made-up trace of jobs in a simulator, and then ask what the gain is worth, since a job learns
# less in a partial iteration. [docs/scheduler.md](../docs/scheduler.md) has the rest. It takes up to two minutes on two
# cores.

# %%
# %matplotlib inline
import dataclasses
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import linen as nn

import splitjax
from splitjax import schedule
from splitjax.data import load_digits
from splitjax.schedule import Cluster, Job, JobProfile, Options
from splitjax.schedule.simulation.plot import draw_efficiency, draw_results
from splitjax.schedule.simulation.task_plot import draw_job_profile, draw_tasks

# %% [markdown]
# ## Jobs and clusters are values
#
# A job wants a number of devices, all at once, for a number of iterations, and its profile says what an iteration costs
# each worker. Times are those of one worker on one device: forward, then backward to one of several *depths*, full
# backpropagation first.

# %%
# equal layers, 0.3 s an iteration, a third of it forward
profile = JobProfile.uniform("sixteen layers", 0.3, num_depths=16)
job = Job("mine", arrival_seconds=0.0, num_workers=4, num_iterations=1000, profile=profile)
cluster = Cluster(num_nodes=4, devices_per_node=4)
print(
    f"alone it takes {job.exclusive_seconds:.0f} s of {job.num_workers} of the {cluster.num_devices} devices of a"
    f" cluster of {cluster}"
)
print("depths of its four workers:", [f"{profile.depths[depth].fraction:.0%}" for depth in profile.partial_depths(4)])
for num_workers in (1, 2, 4, 16):
    print(
        f"device time with partial backpropagation, workers: {num_workers}, perfectly packed:"
        f" {profile.phi(num_workers):.1%}"
    )

# %% [markdown]
# That is (2 + 1/N)/3 of full backpropagation: the forward pass is a third and stays whole; of the backward pass, two
# thirds, about half is left. So packing such jobs perfectly gains at most the inverse of that, half as much again for
# jobs of many workers.
#
# ## The profile of a real step
#
# `step.job_profile(state, batch)` measures a decorated step on one device: the forward pass, the backward pass to every
# layer at which it can end, the update, and bytes and memory as compiled. The time of the exchange follows from the
# bytes in the step's plan and a link, here one of 40 Gbit/s.

# %%
NUM_WORKERS, BATCH_SIZE = 4, 512
digits = load_digits(image_size=None, channels=1)
batch = {
    "image": digits.train["image"][:BATCH_SIZE].reshape(BATCH_SIZE, -1).astype(np.float32) / 255.0,
    "label": digits.train["label"][:BATCH_SIZE].astype(np.int32),
}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(5):
            x = nn.relu(nn.Dense(256, name=f"dense{number}")(x))
        return nn.Dense(10, name="logits")(x)


model, tx = Model(), optax.adam(1e-3)


def init_fn(key):
    params = model.init(key, batch["image"][:1])["params"]
    return {"params": params, "opt": tx.init(params)}


@splitjax.parallelize(mesh={"data": 1}, rules="data_parallel")
def train_step(state, batch):
    def loss_fn(params):
        logits = model.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


state = train_step.init(init_fn, jax.random.key(0), example=(batch,))
link = splitjax.sync.Link(latency_seconds=1e-5, bytes_per_second=40e9 / 8)
measured = train_step.job_profile(state, batch, name="digits", num_workers=NUM_WORKERS, link=link, stages=False)
schedule.profile_table(measured, NUM_WORKERS)

# %% [markdown]
# A depth that a worker should have is rounded up to the next one at which the step can really end, never down: with six
# layers and four workers, some go deeper than they would have to. The update is the same at every depth, so less of the
# computing is saved than (2 + 1/N)/3 says; but others can use the time, too, in which the job waits for its exchange.
# The model is small, and what is measured on a busy machine is noisy: profile what you mean to schedule, where it is to
# run.


# %%
draw_job_profile(measured)

# %% [markdown]
# Profiles are JSON files. `splitjax profile --job --json digits.json` writes one of a shipped model,
# `schedule.write_profiles` any; `splitjax simulate --profiles` and `schedule.read_profiles` read them.

# %%
with tempfile.TemporaryDirectory() as folder:
    schedule.write_profiles(Path(folder) / "profiles.json", [measured, profile])
    assert schedule.read_profiles(Path(folder) / "profiles.json") == {"digits": measured, "sixteen layers": profile}

# %% [markdown]
# ## Holes, and what fills them
#
# Now four devices, and two jobs of four workers. A *discipline* decides within a set of jobs which device computes
# which worker's task of an iteration, at which depth, from when:
#
# - *gang*: every worker has a device of its own, at full depth.
# - *spb*: the same with partial backpropagation. The job waits for its deepest worker, so shallow ones leave holes, and
#   no time is gained.
# - *jigsaw*: each task, longest first, goes to the device that is free first, whichever job it belongs to.
# - *temporal-spb*: all workers of a job have the same depth in an iteration, another one in the next, so that nobody
#   waits.

# %%
four = JobProfile.uniform("four layers", 3.0, num_depths=4)  # 1 s forward, 2 s backward
pair = [Job("A", 0.0, 4, 100, four), Job("B", 0.0, 4, 100, four)]
ways = {
    "full backpropagation, A alone": ("gang", pair[:1]),
    "partial backpropagation, A alone": ("spb", pair[:1]),
    "JigSaw, A (blue) and B (orange)": ("jigsaw", pair),
    "temporal SPB, A alone": ("temporal-spb", pair[:1]),
}

draw_tasks(ways, num_devices=4, horizon_seconds=15.0)

# %% [markdown]
# The number in a box is the depth of a task. Full backpropagation finishes five iterations in fifteen seconds, and so
# does partial backpropagation alone, with a quarter of the time in holes. JigSaw finishes six of the two jobs together
# and is at the seventh, without a hole; which worker is deep changes from iteration to iteration. Temporal partial
# backpropagation finishes as many with one job and no packing at all: keep that in mind for what follows.
#
# ## A trace
#
# Sixteen devices, and 240 jobs of 1 to 16 workers that arrive at random and ask for one and a half times what the
# cluster has. A third of them train the step measured above, for long; the others have the sixteen layers from the
# beginning, and half of these wait for their exchange for 15 % of their time. The same seed gives the same jobs. Seven
# policies compete:
#
# - `gang-fifo` and `gang-srtf` give whole devices, to the first that came or to the job with the least time left.
# - `muri-s` puts jobs together that need different resources, such as the processor and the network (Muri, from another
#   paper).
# - `spb` and `temporal-spb` use partial backpropagation on whole devices.
# - `interleave` shares devices as JigSaw does, at full depth; `jigsaw` does both.
#
# In the first table, JCT is a job's completion time, from its arrival to its end.

# %%
rng = np.random.default_rng(0)
profiles = [measured, profile, JobProfile.uniform("slow links", 0.3, num_depths=16, exposed_fraction=0.15)]
sizes = []
for number, seconds in enumerate(rng.lognormal(6.5, 1.2, 240)):
    chosen = profiles[number % 3]
    sizes.append(
        Job(
            str(number),
            0.0,
            int(rng.choice([1, 2, 4, 8, 16], p=[0.3, 0.2, 0.3, 0.15, 0.05])),
            max(1, round(seconds / chosen.iteration_seconds)),
            chosen,
        )
    )
jobs = schedule.generate(sizes, cluster, load=1.5, seed=0)
print(
    f"{len(jobs)} jobs, load {schedule.offered_load(jobs, cluster):.2f}, median"
    f" {np.median([job.exclusive_seconds for job in jobs]) / 60:.0f} minutes alone"
)

# %%
POLICIES = ["gang-fifo", "gang-srtf", "muri-s", "spb", "interleave", "temporal-spb", "jigsaw"]
compared = schedule.compare(jobs, cluster, POLICIES, Options(restart_seconds=30.0, spans=True))
compared


# %%
draw_results(compared.results, charts=("gang-srtf", "jigsaw"))

# %% [markdown]
# In the charts a colour is a job that has devices for itself, white is idle, and grey are devices that jobs share, the
# darker the more (two to eight). JigSaw shares devices only while the cluster is asked for more than it has. It is done
# sooner although its devices compute for less of the time: what partial backpropagation skips need not be computed.
#
# ## What the gain is worth
#
# A skipped gradient is not free, so gains are counted in two ways, both relative to giving whole devices in the same
# order, while the cluster is asked for more than it has:
#
# - *Iteration efficiency* (*iterations* in the second table above) counts finished iterations, each as if it were a
#   full one.
# - *Cost efficiency* credits only the backward work that was really done.
#
# *Bound* is what perfect packing of the finished iterations would have reached; no result can lie above its own.


# %%
draw_efficiency(compared)

# %%
figures = compared.to_json()
for name in ("jigsaw", "temporal-spb"):
    print(
        f"{name}: the gain is gone once its jobs need {figures[name]['iteration_efficiency'] - 1:.0%} more iterations"
        " than with full backpropagation"
    )

# %% [markdown]
# What is to be read here:
#
# - `spb` gains nothing: without packing, a job waits for its deepest worker. It skips work for no time saved, so its
#   cost efficiency is below 1.
# - `interleave` packs as JigSaw does, at full depth. What it gains is real, by filling the time in which jobs wait, and
#   devices that gangs leave over.
# - `jigsaw` finishes most iterations, but an iteration is then worth less: by cost it is not far from `interleave`.
#   Partial backpropagation changes what a job learns in an iteration, and whether the skipped work was needed the
#   scheduler cannot know; `step.advise` ([notebook 04](04_partial_backprop.ipynb)) measures it.
# - `temporal-spb` needs no packing and shares no memory. It lies behind here because a third of the jobs wait for their
#   exchange, or more, and widths do not always fit. Where neither is so, it matches JigSaw:

# %%
# as long, but of four workers that never wait
alike = [
    Job(one.name, 0.0, 4, max(1, round(one.exclusive_seconds / profile.iteration_seconds)), profile) for one in sizes
]
even = schedule.generate(alike, cluster, load=1.5, seed=0)
for name, one in schedule.compare(even, cluster, ["interleave", "temporal-spb", "jigsaw"]).to_json().items():
    print(
        f"{name:13} iterations {one['iteration_efficiency']:.2f} of {one['bound']:.2f}, cost"
        f" {one['cost_efficiency']:.2f}, {one['avg_jct'] / 60:.0f} minutes on average"
    )

# %% [markdown]
# And while the cluster is not asked for more than it has, there are no iterations to be gained, only completion times:

# %%
calm = schedule.compare(
    schedule.generate(sizes, cluster, load=0.5, seed=0), cluster, ["gang-srtf", "temporal-spb", "jigsaw"]
).results
for result in calm:
    print(f"{result.policy:13} {result.avg_jct / 60:.0f} minutes on average, busy {result.busy:.0%}")

# %% [markdown]
# ## Memory
#
# Jobs that share a device keep their state there, and of one at a time the rest has to fit too. Here every job needs 12
# GB at full depth, half of it state. Smaller devices hold fewer of them, and JigSaw has fewer to pack; with room for
# eight on a device more memory does not help, as it groups no more than eight.

# %%
large = {
    one.name: dataclasses.replace(
        one,
        state_bytes=6 * 10**9,
        depths=tuple(
            dataclasses.replace(depth, memory_bytes=round((6 + 6 * depth.fraction) * 1e9)) for depth in one.depths
        ),
    )
    for one in profiles
}
heavy = [dataclasses.replace(job, profile=large[job.profile.name]) for job in jobs]
for gigabytes in (12, 18, 24, 36, 54, 96):
    limited = schedule.compare(
        heavy, dataclasses.replace(cluster, memory_bytes=gigabytes * 10**9), ["jigsaw", "temporal-spb"]
    ).to_json()
    found = ", ".join(f"{name} {one['iteration_efficiency']:.2f}" for name, one in limited.items())
    print(f"{gigabytes} GB, room for {1 + (gigabytes - 12) // 6} on a device: iterations {found}")

# %% [markdown]
# ## A policy of one's own
#
# A policy is one pure function from what is known at a moment to what changes. It is asked when a job arrives or
# finishes. `schedule.gang` does the rest for those that give jobs whole devices in some order; here the least device
# time left comes first, but before all the jobs that are there for more than six hours.


# %%
@schedule.register("gang-patient", paper="this notebook", order="srsf")
def patient(view: schedule.View) -> schedule.Assignment:
    """Least remaining device time first, but those that are there for long before all."""
    late = view.now_seconds - view.arrival_seconds > 6 * 3600
    return schedule.gang(view, np.where(late, -1.0, view.remaining_seconds * view.num_workers))


own = schedule.compare(jobs, cluster, ["gang-srsf", "gang-patient", "jigsaw"])
own

# %% [markdown]
# The slowest jobs are done sooner, and the average pays for it. The same functions run real training jobs:
# `schedule.execute` with `RayEngine` starts a process for each worker, and asks policy and discipline as the simulator
# does ([docs/scheduler.md](../docs/scheduler.md#real-execution)). From the shell, with traces of your own:
#
# ```sh
# splitjax profile --job --model mlp --batch-size 512 --num-workers 4 --bandwidth 10gbit --json profiles.json
# splitjax simulate --trace jobs.csv --profiles profiles.json --cluster 4x4 \
#     --policy gang-srtf,temporal-spb,jigsaw --plot jobs.png
# ```
