"""What a plan has is compiled, under every combination of options: nothing is missing from the report of a small step
of an embedding bag and three dense layers."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from benchmarks.corpus.cells import Cell, Unit
from benchmarks.corpus.steps import parallel, ready
from benchmarks.planner.quality_ways import model_of
from splitjax import models
from splitjax.plan import Phase, PurposeKind
from tests.report.programs import narrow

MESH = {"data": 2, "model": 4}
ALL = "data+model"
NUM_EXAMPLES = 32
BAG = 3  # ids of an example
SIZES = {"a": (16, 32), "b": (32, 32), "c": (32, 8)}
# Options of `parallelize`, and of the gradient under `microbatches`.
WAYS = {
    "plain": {},
    "modulo": {"group_comm": "modulo"},
    "turns": {"group_comm": "turns"},
    "microbatches": {"microbatches": 4},
    "sync": {"sync": "zen"},
    "sync microbatches": {"sync": "zen", "microbatches": 4},
    "backprop": {"backprop": splitjax.PartialBackprop()},
    "backprop microbatches": {"backprop": splitjax.PartialBackprop(), "microbatches": 4},
    "sync backprop": {"sync": "zen", "backprop": splitjax.PartialBackprop()},
}
# Where nothing but scalars is compiled beside the plan. Rows of a table are sent as they were observed, which is not
# known before.
WITHOUT_ROWS = tuple(way for way in WAYS if "sync" not in way)
PLANNED_WHOLLY = {"splitbrain": WITHOUT_ROWS, "megatron": WITHOUT_ROWS, "fsdp": WITHOUT_ROWS}
COMBINATIONS = list(itertools.product(("splitbrain", "megatron", "fsdp"), (False, True), WAYS))
# Each way once on every version of JAX, under one rule set or another, with its state whole or in parts.
ON_EVERY_VERSION = COMBINATIONS[:: len(WAYS) + 1] + COMBINATIONS[len(WAYS) - 3 :: len(WAYS) + 1]


def shapes_of_step(optimizer, num_examples=NUM_EXAMPLES):
    def init(key):
        keys = iter(jax.random.split(key, 4))
        params = {"table": {"embedding": jax.random.normal(next(keys), (128, 16))}}
        for name, (width_in, width_out) in SIZES.items():
            kernel = jax.random.normal(next(keys), (width_in, width_out)) * 0.1
            params[name] = {"kernel": kernel, "bias": jnp.zeros(width_out)}
        return {"params": params, "optimizer": optimizer.init(params)}

    batch = {
        "ids": jax.ShapeDtypeStruct((num_examples, BAG), jnp.int32),
        "y": jax.ShapeDtypeStruct((num_examples, SIZES["c"][1]), jnp.float32),
    }
    return jax.eval_shape(init, jax.random.key(0)), batch


def make_step(optimizer, microbatches):
    def loss_fn(params, batch):
        hidden = jnp.take(params["table"]["embedding"], batch["ids"], axis=0).sum(axis=1)
        for name in SIZES:
            hidden = hidden @ params[name]["kernel"] + params[name]["bias"]
            hidden = jax.nn.relu(hidden) if name != "c" else hidden
        return jnp.mean((hidden - batch["y"]) ** 2)

    options = {} if microbatches is None else {"microbatches": microbatches}

    def train_step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_fn, **options)(state["params"], batch)
        updates, new = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": new}, loss

    return train_step


def report_of(combination, num_examples=NUM_EXAMPLES):
    rules, shard_state, way = combination
    options = dict(WAYS[way])
    optimizer = optax.adagrad(0.1)
    step = make_step(optimizer, options.pop("microbatches", None))
    parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, shard_state=shard_state, **options)
    return parallel.report(*shapes_of_step(optimizer, num_examples))


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(
            combination,
            marks=() if combination in ON_EVERY_VERSION else pytest.mark.one_version,
            id=" ".join(map(str, combination)),
        )
        for combination in COMBINATIONS
    ],
)
def test_nothing_that_is_planned_is_missing(combination):
    report = report_of(combination)
    assert [f"{one.op} {one.axis} {one.bytes} {one.layer}: {one.why}" for one in report.missing] == []
    assert not report.unattributed
    if combination[2] in PLANNED_WHOLLY.get(combination[0], ()):
        # What plans leave out because it is small: the loss.
        assert [one for one in report.unplanned if one.compiled.shape] == []
    assert any(one.planned is not None for one in report.collectives)


@pytest.mark.parametrize("num_examples", [32, 64])
def test_the_gradient_of_a_split_table_is_summed_into_parts(num_examples):
    """Left to XLA it was gathered for few examples, and all-reduced, twice the bytes, for many."""
    report = report_of(("splitbrain", True, "plain"), num_examples)
    (found,) = (one for one in report.collectives if one.layer == "params/table" and one.phase == "backward")
    assert (found.op, found.axis, found.bytes) == ("reduce_scatter", "data", 128 * 16 // 4 * 4 // 2)
    assert found.planned is not None and found.planned.bytes == found.bytes


@pytest.mark.parametrize("way", ["plain", "microbatches"])
def test_a_report_does_not_depend_on_what_was_compiled_before(way):
    """JAX traces some of its functions once in a process, and keeps the lines of the first call."""
    combination = ("megatron", False, way)
    before = report_of(combination)
    for rules, microbatches in (("splitbrain", 4), ("fsdp", None)):
        step = make_step(optax.adagrad(0.1), microbatches)
        splitjax.parallelize(step, mesh=MESH, rules=rules).report(*shapes_of_step(optax.adagrad(0.1)))
    after = report_of(combination)
    told = lambda report: [
        (one.op, one.axis, one.bytes, one.layer, one.phase, one.realised) for one in report.collectives
    ]
    assert told(after) == told(before) and not after.missing


# Gates that read one value; norms between split layers, differentiated by some workers; a gather that XLA moves behind
# the broadcast of a mean, and those that it made of one behind a mean and a norm; a batch that meets rows of a weight;
# gates whose biases lie side by side; a cotangent as large as a device's part of a table.
CELLS = (
    "lstm/nnx/megatron/2x4/row_exchange/full/gather/4/whole",
    "transformer/linen/splitbrain/2x4/dense/branches/gather/1/sharded",
    "convnext_tiny/linen/megatron/2x4/dense/branches/gather/4/whole",
    "resnet18/nnx/megatron/2x4/dense/full/gather/1/whole",
    "resnet50/linen/megatron/2x4/dense/programs/gather/1/sharded",
    "deepfm/nnx/transformer/2x2x2/dense/full/gather/1/whole",
    "lstm/linen/transformer/2x2x2/dense/full/gather/1/whole",
    "lstm/linen/megatron/2x4/dense/full/gather/1/sharded",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_nothing_of_a_corpus_program_is_missing(name):
    cell = Cell.parse(name)
    made = ready(cell.unit)
    assert parallel(cell, made).report(*made.arguments).missing == ()


def test_gates_that_read_one_value_gather_it_once():
    """Square kernels of a recurrence read and write the same features: the value itself says that they share it."""
    cell = Cell.parse(CELLS[0])
    made = ready(cell.unit)
    plan = parallel(cell, made).plan(*made.arguments)
    kinds = PurposeKind.WHOLE_STATE, PurposeKind.WHOLE_FEATURES
    purposes = [(one.layer, one.purpose) for one in plan.collectives if one.purpose.kind in kinds]
    gathers = [(layer, purpose.kind) for layer, purpose in purposes if purpose.phase == Phase.FORWARD]
    assert gathers == list(zip(("model/lstm1/cell/hi", "model/projection1"), kinds, strict=True))


def test_a_state_that_several_gates_read_is_gathered_once_and_their_cotangents_are_summed_apart():
    """As XLA does it, in every iteration."""
    cell = Cell.parse(CELLS[0])
    made = ready(cell.unit)
    report = parallel(cell, made).report(*made.arguments)
    gates = [one for one in report.collectives if one.layer.startswith("model/lstm1/cell/h") and one.axis == "model"]
    assert len(gates) == 6 and all(one.planned is not None and not one.differs for one in gates)


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("transformer", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("transformer", {"data": 2, "model": 4}),
        ("splitbrain", {"data": 2, "model": 4}),
        ("megatron", {"data": 2, "model": 4}),
        ("fsdp", {"data": 2, "fsdp": 4}),
    ],
    ids=["three-axes", "transformer", "splitbrain", "megatron", "fsdp"],
)
def test_of_a_recurrence_nothing_is_compiled_that_is_not_planned(library, rules, mesh):
    """The layer behind it had the states gathered for each of its passes; and sums over examples in the loop, which
    carry as much as those of cotangents over `model`, were taken for them. Under splitbrain a group's examples lay on
    its devices in the loop, features outside of it; under megatron the weight behind the loop had its gradient from
    parts of the states, and it was moved; under fsdp gradients were summed in every turn."""
    made = ready(Unit("lstm", library, "1"))
    report = made.parallelize(made.step, mesh=mesh, rules=rules).report(*made.arguments)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    over_examples = {"data", "data+fsdp"}
    assert all(
        (one.axis in over_examples) == (one.planned.axis in over_examples) for one in report.collectives if one.planned
    )


def test_a_scale_that_the_backward_loop_gathers_again_is_the_planned_gather():
    """It is handed from loop to loop in parts, turn by turn, so that nothing leads back to the parameter."""
    made = model_of("scanned")
    arguments = jax.eval_shape(made.init, jax.eval_shape(jax.random.key, 0)), made.batch
    report = splitjax.parallelize(made.step, mesh={"data": 2, "model": 2}, rules="fsdp").report(*arguments)
    gathered = [
        (one.layer, one.phase)
        for one in report.collectives
        if one.layer.startswith("params/blocks/scale") and one.planned and one.op == "all_gather"
    ]
    assert gathered == [(f"params/blocks/scale{i}", phase) for phase in ("forward", "backward") for i in (1, 2)]
    assert report.missing == ()


@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_of_norms_between_split_layers_nothing_is_compiled_that_is_not_planned(way):
    """Statistics of each example, and cotangents of these, are sums over the group; each device has the gradient of its
    own part of a scale."""
    cell = Cell.parse(f"transformer/linen/splitbrain/2x4/dense/full/gather/1/{way}")
    made = ready(cell.unit)
    report = parallel(cell, made).report(*made.arguments)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    purposes = ((one, one.planned.purpose) for one in report.collectives if one.planned)
    of_scale = [one for one, purpose in purposes if purpose.leaf == "params/final_norm/scale"]
    behind = [("all_gather", "model")] if way == "whole" else [("collective_permute", ALL), ("all_gather", ALL)]
    assert sorted((one.op, one.axis) for one in of_scale) == sorted([("all_reduce", "data"), *behind])


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2}, {"data": 2, "model": 4}], ids=str)
def test_features_of_several_fields_are_brought_together_before_they_are_laid_side_by_side(mesh):
    """A layer reads them as one dim, of which a device's features are no consecutive part: XLA dealt fields out."""
    spec = models.build("deepfm", field_sizes=(200, 32, 80, 504), num_dense=4, embedding_width=32, features=(64, 32))
    init, step, _ = models.make_step(spec, optax.adagrad(0.1), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), spec.example(64)
    report = splitjax.parallelize(step, mesh=mesh, rules="splitbrain").report(*arguments)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []


