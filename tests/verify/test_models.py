"""The shipped models, at small sizes, under shipped rules, in both Flax libraries and in Equinox: all of their values
are one device's."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
import splitjax.equinox
from splitjax import models
from splitjax.errors import VerificationError
from splitjax.mesh import MeshShape
from tests.verify.lying import lie

MESH = {"data": 2, "model": 4}


def planned(model, rules, library="linen", *, batch_size=64, parallel=None, **options):
    """A shipped model's step and the shapes of its arguments."""
    spec = models.build(model, library=library, **options)
    key = jax.eval_shape(lambda: jax.random.key(0))
    parallel = {"mesh": MESH, "rules": rules, **(parallel or {})}
    if library == "nnx":
        from flax import nnx

        init_fn, step, _ = models.make_nnx_step(spec, optax.adam(1e-3), value_and_grad=splitjax.nnx.value_and_grad)
        return splitjax.nnx.parallelize(step, **parallel), (*nnx.eval_shape(init_fn, key), spec.example(batch_size))
    init_fn, step, _ = models.make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    return splitjax.parallelize(step, **parallel), (jax.eval_shape(init_fn, key), spec.example(batch_size))


CASES = [
    ("mlp", "splitbrain", "linen", {}),
    ("mlp", "fsdp", "nnx", {}),
    ("lstm", "megatron", "nnx", {}),
    pytest.param("lstm", "splitbrain", "linen", {}, marks=pytest.mark.one_version),
    pytest.param("deepfm", "splitbrain", "linen", {}, marks=pytest.mark.one_version),
    pytest.param("dlrm", "data_parallel", "linen", {}, marks=pytest.mark.one_version),
    ("transformer", "megatron", "linen", {"dropout": 0.1, "num_layers": 1}),
    ("transformer", "splitbrain", "nnx", {"dropout": 0.1, "num_layers": 1, "tied": True}),
    pytest.param("resnet18", "megatron", "linen", {}, marks=pytest.mark.slow),
    pytest.param("resnet18", "splitbrain", "nnx", {}, marks=pytest.mark.slow),
    pytest.param("vgg11", "splitbrain", "linen", {}, marks=pytest.mark.slow),
    pytest.param("vgg16", "fsdp", "nnx", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("model, rules, library, options", CASES)
def test_shipped_models_have_the_numbers_of_one_device(model, rules, library, options):
    step, arguments = planned(model, rules, library, **options)
    verification = step.verify(*arguments)
    assert verification.ok, str(verification)
    (run,) = verification.runs
    assert not run.notes and any(one.used < one.given for one in run.dims)
    assert {"loss", "gradient", "state"} <= {one.kind for one in run.values}
    assert all(one.relative < 1e-10 for one in run.values)


@pytest.mark.slow
def test_batch_norm_is_verified_with_its_running_statistics():
    step, arguments = planned("vgg11", "data_parallel", width=0.25, batch_norm=True)
    verification = step.verify(*arguments)
    assert verification.ok
    assert sum("batch_stats" in one.name for one in verification.runs[0].values) >= 8


@pytest.mark.parametrize("sync, said", [("all_gather", False), (splitjax.sync.ByRows("all_gather", lazy=True), True)])
def test_tables_synchronised_by_rows_are_verified_with_their_scheme(sync, said):
    step, arguments = planned("deepfm", "data_parallel", parallel={"sync": sync})
    verification = step.verify(*arguments)
    assert step.plan(*arguments).syncs
    # What leaves rows alone changes the numbers on purpose: it is left out, and said.
    assert verification.ok and bool(verification.runs[0].notes) == said


def test_a_large_model_is_shrunk_before_anything_is_allocated():
    """124 million parameters, and as many numbers in Adam's state twice: 1.5 GB that this process need not have."""
    import resource

    options = {"vocab_size": 50257, "max_len": 1024, "num_layers": 2, "d_model": 768, "num_heads": 12, "tied": True}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step, arguments = planned("transformer", "megatron", **options)
    (run,) = step.verify(*arguments).runs
    assert run.ok and not any(one.why for one in run.dims)
    assert max(one.used for one in run.dims) <= 16
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024
    )  # kibibytes; the embedding's float64 alone would be 300


def equinox_step(change, **options):
    class Net(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))

    keys = jax.random.split(jax.random.key(0), 2)
    net = Net(eqx.nn.Linear(32, 64, key=keys[0]), eqx.nn.Linear(64, 16, key=keys[1]))
    tx = optax.adam(1e-3)

    def loss_fn(net, batch):
        return optax.softmax_cross_entropy_with_integer_labels(change(jax.vmap(net)(batch["x"])), batch["y"]).mean()

    @splitjax.equinox.parallelize(mesh=MESH, **options)
    def step(net, opt, batch):
        loss, grads = splitjax.equinox.value_and_grad(loss_fn)(net, batch)
        updates, opt = tx.update(grads, opt, net)
        return eqx.apply_updates(net, updates), opt, loss

    batch = {"x": jax.random.normal(keys[0], (32, 32)), "y": jnp.zeros(32, jnp.int32)}
    return step, (net, tx.init(eqx.filter(net, eqx.is_array)), batch)


def test_equinox_steps_are_verified():
    step, arguments = equinox_step(lambda x: x)
    assert step.verify(*arguments).ok
    step, arguments = equinox_step(lie, verify="first")
    assert step.verify(*arguments).findings[0].operation == "lying"
    with pytest.raises(VerificationError):
        step(*arguments)


def test_nnx_steps_are_verified_first():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            return self.last(lie(nnx.relu(self.first(x))))

    @splitjax.nnx.parallelize(mesh=MESH, verify="first")
    def step(net, optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda net: (net(batch) ** 2).mean())(net)
        optimizer.update(net, grads)
        return loss

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(VerificationError, match="other numbers"):
        step(net, optimizer, jnp.ones((32, 32)))


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["splitbrain", "megatron", "fsdp", "data_parallel"])
@pytest.mark.parametrize("model, options", [
    ("vgg16", {}),
    ("transformer", {"vocab_size": 50257, "max_len": 1024, "num_layers": 12, "d_model": 768, "num_heads": 12}),
])  # fmt: skip
def test_it_takes_less_than_a_minute(model, options, rules):
    step, arguments = planned(model, rules, **options)
    assert step.plan(*arguments).mesh == MeshShape(tuple(MESH.items()))
    verification = step.verify(*arguments)
    assert verification.ok and verification.seconds < 60


@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_step_in_float64_with_derivative_rules(microbatches):
    def step(params, batch):
        def loss_fn(params):
            hidden = jax.nn.relu(batch["x"] @ params["up"])
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        loss, grads = splitjax.value_and_grad(loss_fn, microbatches=microbatches)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), {"loss": loss}

    with jax.enable_x64(True):
        parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron")
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float64)
        params = {"up": shape(16, 32), "down": shape(32, 8)}
        assert parallel.verify(params, {"x": shape(16, 16), "y": shape(16, 8)}).ok
