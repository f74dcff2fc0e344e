"""What the benchmark of SplitBrain calculates: flops with loops multiplied out, overlap in a schedule, the formula's
terms, goals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.splitbrain import bytes as sent
from benchmarks.splitbrain import crossings, hlo, memory, scaling
from benchmarks.splitbrain import main as splitbrain
from benchmarks.splitbrain.common import Goal, planned, take_turns
from splitjax.mesh import MeshShape
from splitjax.models import build
from splitjax.report.hlo import CompiledCollective
from splitjax.report.wire import Computation, GroupList, Instruction, Module, Shape


def compiled(fn, *shapes):
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def test_flops_of_a_loop_count_as_often_as_it_runs():
    def step(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0] @ w

    found = compiled(step, (8, 16), (16, 16))
    assert hlo.flops(found) == 6 * 2 * 8 * 16 * 16
    assert found.cost_analysis()["flops"] < 0.6 * hlo.flops(found), "cost_analysis counts loops now: use it"


def test_flops_of_a_loop_in_a_loop():
    def inner(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    def step(x, w):
        return jax.lax.scan(lambda x, _: (inner(x, w), None), x, None, length=4)[0]

    assert hlo.flops(compiled(step, (8, 16), (16, 16))) == 12 * 2 * 8 * 16 * 16


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_flops_of_convolutions_and_their_gradients_are_those_of_xla(padding, stride):
    def loss(x, w):
        return (
            jax.lax.conv_general_dilated(
                x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            ).sum()
            ** 2
        )

    found = compiled(jax.grad(loss, (0, 1)), (4, 10, 10, 64), (3, 3, 64, 128))
    assert hlo.flops(found) == pytest.approx(found.cost_analysis()["flops"], rel=0.01)


def instruction(number, opcode, operands=(), called=(), trips=None, name=""):
    empty = {field.name: "" for field in dataclasses.fields(Instruction)}
    known = {
        "id": number,
        "name": name or f"{opcode}.{number}",
        "opcode": opcode,
        "operands": operands,
        "called": called,
        "trip_count": trips,
    }
    return Instruction(**{**empty, **known, "shape": Shape(11, (4,)), "groups": GroupList()})


def schedule(computations, flops=(), targets=()):
    """The first computation is the entry; they run in the order written."""
    module = Module(
        1,
        {
            number: Computation(number, ones[-1].id, {one.id: one for one in ones})
            for number, ones in computations.items()
        },
        (),
    )
    details = {
        number: {one.id: hlo.Detail(dict(flops).get(one.id, 0), dict(targets).get(one.id, "")) for one in ones}
        for number, ones in computations.items()
    }
    return hlo.Scheduled(module, {}, details)


def transfers(scheduled):
    return list(hlo._transfers(scheduled, 1, 1))


def test_a_product_between_start_and_done_is_overlap():
    ones = [
        instruction(1, "all-gather-start"),
        instruction(2, "dot"),
        instruction(3, "all-gather-done", (1,)),
        instruction(4, "dot"),
    ]
    (one,) = transfers(schedule({1: ones}, flops={2: 10, 4: 100}))
    assert (one.asynchronous, one.covered_flops, one.covered_ops, one.overlaps) == (True, 10, 1, True)


def test_started_and_awaited_at_once_or_synchronous_is_none():
    ones = [
        instruction(1, "dot"),
        instruction(2, "all-gather-start"),
        instruction(3, "all-gather-done", (2,)),
        instruction(4, "all-reduce"),
        instruction(5, "dot"),
    ]
    found = transfers(schedule({1: ones}, flops={1: 10, 5: 10}))
    assert [(one.op, one.asynchronous, one.overlaps) for one in found] == [
        ("all-gather", True, False),
        ("all-reduce", False, False),
    ]


def test_a_chain_of_fusions_is_one_transfer_a_turn():
    """As a TPU's compiler writes it, in a loop of seven turns: start, a fusion that computes and carries it along,
    done."""
    body = [
        instruction(10, "fusion", called=(3,)),
        instruction(11, "get-tuple-element", (10,)),
        instruction(12, "fusion", (11,), (4,)),
        instruction(13, "get-tuple-element", (12,)),
        instruction(14, "fusion", (13,), (5,)),
    ]
    computations = {
        1: [instruction(1, "while", called=(2,), trips=7)], 2: body,
        3: [instruction(20, "all-gather", name="one"), instruction(21, "custom-call", (20,))],
        4: [instruction(30, "dot"), instruction(31, "all-gather", name="two")],
        5: [instruction(40, "all-gather", name="three"), instruction(41, "custom-call", (40,))],
    }  # fmt: skip
    scheduled = schedule(computations, flops={30: 64}, targets={21: "AsyncCollectiveStart", 41: "AsyncCollectiveDone"})
    (one,) = transfers(scheduled)
    assert (one.name, one.trips, one.covered_flops) == ("one", 7, 64)
    assert (
        crossings.hidden_share(((one, 300, "crossing"), (hlo.Transfer("x", "all-reduce", 1, False), 100, "rest")))
        == 0.75
    )


@pytest.mark.tpu_aot
def test_turns_of_a_loop_on_a_tpu_are_counted_and_carried_collectives_once(monkeypatch):
    from benchmarks.state import tpu_mesh

    monkeypatch.setattr(crossings, "WIDTH", 1024)
    found = crossings.step_of("modulo", tpu_mesh(crossings.MESH)).lower(*crossings.shapes(64)).compile()
    mine = [
        one
        for one in hlo.collectives(found, MeshShape.of(crossings.MESH))
        if crossings.kind_of(one.op_name) == "crossing"
    ]
    assert sorted((one.op, one.trips) for one in mine) == [
        ("all_gather", 1),
        ("all_gather", 7),
        ("reduce_scatter", 1),
        ("reduce_scatter", 7),
    ]


def test_terms_of_the_formula():
    found = sent.formula_bytes(1000, 800, inputs=10, gathered=(20, 30), examples=4, workers=16, group=8)
    assert found == {
        "convolutions": 4 * 2 * 15 / 16 * 1000,
        "dense": 4 * 800 / 8,
        "crossing": 4 * 2 * 7 * 4 * 10,
        "features": 4 * 2 * 7 * 4 * 50,
    }
    assert sent.formula_bytes(1000, 800, 10, (), 4, workers=8, group=8)["dense"] == 0
    assert sent.gathered_widths(build("vgg11"), 8) == (4096, 10)
    assert sent.gathered_widths(build("vgg11", num_classes=16), 8) == (4096, 4096)


@pytest.mark.parametrize(
    ("axis", "size", "shape", "op_name", "term"),
    [
        ("data+model", 16, (3, 3, 8, 8), "transpose(jvp())/conv1_1", "convolutions"),
        ("data", 2, (512, 64), "transpose(jvp())/dense1/splitjax:product:dense1", "dense"),
        ("model", 8, (8, 512), "splitjax:enter:params.dense1", "crossing"),
        ("model", 8, (8, 512), "splitjax:enter:params.dense2", "features"),
        ("model", 8, (64, 10), "splitjax:product:params.logits/psum", "features"),
        ("data", 2, (), "reduce_sum", None),
    ],
)
def test_a_collective_belongs_to_a_term(axis, size, shape, op_name, term):
    assert (
        sent.term_of(
            CompiledCollective("all_reduce", axis, 1, "float32", shape, size, op_name=op_name), group=8, workers=16
        )
        == term
    )


def test_crossing_bytes_of_turns_are_twice_those_of_gather():
    gather, turns = crossings.formula_bytes("gather"), crossings.formula_bytes("turns")
    assert turns == {"crossing": 2 * gather["crossing"], "features": gather["features"]}
    assert gather["crossing"] == 2 * 7 * 256 * 512 * 4


def test_goals_and_speedups():
    assert Goal("less", 0.7, 0.68, False).ok and not Goal("ratio", 1.2, 1.15, True).ok
    assert str(Goal("less", 0.7, 0.68, False, ".0%")) == "pass less: 70% (goal: at least 68%)"
    taken = {scaling.SINGLE: 1.0, "way": 1.25, scaling.APART: 1.0, scaling.EXCHANGE: 0.3}
    rounds = [scaling.Round(taken, {**taken, scaling.EXCHANGE: 0.25}, 0.0, 1.0)]
    assert scaling.speedups(rounds, "way") == [1.6]
    assert scaling.bounds(rounds) == [1.6]  # what waits at a collective is no time of the core


def test_calls_take_turns():
    order = []
    seconds = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(one) for name, one in seconds.items()} == {"a": 2, "b": 2}


def test_parts_name_what_exists():
    for module, function in splitbrain.PARTS.values():
        assert hasattr(
            {
                "splitbrain.memory": memory,
                "splitbrain.crossings": crossings,
                "splitbrain.scaling": scaling,
                "splitbrain.bytes": sent,
            }.get(module)
            or __import__(f"benchmarks.{module}", fromlist=[module]),
            function,
        )


def test_memory_is_compared_with_all_reduces_apart_and_together():
    def measured(variant, placed, target="cpu"):
        return memory.Measured(variant, "cifar", 8, target, 100, placed + 50, placed, placed, 0, 2**20, 7, 1.0)

    split = memory.Variant("splitbrain", 8, "gather", shard_state=True)
    found = [measured(memory.BASE, 500), measured(memory.APART, 400), measured(split, 110), measured(memory.FSDP, 90)]
    lines = memory._table("cifar", 8, "cpu", found, "gather")
    titles = [cell.strip() for cell in lines[2].split("|")]
    (row,) = [line for line in lines if line.startswith("| split K=8")]
    cells = dict(zip(titles, (cell.strip() for cell in row.split("|"))))
    assert cells["over all-reduces apart"] == "**-72.5%**" and cells["over XLA's default"] == "-78.0%"
    goals = {goal.what: goal for goal in memory._goals(found, "gather")}
    less = "less memory than data parallel, {}: split K=8, gather, sharded state (cpu, 8 examples a device)"
    assert goals[less.format("all-reduces apart")].value == pytest.approx(0.725)
    assert not goals[less.format("all-reduces apart")].ok and goals[less.format("XLA's default")].ok
    on_tpu = memory._goals([dataclasses.replace(one, target="tpu") for one in found], "gather")
    assert on_tpu[0].value == pytest.approx(0.725), "what lies in the cores' own memory does not count"


def test_turning_the_combiner_off_keeps_all_reduces_apart():
    step, state, batch, _ = planned(build("mlp", features=(64, 64)), {"data": 8}, 16, rules="data_parallel")
    lowered = step.lower(state, batch)
    counts = []
    for combined in (True, False):
        text = lowered.compile(compiler_options=memory._compiler_options("cpu", combined)).as_text()
        counts.append(text.count(" all-reduce("))
    assert counts[0] < counts[1], counts
