"""A rendered plan: what the table and the summary say, folding, and names that try to break out."""

from __future__ import annotations

import ast
import dataclasses
import math
import pathlib
import re
import sys
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import splitjax
import splitjax.plan
from splitjax import display
from splitjax.display.figures import bytes_text, percent_saved
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, Constraint, LayerPlan, LeafPlan, Memory, Plan, Purpose, StoredArray, spec_axes
from splitjax.report.plan.summary import collective_rows, memory_rows, summary
from splitjax.report.plan.table import table

MESH = MeshShape((("data", 2), ("model", 4)))


def leaf(path, shape, spec, rule="dense out", role="param", note=""):
    size = 4 * math.prod(shape) // MESH.size(spec_axes(spec))
    return LeafPlan(path, shape, "float32", role, role not in ("batch", "input"), spec, rule, note, size)


def plan_of(layers: dict[str, list[LeafPlan]], extra=(), **fields) -> Plan:
    plans = tuple(
        LayerPlan(
            name, "dense", tuple(x.path for x in leaves), tuple(x.spec for x in leaves), leaves[0].rule, leaves[0].note
        )
        for name, leaves in layers.items()
    )
    leaves = tuple(x for group in layers.values() for x in group)
    return Plan(MESH, "splitbrain", "all", ("data", "model"), (*leaves, *extra), plans, **fields)


def dense(name, shape=(256, 1024), spec=(None, "model"), **kw):
    return [leaf(f"{name}/kernel", shape, spec, **kw), leaf(f"{name}/bias", shape[-1:], spec[-1:])]


SMALL = plan_of(
    {
        "params/Dense_0": dense("params/Dense_0"),
        "params/Head": [leaf("params/Head/kernel", (1024, 10), (), "default", note="10 does not divide")],
    },
    extra=(
        leaf("opt/mu/Dense_0/kernel", (256, 1024), (None, "model"), "follows params/Dense_0/kernel", "optimizer"),
        leaf("opt/count", (), (), "default", "optimizer"),
        leaf("stats/mean", (64,), (), "default", "statistic"),
        leaf("batch/image", (64, 256), (("data", "model"), None), "batch", "batch"),
        leaf("key", (2,), (), "input", "input"),
    ),
    constraints=(Constraint((0,), 0, ("data", "?"), "params/Dense_0", "why"),) * 3,
    gathered=("mystery at train.py:7",),
    memory=Memory(600_000, 3 * 2**20, 5 * 2**20),
    collectives=(
        Collective("all_reduce", "data", 1024, "params/Dense_0", Purpose.told("gradient")),
        Collective("all_reduce", "data", 2048, "params/Head", Purpose.told("gradient")),
        Collective("all_gather", "model", 512, "params/Dense_0", Purpose.told("crossing")),
    ),
    notes=("two updates in one step",),
)  # fmt: skip


def text_of_html(source: str) -> str:
    """The text a browser shows, cells apart."""
    parts: list[str] = []

    class Reader(HTMLParser):
        hidden = False

        def handle_starttag(self, tag, attrs):
            self.hidden = tag == "style"

        def handle_endtag(self, tag):
            self.hidden = False

        def handle_data(self, data):
            if not self.hidden:
                parts.append(data)

    Reader().feed(source)
    return " | ".join(parts)


