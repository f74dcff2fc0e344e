"""Checkpoints and plain orbax: each reads what the other wrote, with the stable interface and with the new one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import splitjax
from splitjax.errors import CheckpointError
from splitjax.planning.carried import Carried
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints
from splitjax.runtime.checkpoint.description import Description
from splitjax.runtime.checkpoint.folder import CARRIED, STATE
from splitjax.runtime.checkpoint.state_io import ArrayWriter, StoredPart
from splitjax.runtime.checkpoint.state_match import describe
from tests.runtime.states import assert_same, filled

TX = optax.adam(1e-2)
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype("f")}
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def dicts():
    params = {"hidden": {"kernel": filled((4, 8), 1)}, "bias": filled(8, 2)}
    return {"params": params, "opt": TX.init(params), "step": jnp.int32(7)}


def train_state():
    model = nn.Dense(8)
    return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), BATCH["x"])["params"], tx=TX)


def nnx_state():
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1)))
    return nnx.state((model, nnx.Optimizer(model, TX, wrt=nnx.Param)))


def abstract(state):
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def assert_values(read, state):
    """Equal in structure and value; plain orbax commits arrays to their devices."""
    assert jax.tree.structure(read) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, read, state)


def plain(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def plain_v1(path, like):
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="this orbax has no v1 interface")
    return (v1.load if hasattr(v1, "load") else v1.load_pytree)(path, like)


@pytest.mark.parametrize("read", [plain, plain_v1])
@pytest.mark.parametrize("make", [dicts, train_state, nnx_state])
def test_plain_orbax_reads_what_we_saved(tmp_path, make, read):
    state = make()
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(3, state)
    assert_values(read(tmp_path / "3" / STATE, abstract(state)), state)


def test_plain_orbax_reads_nested_dicts_without_a_target(tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(3, dicts())
    with ocp.PyTreeCheckpointer() as checkpointer:
        read = checkpointer.restore(tmp_path / "3" / STATE)
    assert_values(read["params"], dicts()["params"])
    assert sorted(read["opt"][0]) == ["count", "mu", "nu"]


@pytest.mark.parametrize("write", ["StandardCheckpointer", "v1"])
def test_a_step_takes_what_plain_orbax_reads(tmp_path, write):
    """The other way round: `abstract_state` is what orbax wants to know, and its layouts come back."""
    rng = np.random.default_rng(1)
    params = {"table": rng.normal(size=(4, 8)).astype("f")}
    state = {"params": params, "opt": TX.init(params)}
    if write == "v1":
        v1 = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="this orbax has no v1 interface")
        (v1.save if hasattr(v1, "save") else v1.save_pytree)(tmp_path / "theirs", state)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "theirs", state)

    @splitjax.parallelize(mesh={"data": 2, "model": 4}, rules="megatron")
    def train_step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda params: jnp.mean((batch["x"] @ params["table"]) ** 2))(
            state["params"]
        )
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    like = train_step.abstract_state(lambda: state, example=(BATCH,))
    read = plain_v1(tmp_path / "theirs", like) if write == "v1" else plain(tmp_path / "theirs", like)
    assert read["params"]["table"].sharding == like["params"]["table"].sharding
    assert read["params"]["table"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
    _, metrics = train_step(read, BATCH)
    np.testing.assert_allclose(metrics["loss"], np.mean((BATCH["x"] @ params["table"]) ** 2), rtol=1e-5)


def test_python_values_and_empty_arrays_stand_in_the_tree(tmp_path):
    state = {"name": "run", "count": 3, "rate": 0.5, "on": True, "none": jnp.zeros((0, 2)), "w": filled(2, 1)}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        assert_same(checkpoints.restore(state).state, state)
    read = plain(tmp_path / "1" / STATE, None)
    assert (read["name"], read["count"], read["rate"], read["on"], read["none"]) == ("run", 3, 0.5, True, None)


@pytest.mark.parametrize(
    "state", [{"a.b": filled(2, 1), "a": {"b": filled(2, 2)}}, {"a/b": filled(2, 1)}, {"": filled(2, 1)}, filled(2, 3)]
)
def test_names_that_orbax_would_confuse_are_stored_by_path(tmp_path, state):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        assert_same(checkpoints.restore(state).state, state)
    assert Description.read(tmp_path / "1" / "checkpoint.json").as_tree is False


def test_odd_names_keep_their_places_in_a_tree(tmp_path):
    state = {name: filled(2, number) for number, name in enumerate(["..", "a", ".zarray", "ü %2f", "0.0", "a\nb", "d"])}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        assert_same(checkpoints.restore(state).state, state)
    assert Description.read(tmp_path / "1" / "checkpoint.json").as_tree is True


def test_another_container_with_the_same_paths_is_read(tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, {"layers": [filled(2, 1), filled(3, 2)]})
        restored = checkpoints.restore({"layers": (filled(2), filled(3))}).state
    assert_same(restored, {"layers": (filled(2, 1), filled(3, 2))})


def test_checkpoints_from_before_are_read(tmp_path, monkeypatch):
    """Their arrays lie flat by path, with what the step carried among them, and their description does not say so."""
    state, carries = dicts(), {"splitjax_carried": {"residuals/table": filled((4, 2), 5)}}
    leaves, more = describe(state), describe(carries)

    def as_before(parts):
        states, _ = parts
        return ArrayWriter([StoredPart(states.folder, (*leaves, *more), (state, carries), as_tree=False)])

    entry = {"arrays": [vars(leaf) for leaf in more], "names": ["residuals/table"], "layouts": {"residuals/table": []}}
    with monkeypatch.context() as patch:
        patch.setattr("splitjax.runtime.checkpoint.checkpoints.ArrayWriter", as_before)
        patch.setattr(
            "splitjax.runtime.checkpoint.checkpoints.Description",
            lambda step, leaves, extra, carried, as_tree: Description(step, leaves, extra, entry),
        )
        with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
            checkpoints.save(1, state)
    assert not (tmp_path / "1" / CARRIED).exists()
    parsed = []
    monkeypatch.setattr(Carried, "parse", lambda values, arrays: parsed.append(arrays))
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        assert_same(checkpoints.restore(state).state, state)
    assert_same(parsed[0], {"residuals/table": np.asarray(filled((4, 2), 5))})


def test_a_state_of_plain_orbax_is_no_checkpoint_of_ours(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", {"w": filled(2, 1)})
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints, pytest.raises(CheckpointError):
        checkpoints.restore({"w": filled(2)})