def small_report(loss_fn, params, batch, rule, mesh):
    """The report of a step that changes `params` by the gradient of `loss_fn`, under one `rule` and replicas."""

    def step(params, batch):
        loss, grads = splitjax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    rules = splitjax.RuleSet("one", (rule, splitjax.Rule("rest", path="**", shard=[])), replicated_batch="data")
    shape = lambda sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    is_sizes = lambda value: isinstance(value, tuple)
    arguments = (jax.tree.map(shape, tree, is_leaf=is_sizes) for tree in (params, batch))
    return splitjax.parallelize(step, mesh=mesh, rules=rules).report(*arguments)


def activations(report):
    return sorted((one.op, one.axis, one.bytes, one.phase) for one in report.collectives if one.axis == "model")


ROWS = splitjax.Rule("rows", path="last", shard=[{"in": "model"}])


def test_behind_a_mean_the_cotangent_of_rows_is_brought_together_before_it_is_spread():
    """XLA kept its parts, and gathered what came of them: a map of features for every convolution before the mean."""

    def loss_fn(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["first"])
        return jnp.mean((hidden.mean(axis=1) @ params["last"] - batch["y"]) ** 2)

    params, batch = {"first": (12, 16), "last": (16, 6)}, {"x": (16, 8, 12), "y": (16, 6)}
    report = small_report(loss_fn, params, batch, ROWS, MESH)
    summed, gathered = 2 * 3 * (8 * 6 * 4) // 4, 3 * (8 * 16 * 4) // 4
    assert activations(report) == [
        ("all_gather", "model", gathered, "backward"),
        ("all_reduce", "model", summed, "forward"),
    ]
    assert report.missing == () and not [one for one in report.unplanned if one.compiled.shape]


