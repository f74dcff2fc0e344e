"""The `Report` value: its figures are XLA's, it survives JSON, and it prints what it holds."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax.display.figures import bytes_text
from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, Memory, Phase, Purpose, PurposeKind
from splitjax.report.attribute import ReportedCollective
from splitjax.report.hlo import CompiledCollective
from splitjax.report.value import CompiledMemory, Report, ReportMemory
from tests.report.programs import BATCH, MESH, PARAMS, mean_square, narrow, step_of


@pytest.fixture(scope="module")
def trained():
    """A step with its state and report."""
    step, state = step_of(mean_square, optax.adam(1e-3))
    parallel = splitjax.parallelize(step, mesh=MESH)
    return parallel, state, parallel.report(state, BATCH)


def test_memory_is_what_the_plan_predicted_and_what_xla_says(trained):
    step, state, report = trained
    stats = step.lower(state, BATCH).compile().memory_analysis()
    plan = step.plan(state, BATCH)
    assert report.memory.predicted == plan.memory and report.plan_digest == plan.digest
    compiled = report.memory.compiled
    assert (compiled.argument_bytes, compiled.temporary_bytes, compiled.output_bytes, compiled.alias_bytes) == (
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
    )
    assert (
        compiled.total_bytes
        == compiled.argument_bytes + compiled.temporary_bytes + compiled.output_bytes - compiled.alias_bytes
    )
    assert compiled.argument_bytes >= plan.memory.state_bytes  # the state, and the batch
    assert compiled.alias_bytes == plan.memory.state_bytes  # donated


def test_sums_are_of_all_collectives(trained):
    step, state, report = trained
    planned = step.plan(state, BATCH).collectives
    for totals in (report.by_op.values(), report.by_layer.values(), [report.total]):
        assert sum(one.compiled_bytes for one in totals) == sum(one.bytes for one in report.collectives)
        assert sum(one.compiled_count for one in totals) == len(report.collectives)
        assert sum(one.predicted_bytes for one in totals) == sum(one.bytes for one in planned)
        assert sum(one.predicted_count for one in totals) == len(planned)
    assert report.by_op["all_reduce", "data"].predicted_bytes == sum(
        one.bytes for one in planned if (one.op, one.axis) == ("all_reduce", "data")
    )
    assert "params/b" in report.by_layer and report.by_layer[""].predicted_count == 0  # the loss


def test_json_round_trip(trained):
    report = trained[-1]
    text = report.to_json()
    assert text.isascii() and Report.from_json(text) == report
    data = json.loads(text)
    assert data["mesh"] == [["data", 2], ["model", 4]] and data["step"] == "step" and data["platform"] == "cpu"
    assert data["memory"]["compiled"]["argument_bytes"] == report.memory.compiled.argument_bytes
    first = data["collectives"][0]
    assert {"op", "axis", "bytes", "layer", "source", "cause", "rule", "planned", "shape", "trips"} <= first.keys()
    assert sum(one["compiled_bytes"] for one in data["by_op"]) == report.total.compiled_bytes
    assert len([line for line in text.splitlines() if line.startswith('    {"op"')]) == len(report.collectives) + len(
        report.missing
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "step": "s"}', '"x"'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(PlanError, match="not the JSON of a report"):
        Report.from_json(text)


GRADIENT = Purpose(PurposeKind.GRADIENT, Phase.BACKWARD, "net/a/kernel")
STORED = Purpose(PurposeKind.STORED_WEIGHT, Phase.FORWARD, "net/b/kernel")


def made(**fields):
    """A report with one planned, one unplanned, one unattributed and one missing collective."""

    def compiled(op, sent, **more):
        return CompiledCollective(op=op, axis="data", bytes=sent, dtype="float32", shape=(4,), group_size=2, **more)

    planned = Collective("reduce_scatter", "data", 2048, "net/a", GRADIENT)
    base = Report(
        "step",
        MeshShape((("data", 2),)),
        "fsdp",
        "cpu",
        "0" * 64,
        ReportMemory(Memory(1024, 2048, 4096), CompiledMemory(1000, 3000, 900, 800, 5000)),
        (
            ReportedCollective(
                compiled("all_reduce", 4096),
                "net/a",
                "backward",
                planned.why,
                "dense",
                "dataflow",
                planned,
                "all_reduce for reduce_scatter",
                "/home/me/train.py:12 (loss)",
            ),
            ReportedCollective(
                compiled("all_gather", 512),
                "",
                "forward",
                "sort over a dim that is split over data",
                source="/x/train.py:7 (f)",
            ),
            ReportedCollective(compiled("all_to_all", 3, trips_known=False), "", "update", ""),
        ),
        (Collective("all_gather", "data", 77, "net/b", STORED),),
    )
    return dataclasses.replace(base, **fields)


def test_parts_of_a_report():
    report = made()
    assert [one.op for one in report.unplanned] == ["all_gather", "all_to_all"]
    assert [one.op for one in report.unattributed] == ["all_to_all"]
    assert report.collectives[0].predicted_bytes == 2048 and report.collectives[1].predicted_bytes == 0
    # What has another operation, axis or size than planned counts as planned under its own op.
    assert (
        report.by_op["reduce_scatter", "data"].predicted_bytes == 2048
        and report.by_op["reduce_scatter", "data"].compiled_bytes == 0
    )
    assert "1 unattributed" in repr(report)


def test_text_shows_every_part():
    text = str(made())
    for title in (
        "memory per device",
        "sent per device and step",
        "by layer",
        "as planned",
        "unplanned",
        "planned, but not in the compiled step",
    ):
        assert f"\n{title}\n" in text
    words = " ".join(text.split())
    assert "gradient of kernel; all_reduce for reduce_scatter" in words and "train.py:12" in words
    assert "sort over a dim that is split over data" in words and "train.py:7" in words
    assert "unattributed; bytes of one turn of a loop of unknown length" in words
    assert "total 4.0 KiB" in words.replace("  ", " ") and bytes_text(4100) == "4.0 KiB"  # 1000 + 3000 + 900 - 800
    assert (
        "3 collectives a step: 1 planned (1 with another op, axis or size), 2 unplanned, 1 unattributed; 1 planned but"
        " missing" in words
    )
    assert "1 planned, 2 unplanned" in str(
        made(collectives=tuple(dataclasses.replace(one, differs="") for one in made().collectives))
    )
    assert "results in buffers of their own" in words
    assert all(len(line) <= 120 for line in text.splitlines())


def test_text_without_collectives_or_memory():
    text = str(made(collectives=(), missing=(), memory=ReportMemory(Memory(1, 2, 3), None)))
    assert "not told by the backend" in text and "as planned" not in text and "0 collectives a step" in text


def test_equal_blocks_are_folded():
    one = made().collectives[0]
    blocks = tuple(
        dataclasses.replace(
            one,
            layer=f"net/block{i}",
            planned=Collective("reduce_scatter", "data", 2048, f"net/block{i}", GRADIENT),
        )
        for i in range(12)
    )
    text = str(made(collectives=blocks))
    assert "net/block*" in text and "12 x all_reduce" in text and "net/block3" not in text
    assert "each of 12: net/block*" in text and "48.0 KiB" in text  # 12 x 4096


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert all(not name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text.append(data)


def test_html_holds_the_same_and_escapes_names():
    evil = '<script>alert("1")</script>&'
    base = made()
    report = dataclasses.replace(
        base,
        step=evil,
        missing=(dataclasses.replace(base.missing[0], layer=evil, purpose=Purpose.told(evil)),),
        collectives=tuple(
            dataclasses.replace(one, layer=evil, cause=evil, rule=evil, source=f"{evil}:1 (f)")
            for one in base.collectives
        ),
    )
    source = report._repr_html_()
    page = Page()
    page.feed(source)
    assert "script" not in page.tags and evil in "".join(page.text)
    assert "<script>" not in source.replace("<style>", "")
    plain = base._repr_html_()
    for word in (
        "memory per device",
        "as planned",
        "unplanned",
        "train.py:12",
        "all_reduce for reduce_scatter",
        "net/b",
    ):
        assert word in plain
    assert re.findall(r"<(\w+)[^>]*>", plain).count("table") == 6


# ---- where reports come from


def test_steps_made_by_like_report_too(trained):
    step, state, _ = trained
    evaluate = step.like(lambda state, batch: mean_square(state["params"], batch))
    report = evaluate.report(state, BATCH)
    assert report.unattributed == () and {one.phase for one in report.collectives} == {"forward"}
    assert report.memory.compiled.alias_bytes == 0  # nothing is donated


def test_arrays_serve_as_well_as_shapes_and_are_not_consumed(trained):
    _, _, wanted = trained
    step, _ = step_of(mean_square, optax.adam(1e-3))
    fill = lambda tree: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), tree)
    params = fill(PARAMS)
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    report = splitjax.parallelize(step, mesh=MESH).report(state, fill(BATCH))
    # all but the stack below the step
    parts = lambda one: (one.op, one.axis, one.bytes, one.layer, one.cause, one.source)
    assert (
        list(map(parts, report.collectives)) == list(map(parts, wanted.collectives)) and report.memory == wanted.memory
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_keyword_arguments_and_static_ones():
    def step(state, batch, *, power=2):
        value, grads = splitjax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["a"]) ** power))(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    parallel = splitjax.parallelize(step, mesh=MESH, static_argnames="power")
    report = parallel.report({"a": PARAMS["a"]}, BATCH, power=4)
    assert "gradient of a" in {one.cause for one in report.collectives} and report.unattributed == ()


def test_equinox_modules():
    eqx = pytest.importorskip("equinox")
    import splitjax.equinox

    optimizer = optax.adam(1e-3)
    model = eqx.filter_eval_shape(lambda key: eqx.nn.MLP(32, 32, 64, 2, key=key), jax.random.key(0))

    @splitjax.equinox.parallelize(mesh=MESH, state_argnums=(0, 1), batch_argnums=(2,))
    def step(model, opt, batch):
        value, grads = splitjax.equinox.value_and_grad(lambda m: jnp.mean((jax.vmap(m)(batch["x"]) - batch["y"]) ** 2))(
            model
        )
        updates, opt = optimizer.update(grads, opt, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt, value

    opt = eqx.filter_eval_shape(lambda m: optimizer.init(eqx.filter(m, eqx.is_array)), model)
    report = step.report(model, opt, BATCH)
    assert report.unattributed == () and report.missing == ()
    assert {one.layer for one in report.collectives} >= {"model/layers/0", "model/layers/1", "model/layers/2"}


def test_haiku_modules():
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(
        hk.transform(
            lambda x: hk.Sequential([hk.Linear(64), jax.nn.relu, hk.Linear(32), hk.LayerNorm(-1, True, True)])(x)
        )
    )
    params = jax.eval_shape(net.init, jax.random.key(0), BATCH["x"])

    def step(state, batch):
        value, grads = splitjax.value_and_grad(lambda p: jnp.mean((net.apply(p, batch["x"]) - batch["y"]) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    report = splitjax.parallelize(step, mesh=MESH).report(params, BATCH)
    assert report.unattributed == () and report.missing == ()
    # 16 examples a device and 32 features: only the axis tells a statistic per example from one per feature.
    kind_of = lambda one: one.planned and one.planned.purpose.kind
    norms = {one.phase: one.axis for one in report.collectives if kind_of(one) == PurposeKind.REDUCED_FEATURES}
    assert norms == {"forward": "model", "backward": "model"}
    assert {one.compiled.shape for one in report.unplanned} == {()}


@pytest.fixture
def cache(tmp_path):
    """JAX's cache of compiled programs, on and empty."""
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_enable_compilation_cache": True,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_cached_program_of_other_lines_is_not_reported(cache):
    """JAX's compilation cache goes by operations alone: without metadata in its key the second report would show the
    first's lines."""

    def one(params, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])

    def another(params, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])

    def lines(loss):
        step, state = step_of(loss)
        first = loss.__code__.co_firstlineno
        report = splitjax.parallelize(step, mesh=MESH).report(state, BATCH)
        return {int(found.source.rsplit(":", 1)[1].split()[0]) - first for found in report.collectives if found.layer}

    # Fills the cache with a program that has the first one's lines.
    step, state = step_of(one)
    splitjax.parallelize(step, mesh=MESH).lower(state, BATCH).compile()
    assert any(cache.iterdir())
    assert lines(another) == {1} == lines(one)
    assert jax.config.jax_compilation_cache_include_metadata_in_key is False  # as it was


@pytest.mark.tpu_aot
def test_a_program_for_a_topology_is_not_looked_for_in_a_cache(cache):
    """JAX writes such a program into its cache and cannot read it again, of which it warns (an error in tests)."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    first, second = (splitjax.parallelize(step_of(mean_square)[0], mesh=mesh) for _ in range(2))
    state = jax.eval_shape(lambda: step_of(mean_square)[1])
    assert first.report(state, BATCH).collectives == second.report(state, BATCH).collectives
    assert not any(cache.iterdir())


def test_an_evaluation_of_an_nnx_model():
    step, (model, optimizer, batch) = narrow("mlp", "nnx")
    step.plan(model, optimizer, batch)
    report = step.like(lambda model, batch: jnp.mean(model(batch["image"]))).report(model, batch)
    assert report.unattributed == () and "model/dense2" in {one.layer for one in report.collectives}
    assert {one.phase for one in report.collectives} == {"forward"}


def test_a_shipped_nnx_model_prints():
    step, arguments = narrow("mlp", "nnx", "megatron")
    text = str(step.report(*arguments))
    assert "model/dense1" in text and "mlp.py:" in text and "0 unattributed" in text
