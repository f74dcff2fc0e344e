"""Padded states in checkpoints, and of Equinox and NNX modules: outside of the mesh they have the sizes that the step
knows."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import splitjax
from splitjax import runtime
from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint.state_match import compare, describe, may_be_padding
from splitjax.runtime.training.stepping import stored_state
from tests.step.padded_model import X64, assert_equal, language_model, reference, tokens

VOCABULARY = 257


def test_a_checkpoint_moves_between_paddings(tmp_path):
    with X64(True):
        step, init = language_model()
        key, example = jax.random.key(0), (tokens(0),)
        make = lambda mesh: splitjax.parallelize(step, mesh=mesh, rules="megatron", uneven="pad")
        wide, narrow = make({"model": 4}), make({"model": 2})
        state = wide.init(init, key, example=example)
        batches = [tokens(0), tokens(1), tokens(2)]
        options = lambda steps: runtime.LoopOptions(num_steps=steps, batch_size=16, checkpoint_every=2)
        with runtime.Checkpoints(tmp_path) as checkpoints:
            runtime.train(wide, state, iter(batches[:2]), options(2), checkpoints=checkpoints)
            restored = runtime.restore(checkpoints, narrow, init, key, example=example)
            assert restored.state["params"]["table"].shape == (258, 16)
            again = runtime.restore(checkpoints, wide, init, key, example=example)
            assert again.state["params"]["table"].shape == (260, 16)
            outcome = runtime.train(narrow, restored.state, iter(batches), options(3), first_step=3)
        assert_equal((narrow.logical(outcome.state), []), (reference()[0], []))
        (saved,) = tmp_path.glob("2/state")
        with pytest.warns(UserWarning, match="Sharding info not provided"):
            read = ocp.PyTreeCheckpointHandler().restore(saved)
        assert read["params"]["table"].shape == (257, 16) and read["params"]["bias"].shape == (257,)


def test_checkpoints_of_ones_own_and_plain_orbax_say_logical(tmp_path):
    """What was saved padded is refused elsewhere with what to do, and both remedies hold; a state that another program
    wrote is read like `logical(abstract_state)`."""
    with X64(True):
        step, init = language_model()
        make = lambda **options: splitjax.parallelize(step, mesh={"model": 4}, rules="megatron", **options)
        padding, plain = make(uneven="pad"), make()
        state = padding.init(init, jax.random.key(0), example=(tokens(0),))
        like = {each: each.abstract_state(init, jax.random.key(0), example=(tokens(0),)) for each in (padding, plain)}
        with runtime.Checkpoints(tmp_path / "padded") as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            with pytest.raises(CheckpointError, match="another state") as caught:
                checkpoints.restore(like[plain])
            assert "padding" in caught.value.remedy and "step.logical(state)" in caught.value.remedy
            restored = padding.logical(checkpoints.restore(like[padding]).state)
            assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, like[plain])
        with ocp.StandardCheckpointer() as writer:
            writer.save(tmp_path / "other", jax.device_get(restored))
        with ocp.StandardCheckpointer() as reader:
            read = reader.restore(tmp_path / "other", padding.logical(like[padding]))
        assert_equal((padding.logical(padding(read, tokens(0))[0]), []), (plain(restored, tokens(0))[0], []))


@pytest.mark.parametrize(
    ("saved", "wanted", "is_padding"),
    [((16, 16), (13, 16), True), ((16, 16), (8, 16), False), ((16, 16), (16,), False), ((0, 4), (1, 4), False)],
)
def test_what_may_be_padding(saved, wanted, is_padding):
    (difference,) = compare(describe({"w": np.zeros(saved)}), describe({"w": np.zeros(wanted)}))
    assert may_be_padding([difference]) == is_padding
    (dtype,) = compare(describe({"w": np.zeros(saved)}), describe({"w": np.zeros(saved, "int32")}))
    assert not may_be_padding([difference, dtype]) and not may_be_padding([])


class Model(eqx.Module):
    table: jax.Array
    bias: jax.Array
    activation: object = eqx.field(static=True, default=jnp.tanh)

    def __call__(self, ids):
        return self.activation(self.table[ids]) @ self.table.T + self.bias


@pytest.mark.slow
def test_equinox_modules():
    tx = optax.adam(1e-2)

    def step(model, opt, batch):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

        loss, grads = splitjax.equinox.value_and_grad(loss_fn)(model)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt, {"loss": loss}

    def make(key):
        model = Model(jax.random.normal(key, (VOCABULARY, 16)), jnp.zeros(VOCABULARY))
        return model, tx.init(eqx.filter(model, eqx.is_array))

    losses = {}
    with X64(True):
        for rules, mesh in (("data_parallel", {"data": 1}), ("megatron", {"model": 4})):
            parallel = splitjax.equinox.parallelize(
                step, mesh=mesh, rules=rules, uneven="pad", state_argnums=(0, 1), batch_argnums=2
            )
            states = parallel.init(make, jax.random.key(0), example=(tokens(0),))
            losses[rules] = []
            for seed in range(3):
                *states, metrics = parallel(*states, tokens(seed))
                losses[rules].append(float(metrics["loss"]))
        np.testing.assert_allclose(losses["megatron"], losses["data_parallel"], rtol=1e-10)
        assert states[0].table.shape == (260, 16)
        model, opt = parallel.logical(*states)
        assert model.table.shape == (VOCABULARY, 16) and opt[0].mu.table.shape == (VOCABULARY, 16)
        np.testing.assert_allclose(
            parallel.like(lambda model, batch: model(batch["x"]))(states[0], tokens(0)), model(tokens(0)["x"])
        )
        stored = parallel.stored(model, opt)
        assert stored[0].table.shape == (260, 16)
        np.testing.assert_array_equal(stored[0].table, states[0].table)
        arrays = stored_state(parallel, tuple(states))
        assert {leaf.shape for leaf in jax.tree.leaves(arrays)} == {(257, 16), (257,), ()}
        described = parallel.abstract_state(make, jax.random.key(0), example=(tokens(0),))
        assert described[0].table.shape == (260, 16)
        assert parallel.logical(*described)[0].table.shape == (257, 16)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 16, rngs=rngs)
        self.head = nnx.Linear(16, VOCABULARY, rngs=rngs)

    def __call__(self, ids):
        return self.head(jnp.tanh(self.embed(ids)))


@pytest.mark.slow
def test_nnx_modules():
    def step(model, optimizer, batch):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

        loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make(key):
        model = Network(nnx.Rngs(params=key))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    losses = {}
    for rules, mesh in (("data_parallel", {"data": 1}), ("megatron", {"model": 4})):
        parallel = splitjax.nnx.parallelize(step, mesh=mesh, rules=rules, uneven="pad")
        model, optimizer = parallel.init(make, jax.random.key(0), example=(tokens(0),))
        losses[rules] = [float(parallel(model, optimizer, tokens(seed))) for seed in range(3)]
    np.testing.assert_allclose(losses["megatron"], losses["data_parallel"], rtol=1e-5)
    assert model.embed.embedding.shape == (260, 16) and model.head.kernel.shape == (16, 260)
    whole, _ = parallel.logical(model, optimizer)
    assert whole.embed.embedding.shape == (257, 16) and model.embed.embedding.shape == (260, 16)
    evaluate = parallel.like(lambda model, batch: model(batch["x"]))
    np.testing.assert_allclose(evaluate(model, tokens(0)), whole(tokens(0)["x"]), rtol=1e-5, atol=1e-5)
    placed, kept = parallel.place(*parallel.logical(model, optimizer), example=(tokens(0),))
    assert placed.embed.embedding.shape == (260, 16)
    np.testing.assert_allclose(
        float(parallel(placed, kept, tokens(5))), float(parallel(model, optimizer, tokens(5))), rtol=1e-6
    )


@pytest.mark.slow
def test_measurements_and_verification_take_states_as_stored_and_as_known():
    step, init = language_model(tied=False)
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron", uneven="pad", donate=False)
    stored = parallel.init(init, jax.random.key(0), example=(tokens(0),))
    batches = [tokens(seed) for seed in range(3)]
    profiles, advices = [], []
    for state in (stored, parallel.logical(stored)):
        profiles.append(parallel.profile(state, batches))
        advices.append(parallel.advise(state, batches, splitjax.PartialBackprop((1.0, 0.5))))
        for sizes in ("shrunken", "given"):
            assert parallel.verify(state, tokens(0), sizes=sizes).ok  # ids of 64 bits, as numpy makes them
    assert str(profiles[0]) == str(profiles[1])
    assert advices[0].num_batches == advices[1].num_batches == 3
