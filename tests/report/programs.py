"""Steps whose reports the tests read: narrow shipped models, and small programs that send something on purpose."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

import splitjax
from splitjax import models

MESH = {"data": 2, "model": 4}
RULES = ("splitbrain", "data_parallel", "fsdp", "megatron")
NARROW = {
    "mlp": {"features": (64, 64), "input_shape": (8, 8, 3)},
    "vgg11": {"width": 1 / 8, "head_features": (64, 64)},
    "resnet18": {"width": 1 / 8},
    "transformer": {"num_layers": 2, "d_model": 32, "num_heads": 4, "vocab_size": 64, "max_len": 16},
}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def narrow(name, library="linen", rules="splitbrain", *, mesh=None, shallow=True):
    """A parallel step of a shipped model, and shapes of its arguments. A ResNet is one of two blocks unless `shallow`
    is False."""
    spec = models.build(name, library=library, **NARROW[name])
    if name == "resnet18" and shallow:
        config = dataclasses.replace(spec.config, stage_sizes=(1, 1), image_size=8)
        spec = dataclasses.replace(
            spec, config=config, module=models.LinenResNet(config) if library == "linen" else None
        )
    batch, key, optimizer = spec.example(32), jax.eval_shape(lambda: jax.random.key(0)), optax.adam(1e-3)
    mesh = MESH if mesh is None else mesh
    if library == "nnx":
        from flax import nnx

        init_fn, train_step, _ = models.make_nnx_step(spec, optimizer, value_and_grad=splitjax.nnx.value_and_grad)
        return splitjax.nnx.parallelize(train_step, mesh=mesh, rules=rules), (*nnx.eval_shape(init_fn, key), batch)
    init_fn, train_step, _ = models.make_step(spec, optimizer, value_and_grad=splitjax.value_and_grad)
    return splitjax.parallelize(train_step, mesh=mesh, rules=rules), (jax.eval_shape(init_fn, key), batch)


BATCH = {"x": f32(32, 32), "y": f32(32, 32), "mask": f32(32)}
PARAMS = {"a": f32(32, 64), "b": f32(64, 32)}


def forward(params, batch):
    return jnp.tanh(batch["x"] @ params["a"]) @ params["b"]


def step_of(loss, optimizer=None):
    """A training step over `PARAMS` (with SGD written out, unless an optimizer is given), and its state."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer

    def step(state, batch):
        value, grads = splitjax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, {"params": PARAMS, "opt": jax.eval_shape(optimizer.init, PARAMS)}


def mean_square(params, batch):
    return jnp.mean((forward(params, batch) - batch["y"]) ** 2)


def line_of(function, text):
    """The number of the line of a function that holds a text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return next(first + offset for offset, line in enumerate(lines) if text in line)
