"""The corpus notices what it should, and nothing else; a few of its cells are those that the repository holds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.corpus import cells as product
from benchmarks.corpus import compare as comparing
from benchmarks.corpus.canonical import canonical_plan, digest
from benchmarks.corpus.cells import LAYOUTS, Cell, Unit, cells_of, combines
from benchmarks.corpus.cover import cover, pairs_of
from benchmarks.corpus.exceptions import KNOWN, LIMIT
from benchmarks.corpus.main import main
from benchmarks.corpus.modules import ModuleError, canonical_module, texts
from benchmarks.corpus.record import Recording, record_plans, record_programs
from benchmarks.corpus.steps import parallel, ready, spec_of
from benchmarks.corpus.store import StoreError, Summary, baseline, load, store, summary_of
from benchmarks.corpus.worker import ROOT, Worker

MODULE = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=8

%add.1 (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(f32[] %x.1, f32[] %y.1)
}

%body.2 (p.1: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  ROOT %negate.1 = f32[8,4]{1,0} negate(f32[8,4]{1,0} %p.1)
}

ENTRY %main.3 (a.1: f32[8,4], b.1: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %a.1 = f32[8,4]{1,0} parameter(0), metadata={op_name="state['a']"}
  %b.1 = f32[8,4]{1,0} parameter(1)
  %constant.1 = f32[4]{0} constant({1, 2, 3, 4})
  %broadcast.1 = f32[8,4]{1,0} broadcast(f32[4]{0} %constant.1), dimensions={1}
  %fusion.1 = f32[8,4]{1,0} fusion(f32[8,4]{1,0} %a.1), kind=kLoop, calls=%body.2, metadata={op_name="jit(step)/a\\"b{"}
  %subtract.1 = f32[8,4]{1,0} subtract(f32[8,4]{1,0} %fusion.1, f32[8,4]{1,0} %broadcast.1)
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(f32[8,4]{1,0} %b.1), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add.1
  ROOT %tuple.1 = (f32[8,4]{1,0}, /*index=1*/f32[8,4]{1,0}) tuple(%subtract.1, f32[8,4]{1,0} %all-reduce.1)
}
"""


def renamed(text: str) -> str:
    """Every name another, in another order; computations, too."""
    names = sorted(set(re.findall(r"%([\w.\-]+)", text)), reverse=True)
    for number, name in enumerate(names):
        text = re.sub(rf"%{re.escape(name)}(?![\w.\-])", f"%other.{number}", text)
    return text.replace("jit_step", "jit_another")


def swapped(text: str, first: str, second: str) -> str:
    """Two lines in each other's place."""
    lines = text.splitlines()
    i, j = (next(k for k, line in enumerate(lines) if line.strip().startswith(name)) for name in (first, second))
    lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "same",
    [
        renamed(MODULE),
        swapped(MODULE, "%all-reduce.1", "%constant.1"),
        renamed(swapped(MODULE, "%b.1", "%a.1")),
        MODULE.replace("channel_id=1", "channel_id=27"),
        MODULE.replace("jit(step)/a", "jit(step)/splitjax:enter:d1/a").replace("state['a']", "state['c']"),
    ],
    ids=["names", "order", "names and order", "channel", "metadata"],
)  # fmt: skip
def test_names_ids_channels_metadata_and_order_are_nothing(same):
    assert same != MODULE and canonical_module(same) == canonical_module(MODULE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("parameter(1)\n  %constant", "parameter(2)\n  %constant"),
        ("{1, 2, 3, 4}", "{1, 2, 3, 5}"),
        ("[2,4]<=[8]", "[4,2]<=[8]"),
        ("calls=%body.2", "calls=%add.1"),
        ("%fusion.1, f32[8,4]{1,0} %broadcast.1)", "%broadcast.1, f32[8,4]{1,0} %fusion.1)"),
        ("%broadcast.1 = f32[8,4]{1,0}", "%broadcast.1 = f32[8,4]{0,1}"),
        ("%broadcast.1 = f32[8,4]", "%broadcast.1 = f64[8,4]"),
        ("%sum.1 = f32[] add", "%sum.1 = f32[] maximum"), ("channel_id=1, ", ""), ("dimensions={1}", "dimensions={0}"),
        ("{0}: (0, {}, may-alias)", "{1}: (0, {}, may-alias)"),
        ("negate(f32[8,4]{1,0} %p.1)", "negate(f32[8,4]{1,0} %p.1), control-predecessors={%p.1}"),
    ],
)  # fmt: skip
def test_what_a_program_computes_is_noticed(old, new):
    assert old in MODULE
    assert canonical_module(MODULE.replace(old, new)) != canonical_module(MODULE)


