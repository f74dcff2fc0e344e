"""Training steps of Equinox examples (checkout `equinox`, the public repository patrick-kidger/equinox)."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from benchmarks.strangers.adapters.base import (
    Loaded,
    StandIn,
    Stranger,
    integers,
    normals,
    padded_tokens,
    pick,
    registrar,
    undecorated,
    without_pmap_collectives,
)  # fmt: skip

STRANGERS: list[Stranger] = []
stranger = registrar("equinox", "equinox", STRANGERS)
BATCH = 16


@stranger("equinox-mnist", "docs/examples/mnist.ipynb", "conv", "dense", "vmap", "multi_state")
def mnist(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax

    notebook = pick(path, "CNN", "loss", "cross_entropy", "train.make_step", "LEARNING_RATE", "optim")

    def states() -> tuple:
        model = notebook.CNN(jax.random.PRNGKey(0))
        return model, notebook.optim.init(eqx.filter(model, eqx.is_array))

    return Loaded(
        step=undecorated(notebook.make_step),
        states=states,
        arguments=lambda states, number: (
            (*states, normals(number, BATCH, 1, 28, 28), integers(number, 10, BATCH)), {}),
        results=lambda outputs, states: (outputs[:2], outputs[2]),
        options={"state_argnums": (0, 1), "batch_argnums": (2, 3)},
        frontend="equinox",
    )  # fmt: skip


@stranger("equinox-stateful", "docs/examples/stateful.ipynb", "dense", "batch_norm", "spectral_norm", "vmap",
          "multi_state", "no_loss")  # fmt: skip
def stateful(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax

    notebook = pick(path, "Model", "compute_loss", "make_step", "learning_rate", "optim")

    def states() -> tuple:
        model, state = eqx.nn.make_with_state(notebook.Model)(jax.random.PRNGKey(0))
        return model, state, notebook.optim.init(eqx.filter(model, eqx.is_inexact_array))

    def data(number: int) -> tuple:
        return normals(number, BATCH, 3), normals(number, BATCH, 3, salt=9)

    def probe(states: tuple) -> Any:
        model, state, _ = states
        return notebook.compute_loss(eqx.nn.inference_mode(model), state, *data(0))[0]

    return Loaded(
        step=undecorated(notebook.make_step),
        states=states,
        arguments=lambda states, number: ((*states, *data(number)), {}),
        results=lambda outputs, states: (outputs, None),
        options={"state_argnums": (0, 1, 2), "batch_argnums": (3, 4)},
        frontend="equinox",
        probe=probe,
    )


@stranger("equinox-rnn", "docs/examples/train_rnn.ipynb", "gru", "scan", "vmap", "multi_state")
def rnn(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax
    import numpy as np

    notebook = pick(path, "get_data", "RNN", "main.compute_loss", "main.make_step", "main.optim",
                    given={"learning_rate": 3e-3})  # fmt: skip

    def states() -> tuple:
        model = notebook.RNN(in_size=2, out_size=1, hidden_size=16, key=jax.random.PRNGKey(0))
        return model, notebook.optim.init(eqx.filter(model, eqx.is_array))

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        x, y = (np.asarray(data) for data in notebook.get_data(BATCH, key=jax.random.PRNGKey(number)))
        return (states[0], x, y, states[1]), {}

    return Loaded(
        step=undecorated(notebook.make_step),
        states=states,
        arguments=arguments,
        results=lambda outputs, states: (outputs[1:], outputs[0]),
        options={"state_argnums": (0, 3), "batch_argnums": (1, 2)},
        frontend="equinox",
    )


@stranger(
    "equinox-frozen-layer", "docs/examples/frozen_layer.ipynb", "dense", "frozen", "vmap", "multi_state", "no_loss"
)
def frozen_layer(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax

    def new_model() -> Any:
        return eqx.nn.MLP(in_size=1, out_size=1, width_size=8, depth=1, key=jax.random.PRNGKey(0))

    notebook = pick(path, "main.filter_spec*", "main.make_step", "main.optim",
                    given={"learning_rate": 3e-3, "model": new_model()})  # fmt: skip

    def states() -> tuple:
        model = new_model()
        return model, notebook.optim.init(eqx.filter(model, eqx.is_array))

    def data(number: int) -> tuple:
        x = normals(number, BATCH, 1)
        return x, 5 * x - 2

    def probe(states: tuple) -> Any:
        x, y = data(0)
        return ((jax.vmap(states[0])(x) - y) ** 2).mean()

    return Loaded(
        step=undecorated(notebook.make_step),
        states=states,
        arguments=lambda states, number: ((states[0], *data(number), states[1]), {}),
        results=lambda outputs, states: (outputs, None),
        options={"state_argnums": (0, 3), "batch_argnums": (1, 2)},
        frontend="equinox",
        probe=probe,
    )


@stranger("equinox-vision-transformer", "docs/examples/vision_transformer.ipynb", "attention", "dropout", "vmap",
          "multi_state")  # fmt: skip
def vision_transformer(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax

    notebook = pick(path, "PatchEmbedding", "AttentionBlock", "VisionTransformer", "compute_grads", "step_model",
                    given={"channels": 3})  # fmt: skip
    optimizer = notebook.optax.adamw(learning_rate=1e-4, b1=0.9, b2=0.999)

    def states() -> tuple:
        model = notebook.VisionTransformer(embedding_dim=32, hidden_dim=64, num_heads=4, num_layers=2, dropout_rate=0.1,
                                           patch_size=8, num_patches=16, num_classes=10,
                                           key=jax.random.PRNGKey(2003))  # fmt: skip
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        keys = jax.random.split(jax.random.PRNGKey(number), BATCH)
        data = normals(number, BATCH, 3, 32, 32), integers(number, 10, BATCH)
        return (states[0], optimizer, states[1], *data, keys), {}

    return Loaded(
        step=undecorated(notebook.step_model),
        states=states,
        arguments=arguments,
        results=lambda outputs, states: (outputs[:2], outputs[2]),
        options={"state_argnums": (0, 2), "batch_argnums": (3, 4, 5)},
        frontend="equinox",
    )


@stranger("equinox-diffusion-mixer", "docs/examples/score_based_diffusion.ipynb", "conv", "conv_transpose", "dense",
          "noise", "vmap", "multi_state")  # fmt: skip
def diffusion(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    notebook = pick(path, "MixerBlock", "Mixer2d", "single_loss_fn", "batch_loss_fn", "make_step", "main.int_beta",
                    "main.weight")  # fmt: skip
    optimizer = notebook.optax.adabelief(3e-4)

    def states() -> tuple:
        model = notebook.Mixer2d((1, 28, 28), 4, 32, 64, 64, 2, 10.0, key=jax.random.PRNGKey(5678))
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        data, key = normals(number, BATCH, 1, 28, 28), jax.random.PRNGKey(number)
        fixed = (notebook.weight, notebook.int_beta, data, jnp.float32(10.0), key)
        return (states[0], *fixed, states[1], optimizer.update), {}

    return Loaded(
        step=undecorated(notebook.make_step),
        states=states,
        arguments=arguments,
        results=lambda outputs, states: ((outputs[1], outputs[3]), outputs[0]),
        options={"state_argnums": (0, 6), "batch_argnums": (3,)},
        frontend="equinox",
    )


@stranger("equinox-bert", "docs/examples/bert.ipynb", "attention", "embedding", "dropout", "clipping", "vmap", "mask",
          "multi_state")  # fmt: skip
def bert(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax

    notebook = pick(path, "EmbedderBlock", "FeedForwardBlock", "AttentionBlock", "TransformerLayer", "Encoder",
                    "BertClassifier", "compute_loss", "make_step", lazy_annotations=True)  # fmt: skip
    without_pmap_collectives(notebook)
    config = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 64, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
              "max_position_embeddings": 32, "type_vocab_size": 2}  # fmt: skip
    tx = notebook.optax.chain(notebook.optax.clip_by_global_norm(1.0), notebook.optax.adam(learning_rate=1e-4))

    def states() -> tuple:
        model = notebook.BertClassifier(config=config, num_classes=2, key=jax.random.PRNGKey(5678))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        tokens = padded_tokens(number, 64, BATCH, 24)
        inputs = {"token_ids": tokens, "segment_ids": tokens % 2, "label": integers(number, 2, BATCH)}
        return (states[0], inputs, states[1], jax.random.PRNGKey(number)), {}

    return Loaded(
        step=functools.partial(notebook.make_step, tx=tx),
        states=states,
        arguments=arguments,
        results=lambda outputs, states: (outputs[1:3], outputs[0]),
        options={"state_argnums": (0, 2), "batch_argnums": (1,)},
        frontend="equinox",
    )


def _gan(path: pathlib.Path) -> tuple[Any, Any]:
    """Load the GAN notebook, eight channels wide, and return it with a function that makes every state."""
    import equinox as eqx
    import jax

    notebook = pick(path, "Generator", "Discriminator", "compute_grads_discriminator", "compute_grads_generator",
                    "step_discriminator", "step_generator", given={"batch_size": BATCH, "latent_size": 16})  # fmt: skip

    optimizer = notebook.optax.adam(0.0002, b1=0.5, b2=0.999)

    def states() -> dict[str, Any]:
        keys = jax.random.split(jax.random.PRNGKey(2003))
        generator, generator_state = eqx.nn.make_with_state(notebook.Generator)(16, (64, 8, 1), keys[0])
        discriminator, discriminator_state = eqx.nn.make_with_state(notebook.Discriminator)((64, 8, 1), keys[1])
        return {
            "generator": generator,
            "generator_state": generator_state,
            "generator_optimizer": optimizer.init(eqx.filter(generator, eqx.is_array)),
            "discriminator": discriminator,
            "discriminator_state": discriminator_state,
            "discriminator_optimizer": optimizer.init(eqx.filter(discriminator, eqx.is_array)),
        }

    notebook.optimizer = optimizer
    return notebook, states


@stranger("equinox-gan-discriminator", "docs/examples/deep_convolutional_gan.ipynb", "conv", "conv_transpose",
          "batch_norm", "noise", "vmap", "multi_state")  # fmt: skip
def gan_discriminator(path: pathlib.Path) -> Loaded:
    import jax

    notebook, new_states = _gan(path)
    order = ("discriminator", "discriminator_optimizer", "generator_state", "discriminator_state")
    generator = new_states()["generator"]

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        discriminator, *rest = states
        batch = normals(number, BATCH, 1, 64, 64)
        return (discriminator, generator, batch, notebook.optimizer, *rest, jax.random.PRNGKey(number)), {}

    return Loaded(
        step=undecorated(notebook.step_discriminator),
        states=lambda: tuple(new_states()[name] for name in order),
        arguments=arguments,
        results=lambda outputs, states: (outputs[1:5], outputs[0]),
        options={"state_argnums": (0, 4, 5, 6), "batch_argnums": (2,)},
        frontend="equinox",
    )


@stranger("equinox-gan-generator", "docs/examples/deep_convolutional_gan.ipynb", "conv", "conv_transpose", "batch_norm",
          "noise", "vmap", "multi_state", "no_batch")  # fmt: skip
def gan_generator(path: pathlib.Path) -> Loaded:
    import jax

    notebook, new_states = _gan(path)
    order = ("generator", "generator_optimizer", "discriminator_state", "generator_state")
    discriminator = new_states()["discriminator"]

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        generator, *rest = states
        return (generator, discriminator, notebook.optimizer, *rest, jax.random.PRNGKey(number)), {}

    return Loaded(
        step=undecorated(notebook.step_generator),
        states=lambda: tuple(new_states()[name] for name in order),
        arguments=arguments,
        results=lambda outputs, states: (outputs[1:5], outputs[0]),
        options={"state_argnums": (0, 3, 4, 5), "batch_argnums": ()},
        frontend="equinox",
    )


@stranger("equinox-data-parallel-mlp", "docs/examples/parallelism.ipynb", "dense", "vmap", "multi_state", "no_loss")
def data_parallel(path: pathlib.Path) -> Loaded:
    import equinox as eqx
    import jax

    notebook = pick(path, "compute_loss", "train_step", "learning_rate", "optim",
                    given={"model_sharding": None, "data_sharding": None})  # fmt: skip
    # Its own sharding constraints name a mesh of the example's; here the decorator decides.
    notebook.eqx = StandIn(eqx, filter_shard=lambda tree, sharding: tree)

    def states() -> tuple:
        model = eqx.nn.MLP(4, 4, 32, 1, key=jax.random.PRNGKey(6789))
        return model, notebook.optim.init(eqx.filter(model, eqx.is_inexact_array))

    def data(number: int) -> tuple:
        return normals(number, BATCH, 4), normals(number, BATCH, 4, salt=9)

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((*states, *data(number)), {}),
        results=lambda outputs, states: (outputs, None),
        options={"state_argnums": (0, 1), "batch_argnums": (2, 3)},
        frontend="equinox",
        probe=lambda states: notebook.compute_loss(states[0], *data(0)),
    )
