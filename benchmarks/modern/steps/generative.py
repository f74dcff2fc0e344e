"""Steps that learn to draw examples other than by diffusion: adversaries, autoencoders, flows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import Perceptron, apply_perceptron, perceptron
from benchmarks.modern.steps.case import ModernStep, Problem

LATENT = 16


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(4 * 4 * 32)(z)).reshape(-1, 4, 4, 32)
        x = nn.relu(nn.GroupNorm(8)(nn.ConvTranspose(16, (4, 4), strides=(2, 2))(x)))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), strides=(2, 2))(x))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (16, 32):
            x = nn.leaky_relu(nn.Conv(width, (4, 4), strides=(2, 2))(x), 0.2)
        x = nn.leaky_relu(nn.Dense(64)(x.reshape(x.shape[0], -1)), 0.2)
        return nn.Dense(1)(x)[:, 0]


def _images(drawn: Drawn) -> tuple[Any, ...]:
    return tuple({"image": np.tanh(drawn.normal(16, 16, 16, 3))} for _ in range(2))


def dcgan(dtype: str) -> Problem:
    """Both networks take a step: the discriminator first, then the generator against the new discriminator."""
    drawn = Drawn.of(dtype, 20)
    generator, critic, batches = Generator(), Critic(), _images(drawn)
    g_params = drawn.linen(generator, drawn.normal(1, LATENT))["params"]
    d_params = drawn.linen(critic, batches[0]["image"])["params"]
    g_tx, d_tx = optax.adam(2e-4, b1=0.5), optax.adam(4e-4, b1=0.5)
    state = {
        "generator": {"params": g_params, "opt": g_tx.init(g_params)},
        "discriminator": {"params": d_params, "opt": d_tx.init(d_params)},
        "key": jax.random.PRNGKey(1),
    }

    def train_step(state: Any, batch: Any) -> Any:
        key, noise_key, other_key = jax.random.split(state["key"], 3)
        g, d = state["generator"], state["discriminator"]
        real = batch["image"]
        fake = generator.apply({"params": g["params"]}, jax.random.normal(noise_key, (real.shape[0], LATENT), dtype))

        def d_loss_fn(params: Any) -> jax.Array:
            on_real, on_fake = (critic.apply({"params": params}, x) for x in (real, fake))
            return jax.nn.softplus(-on_real).mean() + jax.nn.softplus(on_fake).mean()

        d_loss, d_grads = jax.value_and_grad(d_loss_fn)(d["params"])
        updates, d_opt = d_tx.update(d_grads, d["opt"])
        d_params = optax.apply_updates(d["params"], updates)

        def g_loss_fn(params: Any) -> jax.Array:
            z = jax.random.normal(other_key, (real.shape[0], LATENT), dtype)
            return jax.nn.softplus(-critic.apply({"params": d_params}, generator.apply({"params": params}, z))).mean()

        g_loss, g_grads = jax.value_and_grad(g_loss_fn)(g["params"])
        updates, g_opt = g_tx.update(g_grads, g["opt"])
        new = {
            "generator": {"params": optax.apply_updates(g["params"], updates), "opt": g_opt},
            "discriminator": {"params": d_params, "opt": d_opt},
            "key": key,
        }
        return new, {"loss": d_loss + g_loss, "generator": g_loss, "discriminator": d_loss}

    return Problem(train_step, state, batches)


def wgan_gp(dtype: str) -> Problem:
    """The critic's step, whose penalty is a gradient of the critic by its input, differentiated again."""
    drawn = Drawn.of(dtype, 21)
    params = {
        "generator": perceptron(drawn, LATENT, 64, 64, 32),
        "critic": perceptron(drawn, 32, 64, 64, 1),
    }
    g_tx, c_tx = (optax.adam(1e-4, b1=0.0, b2=0.9) for _ in range(2))
    state = {
        "params": params,
        "opt": {"generator": g_tx.init(params["generator"]), "critic": c_tx.init(params["critic"])},
        "step": np.int32(0),
    }
    batches = tuple({"x": drawn.normal(16, 32)} for _ in range(2))
    criticise = lambda params, x: apply_perceptron(params, x, jax.nn.silu)[..., 0]

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = dict(state["params"]), dict(state["opt"])
        keys = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(7), state["step"]), 2)
        z = jax.random.normal(keys[0], (batch["x"].shape[0], LATENT), dtype)
        fake = apply_perceptron(params["generator"], z)

        def critic_loss(critic: Any) -> Any:
            gap = criticise(critic, fake).mean() - criticise(critic, batch["x"]).mean()
            share = jax.random.uniform(keys[1], (fake.shape[0], 1), dtype)
            between = share * batch["x"] + (1 - share) * fake
            slopes = jax.vmap(jax.grad(criticise, argnums=1), (None, 0))(critic, between)
            penalty = ((jnp.sqrt((slopes**2).sum(-1) + 1e-12) - 1) ** 2).mean()
            return gap + 10 * penalty, penalty

        (loss, penalty), grads = splitjax.value_and_grad(critic_loss, has_aux=True)(params["critic"])
        updates, opt["critic"] = c_tx.update(grads, opt["critic"])
        params["critic"] = optax.apply_updates(params["critic"], updates)

        g_loss, grads = splitjax.value_and_grad(
            lambda generator: -criticise(params["critic"], apply_perceptron(generator, z)).mean()
        )(params["generator"])
        updates, opt["generator"] = g_tx.update(grads, opt["generator"])
        params["generator"] = optax.apply_updates(params["generator"], updates)
        new = {"params": params, "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "generator": g_loss, "penalty": penalty}

    return Problem(train_step, state, batches)


def vae(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 22)
    encoder, decoder = Perceptron((64, 2 * LATENT)), Perceptron((64, 64))
    batches = tuple({"x": drawn.uniform(16, 64)} for _ in range(2))
    params = {
        "encoder": drawn.linen(encoder, batches[0]["x"])["params"],
        "decoder": drawn.linen(decoder, drawn.normal(1, LATENT))["params"],
    }
    tx = optax.adamw(1e-3)
    state = {"params": params, "opt": tx.init(params), "key": jax.random.PRNGKey(5), "step": np.int32(0)}

    def train_step(state: Any, batch: Any) -> Any:
        weight = jnp.minimum(1.0, (state["step"] + 1) / 10).astype(dtype)
        key = jax.random.fold_in(state["key"], state["step"])

        def loss_fn(params: Any) -> Any:
            mean, log_var = jnp.split(encoder.apply({"params": params["encoder"]}, batch["x"]), 2, -1)
            z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape, dtype)
            logits = decoder.apply({"params": params["decoder"]}, z)
            likelihood = -optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(-1)
            divergence = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)
            return (weight * divergence - likelihood).mean(), {"kl": divergence.mean()}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new | {"key": state["key"], "step": state["step"] + 1}, {"loss": loss, **aux}

    return Problem(train_step, state, batches)