def test_what_no_result_depends_on_is_kept_in_an_order_by_content():
    effect = '  %{name} = () custom-call(f32[8,4]{{1,0}} %{operand}), custom_call_target="{target}"\n'
    one, two = (
        effect.format(name="one", operand="a.1", target="%x"),
        effect.format(name="two", operand="b.1", target="y"),
    )
    at = MODULE.index("  ROOT %tuple.1")
    both, turned = (MODULE[:at] + lines + MODULE[at:] for lines in (one + two, two + one))
    assert canonical_module(both) == canonical_module(turned)
    assert canonical_module(both) != canonical_module(MODULE[:at] + one + MODULE[at:])
    assert canonical_module(both) != canonical_module(both.replace('"y"', '"z"'))


def test_text_that_is_no_module_is_an_error():
    with pytest.raises(ModuleError, match="no entry"):
        canonical_module("a plan")
    with pytest.raises(ModuleError, match=r"needs a\.1"):
        canonical_module("\n".join(line for line in MODULE.splitlines() if not line.startswith("  %a.1")))


def program(scale: np.ndarray, scope: str = "here", flipped: bool = False) -> str:
    """A compiled step with a loop, a sort, a branch and collectives."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))

    def step(x, y):
        with jax.named_scope(scope):
            first, second = (y, x) if flipped else (x, y)
            total = jax.lax.fori_loop(0, 3, lambda _, carry: carry * scale - first.sum(), second)
            ordered = jax.lax.cond(total.sum() > 0, lambda v: jnp.sort(v), lambda v: -v, total)
        return ordered

    placed = jax.ShapeDtypeStruct((32,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    (text,) = texts(jax.jit(step).lower(placed, placed).compile())
    return canonical_module(text)


def test_compiled_programs_are_the_same_in_other_scopes_and_differ_in_constants_and_arguments():
    scale = np.linspace(0.0, 1.0, 32, dtype=np.float32)
    mine = program(scale)
    assert mine == program(scale, scope="there")
    changed = scale.copy()
    changed[17] = 0.25
    assert mine != program(changed), "large constants are printed in full"
    assert mine != program(scale, flipped=True)
    assert "metadata" not in mine and "channel_id" not in mine and "while(" in mine and "sort(" in mine


def test_cells_are_every_combination_once():
    every = list(product.product())
    assert len(every) == len(set(every)) and all(Cell.parse(cell.name) == cell for cell in every)
    values = [set(dataclasses.astuple(cell)[k] for cell in every) for k in range(len(product.FIELDS))]
    assert values[0] == set(product.MODELS) and values[2:] == [
        {rules for rules, _ in LAYOUTS}, set(product.MESHES), set(product.SYNCS), set(product.PARTIALS),
        set(product.GROUP_COMMS), set(product.MICROBATCHES), set(product.STATES),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="9 values"):
        Cell.parse("mlp/linen")


def test_every_shipped_model_and_rule_set_is_in_the_corpus():
    from splitjax import models

    assert set(product.MODELS) == set(models.NAMES) and set(product.LIBRARIES) == set(models.LIBRARIES)
    assert {rules for rules, _ in LAYOUTS} == {file.stem for file in (ROOT / "sharding_rules").glob("*.toml")}


def test_what_cannot_be_compiled_is_what_has_batch_norm():
    """Refused with a typed error when it is planned."""
    from splitjax.errors import MicrobatchError, PartialError

    cell = Cell("resnet18", "linen", "data_parallel", "8", microbatches="4")
    assert not product.compiles(cell) and product.compiles(dataclasses.replace(cell, microbatches="1"))
    made = ready(cell.unit)
    with pytest.raises(MicrobatchError, match="batch statistics"):
        parallel(cell, made).plan(*made.arguments)
    drops = Cell("efficientnet_b0", "linen", "data_parallel", "8", partial=product.BRANCHES)
    assert not product.compiles(drops) and product.compiles(dataclasses.replace(drops, partial=product.FULL))
    made = ready(drops.unit)
    with pytest.raises(PartialError, match="draws random numbers"):
        parallel(drops, made).plan(*made.arguments)
    norms = {model for model in product.MODELS if spec_of(Unit(model, "linen", "1")).has_batch_stats}
    assert norms == set(product.WITH_BATCH_NORM)


@pytest.mark.parametrize(
    ("cell", "plain"),
    [
        (Cell("mlp", "linen", "data_parallel", "8", sync="zen"), Cell("mlp", "linen", "data_parallel", "8")),
        (Cell("mlp", "linen", "megatron", "2x4", group_comm="modulo"), Cell("mlp", "linen", "megatron", "2x4")),
        (Cell("mlp", "linen", "fsdp", "8", group_comm="turns"), Cell("mlp", "linen", "fsdp", "8")),
    ],
)  # fmt: skip
def test_what_does_not_combine_makes_no_difference(cell, plain):
    assert not combines(cell) and combines(plain)
    made = ready(cell.unit)
    mine, other = (canonical_plan(parallel(one, made).plan(*made.arguments).to_json()) for one in (cell, plain))
    assert mine == other


def test_a_cover_has_every_pair_that_there_is():
    every = [
        *cells_of(Unit("deepfm", "linen", "4")),
        *cells_of(Unit("mlp", "nnx", "1")),
        *cells_of(Unit("resnet18", "nnx", "1")),
    ]
    taken = cover(every, 70)
    assert pairs_of(taken) == pairs_of(every) and len(set(taken)) == len(taken) <= 70
    assert taken == cover(every[::-1], 70), "the order in which cells are given is nothing"
    some = cover(every, 70, taken[5:9])
    assert not set(some) & set(taken[5:9]) and pairs_of([*some, *taken[5:9]]) == pairs_of(every)
    with pytest.raises(ValueError, match="cannot have all pairs"):
        cover(every, 12)
    by_hand = {
        (i, a, j, b)
        for cell in every
        for (i, a), (j, b) in itertools.combinations(enumerate(dataclasses.astuple(cell)), 2)
    }
    assert {(i, a, j, b) for (i, a), (j, b) in pairs_of(every)} == by_hand


def test_sentences_of_a_plan_are_nothing_and_bytes_are_something():
    made = ready(Unit("mlp", "linen", "1"))
    plan = parallel(Cell("mlp", "linen", "splitbrain", "2x4"), made).plan(*made.arguments)
    mine = canonical_plan(plan.to_json())
    values = json.loads(plan.to_json())
    assert [one["why"] for one in values["collectives"]] and "why" not in mine

    def changed(change) -> str:
        copy = json.loads(json.dumps(values))
        change(copy)
        return canonical_plan(json.dumps(copy))

    assert mine == changed(lambda plan: plan["collectives"][0].update(why="another sentence"))
    assert mine == changed(lambda plan: plan["notes"].append("a hint"))
    for change in (
        lambda plan: plan["collectives"][0].update(bytes=plan["collectives"][0]["bytes"] + 1),
        lambda plan: plan["collectives"][0].update(axis="data"),
        lambda plan: plan["collectives"].reverse(),
        lambda plan: plan["leaves"][3].update(spec=["data"]),
        lambda plan: plan["memory"].update(peak_bytes=1),
        lambda plan: plan["constraints"][0].update(site=[2, 0, 2]),
        lambda plan: plan["layers"][0].update(kind="conv"),
    ):
        assert mine != changed(change)


CHEAP = tuple(cell.name for cell in product.GUARDS)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """The cheap cells, planned and compiled by a worker as a user's recording is."""
    made = Recording(tmp_path_factory.mktemp("corpus") / "new", ROOT)
    made.prepare()
    record_programs(made, [Cell.parse(name) for name in CHEAP], num_jobs=1, hash_seed="7")
    return made