@pytest.mark.parametrize("rules", ["megatron", "transformer"])
def test_behind_rows_the_cotangent_of_rows_is_brought_together_before_a_bias_is_summed(rules):
    """XLA kept its parts: it summed a part of the bias' gradient, and gathered the new bias and each of its moments."""
    step, arguments = narrow("mlp", rules=rules)
    report = step.report(*arguments)
    assert report.missing == () and not [one for one in report.unplanned if one.compiled.shape]
    planned = [one for one in report.collectives if one.planned is not None]
    assert [one.differs for one in planned] == [""] * len(planned)
    assert sum(one.bytes for one in planned) == report.total.predicted_bytes


def test_rows_that_read_a_batch_stay_where_they_are():
    """XLA brought the weight together, since the batch is whole on every device."""

    def loss_fn(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["first"])
        return jnp.mean((hidden @ params["out"] + batch["z"] @ params["last"] - batch["y"]) ** 2)

    params, batch = {"first": (12, 16), "out": (16, 1), "last": (4, 1)}, {"x": (16, 12), "z": (16, 4), "y": (16, 1)}
    report = small_report(loss_fn, params, batch, ROWS, MESH)
    assert activations(report) == [("all_reduce", "model", 2 * 3 * (8 * 4) // 4, "forward")]
    assert report.missing == ()


@pytest.mark.parametrize("mesh", [MESH, {"data": 4, "model": 2}])
def test_whole_biases_of_gates_are_summed_as_one_that_is_split(mesh):
    """Behind split kernels the biases' gradients lie side by side, one on each device or two, and are one sum."""

    def loss_fn(params, batch):
        kernel, bias = (jnp.concatenate([params[gate][part] for gate in "fgio"], -1) for part in "wb")
        forget, new, enter, leave = jnp.split(batch["x"] @ kernel + bias, 4, axis=-1)
        cell = jax.nn.sigmoid(enter) * jnp.tanh(new) + jax.nn.sigmoid(forget)
        return jnp.mean((jax.nn.sigmoid(leave) * jnp.tanh(cell)) ** 2)

    params = {gate: {"w": (16, 16), "b": (16,)} for gate in "fgio"}
    columns = splitjax.Rule("columns", path="*/w", shard=[{"out": "model"}])
    report = small_report(loss_fn, params, {"x": (16, 16)}, columns, mesh)
    assert report.missing == ()
    sums = [one for one in report.collectives if len(one.realised) == 4]
    assert [{planned.purpose.leaf for planned in one.realised} for one in sums] == [
        {f"{gate}/b" for gate in "fgio"},
        {f"{gate}/w" for gate in "fgio"},
    ]


@pytest.mark.parametrize("again", [False, True], ids=["once", "rematerialised"])
def test_what_a_loss_reduces_of_split_classes_is_planned(again):
    """A maximum, a sum and a lookup are all-reduced by example; the likeliest class is gathered with its score."""

    def loss_fn(params, batch):
        def losses(hidden):
            logits = hidden @ params["last"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), logits.argmax(-1)

        each, likeliest = (jax.checkpoint(losses) if again else losses)(jnp.tanh(batch["x"] @ params["first"]))
        return each.mean() + 0.0 * (likeliest == batch["y"]).mean()

    params = {"first": (12, 16), "last": (16, 20)}
    columns = splitjax.Rule("columns", path="last", shard=[{"out": "model"}])
    rules = splitjax.RuleSet("one", (columns, splitjax.Rule("rest", path="**", shard=[])), replicated_batch="data")

    def step(params, batch):
        loss, grads = splitjax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    shape = lambda sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)
    batch = {"x": shape((16, 12)), "y": shape((16,), jnp.int32)}
    arguments = {name: shape(sizes) for name, sizes in params.items()}, batch
    parallel_step = splitjax.parallelize(step, mesh=MESH, rules=rules)
    report, plan = parallel_step.report(*arguments), parallel_step.plan(*arguments)
    planned = [one for one in plan.collectives if one.purpose.kind == PurposeKind.REDUCED_FEATURES]
    a_value_each = 8 * 4  # a device's examples, four bytes
    summed, gathered = ("all_reduce", 2 * 3 * a_value_each // 4), ("all_gather", 3 * a_value_each)
    forward = [(one.op, one.bytes) for one in planned if one.purpose.phase == "forward"]
    assert sorted(forward) == sorted([summed] * 3 + [gathered] * 2)
    assert report.missing == () and not [one for one in report.unplanned if one.compiled.shape]


@pytest.mark.parametrize("again", [False, True], ids=["once", "rematerialised"])
def test_stored_parameters_that_are_only_added_are_gathered_for_the_forward_pass(again):
    """The backward pass of a sum reads neither summand: not a bias, nor embeddings of positions. A scale it reads."""

    def loss_fn(params, batch):
        def hidden(x):
            return jnp.tanh((x + params["positions"][:8]) @ params["kernel"] + params["bias"]) * params["scale"]

        return jnp.mean((jax.checkpoint(hidden) if again else hidden)(batch["x"]) ** 2)

    params = {"positions": (12, 16), "kernel": (16, 16), "bias": (16,), "scale": (16,)}
    stored = splitjax.Rule("stored", path="**", shard=[{"largest": ["data", "model"]}, {"largest": "model"}])
    rules = splitjax.RuleSet("stored", (stored,), replicated_batch="all")

    def step(params, batch):
        loss, grads = splitjax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    shape = lambda sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    arguments = {name: shape(sizes) for name, sizes in params.items()}, {"x": shape((32, 8, 16))}
    plan = splitjax.parallelize(step, mesh=MESH, rules=rules).plan(*arguments)
    gathers = [one.purpose for one in plan.collectives if one.purpose.kind == PurposeKind.STORED_WEIGHT]
    backward = {purpose.leaf for purpose in gathers if purpose.phase == Phase.BACKWARD}
    assert {purpose.leaf for purpose in gathers} == set(params)
    assert backward - {"kernel"} == ({"positions", "bias", "scale"} if again else {"scale"})


METRICS = {
    "probabilities": lambda logits: (jax.nn.softmax(logits) ** 2).sum(-1).mean(),
    "likeliest": lambda logits: (logits == logits.max(-1, keepdims=True)).mean(),
}


def counted(hidden):
    return hidden / jnp.maximum((hidden > 0).sum(-1, keepdims=True), 1)


@pytest.mark.parametrize("metric", METRICS)
def test_for_what_has_no_cotangent_none_is_planned(metric):
    """Metrics have no part in the loss, and counts no derivative: what is made of sums over split columns and laid
    along them again is summed in the forward pass alone."""

    def loss_fn(params, batch):
        logits = counted(jnp.tanh(batch["x"] @ params["first"])) @ params["last"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), METRICS[metric](logits)

    columns = [splitjax.Rule(name, path=name, shard=[{"out": "model"}]) for name in ("first", "last")]
    rules = splitjax.RuleSet("one", (*columns, splitjax.Rule("rest", path="**", shard=[])), replicated_batch="data")

    def step(params, batch):
        (loss, found), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), (loss, found)

    shape = lambda sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)
    arguments = (
        {"first": shape((12, 16)), "last": shape((16, 20))},
        {"x": shape((16, 12)), "y": shape((16,), jnp.int32)},
    )
    report = splitjax.parallelize(step, mesh=MESH, rules=rules).report(*arguments)
    assert report.missing == ()


