"""A predicted change of a layout, with partial backpropagation and tables by rows, against the prediction of the whole
step."""

from __future__ import annotations

import functools
import itertools
import random

import jax
import numpy as np
import optax
import pytest

import splitjax
from benchmarks._changes import dims_by_class, draw_change, predicted_differently
from splitjax import PartialBackprop
from splitjax.compile.building import plan_request
from splitjax.lower.strategies import CHOOSER
from splitjax.models import build, make_step
from splitjax.plan import ROW_EXCHANGE, PurposeKind
from splitjax.planning.draft import KnownTables
from splitjax.planning.observing import decide
from splitjax.planning.partial_plan import predict_partial
from splitjax.planning.passes import draft_step, with_tables
from splitjax.planning.predict import StepPrediction, predict
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step
from splitjax.sync.costs.schemes import Link

SIZES = {"data": 2, "model": 4}
MESH = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
SPATIAL, TEMPORAL = PartialBackprop(), PartialBackprop(assignment="temporal")
# model, rule set, whether the tables' steps were observed, options
STEPS = {
    "spatial": ("transformer", "megatron", False, {"backprop": SPATIAL}),
    "spatial, crossings": ("vgg16", "splitbrain", False, {"backprop": SPATIAL}),
    "temporal": ("vgg16", "data_parallel", False, {"backprop": TEMPORAL}),
    "observed later": ("deepfm", "splitbrain", False, {"sync": "row_exchange"}),
    "auto": ("deepfm", "splitbrain", True, {"sync": "auto"}),
    "owners": ("deepfm", "embedding_owner", True, {"sync": "auto"}),
    "sharded state": ("deepfm", "data_parallel", False, {"sync": "zen", "shard_state": True}),
    "both": ("deepfm", "megatron", True, {"sync": "row_exchange", "backprop": SPATIAL}),
}


@functools.cache
def traced_model(model):
    """The step of a shipped model and its trace, which serves under all rules."""
    spec = build(model)
    init, step, _ = make_step(spec, optax.adagrad(1e-2), value_and_grad=splitjax.value_and_grad)
    arguments = (jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), spec.example(64))
    recipe = splitjax.parallelize(step, mesh=SIZES)._recipe
    return step, trace_step(recipe, bind(recipe.fn, recipe.options, arguments))


def draft_of(model, rules, is_observed=False, options=None):
    step, traced = traced_model(model)
    recipe = splitjax.parallelize(step, mesh=SIZES, rules=rules, **(options or {}))._recipe
    request = plan_request(recipe, "cpu")
    draft = with_tables(draft_step(traced, MESH, request, CHOOSER), KnownTables())
    if not is_observed:
        return draft
    draws, samples = np.random.default_rng(0), {}
    for table in draft.tables.tables:
        ids = (3, table.num_workers, min(60, table.num_rows))
        samples[table.param] = list(draws.integers(0, table.num_rows, ids).astype(np.int32))
    links = {axes: Link(1e-3, 1e7) for axes in [("data",), ("data", "model"), ("model",)]}
    return with_tables(draft, KnownTables(decision=decide(draft.tables, request.sync, samples, links)))


def check_changes(name, num_changes):
    """Predicts drawn changes of a step's layout, each on top of those before it. Returns all predictions."""
    draft, draws = draft_of(*STEPS[name]), random.Random(0)
    predictions, classes = [StepPrediction.of(draft)], dims_by_class(draft.graph)
    for _ in range(num_changes):
        before = predictions[-1]
        specs = draw_change(before.dense, classes, draws)
        predictions.append(before.changed(before.laid_out(specs)))
        assert predicted_differently(predictions[-1]) == [], specs
    moved = sum(one.collectives != other.collectives for one, other in itertools.pairwise(predictions))
    assert moved > num_changes // 5, "the drawn changes hardly change what is sent"
    return predictions