def plans_of(recording: Recording) -> dict[str, str]:
    """What `Summary.plans` would have, from the records of programs, which hold their plans."""
    return {
        name: "+".join(digest(text) for text in record["plans"].values())
        for name, record in recording.programs().items()
    }


def test_a_few_cells_are_those_that_the_repository_holds(recording):
    try:
        kept = load(baseline())
    except StoreError:
        pytest.skip(f"nothing is stored for jax {jax.__version__}")
    mine = dataclasses.replace(summary_of(recording), plans=plans_of(recording))
    assert set(mine.programs) == set(CHEAP)
    found = [one for one in comparing.differences(kept, mine) if not one.known]
    assert not found, "record both checkouts and compare them (`python -m benchmarks corpus --help`):\n" + "\n".join(
        map(str, found)
    )
    assert set(CHEAP) <= set(kept.plans) and set(CHEAP) <= set(kept.programs)


def test_a_recording_compares_as_equal_with_itself_and_with_what_is_stored_of_it(recording, tmp_path, capsys):
    assert main(["compare", str(recording.folder), str(recording.folder)]) == 0
    stored = store(summary_of(recording), tmp_path)
    assert main(["compare", str(stored), str(recording.folder)]) == 0
    assert f"programs: {len(CHEAP)} of {len(CHEAP)} cells are identical" in capsys.readouterr().out


