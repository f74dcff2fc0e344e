"""Where a compiled step's collectives come from: shipped models without one that is left over, and programs known by
hand."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.plan import DENSE_GRADIENTS, Collective, Phase, Purpose, PurposeKind
from splitjax.report.attribute import attribute
from splitjax.report.evidence import Evidence
from splitjax.report.hlo import CompiledCollective
from splitjax.report.matching import about
from splitjax.report.op_names import name_parts
from splitjax.report.parts import StepPart
from splitjax.report.reconcile import pair
from splitjax.report.wire import read_module
from splitjax.step.arguments import argument_names
from tests.report.programs import BATCH, MESH, RULES, forward, line_of, mean_square, narrow, step_of


def report_of(loss, optimizer=None, rules="splitbrain"):
    step, state = step_of(loss, optimizer)
    return splitjax.parallelize(step, mesh=MESH, rules=rules).report(state, BATCH)


@functools.cache
def narrow_report(name, library, rules):
    """The report and the plan of a shipped model; several tests look at one compilation."""
    step, arguments = narrow(name, library, rules)
    return step.report(*arguments), step.plan(*arguments)


def causes(report, op=None):
    return [one.cause for one in report.unplanned if op in (None, one.op)]


def check(report, plan):
    """What holds for every report of a shipped model."""
    assert report.unattributed == ()
    assert report.collectives and all(one.source or one.layer for one in report.collectives)
    purposes = [one.planned.purpose for one in report.collectives if one.planned is not None]
    gradients = {purpose.leaf for purpose in purposes if purpose.kind in DENSE_GRADIENTS}
    # each found, and none taken for another
    assert gradients == {leaf.path for leaf in plan.leaves if leaf.role == "param"}
    realised = [one.planned for one in report.collectives if one.planned is not None]
    assert sorted((*realised, *report.missing), key=str) == sorted(plan.collectives, key=str)
    layers = {layer.name: layer.rule for layer in plan.layers}
    for one in report.collectives:
        if one.planned is not None:
            assert one.layer == one.planned.layer and one.rule == layers[one.layer] and one.cause == one.planned.why
        assert one.phase in ("forward", "backward", "update")


# What is left out here runs with the slow tests.
QUICK = {
    "mlp": RULES,
    "vgg11": ("splitbrain", "fsdp"),
    "resnet18": ("splitbrain", "megatron"),
    "transformer": ("splitbrain", "fsdp", "megatron"),
}
SHIPPED = [
    pytest.param(
        name,
        rules,
        marks=pytest.mark.slow if rules not in quick else () if rules in quick[:1] else pytest.mark.one_version,
    )
    for name, quick in QUICK.items()
    for rules in RULES
]


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(("name", "rules"), SHIPPED)
def test_every_collective_of_a_shipped_model_is_attributed(name, library, rules):
    check(*narrow_report(name, library, rules))


@pytest.mark.parametrize(("name", "rules"), SHIPPED)
def test_what_is_found_without_names_is_what_names_say(name, rules):
    """Both versions of a model compile to the same collectives. Linen names its modules; NNX leaves dataflow and lines
    to go by."""

    def found(library):
        report, _ = narrow_report(name, library, rules)
        without_root = lambda text: re.sub(r"\b(optimizer/opt_state/0|opt/0|params|model|batch_stats)/", "", text)
        return collections.Counter(
            (one.op, one.axis, one.bytes, without_root(one.layer), one.phase, without_root(one.cause))
            for one in report.collectives
        )

    assert found("linen") == found("nnx")


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_every_collective_of_the_whole_resnet18_is_attributed(library, rules):
    step, arguments = narrow("resnet18", library, rules, shallow=False)
    check(step.report(*arguments), step.plan(*arguments))


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "library", "rules"),
    [("mlp", "linen", "splitbrain"), ("mlp", "nnx", "fsdp"), ("transformer", "nnx", "splitbrain")],
)
def test_every_collective_that_the_compiler_for_tpus_makes_is_attributed(name, library, rules):
    """It sends bfloat16 for float32, sums zeros where it means a gather, and leaves names out."""
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, arguments = narrow(name, library, rules, mesh=mesh)
    report = step.report(*arguments)
    check(report, step.plan(*arguments))
    assert report.platform == "tpu"
    if rules == "splitbrain":
        assert report.missing == ()


def test_blocks_that_share_their_lines_are_told_apart():
    """NNX gives no names, and both blocks of the Transformer run the same lines. Beside a plan that has no reductions
    of split features, those of norms are told by what is compiled alone."""
    step, arguments = narrow("transformer", "nnx", "splitbrain")
    call = step._pack(arguments)
    entry = call.step._programs.entry(call.args)
    modules = [read_module(data) for data in _compat.serialized_modules(call.step.lower(*call.args).compile())]
    others = [each for each in entry.plan.collectives if each.purpose.kind != PurposeKind.REDUCED_FEATURES]
    plan = dataclasses.replace(entry.plan, collectives=tuple(others))
    found, missing = attribute((StepPart(modules, argument_names(entry.bound), plan.mesh),), plan, entry.graph)
    norms = [one for one in found if one.cause.startswith("statistics of a normalisation")]
    assert missing == () and sorted(one.layer for one in norms) == sorted(
        2 * ["model/block1/norm1", "model/block1/norm2", "model/block2/norm1", "model/block2/norm2", "model/final_norm"]
    )
    assert {one.known_by for one in norms} == {"line"}
    assert len({one.source for one in norms}) == 3
    # With them, each is that of the layer whose columns it reduces.
    report, _ = narrow_report("transformer", "nnx", "splitbrain")
    assert report.missing == () and {one.compiled.shape for one in report.unplanned} == {()}


def test_batch_statistics_are_those_that_the_plan_has_for_what_they_become():
    report, plan = narrow_report("resnet18", "nnx", "splitbrain")
    kinds = (PurposeKind.STATISTIC, PurposeKind.STATISTIC_COTANGENT)
    of_kind = lambda kind: [one for one in plan.collectives if one.purpose.kind == kind]
    realised = [one.planned for one in report.collectives if one.planned and one.planned.purpose.kind in kinds]
    assert len(realised) == sum(len(of_kind(kind)) for kind in kinds) > 0
    leaves = [one.purpose.leaf.rsplit("/", 1)[-1] for one in of_kind(PurposeKind.STATISTIC)]
    assert leaves.count("mean") == leaves.count("var") == len(of_kind(PurposeKind.STATISTIC_COTANGENT))
    assert not any("batch statistics" in cause for cause in causes(report))


def test_a_plan_of_explicit_collectives_is_realised_to_the_byte():
    report = report_of(mean_square)
    assert report.missing == ()
    realised = [one for one in report.collectives if one.planned is not None]
    assert [one.differs for one in realised] == [""] * len(realised)
    assert (
        sum(one.bytes for one in realised)
        == sum(one.predicted_bytes for one in realised)
        == report.total.predicted_bytes
    )
    assert {(one.op, one.layer, one.phase, one.known_by) for one in realised} == {
        ("all_gather", "params/b", "forward", "scope"),
        ("reduce_scatter", "params/b", "backward", "scope"),
        ("all_reduce", "params/a", "backward", "dataflow"),
        ("all_reduce", "params/b", "backward", "dataflow"),
    }


def test_what_xla_makes_of_a_plan_is_said():
    """With plain `jax.grad` XLA sums whole gradients where parts would do, and keeps the weights that it gathered."""
    _, state = step_of(mean_square)

    def step(state, batch):
        value, grads = jax.value_and_grad(mean_square)(state["params"], batch)
        return state | {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    report = splitjax.parallelize(step, mesh=MESH, rules="fsdp").report(state, BATCH)
    gradient = next(one for one in report.collectives if one.cause == "gradient of params/a")
    assert (gradient.op, gradient.planned.op, gradient.bytes) == (
        "all_reduce",
        "reduce_scatter",
        2 * gradient.predicted_bytes,
    )
    assert gradient.differs == "all_reduce for reduce_scatter"
    # Which of the two passes XLA names the gather after depends on its version.
    assert [(one.purpose.kind, one.purpose.leaf) for one in report.missing] == [(PurposeKind.STORED_WEIGHT, "params/b")]


def test_a_sort_over_the_batch_is_unplanned_and_has_its_line():
    def loss(params, batch):
        errors = jnp.sum((forward(params, batch) - batch["y"]) ** 2, axis=-1)
        return jnp.mean(jnp.sort(errors)[:8])

    report = report_of(loss)
    (one,) = [one for one in report.unplanned if "sort" in one.cause]
    assert (one.op, one.axis, one.layer, one.cause) == (
        "all_gather",
        "data",
        "",
        "sort over a dim that is split over data",
    )
    assert one.source == f"{__file__}:{line_of(loss, 'jnp.sort')} (loss)"


def test_a_sharding_that_the_step_asks_for_is_unplanned_and_has_its_line():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, PartitionSpec()))
        return jnp.mean((hidden @ params["b"] - batch["y"]) ** 2)

    def gathers(report):
        return [one for one in report.unplanned if one.op == "all_gather"]

    report = report_of(loss)
    assert report.unattributed == () and gathers(report_of(mean_square)) == []
    assert {one.axis for one in gathers(report)} == {"data", "model"} and all(one.cause for one in gathers(report))
    lines = {
        f"{__file__}:{line_of(loss, text)} (loss)" for text in ("jnp.tanh", "with_sharding_constraint", "jnp.mean")
    }
    assert {one.source for one in gathers(report)} <= lines


def test_scalars_say_what_depends_on_them():
    def loss(params, batch):
        errors = jnp.sum((forward(params, batch) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])

    report = report_of(loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    assert report.unattributed == ()
    scalars = [
        one.cause.partition("to a scalar that ")[2].partition(",")[0]
        for one in report.unplanned
        if not one.compiled.shape
    ]
    assert set(scalars) == {"gradients depend on", "the step returns", "the update depends on"}


def test_a_branch_and_what_decides_it():
    def loss(params, batch):
        some = jnp.sum(batch["mask"]) > 3
        return jnp.mean(jax.lax.cond(some, lambda x: forward(params, {"x": x}), lambda x: x * 1.0, batch["x"]) ** 2)

    report = report_of(loss, rules="fsdp")
    assert "reduce_sum to a scalar that decides which branch is taken" in causes(report)
    inside = [one for one in report.collectives if one.compiled.conditional]
    assert {one.cause for one in inside} >= {
        "gradient of params/a",
        "gradient of params/b",
        "forward: params/a is stored in pieces",
    }
    assert report.unattributed == ()


def test_a_scan_counts_its_turns_and_keeps_its_parameter():
    params = {"w": jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)}

    def step(state, batch):
        def loss(p):
            inputs = jnp.concatenate([batch["x"], batch["x"]], axis=1)
            return jnp.mean(jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), inputs, p["w"])[0] ** 2)

        value, grads = splitjax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    report = splitjax.parallelize(step, mesh=MESH, rules="fsdp").report(params, BATCH)
    assert {one.compiled.trips for one in report.collectives if one.planned} == {6}
    gathers = [one.planned.why for one in report.collectives if one.op == "all_gather"]
    # rematerialisation gathers again
    assert gathers == ["forward: w is stored in pieces", "backward: w is stored in pieces"]
    assert report.missing == ()


def test_without_names_lines_and_dataflow_there_is_no_cause():
    """The causes come from evidence: a module without any leaves holes, and says so."""
    step, arguments = narrow("transformer", "nnx")
    call = step._pack(arguments)
    entry = call.step._programs.entry(call.args)
    modules = [read_module(data) for data in _compat.serialized_modules(call.step.lower(*call.args).compile())]
    blind = tuple(
        dataclasses.replace(
            module,
            frames=(),
            computations={
                number: dataclasses.replace(
                    computation,
                    instructions={
                        key: dataclasses.replace(one, op_name="", stack_frame=0, source=("", 0))
                        for key, one in computation.instructions.items()
                    },
                )
                for number, computation in module.computations.items()
            },
        )
        for module in modules
    )
    found, _ = attribute((StepPart(blind, argument_names(entry.bound), entry.plan.mesh),), entry.plan, entry.graph)
    assert len(found) > 50 and not any(one.is_attributed for one in found)
    # With the arguments' names alone, gradients and new state are still known.
    kept = tuple(
        dataclasses.replace(
            module,
            computations={
                number: dataclasses.replace(
                    computation,
                    instructions={
                        key: one
                        if one.opcode == "parameter"
                        else dataclasses.replace(one, op_name="", stack_frame=0, source=("", 0))
                        for key, one in computation.instructions.items()
                    },
                )
                for number, computation in module.computations.items()
            },
        )
        for module in modules
    )
    found, _ = attribute((StepPart(kept, argument_names(entry.bound), entry.plan.mesh),), entry.plan, entry.graph)
    purposes = [one.planned.purpose for one in found if one.planned]
    gradients = {purpose.leaf for purpose in purposes if purpose.kind == PurposeKind.GRADIENT}
    assert gradients == {leaf.path for leaf in entry.plan.leaves if leaf.role == "param"}


def test_parts_of_a_planned_collective_add_up_to_it():
    """Turns in a loop and a last one beside it, with the way back under the same scope, outside any derivative."""
    there = Purpose(PurposeKind.ENTER_COLUMNS, Phase.FORWARD, in_turns=True)
    back = Purpose(PurposeKind.RETURN_COLUMNS, Phase.BACKWARD, in_turns=True)
    ways = (
        Collective("all_reduce", "model", 40, "dense", there),
        Collective("all_reduce", "model", 40, "dense", back),
    )
    other = Collective("all_gather", "model", 40, "dense", Purpose(PurposeKind.WHOLE_OUTPUT, Phase.FORWARD))

    def explicit(sent):
        one = CompiledCollective(op="all_reduce", axis="model", bytes=sent, dtype="float32", shape=(4,), group_size=4)
        return Evidence(one, "update", "value", "", "splitjax:enter:dense/psum", (), "dense", "scope", None)

    step = types.SimpleNamespace(
        plan=types.SimpleNamespace(collectives=(*ways, other), mesh=MeshShape((("data", 2), ("model", 4)))),
        order={"dense": 0},
        layers={},
    )
    paired, missing = pair([explicit(sent) for sent in (10, 30, 30, 10)], step)
    assert [(one.purpose, one.bytes) for (one,) in paired] == [(there, 10), (there, 30), (back, 30), (back, 10)]
    assert missing == (other,)
    paired, missing = pair([explicit(sent) for sent in (10, 20)], step)  # does not add up
    assert paired == ((), ()) and len(missing) == 3


def test_reductions_of_turns_add_up_to_planned_ones_of_the_layer_before():
    """A norm behind `dense` sums two statistics: each of the first turn, and in a loop of three more."""
    planned = Collective("all_reduce", "model", 40, "dense", Purpose(PurposeKind.REDUCED_FEATURES, Phase.FORWARD))

    def sums(sent, layer="norm", trips=1):
        one = CompiledCollective(
            op="all_reduce", axis="model", bytes=sent, dtype="float32", shape=(4,), group_size=4, trips=trips
        )
        return Evidence(one, "forward", "value", "", "jvp()/reduce_sum", (), layer, "name", None)

    step = types.SimpleNamespace(
        plan=types.SimpleNamespace(collectives=(planned, planned), mesh=MeshShape((("data", 2), ("model", 4)))),
        order={"dense": 0, "norm": 1, "other": 2},
        layers={},
    )
    compiled = [sums(10), sums(30, "other", 3), sums(10), sums(30, trips=3), sums(30, trips=3)]
    paired, missing = pair(compiled, step)
    assert [sum(one.bytes for one in ones) for ones in paired] == [10, 0, 10, 30, 30]
    assert missing == () and paired[0][0].purpose == planned.purpose
    paired, missing = pair([sums(10), sums(30, "other", 3)], step)
    assert paired == ((), ()) and len(missing) == 2, "parts of different layers are none of one"


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@pytest.mark.parametrize("rules", RULES)
def test_the_plan_s_purposes_are_about_leaves_or_values(name, rules):
    step, arguments = narrow(name, "linen", rules)
    plan = step.plan(*arguments)
    params = {leaf.path for leaf in plan.leaves if leaf.role == "param"}
    purposes = [one.purpose for one in plan.collectives]
    assert {one.leaf for one in purposes if about(one) == "gradient"} == params
    assert all((one.leaf in params) == (about(one) != "value") for one in purposes)
    assert all(one.phase is not None for one in purposes)


def test_operations_are_named_as_jax_writes_them():
    assert name_parts("jit(step)/transpose(jvp(Net))/block1/attention/dot_general") == (
        "Net",
        "block1",
        "attention",
        "dot_general",
    )
    assert name_parts("jit(step)/jvp(jit(take_along_axis))/gather") == ("gather",)
