"""Steps as people write them: keyword-only arguments, defaults, decorators, methods; what JAX says of their values."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.errors import PlanError, StateError
from splitjax.step.options import OptionError

MESH = {"data": 2, "model": 4}
BATCH = np.random.default_rng(0).normal(size=(8, 8))
MESHES = {
    "two-axes": MESH,
    "three-axes": {"data": 2, "fsdp": 2, "tensor": 2},
    "explicit": lambda: jax.make_mesh((2, 4), ("data", "model")),
}


def update(state, batch, scale=1.0):
    loss, grad = splitjax.value_and_grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * scale * grad}, loss


def init(key):
    return {"w": jax.random.normal(key, (8, 8), jnp.float64)}


def passing_on(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def adding_scale(fn):
    @functools.wraps(fn)
    def wrapper(state, batch):
        return fn(state, batch, scale=2.0)

    return wrapper


def keyword_batch(state, *, batch):
    return update(state, batch)


def keyword_default(state, batch, *, scale=1.0):
    return update(state, batch, scale)


def default_before_batch(state, *, scale=1.0, batch):
    return update(state, batch, scale)


def keyword_scale(state, batch, *, scale):
    return update(state, batch, scale)


class Callable:
    def __call__(self, state, batch, *, scale=1.0):
        return update(state, batch, scale)


STEPS = {
    "keyword-batch": (keyword_batch, ["batch"], {}),
    "default-left-away": (keyword_default, [], {}),
    "default-given": (keyword_default, [], {"scale": 3.0}),
    "default-before-batch": (default_before_batch, ["batch"], {}),
    "wrapper": (passing_on(keyword_default), [], {"scale": 3.0}),
    "wrapper-that-adds": (adding_scale(keyword_scale), [], {}),
    "jit": (jax.jit(keyword_default), [], {"scale": 3.0}),
    "partial": (functools.partial(keyword_default, scale=2.0), [], {}),
    "partial-of-the-first": (functools.partial(lambda c, state, batch: update(state, batch, c), c=2.0), ["state"], {}),
    "object": (Callable(), [], {"scale": 3.0}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", STEPS)
def test_keyword_only_arguments_and_defaults_in_every_method(name, mesh):
    fn, named, given = STEPS[name]
    mesh = MESHES[mesh]() if callable(MESHES[mesh]) else MESHES[mesh]
    named = [*named, "batch"] if "state" in named else named
    args = {"state": None, "batch": BATCH}
    with jax.enable_x64(True):
        rules = "transformer" if len(dict(mesh) if isinstance(mesh, dict) else mesh.shape) > 2 else "splitbrain"
        step = splitjax.parallelize(fn, mesh=mesh, rules=rules)
        call = lambda run, state: run(
            *(value for key, value in ({**args, "state": state}).items() if key not in named),
            **{key: {**args, "state": state}[key] for key in named},
            **given,
        )
        whole = init(jax.random.key(0))
        want, loss = call(fn, whole)
        for state in (step.init(init, jax.random.key(0), example=(BATCH,)), step.place(whole, example=(BATCH,))):
            got, mine = call(step, state)
            np.testing.assert_allclose(got["w"], want["w"], rtol=1e-10)
            np.testing.assert_allclose(mine, loss, rtol=1e-10)
        shapes = step.abstract_state(init, jax.random.key(0), example=(BATCH,))
        assert call(step.plan, shapes).leaf("batch").role == "batch"
        assert shapes["w"].sharding.is_equivalent_to(got["w"].sharding, 2)


def test_an_example_that_is_too_short_names_what_is_missing():
    def step(state, batch, *, key, scale=1.0):
        return update(state, batch, scale)

    with jax.enable_x64(True), pytest.raises(StateError, match="needs 2 besides its state: batch, key") as caught:
        splitjax.parallelize(step, mesh=MESH).init(init, jax.random.key(0), example=(BATCH,))
    assert caught.value.remedy == "write example=(batch, key)"


def test_too_many_positional_arguments_are_the_error_that_python_has():
    step = splitjax.parallelize(keyword_default, mesh=MESH)
    with pytest.raises(TypeError, match="too many positional arguments"):
        step({"w": np.ones((8, 8))}, BATCH, 2.0)


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @splitjax.parallelize(mesh=MESH)
    def step(self, state, batch, *, scale=1.0):
        return update(state, batch, scale * self.rate)

    @classmethod
    @splitjax.parallelize(mesh=MESH)
    def of_class(cls, state, batch):
        return update(state, batch)

    @splitjax.parallelize(mesh=MESH)
    @staticmethod
    def of_nobody(state, batch):
        return update(state, batch)


def test_a_decorated_method_is_compiled_once_an_object():
    one, other = Trainer(1.0), Trainer(3.0)
    whole = {"w": np.eye(8, dtype=np.float32)}
    for trainer in (one, other, one):
        state = trainer.step.place(whole, example=(BATCH,))
        got, _ = trainer.step(state, BATCH)
        want, _ = update(whole, BATCH, trainer.rate)
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)
        assert len(trainer.step.compiles) == 1, "looked up again, it is the same step"
    for step in (one.of_class, Trainer.of_class, one.of_nobody, Trainer.of_nobody):
        got, _ = step(step.place(whole, example=(BATCH,)), BATCH)
        np.testing.assert_allclose(got["w"], update(whole, BATCH)[0]["w"], rtol=1e-5)
    evaluate = one.step.like(lambda state, batch: (batch @ state["w"]).sum())
    np.testing.assert_allclose(evaluate(got, BATCH), (BATCH @ got["w"]).sum(), rtol=1e-5)


def test_a_decorated_method_keeps_its_object_and_its_class_does_not():
    step = Trainer(2.0).step  # nobody else has the object
    gc.collect()
    whole = {"w": np.eye(8, dtype=np.float32)}
    got, _ = step(step.place(whole, example=(BATCH,)), BATCH)
    np.testing.assert_allclose(got["w"], update(whole, BATCH, 2.0)[0]["w"], rtol=1e-5)
    trainer = Trainer(1.0)
    trainer.step(trainer.step.place(whole, example=(BATCH,)), BATCH)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_an_object_that_cannot_be_referred_to_weakly():
    class Slots:
        __slots__ = ()
        step = splitjax.parallelize(lambda self, state, batch: update(state, batch), mesh=MESH)

    with pytest.raises(OptionError, match="referred to weakly"):
        Slots().step  # noqa: B018


def test_a_module_is_no_self_of_its_own_step():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

        @splitjax.nnx.parallelize(mesh=MESH)
        def step(self, batch):
            return batch

    with pytest.raises(OptionError, match="has to be an argument"):
        Model().step  # noqa: B018

    class NNXTrainer:
        @splitjax.nnx.parallelize(mesh=MESH)
        def step(self, model, batch):
            loss, grads = splitjax.nnx.value_and_grad(lambda model: ((batch @ model.w[...]) ** 2).mean())(model)
            model.w[...] = model.w[...] - 0.1 * grads.w[...]
            return loss

    model = Model()
    loss = NNXTrainer().step(model, np.ones((8, 8), np.float32))
    np.testing.assert_allclose(loss, 64.0)


def an_if(state, batch):
    return update(state, batch) if state["w"][0, 0] > 0 else update(state, batch, 2.0)


def an_array(state, batch):
    np.asarray(state["w"])
    return update(state, batch)


def an_if_in_the_loss(state, batch):
    def loss_of(weights, examples):
        return (examples @ weights["w"]).mean() if examples.sum() > 0 else 0.0

    return state, splitjax.value_and_grad(loss_of)(state, batch)[0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("fn", "named", "argument"),
    [(an_if, "an_if", "state['w']"), (an_array, "an_array", "state['w']"), (an_if_in_the_loss, "loss_of", "examples")],
)
def test_what_jax_says_of_traced_values_names_the_users_function_and_leaf(fn, named, argument, mesh):
    mesh = MESHES[mesh]() if callable(MESHES[mesh]) else MESHES[mesh]
    step = splitjax.parallelize(passing_on(fn), mesh=mesh, rules="data_parallel")
    with pytest.raises(Exception, match="traced array") as caught:
        step.plan({"w": np.ones((8, 8), np.float32)}, BATCH)
    text = str(caught.value)
    assert f"tracing the function {named} at {__file__}" in text and f"of the argument {argument}." in text, text


def an_if_in_init(key):
    return {"w": jax.random.normal(key, (8, 8)) if jax.random.normal(key) > 0 else jnp.zeros((8, 8))}


class WithAnIf:
    @splitjax.parallelize(mesh=MESH)
    def step(self, state, batch):
        return an_if(state, batch)


def test_what_jax_says_of_traced_values_names_functions_that_make_states_and_methods():
    step = splitjax.parallelize(update, mesh=MESH)
    with pytest.raises(Exception, match="traced array") as caught:
        step.init(an_if_in_init, jax.random.key(0), example=(BATCH,))
    text = str(caught.value)
    assert f"tracing the function an_if_in_init at {__file__}" in text and "of the argument key." in text, text
    with pytest.raises(Exception, match="traced array") as caught:
        WithAnIf().step.plan({"w": np.ones((8, 8), np.float32)}, BATCH)
    text = str(caught.value)
    assert f"tracing the function step at {__file__}" in text and "of the argument state['w']." in text, text


@pytest.mark.parametrize("option", ["state_argnums", "batch_argnums", "static_argnums", "state_outnums"])
@pytest.mark.parametrize("value", ["x", 1.5, ["b"]])
def test_positions_that_are_no_numbers_are_refused(option, value):
    with pytest.raises(StateError, match=f"positions of arguments are whole numbers[\\s\\S]*{option}"):
        splitjax.parallelize(lambda state, batch: state, **{option: value})


def test_names_that_are_no_strings_are_refused():
    with pytest.raises(StateError, match="names of arguments are strings"):
        splitjax.parallelize(lambda state, batch: state, static_argnames=3)


def test_a_pinned_plan_that_is_none_is_refused():
    with pytest.raises(PlanError, match="a plan to pin is a splitjax.Plan"):
        splitjax.parallelize(lambda state, batch: state, plan=3)
