"""What a planned collective is for is data: its sentence is rendered from it, and nothing reads that again."""

from __future__ import annotations

import ast
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax.errors import PlanError
from splitjax.plan import Collective, Phase, Plan, Purpose, PurposeKind, beside
from splitjax.report.rows import missing_rows, planned_rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Methods and functions that search a text, or take it apart.
SEARCHES = frozenset(
    "startswith endswith partition rpartition split rsplit splitlines removeprefix removesuffix replace find rfind "
    "index rindex count translate strip lstrip rstrip match fullmatch search sub subn findall finditer".split()
)
# Reasons that have the same name, and are not those of a collective.
OTHER_REASONS = {
    "trace", "verify", "lower", "sync",
}  # fmt: skip


def full(kind):
    """A purpose of a kind with everything that a sentence may need."""
    return Purpose(kind, Phase.BACKWARD, "net/a/kernel", "net/b", "zen", words="in words")


@pytest.mark.parametrize("kind", PurposeKind)
def test_every_kind_has_a_sentence_and_says_what_it_needs(kind):
    sentence = full(kind).sentence()
    assert sentence and "{" not in sentence and not full(kind).lacking
    bare = Purpose(kind)
    assert bare.lacking in ("phase", "leaf", "source", "scheme", "words")
    assert full(kind) != dataclasses.replace(full(kind), in_turns=True)
    assert dataclasses.replace(full(kind), in_turns=True).sentence() == f"{sentence}, each worker's in turn"


def test_no_two_kinds_say_the_same():
    sentences = [full(kind).sentence() for kind in PurposeKind]
    assert len(set(sentences)) == len(sentences)


def test_every_kind_is_predicted_somewhere():
    used = set()
    for file in (ROOT / "splitjax").rglob("*.py"):
        if file.name == "_plan_purpose.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id in ("Kind", "PurposeKind") else set()
    assert PurposeKind.__members__.keys() - used == {"TOLD"}


@pytest.mark.parametrize(
    ("path", "layer", "text"),
    [
        ("net/a/kernel", "", "net/a/kernel"), ("net/a/kernel", "net/a", "kernel"), ("net/a", "net/a", "it"),
        ("net/a2/kernel", "net/a", "a2/kernel"), ("c", "c", "it"), ("other/c", "net/c", "other/c"), ("ab", "a", "ab"),
    ],
)  # fmt: skip
def test_a_path_beside_a_layer(path, layer, text):
    assert beside(path, layer) == text


@pytest.mark.parametrize("layer", ["a", "b", "c", "in", "layer", "column", "cotangent", "of"])
def test_words_of_a_sentence_are_not_taken_for_a_layer_s_name(layer):
    sentence = Purpose(PurposeKind.COLUMNS_COTANGENT, Phase.BACKWARD).sentence(layer)
    assert sentence == "backward: input cotangent of a column-split layer, summed over its columns"
    gradient = Purpose(PurposeKind.GRADIENT, Phase.BACKWARD, f"{layer}/kernel")
    assert gradient.sentence(layer) == "gradient of kernel"
    assert dataclasses.replace(gradient, leaf=layer).sentence(layer) == "gradient of it"


def uses_of_reasons(file):
    """Lines at which a file compares, searches or takes apart a reason (`.why`, `sentence()`, or a variable that is one
    of them)."""

    def is_reason(node, names):
        if isinstance(node, ast.Attribute):
            return node.attr == "why"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr == "sentence" or (node.func.attr in SEARCHES and is_reason(node.func.value, names))
        return isinstance(node, ast.Name) and node.id in names

    tree = ast.parse(file) if isinstance(file, str) else ast.parse(file.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                names |= {x.id for x, value in pairs if isinstance(x, ast.Name) and is_reason(value, ())}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(is_reason(x, names) for x in (node.left, *node.comparators)):
            lines.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            if any(is_reason(x, names) for x in (node.func.value, *node.args)):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source",
    [
        'x = c.why == "a"', 'x = c.why in gone', 'x = "a" in c.why', 'x = c.why.startswith("gradient")',
        'import re\nx = re.fullmatch("a", c.why)', 'why = c.why\nif why.endswith("x"): pass',
        'a, why = f(c), c.why\nx = why.removeprefix("b")', 'x = c.why.partition(", onto")[0] == y',
        'x = c.purpose.sentence().find("a")',
    ],
)  # fmt: skip
def test_the_check_finds_what_matches_on_reasons(source):
    assert uses_of_reasons(source)


def test_no_module_matches_on_the_reason_of_a_collective():
    for file in sorted((ROOT / "splitjax").rglob("*.py")):
        room = file.relative_to(ROOT / "splitjax").parts[0]
        if room not in OTHER_REASONS:
            assert not uses_of_reasons(file), f"{file}: lines {uses_of_reasons(file)}"


# ---- JSON


def plan_with(*purposes):
    collectives = tuple(Collective("all_reduce", "data", 8, "a", purpose) for purpose in purposes)
    return Plan(splitjax.mesh.MeshShape((("data", 2),)), "r", "data", (), (), (), collectives=collectives)