def vq_vae(dtype: str) -> Problem:
    """A codebook that no gradient reaches: its entries are means of what was nearest to them, and move by a decay."""
    codes, width = 32, 16
    drawn = Drawn.of(dtype, 23)
    params = {"encoder": perceptron(drawn, 32, 64, width), "decoder": perceptron(drawn, width, 64, 32)}
    book = drawn.normal(codes, width)
    tx = optax.adam(1e-3)
    state = {
        "params": params,
        "opt": tx.init(params),
        "codebook": {"embedding": book, "counts": np.ones(codes, dtype), "sums": book.copy()},
    }
    batches = tuple({"x": drawn.normal(16, 8, 32)} for _ in range(2))

    def train_step(state: Any, batch: Any) -> Any:
        codebook = state["codebook"]

        def loss_fn(params: Any) -> Any:
            z = apply_perceptron(params["encoder"], batch["x"])
            table = codebook["embedding"]
            distances = (z**2).sum(-1, keepdims=True) - 2 * z @ table.T + (table**2).sum(-1)
            chosen = distances.argmin(-1)
            quantised = table[chosen]
            commitment = ((z - jax.lax.stop_gradient(quantised)) ** 2).mean()
            straight = z + jax.lax.stop_gradient(quantised - z)
            loss = ((apply_perceptron(params["decoder"], straight) - batch["x"]) ** 2).mean()
            return loss + 0.25 * commitment, (z, chosen)

        (loss, (z, chosen)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        flat, which = z.reshape(-1, width), chosen.reshape(-1)
        one_hot = jax.nn.one_hot(which, codes, dtype=dtype)
        counts = optax.incremental_update(one_hot.sum(0), codebook["counts"], 0.01)
        sums = optax.incremental_update(one_hot.T @ flat, codebook["sums"], 0.01)
        smooth = (counts + 1e-5) / (counts.sum() + codes * 1e-5) * counts.sum()
        codebook = {"embedding": sums / smooth[:, None], "counts": counts, "sums": sums}
        usage = one_hot.mean(0)
        perplexity = jnp.exp(-(usage * jnp.log(usage + 1e-10)).sum())
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "codebook": codebook}
        return new, {"loss": loss, "perplexity": perplexity}

    return Problem(train_step, state, batches)


