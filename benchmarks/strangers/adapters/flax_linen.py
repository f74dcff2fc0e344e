"""Training steps of Flax Linen examples (checkout `flax`, the public repository google/flax)."""

from __future__ import annotations

import functools
import pathlib

from benchmarks.strangers.adapters.base import (
    Loaded,
    StandIn,
    Stranger,
    example_module,
    images,
    integers,
    padded_tokens,
    pick,
    registrar,
    returns_state_first,
    returns_state_only,
    undecorated,
    without_pmap_collectives,
)  # fmt: skip

STRANGERS: list[Stranger] = []
stranger = registrar("flax-linen", "flax", STRANGERS)
BATCH = 16


@stranger("flax-imagenet-resnet", "examples/imagenet/train.py", "conv", "batch_norm", "TrainState", "schedule", "l2")
def imagenet(path: pathlib.Path) -> Loaded:
    import jax
    import ml_collections

    train = example_module(path.parent, "train")
    without_pmap_collectives(train)
    linen = train.models.nn  # whose BatchNorm names the pmap axis: over the global batch there is none
    train.models.nn = StandIn(linen, BatchNorm=lambda *args, axis_name=None, **rest: linen.BatchNorm(*args, **rest))
    train.NUM_CLASSES = 16
    config = ml_collections.ConfigDict({"momentum": 0.9, "half_precision": False, "warmup_epochs": 1, "num_epochs": 9})
    small = functools.partial(train.models.ResNet, [1, 1], train.models.ResNetBlock, num_filters=16)
    schedule = train.create_learning_rate_fn(config, 0.1, 2)
    model = train.create_model(model_cls=small, half_precision=False)

    def batch(number: int) -> dict:
        return {"image": images(number, BATCH, 32, 32, 3), "label": integers(number, 16, BATCH)}

    return Loaded(
        step=functools.partial(train.train_step, learning_rate_fn=schedule),
        states=lambda: (train.create_train_state(jax.random.key(0), config, model, 32, schedule),),
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_first,
    )


def _transformer_state(train: object, model: object, *inputs: object) -> tuple:
    """Return a TrainState with the optimizer that the Transformer examples' own `main` builds."""
    import jax
    import optax
    from flax.training import train_state

    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    tx = optax.adamw(train.create_learning_rate_schedule(0.01, 4), b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    state_type = getattr(train, "TrainState", train_state.TrainState)
    more = {"dynamic_scale": None} if state_type is not train_state.TrainState else {}
    return (state_type.create(apply_fn=model.apply, params=params, tx=tx, **more),)


@stranger(
    "flax-lm1b-transformer", "examples/lm1b/train.py", "attention", "embedding", "dropout", "TrainState", "static"
)
def lm1b(path: pathlib.Path) -> Loaded:
    import jax
    import jax.numpy as jnp

    train = example_module(path.parent, "train")
    config = train.models.TransformerConfig(vocab_size=64, output_vocab_size=64, emb_dim=32, num_heads=4, num_layers=2,
                                            qkv_dim=32, mlp_dim=64, max_len=32)  # fmt: skip
    model = train.models.TransformerLM(config.replace(deterministic=True))
    schedule = train.create_learning_rate_schedule(0.01, 4)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        batch = {"inputs": padded_tokens(number, 64, BATCH, 32)}
        return (states[0], batch, config, schedule, 0.0, jax.random.key(1)), {}

    return Loaded(
        step=train.train_step,
        states=lambda: _transformer_state(train, model, jnp.ones((2, 32), jnp.float32)),
        arguments=arguments,
        results=returns_state_first,
        options={"static_argnums": (2, 3, 4)},
    )


@stranger("flax-wmt-transformer", "examples/wmt/train.py", "attention", "embedding", "dropout", "TrainState", "tied")
def wmt(path: pathlib.Path) -> Loaded:
    import jax
    import jax.numpy as jnp

    train = example_module(path.parent, "train")
    without_pmap_collectives(train)
    config = train.models.TransformerConfig(vocab_size=64, output_vocab_size=64, share_embeddings=True, emb_dim=32,
                                            logits_via_embedding=True, num_heads=4, num_layers=2, qkv_dim=32,
                                            mlp_dim=64, max_len=32)  # fmt: skip
    model = train.models.Transformer(config.replace(deterministic=True))
    schedule = train.create_learning_rate_schedule(0.01, 4)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        tokens = [padded_tokens(number, 64, BATCH, 32, salt=salt) for salt in (4, 5)]
        batch = dict(zip(("inputs", "targets"), tokens, strict=True))
        return (states[0], batch, config, schedule, 0.1, jax.random.key(1)), {}

    return Loaded(
        step=train.train_step,
        states=lambda: _transformer_state(train, model, *[jnp.ones((2, 32), jnp.float32)] * 2),
        arguments=arguments,
        results=returns_state_first,
        options={"static_argnums": (2, 3, 4)},
    )


@stranger("flax-seq2seq-lstm", "examples/seq2seq/train.py", "lstm", "scan", "TrainState", "mask")
def seq2seq(path: pathlib.Path) -> Loaded:
    import random

    import jax
    import numpy as np
    from absl import flags

    train = example_module(path.parent, "train")
    flags.FLAGS(["strangers", "--hidden_size=32"])
    table = train.CTable("0123456789+= ", flags.FLAGS.max_len_query_digit)

    def batch(number: int) -> dict:
        random.seed(number)
        return {name: np.asarray(value) for name, value in table.get_batch(BATCH).items()}

    return Loaded(
        step=undecorated(train.train_step),
        states=lambda: (train.get_train_state(jax.random.key(0), table),),
        arguments=lambda states, number: ((states[0], batch(number), jax.random.key(1), table.eos_id), {}),
        results=returns_state_first,
    )


@stranger("flax-sst2-bilstm", "examples/sst2/train.py", "lstm", "scan", "embedding", "dropout", "TrainState", "mask")
def sst2(path: pathlib.Path) -> Loaded:
    import jax
    import numpy as np

    train = example_module(path.parent, "train")
    config = example_module(path.parent / "configs", "default").get_config()
    config.update(embedding_size=32, hidden_size=32, vocab_size=64)
    model = train.model_from_config(config)

    def batch(number: int) -> dict:
        tokens = padded_tokens(number, 64, BATCH, 24)
        return {
            "token_ids": tokens,
            "length": (tokens > 0).sum(1).astype(np.int32),
            "label": integers(number, 2, BATCH),
        }

    return Loaded(
        step=train.train_step,
        states=lambda: (train.create_train_state(jax.random.key(0), config, model),),
        arguments=lambda states, number: ((states[0], batch(number), {"dropout": jax.random.key(number)}), {}),
        results=lambda outputs, states: ((outputs[0],), {"loss": outputs[1].loss, "accuracy": outputs[1].accuracy}),
    )


@stranger("flax-vae", "examples/vae/train.py", "dense", "noise", "TrainState", "static", "no_loss")
def vae(path: pathlib.Path) -> Loaded:
    import jax
    import jax.numpy as jnp
    import optax
    from flax.training import train_state

    train = example_module(path.parent, "train")
    model = train.models.model(16)

    def states() -> tuple:
        params = model.init(jax.random.key(0), jnp.ones((2, 784)), jax.random.key(1))["params"]
        return (train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3)),)

    def batch(number: int) -> object:
        return (images(number, BATCH, 784) > 0.5).astype("float32")

    def probe(states: tuple) -> dict:
        outputs = model.apply({"params": states[0].params}, batch(0), jax.random.key(9))
        return train.compute_metrics(outputs[0], batch(0), *outputs[1:])

    return Loaded(
        step=train.train_step,
        states=states,
        arguments=lambda states, number: ((states[0], batch(number), jax.random.key(number), 16), {}),
        results=returns_state_only,
        options={"static_argnums": (3,)},
        probe=probe,
    )


