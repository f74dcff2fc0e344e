"""Checkpoints: what comes back, what is kept, what is refused."""

from __future__ import annotations

import asyncio
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import splitjax
from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints
from splitjax.runtime.checkpoint.folder import steps_to_keep
from splitjax.runtime.checkpoint.state_match import compare, describe
from tests.runtime.states import assert_same, filled


def mesh_of(**axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=(AxisType.Auto,) * len(axes))


def every_kind_of_leaf():
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh_of(data=2, model=4), P(*spec)))
    params = {
        "kernel": place(jnp.arange(128, dtype=jnp.float32).reshape(8, 16) / 7, "data", "model"),
        "bias": jnp.full(3, 0.1, jnp.bfloat16),
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "key": jax.random.key(3),
        "keys": place(jax.random.split(jax.random.key(0, impl="rbg"), 8), "data"),
        "old_key": jax.random.PRNGKey(1),
        "no_keys": jax.random.split(jax.random.key(0), 0),
        "mask": place(jnp.arange(8) % 3 == 0, ("data", "model")),
        "small": jnp.arange(-4, 4, dtype=jnp.int4),
        "eighth": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "empty": jnp.zeros((0, 3)),
        "weak": jnp.asarray(2.5),
        "replicated": place(jnp.arange(5.0)),
        "float64": np.arange(3) / 3,
        "scalar": np.float32(0.1),
        "wide": np.float64(1 / 3),
        "count": 3,
        "rate": 0.1,
        "name": "x",
        "flag": True,
        "nothing": None,
        "odd": jnp.asarray(np.array([0x80000000, 0x7FC00001, 0xFF800000, 1], np.uint32).view(np.float32)),
        "negative_zero": -jnp.zeros(4),
        "list": [np.uint8(7), (np.int64(2**40),)],
    }


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path):
    state = every_kind_of_leaf()
    extra = {"position": [3, {"epoch": 1}], "rate": 0.1, "nothing": None, "id": "run"}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        assert checkpoints.save(7, state, extra, {"loss": 0.5})
        restored = checkpoints.restore(state)
    assert (restored.step, restored.extra, restored.metrics, restored.skipped) == (7, extra, {"loss": 0.5}, ())
    assert_same(restored.state, state)