@pytest.mark.parametrize("name", STEPS)
def test_a_change_is_predicted_as_the_whole_step_is(name):
    predictions = check_changes(name, 40)
    partials, syncs = ([getattr(one, what) for one in predictions] for what in ("partial", "syncs"))
    has_partial, has_tables = (option in STEPS[name][3] for option in ("backprop", "sync"))
    assert (partials[0] is not None) == has_partial and bool(syncs[0]) == has_tables
    if has_partial:
        assert len({str(partial) for partial in partials}) > 3, "the changes hardly reach a segment"
    if has_tables:
        assert len({str(sync) for sync in syncs}) > 1, "the changes hardly reach a table"


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_thousand_changes_are_predicted_as_the_whole_step_is(name):
    check_changes(name, 1000)


@pytest.mark.parametrize("name", ["both", "owners"])
def test_what_a_plan_says_is_what_the_prediction_says(name):
    draft = draft_of(*STEPS[name])
    plan, predicted = predict(draft), StepPrediction.of(draft)
    assert plan.collectives == predicted.collectives and plan.memory == predicted.memory
    assert plan.syncs == predicted.syncs and plan.partial == predicted.partial
    # The rows of a table that is looked up by another's ids are sent with these.
    own = [table for table in draft.tables.tables if not table.joins]
    assert [one.op for one in plan.collectives].count(ROW_EXCHANGE) == len(own) > 0
    assert (len(own) < len(draft.tables.tables)) == (name == "owners")


def test_a_change_that_no_table_hangs_on_finds_none_again():
    draft = draft_of(*STEPS["auto"])
    before = StepPrediction.of(draft)
    table = draft.tables.tables[0]
    dense = next(leaf for leaf in draft.layout.leaves if leaf.role == "param" and "logits" in leaf.path)
    beside = before.changed(before.laid_out({dense.path: (None,) * len(dense.shape)}))
    assert beside.tables is before.tables and beside.found is before.found
    through = before.changed(before.laid_out({table.param: (None, "data")}))
    assert isinstance(through.tables, SparseStep) and through.tables is not before.tables


def test_a_table_of_other_workers_is_to_be_observed_again():
    draft = draft_of(*STEPS["auto"])
    before = StepPrediction.of(draft)
    table = draft.tables.tables[0]
    assert table.capacities is not None and before.syncs[0].bytes > 0
    changed = before.changed(before.laid_out({table.param: (None, "data")}))  # the rows lie over the workers now
    (now,) = (one for one in changed.tables.tables if one.param == table.param)
    assert now.axes != table.axes and now.capacities is None
    sync = next(one for one in changed.syncs if one.param == table.param)
    assert sync.bytes == 0 and "observed" in sync.why
    back = changed.changed(changed.laid_out({table.param: table.spec}))
    assert back.syncs == before.syncs and back.collectives == before.collectives


def test_the_gradient_of_a_layer_that_is_split_anew_is_exchanged_among_its_contributors():
    draft = draft_of(*STEPS["temporal"])
    before = StepPrediction.of(draft)
    param = draft.graph.layers[0].params[0]
    position = before.dense.structure.position[param]
    share = before.exchanges[position].share
    assert 0 < share < 1
    changed = before.changed(before.laid_out({param: ("model",)}))
    sums = [one for one in changed.sent_by_leaf[position] if one.purpose.kind == PurposeKind.GRADIENT]
    dense = [one for one in changed.dense.sent_by_leaf[position] if one.purpose.kind == PurposeKind.GRADIENT]
    assert [one.bytes for one in sums] == [round(one.bytes * share) for one in dense]
    assert changed.sent_by_leaf[position] != before.sent_by_leaf[position]


@pytest.mark.parametrize("options", [{}, {"shard_state": True}], ids=["whole state", "sharded state"])
def test_advice_predicts_partial_backpropagation_as_plans_do(options):
    """It has the plan of full backpropagation alone: how many devices of a group have parts of a scale's gradient
    follows from what is sent for it."""
    draft = draft_of("transformer", "splitbrain", options={"backprop": SPATIAL, **options})
    predicted = StepPrediction.of(draft)
    known, _ = predict_partial(predict(draft), predicted.dense.collectives, draft.partial, "cpu")
    assert known == predicted.partial
