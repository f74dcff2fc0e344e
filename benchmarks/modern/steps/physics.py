"""Steps of networks over coordinates, functions and time: derivatives of a network, integrals, Fourier transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import apply_dense, apply_perceptron, perceptron
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH = 64


class Field(nn.Module):
    """Density and colour of a point that is looked at from a direction, with a skip connection."""

    @nn.compact
    def __call__(self, point: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = point
        for number in range(4):
            x = nn.relu(nn.Dense(WIDTH)(x if number != 2 else jnp.concatenate([x, point], -1)))
        density = nn.Dense(1, name="density")(x)[..., 0]
        x = jnp.concatenate([nn.Dense(WIDTH, name="feature")(x), direction], -1)
        return density, nn.sigmoid(nn.Dense(3, name="colour")(nn.relu(nn.Dense(32, name="view")(x))))


def nerf(dtype: str) -> Problem:
    """Rays are sampled at jittered distances and composed by what light gets through."""
    samples = 12
    drawn = Drawn.of(dtype, 80)
    model = Field()

    def encode(x: jax.Array, octaves: int) -> jax.Array:
        angles = (x[..., None, :] * 2.0 ** jnp.arange(octaves, dtype=x.dtype)[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)

    def render(params: Any, origin: jax.Array, direction: jax.Array, key: jax.Array) -> jax.Array:
        edges = jnp.linspace(0.5, 3.0, samples + 1, dtype=origin.dtype)
        share = jax.random.uniform(key, (origin.shape[0], samples), origin.dtype)
        depth = edges[:-1] + (edges[1:] - edges[:-1]) * share
        points = origin[:, None] + depth[..., None] * direction[:, None]
        views = jnp.broadcast_to(encode(direction, 2)[:, None], (*depth.shape, 15))
        density, colour = model.apply({"params": params}, encode(points, 4), views)
        steps = jnp.concatenate([jnp.diff(depth, axis=-1), jnp.full_like(depth[:, :1], 1e2)], -1)
        opaque = 1 - jnp.exp(-jax.nn.softplus(density) * steps)
        through = jnp.cumprod(1 - opaque + 1e-10, -1)
        through = jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], -1)
        weights = opaque * through
        return (weights[..., None] * colour).sum(1) + 1 - weights.sum(-1, keepdims=True)

    params = drawn.linen(model, drawn.normal(1, 27), drawn.normal(1, 15))["params"]
    tx = optax.adam(optax.exponential_decay(5e-4, 100, 0.1))
    state = {"params": params, "opt": tx.init(params), "key": jax.random.key(41)}

    def train_step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])

        def loss_fn(params: Any) -> Any:
            error = (render(params, batch["origin"], batch["direction"], own) - batch["colour"]) ** 2
            return error.mean(), -10 * jnp.log10(error.mean())

        (loss, psnr), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}
        return new, {"loss": loss, "psnr": psnr}

    def draw() -> Any:
        direction = drawn.normal(32, 3)
        return {
            "origin": drawn.normal(32, 3, scale=0.1),
            "direction": direction / np.linalg.norm(direction, axis=-1, keepdims=True),
            "colour": drawn.uniform(32, 3),
        }

    return Problem(train_step, state, tuple(draw() for _ in range(2)))


def pinn(dtype: str) -> Problem:
    """Burgers' equation: the residual holds derivatives by time and place, the second by forward over reverse. Points
    inside, on the boundary and at the start have leading dims of their own."""
    drawn = Drawn.of(dtype, 81)
    params = {"net": perceptron(drawn, 2, WIDTH, WIDTH, 1), "log_viscosity": np.asarray(-3.0, dtype)}
    tx = optax.adam(optax.cosine_decay_schedule(1e-3, 100))

    def u(net: Any, x: jax.Array) -> jax.Array:
        return apply_perceptron(net, x, jnp.tanh)[0]

    def residual(params: Any, x: jax.Array) -> jax.Array:
        slope = jax.grad(u, argnums=1)
        along = jnp.zeros_like(x).at[1].set(1)
        first, second = jax.jvp(lambda x: slope(params["net"], x), (x,), (along,))
        return first[0] + u(params["net"], x) * first[1] - jnp.exp(params["log_viscosity"]) * second[1]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            inside = jax.vmap(residual, (None, 0))(params, batch["inside"])
            edge = jax.vmap(u, (None, 0))(params["net"], batch["boundary"])
            start = jax.vmap(u, (None, 0))(params["net"], batch["start"]) + jnp.sin(jnp.pi * batch["start"][:, 1])
            losses = {"residual": (inside**2).mean(), "boundary": (edge**2).mean(), "initial": (start**2).mean()}
            return sum(losses.values()), losses

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, **losses}

    def draw() -> Any:
        boundary, start = drawn.uniform(16, 2), 2 * drawn.uniform(32, 2) - 1
        boundary[:, 1] = np.sign(boundary[:, 1] - 0.5)
        start[:, 0] = 0
        return {"inside": 2 * drawn.uniform(64, 2) - 1, "boundary": boundary, "start": start}

    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


def deeponet(dtype: str) -> Problem:
    """An operator: a branch reads a function at sensors, a trunk the place; the Laplacian of the product is penalised
    by a Hessian."""
    sensors, places = 32, 8
    drawn = Drawn.of(dtype, 82)
    params = {
        "branch": perceptron(drawn, sensors, WIDTH, 32),
        "trunk": perceptron(drawn, 2, WIDTH, 32),
        "bias": np.zeros((), dtype),
    }
    tx = optax.adamw(1e-3)

    def at(params: Any, coded: jax.Array, place: jax.Array) -> jax.Array:
        return coded @ apply_perceptron(params["trunk"], place, jnp.tanh) + params["bias"]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            coded = apply_perceptron(params["branch"], batch["function"], jax.nn.gelu)
            everywhere = jax.vmap(jax.vmap(at, (None, None, 0)), (None, 0, 0))
            error = everywhere(params, coded, batch["places"]) - batch["values"]
            curvature = jax.vmap(jax.vmap(jax.hessian(at, argnums=2), (None, None, 0)), (None, 0, 0))
            laplacian = jnp.trace(curvature(params, coded, batch["places"]), axis1=-2, axis2=-1)
            return (error**2).mean() + 1e-2 * ((laplacian - batch["source"]) ** 2).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    draw = lambda: {
        "function": drawn.normal(16, sensors),
        "places": drawn.uniform(16, places, 2),
        "values": drawn.normal(16, places),
        "source": drawn.normal(16, places),
    }
    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


def fourier_operator(dtype: str) -> Problem:
    """FNO in one dimension: low frequencies are mixed by complex weights, everything else by dense layers."""
    width, modes, length = 32, 8, 32
    drawn = Drawn.of(dtype, 83)
    layer = lambda: {
        "real": drawn.normal(modes, width, width, scale=1 / width),
        "imag": drawn.normal(modes, width, width, scale=1 / width),
        "local": drawn.dense(width, width),
    }
    params = {
        "lift": drawn.dense(2, width),
        "layers": [layer() for _ in range(2)],
        "project": perceptron(drawn, width, 64, 1),
    }
    tx = optax.adamw(1e-3)

    def forward(params: Any, a: jax.Array) -> jax.Array:
        grid = jnp.broadcast_to(jnp.linspace(0, 1, length, dtype=a.dtype), a.shape)
        x = apply_dense(params["lift"], jnp.stack([a, grid], -1))
        for w in params["layers"]:
            spectrum = jnp.fft.rfft(x, axis=1)[:, :modes]
            mixed = jnp.einsum("bki,kio->bko", spectrum, jax.lax.complex(w["real"], w["imag"]))
            mixed = jnp.pad(mixed, ((0, 0), (0, length // 2 + 1 - modes), (0, 0)))
            x = jax.nn.gelu(jnp.fft.irfft(mixed, length, axis=1) + apply_dense(w["local"], x))
        return apply_perceptron(params["project"], x, jax.nn.gelu)[..., 0]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            error = forward(params, batch["a"]) - batch["u"]
            return (jnp.sqrt((error**2).sum(-1)) / jnp.sqrt((batch["u"] ** 2).sum(-1))).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    draw = lambda: {"a": drawn.normal(16, length), "u": drawn.normal(16, length)}
    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


def neural_ode(dtype: str) -> Problem:
    """Latents that move by a network, integrated by Runge and Kutta's fourth order in a scan, each step
    rematerialised; the loss is over the whole path, whose times each example has for itself."""
    latent, steps = 16, 8
    drawn = Drawn.of(dtype, 84)
    params = {
        "encode": perceptron(drawn, 8, WIDTH, latent),
        "move": perceptron(drawn, latent + 1, WIDTH, WIDTH, latent),
        "decode": perceptron(drawn, latent, WIDTH, 8),
    }
    tx = optax.adam(1e-3)

    def slope(w: Any, t: jax.Array, z: jax.Array) -> jax.Array:
        return apply_perceptron(w, jnp.concatenate([z, t[:, None]], -1), jnp.tanh)

    def path(params: Any, start: jax.Array, times: jax.Array) -> jax.Array:
        w = params["move"]

        @jax.checkpoint
        def advance(z: jax.Array, ends: Any) -> Any:
            t, h = ends[0], (ends[1] - ends[0])
            k1 = slope(w, t, z)
            k2 = slope(w, t + h / 2, z + h[:, None] / 2 * k1)
            k3 = slope(w, t + h / 2, z + h[:, None] / 2 * k2)
            k4 = slope(w, t + h, z + h[:, None] * k3)
            z = z + h[:, None] / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return z, z

        z = apply_perceptron(params["encode"], start)
        _, zs = jax.lax.scan(advance, z, (times[:, :-1].T, times[:, 1:].T))
        return apply_perceptron(params["decode"], jnp.concatenate([z[None], zs])).swapaxes(0, 1)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            error = path(params, batch["path"][:, 0], batch["times"]) - batch["path"]
            return ((error**2).sum(-1) * batch["mask"]).sum() / batch["mask"].sum()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    draw = lambda: {
        "path": drawn.normal(16, steps + 1, 8),
        "times": np.cumsum(0.05 + 0.1 * drawn.uniform(16, steps + 1), 1),
        "mask": (drawn.uniform(16, steps + 1) < 0.7).astype(dtype),
    }
    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("NeRF", "NeRF", nerf, ("cumprod", "positional encoding", "typed key", "aux")),
    ModernStep("PINN of Burgers' equation", "PINN", pinn, ("gradient of a gradient", "jvp", "dims of their own")),
    ModernStep("DeepONet with a Laplacian", "DeepONet", deeponet, ("splitjax gradient", "hessian", "vmap")),
    ModernStep("Fourier neural operator", "FNO", fourier_operator, ("splitjax gradient", "fft", "complex numbers")),
    ModernStep("neural ODE", "neural ODE", neural_ode, ("splitjax gradient", "scan", "remat", "mask")),
)
