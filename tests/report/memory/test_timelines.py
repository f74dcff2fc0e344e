"""Memory timelines of steps: their peaks against XLA's own figures, and against values counted by hand."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax import display
from splitjax.errors import PlanError
from splitjax.report.memory.assignment import Allocation, BufferAssignment, Value, read_assignment
from splitjax.report.memory.document import timelines_document
from splitjax.report.memory.living import compiled_timeline
from splitjax.report.memory.moments import Moments
from splitjax.report.protobuf import WireError
from splitjax.report.wire import Computation, GroupList, Instruction, Module, Shape
from tests.report.programs import f32, narrow


def scanned(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, batch["x"], params["blocks"])
    return jnp.mean((h @ params["head"] - batch["y"]) ** 2)


def scanned_step():
    def step(params, batch):
        loss, gradients = splitjax.value_and_grad(scanned)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    arguments = {"blocks": f32(6, 64, 64), "head": f32(64, 16)}, {"x": f32(128, 64), "y": f32(128, 16)}
    return splitjax.parallelize(step, mesh={"data": 4}, rules="data_parallel"), arguments


@pytest.fixture(scope="module")
def transformer():
    step, arguments = narrow("transformer", rules="megatron")
    return step, arguments, step.memory_timeline(*arguments)


@pytest.mark.parametrize(
    "make", [lambda: narrow("transformer", rules="megatron"), scanned_step], ids=["blocks", "scan"]
)
def test_peaks_are_those_of_the_prediction_and_of_the_compiler(make):
    step, arguments = make()
    timelines = step.memory_timeline(*arguments)
    expected = step.memory(*arguments)
    assert timelines.predicted.argument_bytes == expected.argument_bytes
    assert timelines.predicted.temporary_bytes == expected.temporary_bytes
    compiled = timelines.compiled
    told = step.report(*arguments).memory.compiled
    assert compiled.argument_bytes == told.argument_bytes
    assert compiled.set_aside_bytes == told.total_bytes - told.argument_bytes
    # What is stored at a time never exceeds what XLA set aside, which has few holes.
    assert 0.9 * compiled.set_aside_bytes < compiled.temporary_bytes <= compiled.set_aside_bytes


def test_what_lives_at_the_peak_belongs_to_layers(transformer):
    _, _, timelines = transformer
    for timeline in (timelines.predicted, timelines.compiled):
        layers = {array.layer for array in timeline.at_peak}
        assert {name.split("/")[1] for name in layers if name.count("/") > 0} >= {"block1", "block2"}
        unknown = sum(array.num_bytes for array in timeline.at_peak if not array.layer)
        assert unknown < 0.02 * timeline.temporary_bytes
        # Activations are kept from the forward to the backward pass; the update comes last.
        assert timeline.passes[timeline.peak] in ("forward", "backward") and "other" in timeline.passes[-20:]


def test_the_picture_is_a_file_of_its_own(transformer, tmp_path):
    _, _, timelines = transformer
    path = tmp_path / "memory.svg"
    text = timelines.svg(path)
    assert path.read_text() == text == timelines.svg()
    words = [each.text for each in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == f"memory of a device during {timelines.step}"
    assert [each.partition(":")[0] for each in words if each.endswith("B at the peak")] == ["predicted", "compiled"]
    assert {"arguments", "params/block1", "forward", "backward"} <= set(words)
    with pytest.raises(PlanError, match="cannot be written"):
        timelines.svg(tmp_path / "no folder" / "memory.svg")


def test_the_results_of_a_scan_are_stored_from_its_beginning():
    step, arguments = scanned_step()
    compiled = step.memory_timeline(*arguments).compiled
    stacked = 6 * 128 // 4 * 64 * 4  # what each layer keeps for the backward pass, on a device
    kept = [span for span in compiled.spans if span.array.num_bytes == stacked]
    assert kept and all(span.end - span.start > 3 for span in kept)


def test_a_step_is_not_compiled_unless_it_is_asked_for(transformer):
    step, arguments, timelines = transformer
    alone = step.memory_timeline(*arguments, compiled=False)
    assert alone.compiled is None and alone.predicted == timelines.predicted
    assert "it was not asked" in str(alone)


def test_both_panels_have_the_same_axes_and_fit_a_narrow_terminal(transformer):
    _, _, timelines = transformer
    text = display.show(timelines, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("0 B +---") == 2 and text.count("the peak") >= 2
    assert "params/block1" in text and "XLA sets aside" in text
    areas = timelines_document(timelines).parts[1]
    assert [panel.title.split(":")[0] for panel in areas.panels] == ["predicted", "compiled"]
    for panel, timeline in zip(areas.panels, (timelines.predicted, timelines.compiled), strict=True):
        totals = [sum(levels) for levels in zip(*(band.levels for band in panel.bands), strict=True)]
        assert totals == [timeline.argument_bytes + stored for stored in timeline.stored_bytes]
        assert max(totals) <= areas.top


@dataclasses.dataclass(frozen=True)
class NoStep:
    """Knows no layers."""

    def leaf(self, argument):
        return None

    def named(self, op_name):
        return "", False


def instruction(number, opcode, operands=(), **fields):
    return Instruction(
        id=number, name=f"{opcode}.{number}", opcode=opcode, shape=fields.pop("shape", Shape(11, (25,))),
        op_name=fields.pop("op_name", ""), stack_frame=0, source=("", 0), operands=tuple(operands),
        called=fields.pop("called", ()), tuple_index=fields.pop("tuple_index", 0), parameter=0, chain="",
        groups=GroupList(), pairs=(), trip_count=None, literal=None, direction="",
    )  # fmt: skip


def module_of(entry, *others):
    computations = {
        number: Computation(number, listed[-1].id, {each.id: each for each in listed})
        for number, listed in enumerate((entry, *others))
    }
    return Module(0, computations, (), {number: tuple(each.instructions) for number, each in computations.items()})


def test_a_value_lives_as_long_as_it_is_seen_through_tuples_and_views():
    module = module_of(
        [
            instruction(1, "parameter"),
            instruction(2, "exp", [1]),
            instruction(3, "tuple", [2, 1]),
            instruction(4, "log", [1]),
            instruction(5, "get-tuple-element", [3], tuple_index=1),
            instruction(6, "get-tuple-element", [3], tuple_index=0),
            instruction(7, "negate", [5]),
            instruction(8, "bitcast", [6]),
            instruction(9, "add", [8, 4]),
            instruction(10, "sine", [9]),
        ]
    )
    moments = Moments(module)
    assert [each.opcode for each in moments.operations] == ["exp", "log", "negate", "add", "sine"]
    assert moments.span((2, ())) == (0, 4)  # read by the sum alone, behind a tuple and a view
    assert moments.span((4, ())) == (1, 4) and moments.span((7, ())) == (2, 3)
    assert moments.span((10, ())) == (4, 5)  # the result
    assert moments.span((99, ())) is None


def test_the_body_of_a_loop_is_laid_out_where_it_runs():
    body = [instruction(20, "parameter"), instruction(21, "exp", [20]), instruction(22, "log", [21])]
    condition = [instruction(30, "parameter"), instruction(31, "compare", [30])]
    entry = [
        instruction(1, "parameter"),
        instruction(2, "sine", [1]),
        instruction(3, "while", [2], called=(1, 2)),
        instruction(4, "cosine", [3]),
    ]
    moments = Moments(module_of(entry, body, condition))
    assert [each.opcode for each in moments.operations] == ["sine", "compare", "exp", "log", "cosine"]
    assert moments.span((2, ())) == (0, 4)  # what a loop begins with, to its end
    assert moments.span((3, ())) == (1, 5) and moments.span((21, ())) == (2, 4)


def test_bytes_that_are_written_over_are_counted_once():
    module = module_of(
        [
            instruction(1, "parameter"),
            instruction(2, "exp", [1]),
            instruction(3, "log", [2]),
            instruction(4, "sine", [3]),
        ]
    )
    values = {0: Value(100, (1, ())), 1: Value(100, (2, ())), 2: Value(100, (3, ())), 3: Value(60, (4, ()))}
    allocations = (
        Allocation(100, ((0, 0),), is_argument=True),
        Allocation(160, ((1, 0), (2, 0))),
        Allocation(60, ((3, 0),), is_result=True),
        Allocation(4, (), is_constant=True),
    )
    timeline = compiled_timeline(module, BufferAssignment(values, allocations), NoStep())
    assert timeline.argument_bytes == 100 and timeline.set_aside_bytes == 220
    assert timeline.stored_bytes == (100, 100, 160) and timeline.operations == ("exp", "log", "sine")
    assert compiled_timeline(dataclasses.replace(module, order={}), BufferAssignment(values, ()), NoStep()) is None


def test_bytes_that_are_no_assignment_are_told():
    with pytest.raises(WireError):
        read_assignment(b"\xff\xff\xff")
    assert read_assignment(b"") == BufferAssignment({}, ())
