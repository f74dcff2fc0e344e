"""A predicted change of a layout against the prediction of the whole step under the changed layout."""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import optax
import pytest

import splitjax
from benchmarks._changes import differing_fields, dims_by_class, draw_change, full_prediction
from splitjax.compile.building import plan_request
from splitjax.cost import Manner
from splitjax.lower.strategies import CHOOSER
from splitjax.mesh import MeshShape
from splitjax.models import build, make_step
from splitjax.plan import Phase, spec_axes
from splitjax.planning.draft import KnownTables
from splitjax.planning.passes import draft_step, with_tables
from splitjax.planning.predict import dense_prediction, predict
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
# model -> rule sets, each with the group communication that the prediction is made for
MODELS = {
    "vgg16": (("splitbrain", "gather"), ("splitbrain", "turns"), ("data_parallel", "gather")),
    "transformer": (("megatron", "gather"), ("splitbrain", "modulo")),
    "lstm": (("megatron", "gather"), ("splitbrain", "turns")),
    "mobilenet_v2": (("splitbrain", "gather"),),  # with convolutions in groups, which are evaluated device by device
}


def draft_of(model, rules):
    step, traced = traced_model(model)
    recipe = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules=rules)._recipe
    return with_tables(draft_step(traced, MESH, plan_request(recipe, "cpu"), CHOOSER), KnownTables())


@functools.cache
def traced_model(model):
    """The step of a shipped model and its trace, which serves under all rules."""
    spec = build(model)
    init, step, _ = make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    arguments = (jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), spec.example(64))
    recipe = splitjax.parallelize(step, mesh={"data": 2, "model": 4})._recipe
    return step, trace_step(recipe, bind(recipe.fn, recipe.options, arguments))


def check_changes(model, num_changes):
    """Predicts `num_changes` drawn changes of a model's layouts, each on top of those before it."""
    cases, num_moved = MODELS[model], 0
    for number, (rules, group_comm) in enumerate(cases):
        draft, draws = draft_of(model, rules), random.Random(number)
        prediction = dense_prediction(dataclasses.replace(draft, group_comm=group_comm))
        classes = dims_by_class(draft.graph)
        for _ in range(num_changes // len(cases)):
            specs = draw_change(prediction, classes, draws)
            before, prediction = prediction, prediction.changed(prediction.laid_out(specs))
            assert differing_fields(prediction, full_prediction(prediction, draft.layout.layers)) == [], specs
            num_moved += prediction.collectives != before.collectives
    assert num_moved > num_changes // 4, "the drawn changes hardly change what is sent"


@pytest.mark.parametrize("model", MODELS)
def test_a_change_is_predicted_as_the_whole_step_is(model):
    check_changes(model, 120)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_changes_are_predicted_as_the_whole_step_is(model):
    check_changes(model, 1000)


def test_the_prediction_of_a_draft_is_that_of_its_plan():
    draft = draft_of("vgg16", "splitbrain")
    plan, prediction = predict(draft), dense_prediction(draft)
    assert (plan.collectives, plan.memory) == (prediction.collectives, prediction.memory)


def test_a_change_shares_what_it_does_not_touch():
    draft = draft_of("vgg16", "data_parallel")
    before = dense_prediction(draft)
    after = before.changed(before.laid_out({draft.graph.layers[-1].params[0]: (None, "model")}))
    assert after.structure is before.structure
    renewed = sum(ours is not theirs for ours, theirs in zip(after.sent_by_use, before.sent_by_use, strict=True))
    assert 0 < renewed <= 3 < len(before.sent_by_use)


def test_optimizer_state_goes_along_with_its_parameter():
    prediction = dense_prediction(draft_of("lstm", "data_parallel"))
    path = next(leaf.path for leaf in prediction.leaves if leaf.role == "param" and len(leaf.shape) == 2)
    changed = prediction.laid_out({path: (None, "model")})
    assert len(changed) == 3, "the parameter and Adam's two moments"
    mesh = MeshShape.of(MESH)
    for leaf in changed:
        assert spec_axes(leaf.spec) == ("model",)
        assert leaf.bytes_per_device * mesh.num_devices // 2 == leaf.whole_bytes(mesh)
    with pytest.raises(KeyError):
        prediction.laid_out({"params/nothing": ()})


def test_an_evaluation_has_no_gradients_after_a_change():
    draft = draft_of("transformer", "megatron")
    prediction = dataclasses.replace(dense_prediction(draft), manner=Manner(backward=False))
    evaluated = full_prediction(prediction, draft.layout.layers)
    draws, classes = random.Random(3), dims_by_class(draft.graph)
    for _ in range(20):
        evaluated = evaluated.changed(evaluated.laid_out(draw_change(evaluated, classes, draws)))
        assert {collective.purpose.phase for collective in evaluated.collectives} <= {Phase.FORWARD}
    assert evaluated.collectives
    assert differing_fields(evaluated, full_prediction(evaluated, draft.layout.layers)) == []