def test_every_purpose_is_written_and_read_as_data():
    plan = plan_with(*map(full, PurposeKind), dataclasses.replace(full(PurposeKind.ENTER_ROWS), in_turns=True))
    assert Plan.from_json(plan.to_json()) == plan and plan.diff(Plan.from_json(plan.to_json())) == ()
    written = json.loads(plan.to_json())["collectives"][0]
    assert written["purpose"]["kind"] == "gradient" and written["why"] == "gradient of net/a/kernel"


def test_a_plan_of_before_has_its_sentences_in_words():
    plan = plan_with(Purpose.told("gradient of a/kernel"))
    entry = json.loads(plan.to_json())["collectives"][0]
    assert entry == {"op": "all_reduce", "axis": "data", "bytes": 8, "layer": "a", "why": "gradient of a/kernel"}
    assert Plan.from_json(plan.to_json()).collectives[0].why == "gradient of a/kernel"


def test_a_plan_of_before_differs_by_what_can_be_compared():
    before = plan_with(Purpose.told("gradient of a/kernel"), Purpose.told("gradient of a/bias"))
    now = plan_with(*(Purpose(PurposeKind.GRADIENT, Phase.BACKWARD, leaf) for leaf in ("a/kernel", "a/bias")))
    assert before.diff(now) == now.diff(before) == ()
    larger = dataclasses.replace(now, collectives=(dataclasses.replace(now.collectives[0], bytes=16),))
    assert len(before.diff(larger)) == 2  # other bytes, and one collective less
    other_words = plan_with(Purpose.told("gradient of b/kernel"), Purpose.told("gradient of a/bias"))
    assert before.diff(other_words)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda c: c["purpose"].update(kind="gradeint"), "collectives[0].purpose.kind"),
        (lambda c: c["purpose"].update(phase="sideways"), "collectives[0].purpose.phase"),
        (lambda c: c["purpose"].update(leaves="a"), "collectives[0].purpose.leaves"),
        (lambda c: c["purpose"].pop("leaf"), "collectives[0].purpose.leaf"),
        (lambda c: c["purpose"].pop("kind"), "collectives[0].purpose.kind"),
        (lambda c: c.pop("why"), "collectives[0].why"),
    ],
)
def test_a_purpose_that_does_not_fit_is_an_error(change, place):
    values = json.loads(plan_with(Purpose(PurposeKind.GRADIENT, Phase.BACKWARD, "a/kernel")).to_json())
    change(values["collectives"][0])
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(values))
    assert caught.value.place == place and caught.value.remedy


def test_plans_differ_by_purposes():
    here = plan_with(Purpose(PurposeKind.GRADIENT, Phase.BACKWARD, "a/kernel"))
    there = plan_with(Purpose(PurposeKind.GRADIENT, Phase.BACKWARD, "a/bias"))
    assert here.diff(there) == (
        "collective all_reduce over data for a (gradient of a/kernel): only in the first plan",
        "collective all_reduce over data for a (gradient of a/bias): only in the second plan",
    )


# ---- A small step of an embedding bag and dense layers named a, b, c


def small_step():
    def loss(params, batch):
        hidden = jnp.mean(params["bag"][batch["x"]], axis=1)
        for name in "abc":
            hidden = jnp.tanh(hidden @ params[name]["w"] + params[name]["v"])
        return jnp.mean((hidden - batch["y"]) ** 2)

    tx = optax.sgd(0.1)

    def step(state, batch):
        value, grads = splitjax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {name: {"w": jnp.ones((8, 8)), "v": jnp.ones(8)} for name in "abc"} | {"bag": jnp.ones((64, 8))}
    batch = {"x": jnp.zeros((16, 3), "int32"), "y": jnp.zeros((16, 8))}
    return step, {"params": params, "opt": tx.init(params)}, batch


@pytest.mark.parametrize("sync", ["zen", "row_exchange", "auto"])
@pytest.mark.parametrize("assignment", ["spatial", "temporal"])
def test_a_table_that_goes_by_rows_has_no_dense_gradient_under_partial_backpropagation(sync, assignment):
    step, state, batch = small_step()
    backprop = splitjax.PartialBackprop(assignment=assignment)
    plan = splitjax.parallelize(
        step, mesh={"data": 8}, rules="data_parallel", sync=sync, backprop=backprop
    ).plan(state, batch)  # fmt: skip
    (table,) = plan.syncs
    assert table.param == "params/bag" and table.scheme != "dense"
    kinds = {one.purpose.kind for one in plan.collectives if one.purpose.leaf == "params/bag"}
    assert kinds <= {PurposeKind.GRADIENT_ROWS}
    assert {one.purpose.leaf for one in plan.collectives if one.purpose.kind == PurposeKind.GRADIENT} == {
        f"params/{name}/{leaf}" for name in "abc" for leaf in "wv"
    }


def test_a_report_names_layers_and_leaves_words_alone():
    def loss(params, batch):
        hidden = batch["x"]
        for name in "abc":
            hidden = jnp.tanh(hidden @ params[name]["w"])
        return jnp.mean(hidden**2)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {name: {"w": jnp.ones((16, 16))} for name in "abc"}
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron")
    report = parallel.report(params, {"x": jnp.ones((8, 16))})
    reasons = {row.why for row in (*planned_rows(report), *missing_rows(report))}
    assert {
        "gradient of w",
        "backward: input cotangent of a column-split layer, summed over its columns",
        "forward: partial outputs of a row-split layer",
    } <= reasons
    assert not any(word in str(report) for word in ("itotangent", "itolumn"))
