"""Training steps of Haiku examples (checkout `dm-haiku`, the public repository google-deepmind/dm-haiku)."""

from __future__ import annotations

import pathlib
import types

from benchmarks.strangers.adapters.base import (
    Loaded,
    Stranger,
    example_module,
    generator,
    images,
    integers,
    normals,
    padded_tokens,
    pick,
    registrar,
    returns_state_first,
    returns_state_only,
    undecorated,
    without_pmap_collectives,
)  # fmt: skip

STRANGERS: list[Stranger] = []
stranger = registrar("haiku", "dm-haiku", STRANGERS)
BATCH = 16


@stranger("haiku-mnist", "examples/mnist.py", "dense", "ema", "l2", "NamedTuple_state", "no_loss")
def mnist(path: pathlib.Path) -> Loaded:
    import jax

    script = pick(path, "NUM_CLASSES", "Batch", "TrainingState", "net_fn")
    optimiser = script.optax.adam(1e-3)
    network = script.hk.without_apply_rng(script.hk.transform(script.net_fn))
    inner = pick(path, "main.loss", "main.update", given={**vars(script), "network": network, "optimiser": optimiser})

    def batch(number: int) -> tuple:
        return script.Batch(255 * images(number, BATCH, 28, 28, 1), integers(number, 10, BATCH))

    def states() -> tuple:
        params = network.init(jax.random.PRNGKey(seed=0), batch(0).image)
        return (script.TrainingState(params, params, optimiser.init(params)),)

    return Loaded(
        step=undecorated(inner.update),
        states=states,
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_only,
        probe=lambda states: inner.loss(states[0].params, batch(0)),
    )


@stranger("haiku-vae", "examples/vae.py", "dense", "noise", "rng_in_state", "NamedTuple_state", "no_loss")
def vae(path: pathlib.Path) -> Loaded:
    import jax

    script = pick(path, "Config", "Batch", "Encoder", "Decoder", "VAEOutput", "VariationalAutoEncoder", "TrainingState")
    inner = pick(path, "main.config", "main.model", "main.loss_fn", "main.optimizer", "main.update", given=vars(script))

    def batch(number: int) -> tuple:
        return script.Batch((images(number, BATCH, 28, 28, 1) > 0.5).astype("float32"))

    def states() -> tuple:
        key = jax.random.PRNGKey(0)
        params = inner.model.init(key, batch(0).image)
        return (script.TrainingState(params, inner.optimizer.init(params), key),)

    return Loaded(
        step=undecorated(inner.update),
        states=states,
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_only,
        probe=lambda states: inner.loss_fn(states[0].params, jax.random.PRNGKey(7), batch(0)),
    )


@stranger("haiku-mnist-gan", "examples/mnist_gan.ipynb", "conv", "conv_transpose", "noise", "several_updates", "static")
def gan(path: pathlib.Path) -> Loaded:
    import jax

    notebook = pick(path, "Generator", "Discriminator", "tree_shape", "sparse_softmax_cross_entropy", "GANTuple",
                    "GANState", "GAN")  # fmt: skip
    notebook.print = lambda *args: None
    model = notebook.GAN(num_latents=20)

    def batch(number: int) -> object:
        return 2 * images(number, BATCH, 28, 28, 1) - 1

    return Loaded(
        step=types.MethodType(undecorated(notebook.GAN.update), model),
        states=lambda: (model.initial_state(jax.random.PRNGKey(1), batch(0)),),
        arguments=lambda states, number: ((jax.random.PRNGKey(number), states[0], batch(number)), {}),
        results=lambda outputs, states: ((outputs[1],), outputs[2]),
        options={"state_argnums": (1,), "batch_argnums": (2,)},
    )


@stranger("haiku-lstm", "examples/haiku_lstms.ipynb", "lstm", "scan", "multi_state", "time_major")
def lstm(path: pathlib.Path) -> Loaded:
    import jax
    import numpy as np

    notebook = pick(path, "unroll_net", "model", "T", "Pair", "sine_seq", "generate_data")
    inner = pick(path, "train_model.opt", "train_model.loss", "train_model.update", given=vars(notebook))

    def batch(number: int) -> tuple:
        np.random.seed(number)
        (x, y), _ = notebook.generate_data(16, BATCH, 2)
        return x.astype(np.float32), y.astype(np.float32)

    def states() -> tuple:
        params = notebook.model.init(jax.random.PRNGKey(428), batch(0)[0])
        return params, inner.opt.init(params)

    return Loaded(
        step=undecorated(inner.update),
        states=states,
        arguments=lambda states, number: ((number, *states, *batch(number)), {}),
        results=lambda outputs, states: (outputs[1:], outputs[0]),
        options={"state_argnums": (1, 2), "batch_argnums": ()},  # [T, B, F]: the leading dim is time
    )


