"""Training steps of optax's documentation and examples (checkout `optax`, the public repository
google-deepmind/optax)."""

from __future__ import annotations

import pathlib

from benchmarks.strangers.adapters.base import (
    Loaded,
    Stranger,
    images,
    integers,
    mutates_states,
    pick,
    registrar,
    undecorated,
)  # fmt: skip

STRANGERS: list[Stranger] = []
stranger = registrar("optax", "optax", STRANGERS)
BATCH = 16


def _digits(number: int) -> tuple:
    return images(number, BATCH, 28, 28, 1), integers(number, 10, BATCH)


@stranger(
    "optax-getting-started", "docs/getting_started.ipynb", "dense", "multi_state", "inject_hyperparams", "schedule"
)
def getting_started(path: pathlib.Path) -> Loaded:
    import numpy as np

    notebook = pick(path, "initial_params", "net", "loss")
    # The notebook defines `loss` twice; the training step below it uses the second.
    schedule = notebook.optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    optimizer = notebook.optax.inject_hyperparams(notebook.optax.adamw)(learning_rate=schedule)
    inner = pick(path, "fit.step", given={**vars(notebook), "optimizer": optimizer})

    def states() -> tuple:
        params = {name: value.copy() for name, value in notebook.initial_params.items()}
        return params, optimizer.init(params)

    def data(number: int) -> tuple:
        raw = integers(number, 255, BATCH, 1).astype(np.uint8)
        labels = np.eye(2, dtype=np.float32)[raw[:, 0] % 2]
        return np.unpackbits(raw, axis=-1).astype(np.float32), labels

    return Loaded(
        step=undecorated(inner.step),
        states=states,
        arguments=lambda states, number: ((*states, *data(number)), {}),
        results=lambda outputs, states: (outputs[:2], outputs[2]),
        options={"state_argnums": (0, 1), "batch_argnums": (2, 3)},
    )


@stranger("optax-mlp-mnist", "examples/mlp_mnist.ipynb", "nnx", "dense", "multi_state")
def mlp_mnist(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    notebook = pick(path, "MLP", "compute_loss_and_accuracy", "train_step")

    def states() -> tuple:
        model = notebook.MLP(num_inputs=784, num_classes=10, hidden_sizes=[64, 64], rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.002), wrt=nnx.Param)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        pixels, labels = _digits(number)
        return (*states, (pixels.reshape(BATCH, -1), labels)), {}

    options = {"state_argnums": (0, 1), "batch_argnums": (2,)}
    return Loaded(undecorated(notebook.train_step), states, arguments, mutates_states, options, "nnx")


@stranger("optax-nanolm", "examples/nanolm.ipynb", "linen", "attention", "embedding", "dropout", "batch_from_key",
          "multi_state")  # fmt: skip
def nanolm(path: pathlib.Path) -> Loaded:
    import jax
    import jax.numpy as jnp

    sizes = {"BATCH_SIZE": BATCH, "BLOCK_SIZE": 16, "NUM_LAYERS": 2, "EMBED_SIZE": 32, "NUM_HEADS": 4, "HEAD_SIZE": 8}
    notebook = pick(path, "dynamic_slice_vmap", "get_batch", "NanoLM", "model", "loss_fun", "step", "opt",
                    "DROPOUT_RATE", "LEARNING_RATE", given={"vocab": range(64)},
                    train_data=jnp.asarray(integers(0, 64, 4096)), **sizes)  # fmt: skip

    def states() -> tuple:
        params = notebook.model.init(jax.random.PRNGKey(42), jnp.ones((BATCH, 16), jnp.int32), training=False)
        return params, notebook.opt.init(params)

    return Loaded(
        step=undecorated(notebook.step),
        states=states,
        arguments=lambda states, number: ((jax.random.PRNGKey(number), *states), {}),
        results=lambda outputs, states: ((outputs[0], outputs[2]), outputs[3]),
        options={"state_argnums": (1, 2), "batch_argnums": ()},
    )


@stranger("optax-adversarial", "examples/adversarial_training.ipynb", "linen", "conv", "dense", "input_gradients", "l2",
          "multi_state", "no_loss")  # fmt: skip
def adversarial(path: pathlib.Path) -> Loaded:
    import jax
    import jax.numpy as jnp

    notebook = pick(path, "L2_REG", "EPSILON", "CNN", "net", "loss_fun", "pgd_attack", "train_step", "optimizer",
                    "LEARNING_RATE", num_classes=10)  # fmt: skip

    def states() -> tuple:
        params = notebook.net.init(jax.random.PRNGKey(0), jnp.zeros((1, 28, 28, 1)))["params"]
        return params, notebook.optimizer.init(params)

    def batch(number: int) -> tuple:
        pixels, labels = _digits(number)
        return 255 * pixels, labels

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((*states, batch(number)), {}),
        results=lambda outputs, states: (outputs, None),
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
        probe=lambda states: notebook.loss_fun(states[0], notebook.L2_REG, _digits(0)),
    )


@stranger("optax-lookahead", "examples/lookahead_mnist.ipynb", "nnx", "conv", "dense", "lookahead", "multi_state")
def lookahead(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    notebook = pick(path, "FAST_LEARNING_RATE", "SLOW_LEARNING_RATE", "CNN", "predict", "loss_accuracy", "fast_solver",
                    "solver", "train_step", SYNC_PERIOD=2)  # fmt: skip
    network = notebook.CNN(1, nnx.Rngs(0))

    def states() -> tuple:
        params = optax.LookaheadParams.init_synced(nnx.state(notebook.CNN(1, nnx.Rngs(0)), nnx.Param))
        return params, notebook.solver.init(params)

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((states[0], network, states[1], _digits(number)), {}),
        results=lambda outputs, states: (outputs[:2], outputs[2]),
        options={"state_argnums": (0, 2), "batch_argnums": (3,)},
        frontend="nnx",
    )


