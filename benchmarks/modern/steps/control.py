"""Steps that learn from rewards, or to learn: several gradients in a step, and gradients of gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import apply_perceptron, perceptron
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH = 64
OBSERVED, ACTIONS = 16, 4


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        towers = []
        for name, outputs in (("actor", ACTIONS), ("critic", 1)):
            y = nn.tanh(nn.Dense(WIDTH, name=f"{name}_1")(x))
            y = nn.tanh(nn.Dense(WIDTH, name=f"{name}_2")(y))
            towers.append(nn.Dense(outputs, name=f"{name}_out")(y))
        return towers[0], towers[1][..., 0]


def ppo(dtype: str) -> Problem:
    """Advantages of whole rollouts, then two epochs over them, each in two parts of shuffled examples in a scan."""
    environments, length, epochs, parts = 16, 8, 2, 2
    drawn = Drawn.of(dtype, 70)
    model = ActorCritic()
    params = drawn.linen(model, drawn.normal(1, OBSERVED))["params"]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def advantages(batch: Any) -> tuple[jax.Array, jax.Array]:
        def back(carry: Any, now: Any) -> Any:
            advantage, later = carry
            reward, value, done = now
            error = reward + 0.99 * later * (1 - done) - value
            advantage = error + 0.99 * 0.95 * (1 - done) * advantage
            return (advantage, value), advantage

        over_time = jax.tree.map(lambda x: x.swapaxes(0, 1), (batch["reward"], batch["value"], batch["done"]))
        start = jnp.zeros_like(batch["last_value"]), batch["last_value"]
        _, found = jax.lax.scan(back, start, over_time, reverse=True)
        found = found.swapaxes(0, 1)
        return found, found + batch["value"]

    def loss_fn(params: Any, apply_fn: Any, part: Any) -> Any:
        logits, value = apply_fn({"params": params}, part["observed"])
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, part["action"][..., None], -1)[..., 0]
        ratio = jnp.exp(log_prob - part["log_prob"])
        gain = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
        actor = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        clipped = part["value"] + jnp.clip(value - part["value"], -0.2, 0.2)
        critic = 0.5 * jnp.maximum((value - part["return"]) ** 2, (clipped - part["return"]) ** 2).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return actor + 0.5 * critic - 0.01 * entropy, entropy

    def train_step(state: Any, batch: Any) -> Any:
        train_state, key = state
        advantage, returns = advantages(batch)
        names = ("observed", "action", "log_prob", "value")
        rollout = {name: batch[name] for name in names} | {"advantage": advantage, "return": returns}
        flat = jax.tree.map(lambda x: x.reshape(environments * length, *x.shape[2:]), rollout)

        def epoch(carry: Any, _: Any) -> Any:
            train_state, key = carry
            key, own = jax.random.split(key)
            order = jax.random.permutation(own, environments * length)
            shuffled = jax.tree.map(lambda x: x[order].reshape(parts, -1, *x.shape[1:]), flat)

            def update(train_state: Any, part: Any) -> Any:
                differentiate = jax.value_and_grad(loss_fn, has_aux=True)
                (loss, entropy), grads = differentiate(train_state.params, train_state.apply_fn, part)
                return train_state.apply_gradients(grads=grads), (loss, entropy)

            train_state, metrics = jax.lax.scan(update, train_state, shuffled)
            return (train_state, key), metrics

        (train_state, key), (losses, entropies) = jax.lax.scan(epoch, (train_state, key), None, epochs)
        return (train_state, key), {"loss": losses.mean(), "entropy": entropies.mean()}

    draw = lambda: {
        "observed": drawn.normal(environments, length, OBSERVED),
        "action": drawn.integers(ACTIONS, environments, length),
        "log_prob": np.log(0.1 + 0.8 * drawn.uniform(environments, length)),
        "value": drawn.normal(environments, length),
        "reward": drawn.normal(environments, length),
        "done": (drawn.uniform(environments, length) < 0.1).astype(dtype),
        "last_value": drawn.normal(environments),
    }
    return Problem(train_step, (train_state, jax.random.PRNGKey(31)), tuple(draw() for _ in range(2)))


def dqn(dtype: str) -> Problem:
    """Double Q-learning with a duelling network and priorities; the target follows every second step, at once."""
    drawn = Drawn.of(dtype, 71)
    params = {
        "body": perceptron(drawn, OBSERVED, WIDTH, WIDTH),
        "value": perceptron(drawn, WIDTH, 32, 1),
        "advantage": perceptron(drawn, WIDTH, 32, ACTIONS),
    }
    tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3))
    state = {
        "params": params,
        "target": jax.tree.map(lambda x: x + drawn.normal(*x.shape, scale=0.01), params),
        "opt": tx.init(params),
        "step": np.int32(0),
    }

    def quality(params: Any, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(apply_perceptron(params["body"], x))
        advantage = apply_perceptron(params["advantage"], y)
        return apply_perceptron(params["value"], y) + advantage - advantage.mean(-1, keepdims=True)

    def train_step(state: Any, batch: Any) -> Any:
        best = quality(state["params"], batch["next"]).argmax(-1)
        later = quality(state["target"], batch["next"])[jnp.arange(best.shape[0]), best]
        goal = batch["reward"] + 0.99 * batch["continues"] * later

        def loss_fn(params: Any) -> Any:
            chosen = jnp.take_along_axis(quality(params, batch["observed"]), batch["action"][:, None], 1)[:, 0]
            error = chosen - goal
            return (batch["weight"] * optax.huber_loss(error)).mean(), jnp.abs(error)

        (loss, priorities), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        target = optax.periodic_update(params, state["target"], state["step"] + 1, 2)
        new = {"params": params, "target": target, "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "priorities": priorities}

    draw = lambda: {
        "observed": drawn.normal(16, OBSERVED),
        "next": drawn.normal(16, OBSERVED),
        "action": drawn.integers(ACTIONS, 16),
        "reward": drawn.normal(16),
        "continues": (drawn.uniform(16) < 0.9).astype(dtype),
        "weight": drawn.uniform(16),
    }
    return Problem(train_step, state, tuple(draw() for _ in range(2)))


def soft_actor_critic(dtype: str) -> Problem:
    """Three optimizers in a step: of two critics in a vmap, of the actor, and of the temperature."""
    moves = 4
    drawn = Drawn.of(dtype, 72)
    critics = [perceptron(drawn, OBSERVED + moves, WIDTH, WIDTH, 1) for _ in range(2)]
    params = {
        "actor": perceptron(drawn, OBSERVED, WIDTH, WIDTH, 2 * moves),
        "critics": jax.tree.map(lambda *leaves: np.stack(leaves), *critics),
        "log_temperature": np.asarray(-1.0, dtype),
    }
    tx = {name: optax.adam(3e-4) for name in params}
    state = {
        "params": params,
        "target": params["critics"],
        "opt": {name: tx[name].init(each) for name, each in params.items()},
        "key": jax.random.PRNGKey(37),
    }

    def act(actor: Any, observed: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(apply_perceptron(actor, observed), 2, -1)
        log_std = jnp.clip(log_std, -5, 2)
        raw = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)
        action = jnp.tanh(raw)
        log_prob = jax.scipy.stats.norm.logpdf(raw, mean, jnp.exp(log_std)) - jnp.log(1 - action**2 + 1e-6)
        return action, log_prob.sum(-1)

    def judge(critics: Any, observed: jax.Array, action: jax.Array) -> jax.Array:
        both = jnp.concatenate([observed, action], -1)
        return jax.vmap(lambda critic: apply_perceptron(critic, both)[:, 0])(critics)

    def train_step(state: Any, batch: Any) -> Any:
        key, next_key, own_key = jax.random.split(state["key"], 3)
        params = state["params"]
        temperature = jnp.exp(params["log_temperature"])
        action, log_prob = act(params["actor"], batch["next"], next_key)
        later = judge(state["target"], batch["next"], action).min(0) - temperature * log_prob
        goal = batch["reward"] + 0.99 * later

        def critic_loss(critics: Any) -> jax.Array:
            return ((judge(critics, batch["observed"], batch["action"]) - goal) ** 2).mean()

        def actor_loss(actor: Any) -> Any:
            action, log_prob = act(actor, batch["observed"], own_key)
            worth = judge(params["critics"], batch["observed"], action).min(0)
            return (temperature * log_prob - worth).mean(), log_prob

        loss, critic_grads = splitjax.value_and_grad(critic_loss)(params["critics"])
        (gain, log_prob), actor_grads = splitjax.value_and_grad(actor_loss, has_aux=True)(params["actor"])
        temperature_grad = jax.grad(lambda raw: -(jnp.exp(raw) * (log_prob - moves)).mean())(params["log_temperature"])
        grads = {"actor": actor_grads, "critics": critic_grads, "log_temperature": temperature_grad}
        new, opt = {}, {}
        for name, each in params.items():
            updates, opt[name] = tx[name].update(grads[name], state["opt"][name])
            new[name] = optax.apply_updates(each, updates)
        target = optax.incremental_update(new["critics"], state["target"], 0.005)
        return {"params": new, "target": target, "opt": opt, "key": key}, {"loss": loss, "actor": gain}

    draw = lambda: {
        "observed": drawn.normal(16, OBSERVED),
        "next": drawn.normal(16, OBSERVED),
        "action": np.tanh(drawn.normal(16, moves)),
        "reward": drawn.normal(16),
    }
    return Problem(train_step, state, tuple(draw() for _ in range(2)))


def maml(dtype: str) -> Problem:
    """A batch of tasks: each adapts the weights by two gradient steps of its own, whose gradient is taken again."""
    drawn = Drawn.of(dtype, 73)
    params = {"net": perceptron(drawn, 8, WIDTH, WIDTH, 4), "rate": np.asarray(0.05, dtype)}
    tx = optax.adam(1e-3)

    def task_loss(net: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(apply_perceptron(net, x, jax.nn.gelu), y).mean()

    def adapted_loss(params: Any, task: Any) -> jax.Array:
        net = params["net"]
        for _ in range(2):
            grads = jax.grad(task_loss)(net, task["support_x"], task["support_y"])
            net = jax.tree.map(lambda w, g: w - params["rate"] * g, net, grads)
        return task_loss(net, task["query_x"], task["query_y"])

    def train_step(state: Any, batch: Any) -> Any:
        loss_fn = lambda params: jax.vmap(adapted_loss, (None, 0))(params, batch).mean()
        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    draw = lambda: {
        "support_x": drawn.normal(16, 5, 8),
        "support_y": drawn.integers(4, 16, 5),
        "query_x": drawn.normal(16, 8, 8),
        "query_y": drawn.integers(4, 16, 8),
    }
    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("PPO, shuffled parts in a scan", "PPO", ppo, ("scan of steps", "permutation", "TrainState", "aux")),
    ModernStep("double DQN", "DQN", dqn, ("target network", "argmax", "periodic update", "results by example")),
    ModernStep(
        "soft actor-critic",
        "SAC",
        soft_actor_critic,
        ("splitjax gradient", "three optimizers", "target network", "vmap", "keys"),
    ),
    ModernStep("MAML", "MAML", maml, ("splitjax gradient", "gradient of a gradient", "vmap")),
)