@stranger("haiku-vqvae", "examples/vqvae_example.ipynb", "conv", "conv_transpose", "ema_codebook", "multi_state")
def vqvae(path: pathlib.Path) -> Loaded:
    import jax

    names = ("commitment_cost", "vq_use_ema", "decay", "learning_rate", "num_residual_layers", "forward", "optimizer",
             "ResidualStack", "Encoder", "Decoder", "VQVAEModel", "train_step")  # fmt: skip
    notebook = pick(path, *names, train_data_variance=0.06, num_hiddens=32, num_residual_hiddens=16,
                    embedding_dim=16, num_embeddings=64)  # fmt: skip
    forward = notebook.hk.transform_with_state(notebook.forward)
    notebook.forward = forward

    def batch(number: int) -> dict:
        return {"image": images(number, BATCH, 32, 32, 3) - 0.5}

    def states() -> tuple:
        params, state = forward.init(jax.random.PRNGKey(42), batch(0), is_training=True)
        return params, state, notebook.optimizer.init(params)

    def results(outputs: tuple, states: tuple) -> tuple[tuple, dict]:
        return outputs[:3], {name: outputs[3][name] for name in ("loss", "recon_error")}

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((*states, batch(number)), {}),
        results=results,
        options={"state_argnums": (0, 1, 2), "batch_argnums": (3,)},
    )


@stranger("haiku-rnn", "examples/rnn/train.py", "lstm", "scan", "one_hot", "time_major", "NamedTuple_state", "no_loss")
def rnn(path: pathlib.Path) -> Loaded:
    import haiku as hk
    import jax
    from absl import flags

    train = example_module(path.parents[2], "examples.rnn.train")
    flags.FLAGS(["strangers", "--hidden_size=32"])
    init, loss_fn = hk.without_apply_rng(hk.transform(train.sequence_loss))

    def batch(number: int) -> dict:
        return {"input": integers(number, 128, 24, BATCH), "target": integers(number, 128, 24, BATCH, salt=9)}

    def states() -> tuple:
        params = init(jax.random.PRNGKey(42), batch(0))
        return (train.TrainingState(params=params, opt_state=train.make_optimizer().init(params)),)

    return Loaded(
        step=undecorated(train.update),
        states=states,
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_only,
        options={"batch_argnums": ()},  # [T, B]: the leading dim is time
        probe=lambda states: loss_fn(states[0].params, batch(0)),
    )


@stranger("haiku-transformer", "examples/transformer/train.py", "attention", "embedding", "dropout", "clipping",
          "rng_in_state", "NamedTuple_state", "mask")  # fmt: skip
def transformer(path: pathlib.Path) -> Loaded:
    import jax

    train = example_module(path.parents[2], "examples.transformer.train")
    train.NUM_LAYERS, train.NUM_HEADS, train.MODEL_SIZE, train.KEY_SIZE = 2, 4, 32, 8

    def batch(number: int) -> tuple:
        tokens = padded_tokens(number, 128, BATCH, 25)
        return train.dataset.Batch(tokens[:, :-1], tokens[:, 1:])

    return Loaded(
        step=undecorated(train.update),
        states=lambda: (undecorated(train.init)(jax.random.PRNGKey(0), batch(0)),),
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_first,
    )


@stranger("haiku-imagenet-resnet50", "examples/imagenet/train.py", "conv", "batch_norm", "schedule", "l2",
          "NamedTuple_state", "mixed_precision")  # fmt: skip
def imagenet(path: pathlib.Path) -> Loaded:
    import jax
    from absl import flags

    train = example_module(path.parents[2], "examples.imagenet.train")
    without_pmap_collectives(train)
    flags.FLAGS(["strangers", "--train_device_batch_size=2"])

    def batch(number: int) -> dict:
        return {"images": normals(number, BATCH, 32, 32, 3), "labels": integers(number, 1000, BATCH)}

    return Loaded(
        step=undecorated(train.train_step),
        states=lambda: (jax.jit(train.initial_state)(jax.random.PRNGKey(42), batch(0)),),
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_first,
    )


@stranger("haiku-docs-non-trainable", "docs/notebooks/non_trainable.ipynb", "dense", "frozen", "no_loss")
def non_trainable(path: pathlib.Path) -> Loaded:
    import haiku as hk
    import jax
    import numpy as np

    notebook = pick(path, "num_classes", "f", "loss_fn", "sgd_step", "train_step")
    notebook.f = notebook.hk.transform(notebook.f)
    params = notebook.f.init(jax.random.PRNGKey(42), np.zeros([10, 1], np.float32))
    frozen = hk.data_structures.partition(lambda module, name, value: module != "mlp/~/linear_1", params)[1]

    def batch(number: int) -> tuple:
        labels = generator(number).permutation(np.tile(np.arange(10), 2))[:BATCH]
        return labels.reshape(BATCH, 1).astype(np.float32), labels.astype(np.int32)

    def states() -> tuple:
        copied = jax.tree.map(lambda leaf: leaf.copy(), params)
        return (hk.data_structures.partition(lambda module, name, value: module != "mlp/~/linear_1", copied)[0],)

    return Loaded(
        step=undecorated(notebook.train_step),
        states=states,
        arguments=lambda states, number: ((states[0], frozen, *batch(number)), {}),
        results=returns_state_only,
        options={"batch_argnums": (2, 3)},
        probe=lambda states: notebook.loss_fn(states[0], frozen, *batch(0)),
    )
