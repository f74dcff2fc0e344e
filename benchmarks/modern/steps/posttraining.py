"""What is done with a decoder that was trained before: instructions, preferences, a teacher, rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import splitjax
from benchmarks.modern.steps._decoder import decoder, hidden, logits_of
from benchmarks.modern.steps._language import (
    EXAMPLES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LENGTH,
    NUM_STEPS,
    VOCAB,
    WIDTH,
    Draws,
    Tree,
    attention,
    causal,
    next_token_loss,
    problem,
    rotated,
    token_batches,
)
from benchmarks.modern.steps.case import ModernStep, Problem


def _dpo(dtype: str) -> Problem:
    """A policy is drawn to the chosen of two answers, against a frozen reference (direct preferences)."""
    policy, reference = decoder(Draws(dtype, 0)), decoder(Draws(dtype, 0))
    optimizer = optax.rmsprop(1e-3, decay=0.99)

    def log_probability(params: Tree, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits_of(params, tokens[:, :-1]))
        of = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        return (of * mask[:, 1:]).sum(-1)

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        def loss_fn(params: Tree) -> tuple[jax.Array, Tree]:
            # Both answers in one pass, one behind the other.
            both = jnp.concatenate([batch["chosen"], batch["rejected"]])
            masks = jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]])
            ours = jnp.split(log_probability(params, both, masks), 2)
            theirs = jnp.split(jax.lax.stop_gradient(log_probability(state["reference"], both, masks)), 2)
            margin = 0.1 * ((ours[0] - theirs[0]) - (ours[1] - theirs[1]))
            return -jax.nn.log_sigmoid(margin).mean(), {"accuracy": (margin > 0).mean(), "margin": margin.mean()}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "reference": state["reference"]}
        return new, {"loss": loss, **metrics}

    draws = Draws(dtype, 3)
    mask = (np.arange(LENGTH)[None] >= 4).astype(dtype) * np.ones((EXAMPLES, 1), dtype)
    batches = tuple(
        {
            "chosen": draws.integers(VOCAB, EXAMPLES, LENGTH),
            "rejected": draws.integers(VOCAB, EXAMPLES, LENGTH),
            "chosen_mask": mask,
            "rejected_mask": mask,
        }
        for _ in range(NUM_STEPS)
    )
    return Problem(step, {"params": policy, "opt": optimizer.init(policy), "reference": reference}, batches)


def _distilled(dtype: str) -> Problem:
    """A student learns a teacher's probabilities and the words; an average of its weights follows it."""
    teacher, student = decoder(Draws(dtype, 0)), decoder(Draws(dtype, 1))
    optimizer, temperature = optax.adamw(1e-2), 2.0

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        soft = jax.nn.log_softmax(logits_of(state["teacher"], batch["tokens"]) / temperature)

        def loss_fn(params: Tree) -> jax.Array:
            logits = logits_of(params, batch["tokens"])
            own = jax.nn.log_softmax(logits / temperature)
            apart = (jnp.exp(soft) * (soft - own)).sum(-1).mean() * temperature**2
            return 0.5 * apart + 0.5 * next_token_loss(logits, batch["targets"])

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"params": params, "opt": opt, "teacher": state["teacher"], "average": average}, {"loss": loss}

    state = {"params": student, "opt": optimizer.init(student), "teacher": teacher, "average": student}
    return Problem(step, state, token_batches())