@stranger(
    "flax-ppo", "examples/ppo/ppo_lib.py", "conv", "dense", "TrainState", "static", "several_updates", "actor_critic"
)
def ppo(path: pathlib.Path) -> Loaded:
    import jax
    import ml_collections
    import optax
    from flax.training import train_state

    del ml_collections  # imported by the example
    ppo_lib = _ppo_lib(path)
    model = ppo_lib.models.ActorCritic(num_outputs=4)
    params = ppo_lib.get_initial_params(jax.random.key(0), model)

    def states() -> tuple:
        copied = jax.tree.map(lambda leaf: leaf.copy(), params)
        return (train_state.TrainState.create(apply_fn=model.apply, params=copied, tx=optax.adam(2.5e-4)),)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        floats = [images(number, 2 * BATCH, salt=salt) for salt in (11, 12, 13)]
        frames = 255 * images(number, 2 * BATCH, 84, 84, 4)
        trajectories = (frames, integers(number, 4, 2 * BATCH), -floats[0], floats[1], floats[2])
        return (states[0], trajectories, BATCH), {"clip_param": 0.1, "vf_coeff": 0.5, "entropy_coeff": 0.01}

    return Loaded(
        step=undecorated(ppo_lib.train_step),
        states=states,
        arguments=arguments,
        results=returns_state_first,
        options={"static_argnums": (2,)},
    )


def _ppo_lib(path: pathlib.Path) -> object:
    """Import the PPO library without the Atari simulator that it plays in."""
    from benchmarks.strangers.adapters.base import stubs

    with stubs("gymnasium", "gym", "ale_py", "cv2", "env_utils", "test_episodes", "seed_rl_atari_preprocessing"):
        return example_module(path.parent, "ppo_lib")


@stranger("flax-docs-quick-start", "docs/quick_start.md", "conv", "dense", "TrainState", "metrics", "no_loss")
def quick_start(path: pathlib.Path) -> Loaded:
    import jax

    page = pick(path, "CNN", "Metrics", "TrainState", "create_train_state", "train_step", "compute_metrics",
                keep=("clu",))  # fmt: skip

    def batch(number: int) -> dict:
        return {"image": images(number, BATCH, 28, 28, 1), "label": integers(number, 10, BATCH)}

    def probe(states: tuple) -> dict:
        return page.compute_metrics(state=states[0], batch=batch(0)).metrics.compute()

    return Loaded(
        step=undecorated(page.train_step),
        states=lambda: (page.create_train_state(page.CNN(), jax.random.key(0), 0.01, 0.9),),
        arguments=lambda states, number: ((states[0], batch(number)), {}),
        results=returns_state_only,
        probe=probe,
    )
