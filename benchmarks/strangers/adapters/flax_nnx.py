"""Training steps of Flax NNX examples and guides (checkout `flax`, the public repository google/flax)."""

from __future__ import annotations

import pathlib

from benchmarks.strangers.adapters.base import (
    Loaded,
    Stranger,
    example_module,
    images,
    integers,
    mutates_states,
    normals,
    padded_tokens,
    pick,
    registrar,
    returns_state_only,
    undecorated,
)  # fmt: skip

STRANGERS: list[Stranger] = []
stranger = registrar("flax-nnx", "flax", STRANGERS)
BATCH = 16


def _digits(number: int) -> dict:
    return {"image": images(number, BATCH, 28, 28, 1), "label": integers(number, 10, BATCH)}


def _metrics_probe(metrics_argnum: int):
    return lambda states: states[metrics_argnum].compute()


@stranger("nnx-mnist", "examples/mnist/train.py", "conv", "batch_norm", "dropout", "metrics", "multi_state", "no_loss")
def mnist(path: pathlib.Path) -> Loaded:
    train = example_module(path.parent, "train")
    return _mnist(train)


@stranger("nnx-docs-mnist-tutorial", "docs_nnx/mnist_tutorial.md", "conv", "batch_norm", "dropout", "metrics",
          "multi_state", "no_loss")  # fmt: skip
def mnist_tutorial(path: pathlib.Path) -> Loaded:
    return _mnist(pick(path, "CNN", "loss_fn", "train_step", stub=("orbax.export",)), rngs_first=True)


def _mnist(train: object, *, rngs_first: bool = False) -> Loaded:
    import optax
    from flax import nnx

    def states() -> tuple:
        model = train.CNN(rngs=nnx.Rngs(0))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        return model, nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param), metrics, nnx.Rngs(1)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        rest = (states[3], _digits(number)) if rngs_first else (_digits(number), states[3])
        return (*states[:3], *rest), {}

    positions = {"state_argnums": (0, 1, 2, 3), "batch_argnums": (4,)}
    if not rngs_first:
        positions = {"state_argnums": (0, 1, 2, 4), "batch_argnums": (3,)}
    return Loaded(undecorated(train.train_step), states, arguments, mutates_states, positions, "nnx", _metrics_probe(2))


def _toy_batch(number: int) -> tuple:
    return images(number, 32, 1), normals(number, 32, 1)