def test_values_are_those_of_the_moment_of_saving(tmp_path):
    """The trap: on a processor the host's "copy" can be a view of the very buffer that the next step overwrites in
    place."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    mesh = mesh_of(data=2, model=4)
    for name, sharding in {
        "one": jax.devices()[0],
        "split": NamedSharding(mesh, P("data", "model")),
        "copies": NamedSharding(mesh, P()),
    }.items():
        state = step({str(n): jax.device_put(jnp.full((512, 512), float(n)), sharding) for n in range(4)})
        with Checkpoints(CheckpointOptions(tmp_path / name)) as checkpoints:
            for number in range(3):
                expected = {path: float(leaf[0, 0]) for path, leaf in state.items()}
                checkpoints.save(number, state)
                for _ in range(10):
                    state = step(state)
                restored = checkpoints.restore(state).state
                for path, leaf in restored.items():
                    np.testing.assert_array_equal(
                        leaf, np.full((512, 512), expected[path], np.float32), err_msg=f"{name} {number}"
                    )


def test_numpy_leaves_may_be_changed_in_place_after_saving(tmp_path):
    state = {"position": np.zeros(200_000)}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        state["position"] += 1
        assert not checkpoints.restore(state).state["position"].any()


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 1, "model": 4}, {"model": 2, "data": 2}, {"data": 1}])
def test_restores_onto_other_meshes(tmp_path, axes):
    saved_on, mesh = mesh_of(data=2, model=4), mesh_of(**axes)
    state = {
        "kernel": jax.device_put(
            jax.random.normal(jax.random.key(0), (8, 16)), NamedSharding(saved_on, P("data", "model"))
        ),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(saved_on, P("model"))),
    }
    sharding = NamedSharding(mesh, P("data"))
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in state.items()}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(like).state
    assert all(leaf.sharding == sharding for leaf in restored.values())
    np.testing.assert_array_equal(restored["kernel"], state["kernel"])
    np.testing.assert_array_equal(jax.random.key_data(restored["keys"]), jax.random.key_data(state["keys"]))


def test_shapes_without_sharding_become_free_arrays_on_the_default_device(tmp_path):
    state = {"a": filled(3), "key": jax.random.key(0)}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(jax.eval_shape(lambda: state)).state
    assert_same(restored, state)
    jax.jit(lambda a, b: a + b)(restored["a"], jax.device_put(jnp.ones(3), jax.devices()[3]))  # not bound to a device


def test_leaves_come_back_in_the_kind_that_is_asked_for(tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, {"count": 3, "rate": jnp.float32(0.1), "rows": jnp.arange(3)})
        like = {
            "count": jax.ShapeDtypeStruct((), jnp.int32, weak_type=True),
            "rate": 0.0,
            "rows": np.zeros(3, np.int32),
        }
        assert_same(
            checkpoints.restore(like).state,
            {"count": jnp.asarray(3), "rate": float(np.float32(0.1)), "rows": np.arange(3, dtype=np.int32)},
        )


def test_nnx_states_are_pytrees_like_any_other(tmp_path):
    def make(seed):
        model = nnx.BatchNorm(3, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = make(0)
    model(jnp.arange(6.0).reshape(2, 3))  # moves the statistics
    state = nnx.state((model, optimizer))
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        abstract = nnx.state(nnx.eval_shape(lambda: make(1)))
        restored = checkpoints.restore(abstract).state
    assert_same(restored, state)
    nnx.update((model, optimizer), restored)
    assert float(model.mean[0]) != 0


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    """Keys, schedule and step count included; then on another mesh under other rules."""
    tx = optax.adam(optax.cosine_decay_schedule(0.1, 6))

    def init(key):
        params = {"hidden": jax.random.normal(key, (8, 16)), "out": jnp.zeros((16, 4))}
        return {"params": params, "opt": tx.init(params), "key": key}

    def step(state, batch):
        key, draw = jax.random.split(state["key"])

        def loss_fn(params):
            hidden = jnp.tanh(batch["x"] @ params["hidden"])
            hidden = hidden * jax.random.bernoulli(draw, 0.5, hidden.shape)
            return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss}

    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(8, 8)).astype("f"), "y": rng.normal(size=(8, 4)).astype("f")} for _ in range(6)]
    example = (jax.eval_shape(lambda: batches[0]),)

    def run(parallel, state, first, checkpoints=None):
        losses = []
        for number, batch in enumerate(batches[first:], first):
            state, metrics = parallel(state, batch)
            losses.append(float(metrics["loss"]))
            if checkpoints is not None and number == 2:
                checkpoints.save(3, state, {"position": 3}, {"loss": losses[-1]})
        return losses

    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="splitbrain")
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        undisturbed = run(parallel, parallel.init(init, jax.random.key(0), example=example), 0, checkpoints)

    def resume(parallel):
        with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
            restored = checkpoints.restore(parallel.abstract_state(init, jax.random.key(9), example=example))
        return run(parallel, restored.state, restored.extra["position"])

    assert resume(splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="splitbrain")) == undisturbed[3:]
    np.testing.assert_allclose(
        resume(splitjax.parallelize(step, mesh={"data": 2, "model": 2}, rules="megatron")), undisturbed[3:], rtol=1e-5
    )


def test_another_optimizer_or_model_is_refused_with_the_first_path(tmp_path):
    params = {"a": filled(3), "b": filled((2, 2))}
    state = {"opt": optax.adam(1e-3).init(params), "params": params}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        for file in (tmp_path / "1" / "state" / "ocdbt.process_0").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")  # refused before an array is read: this damage is not come to
        with pytest.raises(
            CheckpointError, match=r"opt/0/count: saved int32\[\], not in the wanted state \(4 further differences\)"
        ):
            checkpoints.restore({**state, "opt": optax.sgd(1e-3).init(params)})
        with pytest.raises(CheckpointError, match=r"params/b: saved float32\[2,2\], wanted float32\[2,3\]\n"):
            checkpoints.restore({**state, "params": {**params, "b": filled((2, 3))}})
        with pytest.raises(CheckpointError, match=r"params/b: saved float32\[2,2\], wanted bfloat16\[2,2\]\n"):
            checkpoints.restore({**state, "params": {**params, "b": filled((2, 2)).astype(jnp.bfloat16)}})
        with pytest.raises(CheckpointError, match=r"params/c: wanted float32\[1\], not in the checkpoint\n"):
            checkpoints.restore({**state, "params": {**params, "c": filled(1)}})
        with pytest.raises(CheckpointError, match="no checkpoint is undamaged: step 1: state/ocdbt"):
            checkpoints.restore(state)


def test_differences_name_key_types_and_ambiguous_paths():
    assert [
        str(d) for d in compare(describe({"k": jax.random.key(0)}), describe({"k": jax.random.key(0, impl="rbg")}))
    ] == ["k: saved key<fry>[], wanted key<rbg>[]"]
    assert [leaf.path for leaf in describe({"a": {"b": 1}, "a/b": 2})] == ["['a']['b']", "['a/b']"]
    assert [leaf.path for leaf in describe({"a": 1, "a/b": 2})] == ["['a']", "['a/b']"]
    assert [leaf.path for leaf in describe(1)] == ["state"]


def test_odd_names_and_a_bare_array_are_kept_apart(tmp_path):
    state = {
        name: filled(2, number) for number, name in enumerate(["", "..", "a/b", "a", ".zarray", "ü %2f", "0.0", "a\nb"])
    }
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
        assert_same(checkpoints.restore(state).state, state)
        checkpoints.save(2, filled(3, 5))
        assert_same(checkpoints.restore(filled(3)).state, filled(3, 5))
        checkpoints.save(3, {"only": 4})  # no array at all
        assert checkpoints.restore({"only": 0}).state == {"only": 4}


def test_the_last_and_the_best_are_kept(tmp_path):
    losses = [5.0, 1.0, 3.0, float("nan"), 4.0, 2.0]
    with Checkpoints(CheckpointOptions(tmp_path, keep_last=2, keep_best=2)) as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(step, {"a": filled(2, step)}, metrics={"loss": loss})
        assert checkpoints.steps() == (1, 4, 5)
        assert checkpoints.restore({"a": filled(2)}, step=1).metrics == {"loss": 1.0}  # the best survives, old as it is
    assert sorted(os.listdir(tmp_path)) == ["1", "4", "5"]


def test_which_steps_are_kept():
    metrics = {
        10: {"loss": 1.0, "right": 0.5},
        20: {"loss": 3.0, "right": 0.9},
        30: {"loss": 1.0},
        40: {"loss": float("nan")},
        50: {},
    }
    keep = lambda **options: steps_to_keep(
        metrics, **{"keep_last": 1, "keep_best": 1, "best_metric": "loss", "best_mode": "min"} | options
    )
    assert keep() == {30, 50}
    assert keep(keep_best=2) == {10, 30, 50}
    assert keep(best_mode="max") == {20, 50}
    assert keep(best_metric="right", best_mode="max", keep_best=5) == {10, 20, 50}
    assert keep(keep_best=0, keep_last=2) == {40, 50}
    assert keep(best_metric=None) == {50}
    assert keep(keep_last=None) == {10, 20, 30, 40, 50}
    assert keep(keep_last=99) == {10, 20, 30, 40, 50}


def test_other_files_are_left_alone_and_leftovers_removed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("2024", "400.saving-mine", "logs", "007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    for name in ("100.saving-0123abcd", "100.deleting"):
        (tmp_path / name / "state").mkdir(parents=True)
    before = sorted(os.listdir(tmp_path))
    with Checkpoints(CheckpointOptions(tmp_path, keep_last=1, read_only=True)) as checkpoints:
        assert checkpoints.steps() == ()
        assert sorted(os.listdir(tmp_path)) == before
    with Checkpoints(CheckpointOptions(tmp_path, keep_last=1)) as checkpoints:
        assert sorted(os.listdir(tmp_path)) == ["007", "2024", "400.saving-mine", "logs", "notes.txt"]
        assert checkpoints.newest_good() is None
        checkpoints.save(1, {"a": filled(2)})
        checkpoints.save(2, {"a": filled(2)}, wait=True)
        with pytest.raises(CheckpointError, match="2024 exists already and is no checkpoint"):
            checkpoints.save(2024, {"a": filled(2)}, wait=True)
        checkpoints.save(3, {"a": filled(2)}, wait=True)
        assert sorted(os.listdir(tmp_path)) == ["007", "2024", "3", "400.saving-mine", "logs", "notes.txt"]


def test_only_who_opened_the_folder_first_removes_leftovers(tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)):
        (tmp_path / "5.saving-00").mkdir()
        with Checkpoints(CheckpointOptions(tmp_path)) as other:
            assert (tmp_path / "5.saving-00").exists()
            other.save(1, {"a": 1}, wait=True)
            assert (tmp_path / "5.saving-00").exists()
    with Checkpoints(CheckpointOptions(tmp_path)):
        assert not (tmp_path / "5.saving-00").exists()


def test_a_step_that_is_there_stays_and_a_run_that_was_given_up_is_set_aside(tmp_path, caplog):
    like = {"a": filled(2)}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        for step in (100, 200, 300):
            checkpoints.save(step, {"a": filled(2, step)})
        assert checkpoints.save(300, {"a": filled(2, -1)}) is False
        assert_same(checkpoints.restore(like).state, {"a": filled(2, 300)})
    with Checkpoints(CheckpointOptions(tmp_path, keep_last=4)) as checkpoints:
        assert_same(checkpoints.restore(like, step=100).state, {"a": filled(2, 100)})
        assert checkpoints.save(400, {"a": filled(2, 400)})
        assert checkpoints.steps() == (100, 200, 300, 400)  # looking at an old one, and going on, sets nothing aside
        checkpoints.restore(like, step=100)
        assert checkpoints.save(200, {"a": filled(2, -2)})
        assert_same(checkpoints.restore(like).state, {"a": filled(2, -2)})
    assert sorted(os.listdir(tmp_path)) == ["100", "200", "200.superseded-1", "300.superseded-1", "400.superseded-1"]


def test_works_where_an_event_loop_runs(tmp_path):
    async def notebook():
        with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
            checkpoints.save(1, {"a": filled(2, 4)}, wait=True)
            return checkpoints.restore({"a": filled(2)}).state

    assert_same(asyncio.run(notebook()), {"a": filled(2, 4)})


def test_saving_returns_before_the_files_are_complete(tmp_path):
    state = {"a": jnp.zeros((2048, 2048))}
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        assert checkpoints.save(1, state)
        assert not (tmp_path / "1").exists()
        checkpoints.wait()
        assert json.loads((tmp_path / "1" / "checkpoint.json").read_text())["step"] == 1


def test_64_bit_states_are_not_narrowed(tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, {"a": np.arange(3) / 3})
        with pytest.raises(CheckpointError, match="(?s)float64 arrays need JAX's 64-bit types.*place:  a"):
            checkpoints.restore({"a": jax.ShapeDtypeStruct((3,), np.float64)})
        with jax.enable_x64(True):
            state = {"a": jnp.arange(8.0) / 3}
            # written in slices by all devices
            state["a"] = jax.device_put(state["a"], NamedSharding(mesh_of(data=8), P()))
            checkpoints.save(2, state)
            assert_same(checkpoints.restore(state).state, state)


def test_bad_arguments_are_named(tmp_path):
    consumed = jnp.zeros(3)
    consumed.delete()
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        for step in (-1, 1.5, "3"):
            with pytest.raises(CheckpointError, match="a step is a whole number"):
                checkpoints.save(step, {})
        with pytest.raises(CheckpointError, match="(?s)none of them.*place:  model/act"):
            checkpoints.save(1, {"model": {"act": jax.nn.relu}})
        with pytest.raises(CheckpointError, match="(?s)none of them.*place:  names"):
            checkpoints.save(1, {"names": np.array(["a"])})
        with pytest.raises(CheckpointError, match="(?s)consumed.*place:  w"):
            checkpoints.save(1, {"w": consumed})
        with pytest.raises(CheckpointError, match=r"(?s)JSON values.*place:  extra\['a'\]\[1\]"):
            checkpoints.save(1, {}, {"a": [1, np.int64(2)]})
        with pytest.raises(CheckpointError, match="(?s)keys of JSON objects.*place:  extra"):
            checkpoints.save(1, {}, {3: 1})
        with pytest.raises(CheckpointError, match="there is no checkpoint\n"):
            checkpoints.restore({})
        checkpoints.save(1, {"a": 1})
        with pytest.raises(CheckpointError, match=r"(?s)no checkpoint of step 2.*the steps \[1\]"):
            checkpoints.restore({"a": 1}, step=2)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoints.save(2, {})
    checkpoints.close()
    with (
        Checkpoints(CheckpointOptions(tmp_path, read_only=True)) as checkpoints,
        pytest.raises(CheckpointError, match="restore only"),
    ):
        checkpoints.save(2, {"a": 1})


def test_bad_folders_and_options_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        with pytest.raises(CheckpointError, match="is a file, or lies below one"):
            Checkpoints(CheckpointOptions(tmp_path / path))
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoints(CheckpointOptions(tmp_path / "absent", read_only=True))
    with pytest.raises(CheckpointError, match="(?s)not a folder.*name a folder"):
        Checkpoints(CheckpointOptions(tmp_path / "file", read_only=True))
    for options in ({"keep_last": 0}, {"keep_best": -1}, {"best_mode": "best"}, {"timeout_seconds": 0}):
        with pytest.raises(CheckpointError, match=f"CheckpointOptions.{next(iter(options))}"):
            CheckpointOptions(tmp_path, **options)
    with pytest.raises(CheckpointError, match="mounted file system"):
        CheckpointOptions("gs://bucket/run")


@pytest.mark.skipif(
    os.name != "posix" or not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write to"
)
def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(CheckpointError, match="(?s)cannot be written.*/proc/self/checkpoints.*read_only=True"):
        Checkpoints(CheckpointOptions("/proc/self/checkpoints"))