def _ppo(dtype: str) -> Problem:
    """A policy and its value head by clipped ratios, advantages by a scan from the end, a penalty for leaving the
    reference."""
    draws = Draws(dtype)
    params = decoder(draws) | {"value": draws.normal(WIDTH, 1)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))

    def advantages(rewards: jax.Array, values: jax.Array) -> jax.Array:
        following = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
        errors = rewards + 0.99 * following - values
        back = lambda carry, error: ((new := error + 0.99 * 0.95 * carry), new)
        return jax.lax.scan(back, jnp.zeros_like(errors[:, 0]), errors.T, reverse=True)[1].T

    def loss_fn(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        mask = batch["mask"]
        mean = lambda x: (x * mask).sum() / mask.sum()
        features = hidden(params, batch["tokens"])
        log_p = jax.nn.log_softmax(features @ params["head"])
        own = jnp.take_along_axis(log_p, batch["actions"][..., None], -1)[..., 0]
        values = (features @ params["value"])[..., 0]
        rewards = batch["rewards"] - 0.05 * (batch["old_log_p"] - batch["reference_log_p"])
        gain = advantages(rewards, batch["old_values"])
        returns = gain + batch["old_values"]
        gain = (gain - mean(gain)) * jax.lax.rsqrt(mean((gain - mean(gain)) ** 2) + 1e-8)
        ratio = jnp.exp(own - batch["old_log_p"])
        policy = mean(jnp.maximum(-gain * ratio, -gain * jnp.clip(ratio, 0.8, 1.2)))
        near = batch["old_values"] + jnp.clip(values - batch["old_values"], -0.2, 0.2)
        value = 0.5 * mean(jnp.maximum((values - returns) ** 2, (near - returns) ** 2))
        entropy = mean(-(jnp.exp(log_p) * log_p).sum(-1))
        return policy + 0.1 * value - 0.01 * entropy, {"clipped": mean(jnp.abs(ratio - 1) > 0.2), "entropy": entropy}

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        (loss, metrics), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, **metrics}

    shape = (EXAMPLES, LENGTH)
    batches = tuple(
        {
            "tokens": draws.integers(VOCAB, *shape),
            "actions": draws.integers(VOCAB, *shape),
            "mask": np.asarray(np.arange(LENGTH)[None] < 6 + draws.integers(10, EXAMPLES, 1), dtype),
            "old_log_p": draws.near(-5, *shape),
            "reference_log_p": draws.near(-5, *shape),
            "old_values": draws.near(0, *shape),
            "rewards": draws.normal(*shape, scale=0.3),
        }
        for _ in range(NUM_STEPS)
    )
    return Problem(step, {"params": params, "opt": optimizer.init(params)}, batches)


class _Block(nnx.Module):
    """A block of Qwen's in Flax NNX: biases on query, key and value, none elsewhere."""

    def __init__(self, dtype: str, rngs: nnx.Rngs) -> None:
        linear = lambda into, out, bias: nnx.Linear(into, out, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        norm = lambda: nnx.RMSNorm(WIDTH, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.norm, self.norm2 = norm(), norm()
        self.q, self.k, self.v = linear(WIDTH, WIDTH, True), linear(WIDTH, WIDTH, True), linear(WIDTH, WIDTH, True)
        self.o = linear(WIDTH, WIDTH, False)
        self.gate, self.up = linear(WIDTH, 2 * WIDTH, False), linear(WIDTH, 2 * WIDTH, False)
        self.down = linear(2 * WIDTH, WIDTH, False)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, s, _ = x.shape
        h, positions = self.norm(x), jnp.arange(s)[None]
        q, k, v = (layer(h).reshape(b, s, HEADS, HEAD_DIM) for layer in (self.q, self.k, self.v))
        mixed = attention(rotated(q, positions, 1e6), rotated(k, positions, 1e6), v, causal(s))
        x = x + self.o(mixed.reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class _Qwen(nnx.Module):
    def __init__(self, dtype: str, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([_Block(dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def _qwen(dtype: str) -> Problem:
    """Supervised tuning of an NNX module that is split into a graph and its state, and merged within the loss; words of
    the prompt do not count."""
    graph, params = nnx.split(_Qwen(dtype, nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adamw(1e-2)

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(losses, where=batch["answer"]) / jnp.maximum(batch["answer"].sum(), 1)

    draws = np.random.default_rng(2)
    batches = tuple(
        {**batch, "answer": np.arange(LENGTH)[None] >= draws.integers(2, 12, (EXAMPLES, 1))}
        for batch in token_batches()
    )
    return problem(loss_fn, params, optimizer, batches=batches)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("Qwen in NNX", "Qwen", _qwen, ("table", "tied head", "nnx split and merge", "masked mean")),
    ModernStep("Direct preferences", "DPO", _dpo,
               ("table", "reference model", "two halves of a batch", "take_along_axis")),
    ModernStep("Distillation with averaged weights", "distillation", _distilled,
               ("table", "splitjax gradient", "teacher", "ema")),
    ModernStep("PPO on texts", "RLHF", _ppo,
               ("table", "splitjax gradient", "reversed scan", "masked mean", "clipped ratios")),
)  # fmt: skip