# ---- content


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_text_table_of_a_small_plan():
    lines = str(SMALL).split("\n\n", 1)[1].splitlines()
    assert cells(lines[0]) == [
        "layer",
        "parameter",
        "kind",
        "shape",
        "spec",
        "rule",
        "per device",
        "filled: this device's part",
    ]
    assert cells(lines[2]) == [
        "params/Dense_0",
        "kernel",
        "dense",
        "(256, 1024)",
        "P(None, 'model')",
        "dense out",
        "256.0 KiB",
        4 * "█" + 12 * "░",  # 257 KiB of 1028 KiB, the largest layer
    ]
    assert cells(lines[3]) == ["bias", "(1024,)", "P('model')", "dense out", "1.0 KiB"]
    assert cells(lines[4]) == ["params/Head", "kernel", "dense", "(1024, 10)", "replicated", "default", "40.0 KiB", "█"]
    assert lines[5] == ""
    _, _, memory, sent, pairs = str(SMALL).split("\n\n")
    footer = dict(cells(line)[:2] for line in pairs.splitlines() if not line.startswith(" "))
    held, whole = 2 * 256 * 1024 + 1024 + 40960 + 4 + 256, 2 * 1024 * 1024 + 4096 + 40960 + 4 + 256
    assert footer == {
        "mesh": "data=2 x model=4 (8 devices)",
        "rules": "splitbrain; examples of whole layers lie over data x model, of split layers over data",
        "optimizer": "2 arrays, 1 split",
        "statistics": "1 array, 0 split",
        "constraints": "shardings pinned inside the step: 3",
        "batch": "batch/image (64, 256) P(('data', 'model'))",
        "inputs": "key (2,) replicated",
        "gathered": "replicated around mystery at train.py:7: no dim rule",
        "exceptions": "params/Head/kernel: 10 does not divide",
        "notes": "two updates in one step",
    }
    assert [cells(line) for line in memory.splitlines() if "─" not in line] == [
        ["memory"],
        ["per device", "on one device", "saved"],
        ["state", bytes_text(held), bytes_text(whole), percent_saved(held, whole)],
        ["of it optimizer", "256.0 KiB", "1.0 MiB", "75.0 %"],
        ["of it statistics", "256 B", "256 B", "0.0 %"],
        ["activations, if all of them live at once", "3.0 MiB"],
        ["peak, if everything lives at once (no bound)", "5.0 MiB"],
    ]
    assert [cells(line) for line in sent.splitlines() if "─" not in line] == [
        ["sent per device and step"],
        ["collective", "number", "bytes"],
        ["all_reduce over data", "2", "3.0 KiB"],
        ["all_gather over model", "1", "512 B"],
        ["all", "3", "3.5 KiB"],
    ]
    assert "1 follow their parameter, 1 default" in str(SMALL)


def test_the_first_lines_say_what_is_saved_what_is_sent_and_what_to_try():
    first = str(SMALL).split("\n\n")[0].splitlines()
    held, whole = 2 * 256 * 1024 + 1024 + 40960 + 4 + 256, 2 * 1024 * 1024 + 4096 + 40960 + 4 + 256
    assert first == [
        f"saves  {percent_saved(held, whole)} of the state: each device holds {bytes_text(held)} of"
        f" {bytes_text(whole)}",
        "sends  3.5 KiB a device and step, of it 3.0 KiB by all_reduce over data",
        "next   step.report(state, batch): what XLA makes of it",
    ]


def test_where_nothing_is_saved_the_first_lines_say_so():
    mesh = MeshShape((("data", 8),))
    kernel = leaf("params/w", (256, 256), ())
    moment = dataclasses.replace(kernel, path="opt/w", role="optimizer", rule="follows params/w")
    plan = Plan(mesh, "splitbrain", "all", ("data",), (kernel, moment), ())
    saves, _, *following = " ".join(str(plan).split()).split(" sends ")[0], None, str(plan).split("next")[1]
    held = bytes_text(2 * kernel.bytes_per_device)
    assert (
        saves
        == f"saves nothing: each device holds the whole state, {held}, as the rules use data=8 for the batch alone"
    )
    assert "shard_state=True: 256.0 KiB of optimizer state" in " ".join(following[0].split())
    one = Plan(MeshShape((("data", 1),)), "splitbrain", "all", (), (kernel,), ())
    assert "as there is one device" in str(one) and "step.report" in str(one)


def test_a_plan_does_not_contradict_itself_about_examples():
    """An array that lies over fewer axes than the batch says why."""
    label = leaf("batch/label", (64,), ("data",), "batch", "batch")
    plan = dataclasses.replace(SMALL, leaves=(*SMALL.leaves, label))
    text = display.show(plan, width=200)
    assert "batch/label (64,) P('data'), as the split layers have their examples" in text
    assert "batch/image (64, 256) P(('data', 'model'))\n" in text
    assert "examples of whole layers lie over data x model, of split layers over data" in text
    by_data = dataclasses.replace(plan, replicated_batch="data", batch_axes=("data",))
    assert "examples lie over data\n" in display.show(by_data, width=200)
    assert "behind split layers" not in display.show(by_data, width=200)


