"""An operation that is wrong on several devices is found, named, and told from rounding."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax import display
from splitjax.errors import SplitjaxError, VerificationError
from splitjax.primitives.walk import equation_at
from splitjax.verify import Verification
from splitjax.verify.comparing import Difference
from splitjax.verify.locating import describe
from splitjax.verify.taps import Tap
from tests.verify.lying import lie, lie_backward

MESH = {"data": 2, "model": 4}
TX = optax.adam(1e-3)


def honest(x):
    return x


def unrolled(change):
    def hidden(x, weights):
        for i in range(3):
            x = jnp.tanh(change(x @ weights[i]) if i == 1 else x @ weights[i])
        return x

    return hidden


def scanned(change):
    def hidden(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(change(x @ w)), None), x, weights)[0]

    return hidden


def checkpointed(change):
    return lambda x, weights: jax.checkpoint(unrolled(change))(x, weights)


def make(hidden, *, value_and_grad=splitjax.value_and_grad, update=honest, **options):
    """A step with the shapes of its arguments."""

    def loss_fn(params, batch):
        x = hidden(jax.nn.relu(batch["x"] @ params["first"]), params["hidden"])
        logits = x @ params["last"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {"top": logits.max()}

    @splitjax.parallelize(mesh=MESH, **options)
    def step(state, batch):
        (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], update(updates)), "opt": opt}, {"loss": loss, **aux}

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"first": shape(96, 64), "hidden": shape(3, 64, 64), "last": shape(64, 16)}
    state = {"params": params, "opt": jax.eval_shape(TX.init, params)}
    return step, state, {"x": shape(32, 96), "y": jax.ShapeDtypeStruct((32,), jnp.int32)}


def found_in(hidden, **options):
    step, state, batch = make(hidden, **options)
    verification = step.verify(state, batch)
    assert not verification.ok
    (finding,) = verification.findings
    return verification, finding


def once(*values):
    """Values that one version of Python and JAX is enough for."""
    return pytest.param(*values, marks=pytest.mark.one_version)


@pytest.mark.parametrize("rules", ["splitbrain", "megatron", once("fsdp"), once("data_parallel")])
def test_a_right_step_is_right_in_every_value(rules):
    step, state, batch = make(unrolled(honest), rules=rules)
    verification = step.verify(state, batch)
    assert verification.ok and verification.findings == () and verification.raise_if_wrong() is verification
    (run,) = verification.runs
    kinds = [one.kind for one in run.values]
    assert (
        kinds.count("gradient") == 3
        and kinds.count("state") == 10
        and kinds.count("loss") == kinds.count("auxiliary") == 1
    )
    assert max(one.relative for one in run.values) < 1e-12
    assert {one.used for one in run.dims} <= {2, 3, 8, 16} and not any(one.why for one in run.dims)


@pytest.mark.parametrize("hidden, rules", [
    (unrolled, "splitbrain"), (scanned, "splitbrain"), (checkpointed, "megatron"),
    once(unrolled, "megatron"), once(scanned, "megatron"),
])  # fmt: skip
def test_a_wrong_value_is_found_at_its_operation(hidden, rules):
    verification, finding = found_in(hidden(lie), rules=rules)
    assert (finding.operation, finding.what) == ("lying", "value")
    assert finding.ratio == pytest.approx(2.0) and "the size of axis data" in finding.text
    assert "lying.py" in finding.source and finding.layer == "behind layer params/hidden"
    assert any(one.kind == "loss" for one in verification.runs[0].wrong)


@pytest.mark.parametrize("hidden", [unrolled, scanned, once(checkpointed)])
def test_a_wrong_gradient_is_found_where_the_forward_pass_is_right(hidden):
    verification, finding = found_in(hidden(lie_backward))
    assert (finding.operation, finding.what) == ("honest", "gradient")
    assert finding.ratio == pytest.approx(2.0) and "lying.py" in finding.source
    wrong = {(one.kind, one.name) for one in verification.runs[0].wrong}
    assert (
        ("gradient", "params/first") in wrong
        and ("gradient", "params/last") not in wrong
        and not any(kind == "loss" for kind, _ in wrong)
    )


def test_a_weights_gradient_is_named_with_layer_and_layout():
    step, state, batch = make(unrolled(honest), rules="megatron")
    entry = step._programs.entry((state, batch))
    use = next(one for one in entry.graph.uses if one.param == "params/last")
    tap = Tap(use.site, equation_at(entry.jaxpr, use.site), operand=use.weight)
    text = describe(entry, tap, Difference(3.0, 3.0, ratio=4.0)).text
    assert (
        text.startswith("the weight gradient of dot_general in layer params/last, at ")
        and "test_finding_errors.py:" in text
    )
    assert "batch P('data'), weight params/last P(None, 'model')" in text
    assert text.endswith("4 times one device's (the size of axis model)")


@pytest.mark.parametrize("change, operation", [(lie, "lying"), (lie_backward, "lying")])
def test_plain_jax_gradients_are_looked_at_too(change, operation):
    _, finding = found_in(unrolled(change), value_and_grad=jax.value_and_grad)
    assert finding.operation == operation
    assert ("in the backward pass" in finding.text) == (change is lie_backward)


def test_an_update_can_be_wrong():
    verification, finding = found_in(unrolled(honest), update=lambda updates: {**updates, "last": lie(updates["last"])})
    assert finding.operation == "lying"
    assert [(one.kind, one.name) for one in verification.runs[0].wrong] == [("state", "params/last")]


def test_microbatches_sharded_state_and_turns_keep_the_numbers():
    accumulating = lambda fun, **options: splitjax.value_and_grad(fun, microbatches=2, **options)
    for options in ({"value_and_grad": accumulating}, {"shard_state": True}, {"group_comm": "modulo"}):
        step, state, batch = make(unrolled(honest), **options)
        verification = step.verify(state, batch)
        assert verification.ok and not verification.runs[0].notes


def test_derivative_rules_of_functions_are_kept():
    @jax.custom_vjp
    def scaled(x, k):
        return x * k

    scaled.defvjp(
        lambda x, k: (x * k, (x, k)), lambda kept, cotangent: (3 * cotangent * kept[1], (cotangent * kept[0]).sum())
    )
    step, state, batch = make(unrolled(lambda x: scaled(x, jnp.float32(2.0))))
    assert step.verify(state, batch).ok
    _, finding = found_in(unrolled(lambda x: scaled(lie(x), jnp.float32(2.0))))
    assert finding.operation == "lying"


def test_given_sizes_and_values_are_taken_as_they_are():
    step, state, batch = make(unrolled(honest))
    rng = np.random.default_rng(0)
    fill = lambda one: (
        rng.standard_normal(one.shape).astype(one.dtype) if one.dtype == jnp.float32 else np.zeros(one.shape, one.dtype)
    )
    state, batch = jax.tree.map(fill, (state, batch))
    state["opt"] = jax.tree.map(np.abs, state["opt"])
    verification = step.verify(state, batch, sizes="both", own_precision=True)
    assert verification.ok and [run.sizes for run in verification.runs] == ["shrunken", "given"]
    given = verification.runs[1]
    assert {one.name: one.shape for one in given.values}["params/first"] == (96, 64)
    # What the step's own precision rounds away is no error, and is shown as such.
    own = [one.own_relative for one in given.values]
    assert max(own) > 1e-9 > max(one.relative for one in given.values)
    assert "own precision" in str(verification)


def test_the_result_prints_in_80_columns_and_serialises():
    verification, finding = found_in(unrolled(lie))
    text = display.show(verification, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.endswith("OTHER NUMBERS THAN ON ONE DEVICE") and "wrong value" in text
    assert "found  the value of lying" in text
    read = json.loads(verification.to_json())
    assert read["ok"] is False and read["runs"][0]["findings"][0]["operation"] == finding.operation
    assert "&lt;" not in verification._repr_html_()[:5] and "OTHER NUMBERS" in verification._repr_html_()
    with pytest.raises(VerificationError, match="other numbers on data=2 x model=4 than on one device") as caught:
        verification.raise_if_wrong()
    assert "lying" in caught.value.place and caught.value.remedy


def initial(state, batch):
    key = jax.random.key(0)
    fill = lambda one: (
        jax.random.normal(key, one.shape) if one.dtype == jnp.float32 else jnp.zeros(one.shape, one.dtype)
    )
    return jax.tree.map(fill, state), jax.tree.map(lambda one: np.asarray(fill(one)), batch)


def test_verify_first_stops_a_wrong_step_before_it_trains():
    step, state, batch = make(unrolled(lie), verify="first")
    state, batch = initial(state, batch)
    with pytest.raises(VerificationError, match="other numbers"):
        step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_verify_first_verifies_once_for_each_signature(monkeypatch):
    import splitjax.verify

    seen = []
    real = splitjax.verify.verify_step

    def counting(*args) -> Verification:
        seen.append(args[2].bound.signature)
        return real(*args)

    monkeypatch.setattr(splitjax.verify, "verify_step", counting)
    step, state, batch = make(unrolled(honest), verify="first", rules="data_parallel")
    state, batch = initial(state, batch)
    for _ in range(3):
        state, _ = step(state, batch)
    assert len(seen) == 1
    half = jax.tree.map(lambda one: one[:16], batch)
    state, _ = step(state, half)
    state, _ = step(state, batch)
    assert len(seen) == 2


def test_no_state_is_consumed_and_a_consumed_one_is_refused():
    step, state, batch = make(unrolled(honest), rules="data_parallel")
    state, batch = initial(state, batch)
    assert step.verify(state, batch).ok
    new, _ = step(state, batch)
    assert step.verify(new, batch).ok
    with pytest.raises(SplitjaxError, match="consumed"):
        step.verify(state, batch)


@pytest.mark.parametrize("call, words", [
    (lambda: make(unrolled(honest), verify="always"), "verify has no such value"),
    (lambda: make(unrolled(honest), verify=True), "verify has no such value"),
    (
        lambda: (lambda step, state, batch: step.verify(state, batch, sizes="small"))(*make(unrolled(honest))),
        "verify has no such sizes",
    ),
])  # fmt: skip
def test_wrong_options_are_typed_errors(call, words):
    with pytest.raises(SplitjaxError, match=words) as caught:
        call()
    assert caught.value.remedy and caught.value.place


def test_values_that_jump_on_one_device_too_are_not_called_wrong():
    """Sums in another order differ in their last digits, which this makes into another number altogether."""
    step, state, batch = make(lambda x, weights: x + 0.1 * x @ jnp.sin(1e16 * (x.T @ x)))
    verification = step.verify(state, batch)
    (run,) = verification.runs
    assert (
        verification.ok
        and any("jump" in one for one in run.notes)
        and any("jumps by" in one.note for one in run.values)
    )
    assert not any("jumps by" in one.note for one in run.values if one.name == "opt/0/count")


def test_a_shard_map_of_the_steps_own_cannot_be_compared():
    def hidden(x, weights):
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        spec = jax.sharding.PartitionSpec(("data", "model"))
        return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    step, state, batch = make(hidden)
    with pytest.raises(VerificationError, match="which one device cannot run") as caught:
        step.verify(state, batch)
    assert "test_finding_errors.py" in caught.value.place


def test_partial_backpropagation_is_left_out_and_said():
    step, state, batch = make(unrolled(honest), rules="data_parallel", backprop=splitjax.PartialBackprop())
    verification = step.verify(state, batch)
    assert verification.ok and "verified without it" in verification.runs[0].notes[0]


def test_a_step_like_another_is_verified_on_its_layouts():
    step, state, batch = make(unrolled(honest))
    step.plan(state, batch)
    evaluate = step.like(lambda state, batch: (batch["x"] @ state["params"]["first"]).mean())
    assert evaluate.verify(state, batch).ok
    wrong = step.like(lambda state, batch: lie(batch["x"] @ state["params"]["first"]).mean())
    assert wrong.verify(state, batch).findings[0].operation == "lying"


def test_ids_that_numpy_made_are_verified():
    """They are of 64 bits, where JAX's own are of 32: the plan's memory, which is predicted when it is first read, was
    once predicted for the wider ones."""

    @splitjax.parallelize(mesh={"data": 8}, rules="data_parallel")
    def step(table, ids):
        loss, grad = splitjax.value_and_grad(lambda table: jnp.mean(jnp.tanh(table[ids])))(table)
        return table - 0.1 * grad, loss

    assert step.verify(jnp.ones((64, 4)), np.arange(64)).ok