@stranger("optax-gradient-accumulation", "examples/gradient_accumulation.ipynb", "nnx", "dense", "MultiSteps",
          "multi_state", "no_loss")  # fmt: skip
def gradient_accumulation(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    notebook = pick(path, "MLP", "loss_fn", "build_train_step.update")

    def states() -> tuple:
        model = notebook.MLP(nnx.Rngs(0))
        tx = optax.MultiSteps(optax.sgd(1e-2), every_k_schedule=3)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def batch(number: int) -> dict:
        return dict(zip(("image", "label"), _digits(number), strict=True))

    return Loaded(
        step=undecorated(notebook.update),
        states=states,
        arguments=lambda states, number: ((*states, batch(number)), {}),
        results=mutates_states,
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
        frontend="nnx",
        probe=lambda states: notebook.loss_fn(states[0], batch(0)),
    )


def _microbatching(path: pathlib.Path, step: str, optimizer: str, *, after: bool) -> Loaded:
    """Load a step of the microbatching notebook; `after` says whether the optimizer state follows the batch."""
    import optax
    from flax import nnx

    notebook = pick(path, "TransformerBlock", "Transformer", "loss_fn", "adamw", "multi_adam", step, batch_size=8,
                    given={"accumulation_steps": 2})  # fmt: skip
    model = notebook.Transformer(64, 2, 32, 4, rngs=nnx.Rngs(0))
    notebook.graphdef, _ = nnx.split(model, nnx.Variable)

    def states() -> tuple:
        params = nnx.split(notebook.Transformer(64, 2, 32, 4, rngs=nnx.Rngs(0)), nnx.Variable)[1]
        return params, getattr(notebook, optimizer).init(params)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        batch = integers(number, 64, BATCH, 16)
        return ((states[0], batch, states[1]) if after else (*states, batch)), {}

    del optax
    positions = {"state_argnums": (0, 2), "batch_argnums": (1,)} if after else \
        {"state_argnums": (0, 1), "batch_argnums": (2,)}  # fmt: skip
    return Loaded(
        step=undecorated(getattr(notebook, step)),
        states=states,
        arguments=arguments,
        results=lambda outputs, states: (outputs, None),
        options=positions,
        probe=lambda states: notebook.loss_fn(states[0], integers(0, 64, BATCH, 16)),
    )


MICROBATCHING = "examples/gradient_accumulation_and_microbatching.ipynb"


@stranger("optax-transformer", MICROBATCHING, "nnx", "split_merge", "attention", "embedding", "multi_state", "no_loss")
def transformer(path: pathlib.Path) -> Loaded:
    return _microbatching(path, "update_fn", "adamw", after=False)


@stranger("optax-transformer-multisteps", MICROBATCHING, "nnx", "split_merge", "attention", "embedding", "MultiSteps",
          "multi_state", "no_loss")  # fmt: skip
def transformer_multisteps(path: pathlib.Path) -> Loaded:
    return _microbatching(path, "update_fn_v2", "multi_adam", after=True)


@stranger("optax-transformer-microbatch", MICROBATCHING, "nnx", "split_merge", "attention", "embedding", "microbatch",
          "scan", "multi_state", "no_loss")  # fmt: skip
def transformer_microbatch(path: pathlib.Path) -> Loaded:
    return _microbatching(path, "update_fn_v3", "adamw", after=True)


@stranger("optax-reduce-on-plateau", "examples/contrib/reduce_on_plateau.ipynb", "linen", "dense", "plateau", "cond",
          "multi_state")  # fmt: skip
def reduce_on_plateau(path: pathlib.Path) -> Loaded:
    import jax
    import jax.numpy as jnp

    notebook = pick(path, "MLP", "loss_accuracy", "opt", "train_step", "LEARNING_RATE", "PATIENCE", "COOLDOWN",
                    "FACTOR", "RTOL", ACCUMULATION_SIZE=2, NUM_CLASSES=10)  # fmt: skip
    notebook.net = notebook.MLP(hidden_sizes=(64, 64))

    def states() -> tuple:
        params = notebook.net.init({"params": jax.random.PRNGKey(0)}, jnp.ones((1, 28, 28, 1)))["params"]
        return params, notebook.opt.init(params)

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((*states, _digits(number)), {}),
        results=lambda outputs, states: (outputs[:2], outputs[2]),
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
    )


@stranger("optax-dpsgd", "examples/contrib/differentially_private_sgd.ipynb", "stax", "conv", "dense", "max_pool",
          "per_example_gradients", "noise", "multi_state", "no_loss")  # fmt: skip
def dpsgd(path: pathlib.Path) -> Loaded:
    import jax

    notebook = pick(path, "DPSGD", "init_random_params", "predict", "loss_fn", "train_step")
    notebook.tx = notebook.contrib.dpsgd(0.25, 1.5, 1.3, 1337)

    def states() -> tuple:
        params = notebook.init_random_params(jax.random.PRNGKey(1337), (-1, 28, 28, 1))[1]
        return params, jax.tree.map(lambda leaf: leaf.copy(), notebook.tx.init(params))  # its key belongs to `tx`

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((*states, _digits(number)), {}),
        results=lambda outputs, states: (outputs, None),
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
        probe=lambda states: notebook.loss_fn(states[0], _digits(0))[0],
    )