def test_a_simulated_peak_is_an_estimate_with_a_bound_and_what_is_alive():
    """What is alive at the peak stands by layer; arrays that differ in a number of their layer's name are one row."""
    arrays = [StoredArray((64, 64), 4096, "dot_general", f"params/block{n}/up") for n in range(3)]
    arrays += [StoredArray((64, 256), 8192, "exp", "params/Head"), StoredArray((8,), 32, "iota")]
    memory = Memory(600_000, 3 * 2**20, 5 * 2**20, 6 * 2**20, tuple(arrays))
    plan = dataclasses.replace(SMALL, memory=memory)
    sections = {section.splitlines()[0]: section.splitlines()[3:] for section in str(plan).split("\n\n")}
    assert [cells(line) for line in sections["memory"][3:]] == [
        ["arguments: state, batch, others", "2.0 MiB"],
        ["beside them at the peak, estimated", "3.0 MiB"],
        ["peak, estimated", "5.0 MiB"],
        ["peak, at most (upper bound)", "6.0 MiB"],
    ]
    assert [cells(line) for line in sections["stored at the peak, beside the arguments"]] == [
        ["params/block*/up", "3 x dot_general", "(64, 64)", "12.0 KiB"],
        ["params/Head", "exp", "(64, 256)", "8.0 KiB"],
        ["iota", "(8,)", "32 B"],
        ["all else", bytes_text(3 * 2**20 - 3 * 4096 - 8192 - 32)],
    ]
    assert "stored at the peak" not in str(SMALL)
    again = Plan.from_json(plan.to_json())
    assert again == plan and str(again) == str(plan)


def test_html_says_what_the_text_says():
    shown = text_of_html(SMALL._repr_html_())
    for group in table(SMALL):
        for row in group:
            for cell in (
                row.layer,
                row.param,
                row.kind,
                str(row.shape),
                row.spec,
                row.rule,
                bytes_text(row.device_bytes),
            ):
                assert cell in shown
    for row in (*memory_rows(SMALL), *collective_rows(SMALL)):
        assert all(cell in shown for cell in row)
    for title, lines in summary(SMALL):
        assert title in shown and all(line in shown for line in lines)


def test_html_bars_show_the_share_of_a_device():
    source = display.html(SMALL)
    bars = re.findall(r'class="bar" style="width: (\d+)px" title="([^"]*)"><span style="width: ([\d.]+)%"', source)
    assert [bar[0] for bar in bars] == ["100", str(round(100 * 40960 / (1024 * 1024 + 4096)))]
    assert [bar[2] for bar in bars] == ["25.0", "100.0"]
    assert bars[0][1] == "257.0 KiB per device of 1.0 MiB: 75.0 % saved"


def test_empty_plan_renders():
    empty = Plan(MESH, "none", "data", (), (), ())
    assert "8 devices" in str(empty) and "every device has all examples" in str(empty)
    assert str(empty).startswith("saves  nothing: the step has no state\nsends  nothing\n")
    assert "8 devices" in text_of_html(display.html(empty))


def test_parameter_without_layer_is_shown():
    plan = plan_of({}, extra=(leaf("params/lonely", (8,), ()),))
    assert "params/lonely" in str(plan)


def test_a_layer_that_is_one_array_says_its_path_once():
    (group,) = table(plan_of({"params/position": [leaf("params/position", (8, 4), ())]}))
    assert [(row.layer, row.param) for row in group] == [("params/position", "position")]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (5 * 2**50, "5120.0 TiB")],
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text


# ---- width and plainness