def test_a_planted_difference_is_reported(recording, tmp_path, capsys):
    mine = summary_of(recording)
    cell = CHEAP[0]
    found = json.loads(json.dumps(mine.programs))
    found[cell]["first"]["memory"]["temp_bytes"] += 8
    found[CHEAP[1]]["then"]["module"] = "0" * 16
    planted = Summary(mine.about, {CHEAP[2]: "refused PlanError"}, found)
    before = store(dataclasses.replace(mine, plans={CHEAP[2]: plans_of(recording)[CHEAP[2]]}), tmp_path / "before")
    assert main(["compare", str(before), str(store(planted, tmp_path / "after"))]) == 1
    text = capsys.readouterr().out
    assert f"DIFFERS  plan  {CHEAP[2]}" in text and "-> refused PlanError" in text
    assert f"DIFFERS  program  {cell}" in text and "first: memory" in text
    assert f"DIFFERS  program  {CHEAP[1]}" in text and "then: module" in text
    assert f"programs: 1 of {len(CHEAP)} cells are identical" in text


def test_a_recording_of_another_release_is_not_compared(recording, tmp_path, capsys):
    other = dataclasses.replace(summary_of(recording), about={**recording.about(), "jax": "0.1"})
    assert main(["compare", str(store(other, tmp_path)), str(recording.folder)]) == 2
    assert "is of jax 0.1" in capsys.readouterr().err


def test_what_kills_a_process_ends_its_cell_alone(tmp_path):
    worker = Worker(ROOT)
    try:
        file = tmp_path / "cell.json.gz"
        assert (
            worker.ask({"kind": "program", "cell": CHEAP[0], "file": str(file)}, 0.2) == "SIGKILL" and not file.exists()
        )
        assert worker.ask({"kind": "program", "cell": "no/cell", "file": str(file)}) == "exit status 1"
        unit = ["mlp", "linen", "1"]
        assert (
            worker.ask({"kind": "plans", "unit": unit, "only": [CHEAP[0]], "file": str(file)}) == "" and file.exists()
        )
    finally:
        worker.close()


def test_plans_that_are_there_are_not_made_again(tmp_path):
    made = Recording(tmp_path / "plans", ROOT)
    made.prepare()
    unit = Unit("mlp", "linen", "1")
    made.plan_file(unit).write_bytes(b"kept")
    record_plans(made, [unit], 1)
    assert made.plan_file(unit).read_bytes() == b"kept"


def test_at_most_ten_cells_are_excepted():
    every = [cell.name for cell in product.product()]
    assert sum(bool(comparing.known_defect(cell, part)) for cell in every for part in ("plan", "program")) <= LIMIT
    assert all(one.why for one in KNOWN)