@stranger(
    "nnx-lifted-transforms", "examples/nnx_toy_examples/02_lifted_transforms.py", "dense", "multi_state", "no_loss"
)
def lifted_transforms(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    script = pick(path, "Linear", "Count", "MLP", "train_step", "test_step")

    def states() -> tuple:
        model = script.MLP(din=1, dhidden=32, dout=1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    return Loaded(
        step=undecorated(script.train_step),
        states=states,
        arguments=lambda states, number: ((*states, _toy_batch(number)), {}),
        results=mutates_states,
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
        frontend="nnx",
        probe=lambda states: undecorated(script.test_step)(nnx.clone(states[0]), _toy_batch(0)),
    )


@stranger(
    "nnx-train-state", "examples/nnx_toy_examples/03_train_state.py", "dense", "split_merge", "TrainState", "no_loss"
)
def train_state(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    script = pick(path, "Linear", "Count", "MLP", "TrainState", "train_step", "test_step")

    def states() -> tuple:
        model = script.MLP(din=1, dhidden=32, dout=1, rngs=nnx.Rngs(0))
        graphdef, params, counts = nnx.split(model, nnx.Param, script.Count)
        state = script.TrainState.create(
            apply_fn=None, graphdef=graphdef, params=params, tx=optax.sgd(0.1), counts=counts
        )
        return (state,)

    return Loaded(
        step=undecorated(script.train_step),
        states=states,
        arguments=lambda states, number: ((states[0], _toy_batch(number)), {}),
        results=returns_state_only,
        probe=lambda states: undecorated(script.test_step)(states[0], _toy_batch(0)),
    )


@stranger("nnx-vae", "examples/nnx_toy_examples/05_vae.py", "dense", "noise", "rngs_in_model", "multi_state")
def vae(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    script = pick(path, "Loss", "Encoder", "Decoder", "VAE", "train_step")

    def states() -> tuple:
        model = script.VAE(784, 64, 16, (28, 28), rngs=nnx.Rngs(0, noise=1))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    return Loaded(
        step=undecorated(script.train_step),
        states=states,
        arguments=lambda states, number: ((*states, (images(number, BATCH, 28, 28) > 0.5).astype("float32")), {}),
        results=mutates_states,
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
        frontend="nnx",
    )


@stranger("nnx-docs-basics", "docs_nnx/nnx_basics.md", "dense", "batch_norm", "dropout", "multi_state")
def basics(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    page = pick(path, "Linear", "MLP", "train_step")

    def states() -> tuple:
        model = page.MLP(2, 16, 10, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), nnx.Rngs(1)

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        return (*states[:2], normals(number, BATCH, 2), normals(number, BATCH, 10, salt=9), states[2]), {}

    options = {"state_argnums": (0, 1, 4), "batch_argnums": (2, 3)}
    return Loaded(undecorated(page.train_step), states, arguments, mutates_states, options, "nnx")


@stranger("nnx-docs-performance", "docs_nnx/guides/performance.md", "dense", "batch_norm", "dropout", "metrics",
          "rngs_in_model", "multi_state")  # fmt: skip
def performance(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    page = pick(path, "Model", "train_step")

    def states() -> tuple:
        model = page.Model(2, 64, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        return (*states, normals(number, 32, 2), normals(number, 32, 3, salt=9)), {}

    options = {"state_argnums": (0, 1, 2), "batch_argnums": (3, 4)}
    return Loaded(undecorated(page.train_step), states, arguments, mutates_states, options, "nnx")


@stranger("nnx-docs-ema", "docs_nnx/guides/optimization_cookbook.md", "dense", "ema", "multi_state", "no_loss")
def ema(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    page = pick(path, "lecun_normal", "make_model", "loss_fn", "train_step")

    def states() -> tuple:
        model = page.make_model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), nnx.EMA(model, decay=0.9)

    def data(number: int) -> tuple:
        return normals(number, 32, 2), normals(number, 32, 8, salt=9)

    return Loaded(
        step=undecorated(page.train_step),
        states=states,
        arguments=lambda states, number: ((*states, *data(number)), {}),
        results=mutates_states,
        options={"state_argnums": (0, 1, 2), "batch_argnums": (3, 4)},
        frontend="nnx",
        probe=lambda states: page.loss_fn(states[0], *data(0)),
    )


@stranger("nnx-docs-vit", "docs_nnx/examples/vit_training.md", "conv", "attention", "dropout", "rngs_in_model",
          "multi_state", "schedule")  # fmt: skip
def vit(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    page = pick(path, "ShardingConfig", "ModelConfig", "VisionTransformer", "TransformerEncoder",
                "compute_losses_and_logits", "train_step")  # fmt: skip
    config = page.ModelConfig(num_classes=16, img_size=32, patch_size=8, num_layers=2, num_heads=4, mlp_dim=64,
                              hidden_size=32, use_bfloat16=False)  # fmt: skip

    def states() -> tuple:
        model = page.VisionTransformer(config, rngs=nnx.Rngs(0))
        schedule = optax.linear_schedule(0.001, 0.0, 30)
        return model, nnx.Optimizer(model, optax.sgd(schedule, 0.8, nesterov=True), wrt=nnx.Param), nnx.Rngs(1)

    return Loaded(
        step=undecorated(page.train_step),
        states=states,
        arguments=lambda states, number: (
            (*states, (images(number, BATCH, 32, 32, 3), integers(number, 16, BATCH))), {}),
        results=mutates_states,
        options={"state_argnums": (0, 1, 2), "batch_argnums": (3,)},
        frontend="nnx",
    )  # fmt: skip


@stranger("nnx-docs-translation", "docs_nnx/examples/machine_translation.md", "attention", "embedding", "dropout",
          "rngs_in_model", "multi_state")  # fmt: skip
def translation(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    page = pick(path, "TransformerEncoder", "PositionalEmbedding", "TransformerDecoder", "TransformerModel",
                "compute_loss", "train_step")  # fmt: skip

    def states() -> tuple:
        model = page.TransformerModel(20, 64, 32, 64, 4, 0.5, rngs=nnx.Rngs(0))
        train_model = nnx.view(model, deterministic=False)
        return train_model, nnx.ModelAndOptimizer(model, optax.adamw(1.5e-3))

    def batch(number: int) -> dict:
        names = ("encoder_inputs", "decoder_inputs", "target_output")
        return {name: padded_tokens(number, 64, BATCH, 20, salt=salt) for salt, name in enumerate(names, 20)}

    return Loaded(
        step=undecorated(page.train_step),
        states=states,
        arguments=lambda states, number: ((*states, batch(number)), {}),
        results=mutates_states,
        options={"state_argnums": (0, 1), "batch_argnums": (2,)},
        frontend="nnx",
    )


@stranger("nnx-gemma", "examples/gemma/train.py", "attention", "embedding", "tied", "metrics", "multi_state", "no_loss")
def gemma(path: pathlib.Path) -> Loaded:
    import optax
    from flax import nnx

    train = example_module(path.parent, "train")
    cfg = example_module(path.parent, "transformer_cfg")
    config = cfg.TransformerConfig(
        num_layers=2, num_embed=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        final_logit_softcap=30.0, use_post_attn_norm=True, use_post_ffw_norm=True, use_qk_norm=True,
        attention_types=(cfg.AttentionType.LOCAL_SLIDING, cfg.AttentionType.GLOBAL), sliding_window_size=8,
    )  # fmt: skip

    def states() -> tuple:
        model = train.transformer_lib.Transformer(config, rngs=nnx.Rngs(params=0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3, b2=0.98, weight_decay=0.1), wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        return model, optimizer, nnx.Rngs(1), metrics

    def arguments(states: tuple, number: int) -> tuple[tuple, dict]:
        tokens = padded_tokens(number, 64, BATCH, 17)
        positions = (tokens[:, :-1] * 0 + range(16)).astype("int32")
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "inputs_position": positions}
        return (*states[:3], batch, states[3]), {}

    options = {"state_argnums": (0, 1, 2, 4), "batch_argnums": (3,)}
    return Loaded(train.nnx_train_step, states, arguments, mutates_states, options, "nnx", _metrics_probe(3))