def test_a_weight_that_is_stored_along_two_dims_is_gathered_and_summed_along_one_after_the_other():
    def step(params, batch):
        def loss_fn(params):
            return jnp.mean((jax.nn.relu(batch["x"] @ params["two"]) @ params["last"]) ** 2)

        loss, grads = splitjax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss

    two = splitjax.Rule("two", path="two", shard=[{"in": "fsdp", "out": "data"}])
    rest = splitjax.Rule("rest", path="**", shard=[])
    rules = splitjax.RuleSet("stored", (two, rest), replicated_batch=("data", "fsdp"))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    params = {"two": shape(12, 20), "last": shape(20, 4)}
    report = splitjax.parallelize(step, mesh={"data": 2, "fsdp": 4}, rules=rules).report(params, {"x": shape(16, 12)})
    stored = [one for one in report.collectives if one.layer == "two"]
    held = 12 * 20 * 4 // 8
    expected = [("all_gather", "fsdp", 3 * held), ("all_gather", "data", 4 * held)]
    expected += [("reduce_scatter", "fsdp", 6 * held), ("reduce_scatter", "data", held)]
    assert sorted((one.op, one.axis, one.bytes) for one in stored) == sorted(expected)
    assert report.missing == () and not any(one.planned is None or one.differs for one in stored)
