"""Training steps of JAX's own examples (checkout `jax`, the public repository jax-ml/jax): no framework at all."""

from __future__ import annotations

import pathlib

from benchmarks.strangers.adapters.base import (
    Loaded,
    StandIn,
    Stranger,
    images,
    integers,
    pick,
    registrar,
    returns_state_only,
    undecorated,
)  # fmt: skip

STRANGERS: list[Stranger] = []
stranger = registrar("jax", "jax", STRANGERS)
BATCH = 16


def _digits(number: int) -> tuple:
    import numpy as np

    return images(number, BATCH, 784), np.eye(10, dtype=np.float32)[integers(number, 10, BATCH)]


@stranger("jax-mnist", "examples/mnist_classifier.py", "stax", "dense", "momentum", "no_loss")
def mnist(path: pathlib.Path) -> Loaded:
    import jax

    script = pick(path, "loss", "init_random_params", "predict", "__main__.step_size", "__main__.momentum_mass",
                  "__main__.opt_init", "__main__.update", stub=("examples",))  # fmt: skip
    params = script.init_random_params(jax.random.key(0), (-1, 784))[1]

    return Loaded(
        step=undecorated(script.update),
        states=lambda: (script.opt_init(jax.tree.map(lambda leaf: leaf.copy(), params)),),
        arguments=lambda states, number: ((number, states[0], _digits(number)), {}),
        results=returns_state_only,
        options={"state_argnums": (1,), "batch_argnums": (2,)},
        probe=lambda states: script.loss(script.get_params(states[0]), _digits(0)),
    )


@stranger("jax-mnist-fromscratch", "examples/mnist_classifier_fromscratch.py", "dense", "no_optimizer", "no_loss")
def mnist_fromscratch(path: pathlib.Path) -> Loaded:
    import jax.numpy as jnp
    import numpy.random as npr

    script = pick(path, "init_random_params", "predict", "loss", "__main__.step_size", "__main__.update",
                  stub=("examples",))  # fmt: skip

    def states() -> tuple:
        params = script.init_random_params(0.1, [784, 64, 64, 10], npr.RandomState(0))
        return ([tuple(jnp.asarray(leaf, jnp.float32) for leaf in layer) for layer in params],)

    return Loaded(
        step=undecorated(script.update),
        states=states,
        arguments=lambda states, number: ((states[0], _digits(number)), {}),
        results=returns_state_only,
        probe=lambda states: script.loss(states[0], _digits(0)),
    )


@stranger("jax-dpsgd", "examples/differentially_private_sgd.py", "stax", "conv", "max_pool", "per_example_gradients",
          "noise", "no_loss")  # fmt: skip
def dpsgd(path: pathlib.Path) -> Loaded:
    import jax

    script = pick(path, "init_random_params", "predict", "loss", "clipped_grad", "private_grad", "shape_as_image",
                  "main.opt_init", "main.private_update", stub=("examples",),
                  **{name: StandIn(None, value=value) for name, value in (
                      ("_LEARNING_RATE", 0.15), ("_NOISE_MULTIPLIER", 1.1), ("_L2_NORM_CLIP", 1.0),
                      ("_BATCH_SIZE", BATCH))})  # fmt: skip
    params = script.init_random_params(jax.random.key(0), (-1, 28, 28, 1))[1]

    def batch(number: int, *, dummy_dim: bool = True) -> tuple:
        return script.shape_as_image(*_digits(number), dummy_dim=dummy_dim)

    return Loaded(
        step=undecorated(script.private_update),
        states=lambda: (script.opt_init(jax.tree.map(lambda leaf: leaf.copy(), params)),),
        arguments=lambda states, number: ((jax.random.key(1), number, states[0], batch(number)), {}),
        results=returns_state_only,
        options={"state_argnums": (2,), "batch_argnums": (3,)},
        probe=lambda states: script.loss(script.get_params(states[0]), batch(0, dummy_dim=False)),
    )
