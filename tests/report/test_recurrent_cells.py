"""Of Flax's recurrent cells nothing is compiled that is not planned: their gates read the state that they made in the
iteration before, also where reading and writing it are no class of dims together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import splitjax
from splitjax.plan import Phase, PurposeKind

MESH = {"data": 2, "model": 2}
VOCAB, WIDTH, HIDDEN, LENGTH, EXAMPLES = 96, 16, 32, 4, 8
CELLS = ("SimpleCell", "GRUCell", "MGUCell", "LSTMCell", "OptimizedLSTMCell")


class Model(nn.Module):
    """Predicts tokens: an embedding, cells one behind the other (in a loop each, or all in one), and logits."""

    cells: tuple[str, ...]
    stacked: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, param_dtype=jnp.float64)(tokens)
        cells = [getattr(nn, cell)(HIDDEN, param_dtype=jnp.float64) for cell in self.cells]
        for cell in [Stacked(cells)] if self.stacked else cells:
            x = nn.RNN(cell)(x)
        return nn.Dense(VOCAB, param_dtype=jnp.float64)(x)


class Stacked(nn.RNNCellBase):
    """Runs several cells in one loop: each reads what the one before it gives."""

    cells: tuple[nn.RNNCellBase, ...]

    def __call__(self, carry, x):
        states = []
        for cell, state in zip(self.cells, carry, strict=True):
            state, x = cell(state, x)
            states.append(state)
        return tuple(states), x

    def initialize_carry(self, rng, input_shape):
        widths = [input_shape[-1], *[HIDDEN] * (len(self.cells) - 1)]
        shapes = [(*input_shape[:-1], width) for width in widths]
        return tuple(cell.initialize_carry(rng, shape) for cell, shape in zip(self.cells, shapes, strict=True))

    @property
    def num_feature_axes(self):
        return 1


def setup(model):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, EXAMPLES, LENGTH))
    batch = {"x": jnp.asarray(tokens[0], jnp.int32), "y": jnp.asarray(tokens[1], jnp.int32)}
    return model.init(jax.random.key(0), batch["x"])["params"], batch


def stepping(model, value_and_grad):
    def loss(params, batch):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(params, batch):
        value, grads = value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def checked(model, rules, mesh=MESH):
    """The plan and report of a step that gives one device's numbers, and of which all is compiled and nothing else."""
    with jax.enable_x64(True):
        params, batch = setup(model)
        parallel = splitjax.parallelize(stepping(model, splitjax.value_and_grad), mesh=mesh, rules=rules, donate=False)
        alone = jax.jit(stepping(model, jax.value_and_grad))(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        jax.tree.map(close, parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    return plan, report


def states(plan):
    return [one for one in plan.collectives if one.purpose.kind == PurposeKind.WHOLE_STATE]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("rules", ["splitbrain", "megatron"])
def test_the_state_of_a_cell_is_gathered_as_planned(cell, rules):
    plan, _ = checked(Model((cell,)), rules)
    # All gates of a cell read it together; under megatron the backward pass gathers it once more.
    assert len(states(plan)) == {"splitbrain": 1, "megatron": 2}[rules]


@pytest.mark.parametrize("rules", ["splitbrain", "megatron"])
def test_a_cell_above_another_one_in_its_loop_reads_no_state_of_its_own_there(rules):
    plan, _ = checked(Model(("GRUCell", "LSTMCell"), stacked=True), rules)
    assert {one.layer.rpartition("/")[2][0] for one in states(plan)} == {"h"}


@pytest.mark.parametrize("every", [None, 1, 2])
def test_columns_from_before_a_loop_are_gathered_in_it_as_planned(every):
    """A split layer gives them, or another loop: of as many turns, or of twice as many."""

    class Behind(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, WIDTH, param_dtype=jnp.float64)(tokens)
            if every is None:
                x = nn.Dense(HIDDEN, param_dtype=jnp.float64)(x)
            else:
                x = nn.RNN(nn.GRUCell(HIDDEN, param_dtype=jnp.float64))(x)[:, ::every]
            x = nn.RNN(nn.GRUCell(HIDDEN, param_dtype=jnp.float64))(x)
            return jnp.repeat(nn.Dense(VOCAB, param_dtype=jnp.float64)(x), every or 1, axis=1)

    checked(Behind(), "megatron")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [("fsdp", {"data": 4}), ("transformer", {"data": 2, "fsdp": 2}), ("megatron", {"fsdp": 2, "tensor": 2})],
)
def test_gradients_of_a_cell_are_exchanged_once_where_weights_are_stored_in_parts(cell, rules, mesh):
    """The logits' weight is larger than the cell's: a loop around the whole gradient would have it whole, too."""
    plan, report = checked(Model((cell,)), rules, mesh)
    assert "exchanged once, behind the loops" in plan.boundaries[0].why
    of_cell = [one for one in report.collectives if cell in one.layer and one.planned and one.planned.purpose.leaf]
    assert of_cell and {one.compiled.trips for one in of_cell} == {1}
    gathers = [one.planned.purpose for one in of_cell if one.planned.purpose.kind == PurposeKind.STORED_WEIGHT]
    assert {purpose.phase for purpose in gathers} == ({Phase.FORWARD} if rules == "fsdp" else set())


def test_a_cell_that_drops_states_at_random_exchanges_in_every_turn():
    """The bits are those of the whole batch: no worker can make its own part of them alone."""

    class Dropping(nn.RNNCellBase):
        @nn.compact
        def __call__(self, carry, x):
            key, state = carry
            key, now = jax.random.split(key)
            state = nn.tanh(nn.Dense(HIDDEN, param_dtype=jnp.float64)(jnp.concatenate([x, state], -1)))
            state = jnp.where(jax.random.bernoulli(now, 0.9, state.shape), state, 0)
            return (key, state), state

        def initialize_carry(self, rng, input_shape):
            return jax.random.key(3), jnp.zeros((*input_shape[:-1], HIDDEN))

        @property
        def num_feature_axes(self):
            return 1

    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, WIDTH, param_dtype=jnp.float64)(tokens)
            return nn.Dense(VOCAB, param_dtype=jnp.float64)(nn.RNN(Dropping())(x))

    with jax.enable_x64(True):
        params, batch = setup(Dropped())
        step = stepping(Dropped(), splitjax.value_and_grad)
        parallel = splitjax.parallelize(step, mesh={"data": 4}, rules="fsdp", donate=False)
        alone = jax.jit(stepping(Dropped(), jax.value_and_grad))(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        jax.tree.map(close, parallel(params, batch), alone)
        assert "exchanged at every turn" in parallel.plan(params, batch).boundaries[0].why