def coupling_flow(dtype: str) -> Problem:
    """RealNVP with invertible mixing of dims: affine couplings, and log-determinants of dense matrices."""
    dims, half = 16, 8
    drawn = Drawn.of(dtype, 24)
    layer = lambda: {
        "mix": np.linalg.qr(drawn.normal(dims, dims))[0] + drawn.normal(dims, dims, scale=0.01),
        "log_scale": drawn.normal(dims, scale=0.1),
        "shift": drawn.normal(dims, scale=0.1),
        "net": perceptron(drawn, half, 64, 2 * half),
    }
    params = [layer() for _ in range(3)]
    tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3))

    def log_density(params: Any, x: jax.Array) -> jax.Array:
        total = jnp.zeros(x.shape[0], x.dtype)
        for w in params:
            x = (x + w["shift"]) * jnp.exp(w["log_scale"])
            x = x @ w["mix"]
            total += w["log_scale"].sum() + jnp.linalg.slogdet(w["mix"])[1]
            first, second = jnp.split(x, 2, -1)
            log_scale, shift = jnp.split(apply_perceptron(w["net"], first, jnp.tanh), 2, -1)
            log_scale = jnp.tanh(log_scale)
            x = jnp.concatenate([second * jnp.exp(log_scale) + shift, first], -1)
            total += log_scale.sum(-1)
        return total + jax.scipy.stats.norm.logpdf(x).sum(-1)

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = splitjax.value_and_grad(lambda params: -log_density(params, batch["x"]).mean() / dims)(
            state["params"]
        )
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    batches = tuple({"x": drawn.normal(16, dims)} for _ in range(2))
    return Problem(train_step, {"params": params, "opt": tx.init(params)}, batches)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("DCGAN, two optimizers in a step", "GAN", dcgan, ("two optimizers", "transposed convolution", "keys")),
    ModernStep(
        "WGAN with a gradient penalty",
        "GAN",
        wgan_gp,
        ("splitjax gradient", "two optimizers", "gradient of a gradient", "vmap"),
    ),
    ModernStep("VAE with an annealed divergence", "VAE", vae, ("keys", "schedule by step", "aux")),
    ModernStep("VQ-VAE with a moving codebook", "VQ-VAE", vq_vae, ("argmin", "straight through", "ema", "aux")),
    ModernStep(
        "RealNVP with mixing",
        "normalising flow",
        coupling_flow,
        ("splitjax gradient", "slogdet", "clip", "plain dicts"),
    ),
)