def test_width(monkeypatch):
    wide = plan_of({f"params/{'x' * 70}_{c}": dense(f"params/{'x' * 70}_{c}", rule="r" * 60) for c in "ab"})
    assert max(map(len, str(wide).splitlines())) == 120  # captured output is no terminal

    class Terminal:
        def __init__(self, stream):
            self._stream = stream

        def isatty(self):
            return True

        def __getattr__(self, name):
            return getattr(self._stream, name)

    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    for columns, expected in (("140", 140), ("300", 160), ("20", 60)):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, str(wide).splitlines())) == expected
    narrow = display.show(wide, width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.replace("\n", "").count("x") >= 2 * 70  # folded, never cut


def test_no_colour_codes_whatever_the_environment(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in str(SMALL)


def test_the_plan_loads_rendering_only_when_shown():
    tree = ast.parse(pathlib.Path(splitjax.plan.__file__).read_text())
    names = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert names and not any("report" in name or "rich" in name for name in names)


# ---- names that try to break out


HOSTILE = "<script>alert('x')</script>&\"[bold red]:smile:\x1b[31m\n"


def test_hostile_names_are_inert():
    plan = plan_of(
        {HOSTILE: [leaf(f"{HOSTILE}/{HOSTILE}", (8,), (), HOSTILE, note=HOSTILE)]},
        extra=(leaf(f"b{HOSTILE}", (8,), (), HOSTILE, "batch"), leaf(f"o{HOSTILE}", (8,), (), HOSTILE, "optimizer")),
        gathered=(HOSTILE,), notes=(HOSTILE,),
        collectives=(Collective(HOSTILE, HOSTILE, 1, HOSTILE, Purpose.told(HOSTILE)),),
    )  # fmt: skip
    plan = dataclasses.replace(plan, rules=HOSTILE)
    source = display.html(plan)
    assert "<script" not in source and "alert('" not in source and "\x1b" not in source
    visible = HOSTILE.replace("\x1b", "\\x1b").replace("\n", "\\n")
    assert visible in text_of_html(source)
    text = display.show(plan, width=600)
    _, grid, footer = text.split("\n\n", 2)
    assert "\x1b" not in text  # and no markup, no emoji, no line break:
    assert grid.count(visible) == 3 and footer.count(visible) >= 6


def test_html_is_self_contained():
    assert not re.search(r"https?:|src=|@import|url\(", display.html(SMALL))


# ---- folding


def blocks(count, kinds=("attention/query", "mlp/up", "mlp/down")):
    return {f"params/blocks_{i}/{kind}": dense(f"params/blocks_{i}/{kind}") for i in range(count) for kind in kinds}


def test_equal_blocks_are_folded():
    plan = plan_of({"params/embed": dense("params/embed"), **blocks(32), "params/head": dense("params/head")})
    groups = table(plan)
    assert [group[0].layer for group in groups] == [
        "params/embed",
        "params/blocks_[0-31]/attention/query",
        "params/blocks_[0-31]/mlp/up",
        "params/blocks_[0-31]/mlp/down",
        "params/head",
    ]
    assert [row.repeat for row in groups[1]] == [32, 32]
    (line,) = [line for line in str(plan).splitlines() if line.startswith("params/blocks_[0-31]/mlp/up")]
    assert cells(line)[-2:] == ["32", "256.0 KiB"] and "each, per" in str(plan).split("\n\n")[1].splitlines()[0]
    total = sum(row.device_bytes * row.repeat for group in groups for row in group)
    assert total == sum(x.bytes_per_device for x in plan.leaves)


def test_equal_layers_within_equal_blocks_fold_by_block():
    plan = plan_of(blocks(8, kinds=("Conv_0", "Conv_1", "Conv_2", "Conv_3")))
    assert [group[0].layer for group in table(plan)] == [f"params/blocks_[0-7]/Conv_{k}" for k in range(4)]


def test_two_equal_layers_are_not_folded():
    assert len(table(plan_of(blocks(2)))) == 6


def test_indices_may_start_anywhere_and_cross_ten():
    layers = {f"Conv_{i}": dense(f"Conv_{i}") for i in range(7, 13)}
    assert [group[0].layer for group in table(plan_of(layers))] == ["Conv_[7-12]"]


@pytest.mark.parametrize(
    "change",
    [dict(spec=("model", None)), dict(shape=(256, 512)), dict(rule="other")],
)
def test_a_block_that_differs_is_shown(change):
    layers = {f"Dense_{i}": dense(f"Dense_{i}", **(change if i == 4 else {})) for i in range(9)}
    assert [group[0].layer for group in table(plan_of(layers))] == ["Dense_[0-3]", "Dense_4", "Dense_[5-8]"]


def test_gaps_and_padded_numbers_are_not_folded():
    assert len(table(plan_of({f"Dense_{i}": dense(f"Dense_{i}") for i in (0, 2, 4, 6)}))) == 4
    assert len(table(plan_of({f"Dense_{i:02d}": dense(f"Dense_{i:02d}") for i in range(3)}))) == 3
    assert len(table(plan_of({f"a{i}_b{i}": dense(f"a{i}_b{i}") for i in range(3)}))) == 3


def test_equal_notes_are_joined():
    layers = {f"D{c}": [leaf(f"D{c}/w", (8, 10), (), note="10 does not divide")] for c in "abcdef"}
    (line,) = dict(summary(plan_of(layers)))["exceptions"]
    assert line == "Da/w, Db/w, Dc/w, Dd/w and 2 more: 10 does not divide"


@pytest.mark.parametrize("rules", ["fsdp", "splitbrain"])
def test_gathered_weights_do_not_bring_examples_together(rules):
    """Under `fsdp` a device computes whole layers for its own examples, though their weights are stored in parts."""

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w["a"]) @ w["b"]))(state)
        return jax.tree.map(lambda w, grad: w - grad, state, grads), loss

    state = {"a": jax.ShapeDtypeStruct((64, 64), "float32"), "b": jax.ShapeDtypeStruct((64, 64), "float32")}
    plan = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules=rules).plan(
        state, jax.ShapeDtypeStruct((16, 64), "float32")
    )
    said = {
        "fsdp": "fsdp; examples lie over data x model\n",
        "splitbrain": "examples of whole layers lie over data x model, of split layers over data\n",
    }
    assert said[rules] in display.show(plan, width=200)
