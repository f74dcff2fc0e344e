"""Mistakes that a type checker has to find, each on a line of its own, and nothing else. It is never run."""

import jax
import jax.numpy as jnp

import splitjax

State = dict[str, jax.Array]


def step(state: State, batch: jax.Array, scale: float) -> tuple[State, jax.Array]:
    return state, scale * batch.sum()


state: State = {"w": jnp.zeros((8, 8))}
batch = jnp.zeros((8, 8))
train_step = splitjax.parallelize(step, mesh={"data": 8})

splitjax.parallelize(step, group_com="turns")  # mistake: a misspelt option
splitjax.parallelize(step, group_comm="turn")  # mistake: a misspelt name
splitjax.parallelize(mesh={"data": 8}, sync="zenn")(step)  # mistake: a misspelt scheme
splitjax.parallelize(step, shard_state="yes")  # mistake: a value of the wrong type
splitjax.nnx.parallelize(step, verify="always")  # mistake: a name that is not there, in another library
splitjax.equinox.parallelize(step, donat=False)  # mistake: a misspelt option, in another library
train_step.plann(state, batch, 0.5)  # mistake: a misspelt method
train_step(state, batch, "half")  # mistake: an argument of the wrong type
train_step(state, batch)  # mistake: an argument that is missing
train_step.verify(state, batch, 0.5, sizes="large")  # mistake: sizes that are not there
