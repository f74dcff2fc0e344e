"""Axes have roles: every shipped rule set on meshes of three axes, by the names that people use, and by roles that they
say. Numbers are those of one device in float64, and what is predicted is what is compiled."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import MeshError, RuleError, UnavailableError
from splitjax.mesh import MeshShape
from splitjax.plan import Plan
from splitjax.roles import MeshRoles, Role, read_roles
from tests.steps import attention_case, conv_case, largest_difference, linen_case, train

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
# By rule set, meshes whose roles it knows.
MESHES = {
    "transformer": (CUBE, {"replica": 2, "data": 2, "model": 2}, {"fsdp": 2, "ep": 2, "tp": 2}),
    "megatron": (CUBE, {"replica": 2, "data": 2, "model": 2}),
    "splitbrain": ({"replica": 2, "data": 2, "model": 2}, {"data": 2, "tensor": 2, "tp": 2}),
    "fsdp": (CUBE, {"fsdp": 8}),
    "embedding_owner": (CUBE, {"fsdp": 8}),
    "data_parallel": (CUBE, {"x": 8}),
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


class Dense(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x, train=True):
        for width in (64, 64):
            x = nn.relu(nn.Dense(width, param_dtype=jnp.float64)(x))
        return nn.Dense(8, param_dtype=jnp.float64)(x)


class Bag(nn.Module):
    """The mean of looked-up rows, and a dense layer."""

    @nn.compact
    def __call__(self, ids, train=True):
        x = nn.Embed(64, 32, param_dtype=jnp.float64)(ids).mean(axis=1)
        return nn.Dense(16, param_dtype=jnp.float64)(x)


class Experts(nn.Module):
    """An embedding, and four experts of two layers each among which tokens are dealt out by capacity."""

    @nn.compact
    def __call__(self, ids, train=True):
        normal = nn.initializers.normal(0.1)
        x = nn.Embed(64, 32, param_dtype=jnp.float64)(ids)
        gate = jax.nn.softmax(nn.Dense(4, use_bias=False, param_dtype=jnp.float64, name="gate")(x))
        up = self.param("up", normal, (4, 32, 64), jnp.float64)
        down = self.param("down", normal, (4, 64, 32), jnp.float64)
        dealt = jnp.einsum("bte,btd->ebtd", gate, x)
        out = jnp.einsum("ebth,ehd->ebtd", nn.relu(jnp.einsum("ebtd,edh->ebth", dealt, up)), down)
        return nn.Dense(16, param_dtype=jnp.float64, name="head")(x + out.sum(0))


def case_of(name):
    rng, adam = np.random.default_rng(3), optax.adam(1e-2)
    if name == "transformer":
        return attention_case(adam, steps=2)
    if name == "cnn":
        return conv_case(adam, steps=2, dtype=np.float64, batch_norm=False)
    shape = (16, 12) if name == "experts" else (16,)
    labels = [rng.integers(0, 8, shape) for _ in range(2)]
    if name == "mlp":
        return linen_case(Dense(), [rng.normal(size=(16, 32)) for _ in range(2)], labels, adam)
    ids = [rng.integers(0, 64, (16, 12)) for _ in range(2)]
    return linen_case(Bag() if name == "embedding" else Experts(), ids, labels, adam)


WANTED = {}


def one_device(name):
    """The case, with the state and the losses of one device."""
    if name not in WANTED:
        case = case_of(name)
        WANTED[name] = case, *train(jax.jit(case.step), case.init(jax.random.key(0)), case.batches)
    return WANTED[name]


def cells():
    models = {"embedding_owner": ("embedding",), "transformer": ("transformer", "mlp", "cnn", "embedding")}
    slow = pytest.mark.slow
    for rules, meshes in MESHES.items():
        for number, mesh in enumerate(meshes):
            for model in models.get(rules, ("transformer", "mlp", "cnn", "embedding")):
                if "ep" in mesh:
                    continue
                first = number == 0 and (model == "transformer" or rules in ("transformer", "embedding_owner"))
                name = f"{rules}-{'x'.join(mesh)}-{model}"
                yield pytest.param(rules, mesh, model, id=name, marks=() if first else slow)
    yield pytest.param("transformer", MESHES["transformer"][2], "experts", id="transformer-experts")


@pytest.mark.parametrize(("rules", "mesh", "model"), list(cells()))
def test_numbers_are_those_of_one_device(rules, mesh, model):
    case, state, losses = one_device(model)
    step = splitjax.parallelize(case.step, mesh=mesh, rules=rules, donate=False)
    found, own = train(step, case.init(jax.random.key(0)), case.batches)
    assert np.max(np.abs(np.subtract(own, losses))) < 1e-10
    assert largest_difference(found, state) < 1e-10
