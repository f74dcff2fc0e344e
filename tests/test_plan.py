"""The `Plan` value: specs, JSON, differences, pinning."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings
from jax.sharding import PartitionSpec as P

from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import (
    BlockRemat,
    BoundaryPlan,
    Collective,
    Compute,
    Constraint,
    LayerPlan,
    LeafPlan,
    Memory,
    PartialPlan,
    Phase,
    Plan,
    PlanWarning,
    Purpose,
    PurposeKind,
    SegmentPlan,
    SyncPlan,
    first_mismatch,
    spec_axes,
    spec_text,
)

MESH = MeshShape((("data", 2), ("model", 4)))
KERNEL = LeafPlan("params/Dense_0/kernel", (8, 16), "float32", "param", True, (None, "model"), "dense out", "", 128)
BIAS = LeafPlan("params/Dense_0/bias", (16,), "float32", "param", True, ("model",), "dense out", "", 16)
MOMENT = LeafPlan(
    "opt/mu/Dense_0/kernel",
    (8, 16),
    "float32",
    "optimizer",
    True,
    (None, "model"),
    "follows params/Dense_0/kernel",
    "",
    128,
)
IMAGE = LeafPlan("batch/image", (32, 8), "float32", "batch", False, (("data", "model"), None), "batch", "", 128)
PLAN = Plan(
    mesh=MESH,
    rules="splitbrain",
    replicated_batch="all",
    batch_axes=("data", "model"),
    leaves=(KERNEL, BIAS, MOMENT, IMAGE),
    layers=(LayerPlan("params/Dense_0", "dense", (KERNEL.path, BIAS.path), (KERNEL.spec, BIAS.spec), "dense out"),),
    constraints=(Constraint((3, 1), 0, ("data", "?"), "params/Dense_0", "the group's examples"),),
    gathered=("mystery at train.py:7",),
    memory=Memory(272, 1000, 1416),
    collectives=(Collective("all_reduce", "data", 144, "params/Dense_0", Purpose.told("gradient")),),
    notes=("two updates",),
)


def replaced(plan: Plan, path: str, **changes) -> Plan:
    return dataclasses.replace(
        plan, leaves=tuple(dataclasses.replace(x, **changes) if x.path == path else x for x in plan.leaves)
    )


# ---- specs


def test_spec_of_any_leaf():
    assert PLAN.spec("params/Dense_0/kernel") == P(None, "model")
    assert PLAN.spec("opt/mu/Dense_0/kernel") == P(None, "model")
    assert PLAN.spec("batch/image") == P(("data", "model"), None)
    assert PLAN.layers[0].spec == P(None, "model")


@pytest.mark.parametrize("path", ["params/Dense_0/kernal", "nothing like it", ("params",), 3])
def test_unknown_path_is_an_error_with_close_matches(path):
    with pytest.raises(PlanError) as caught:
        PLAN.spec(path)
    assert caught.value.value == path and caught.value.remedy
    if path == "params/Dense_0/kernal":
        assert "params/Dense_0/kernel" in caught.value.remedy


def test_spec_helpers():
    assert spec_axes((None, ("data", "model"), "x", "?")) == ("data", "model", "x")
    assert spec_text((None, "model", None)) == "P(None, 'model')"
    assert spec_text(()) == spec_text((None, ())) == "replicated"
    assert IMAGE.num_shards(MESH) == 8 and IMAGE.whole_bytes(MESH) == 32 * 8 * 4


# ---- JSON


names = st.text(min_size=1, max_size=12)
purposes = st.builds(Purpose.told, names) | st.builds(
    Purpose, st.sampled_from(PurposeKind), st.sampled_from(Phase), names, names, names, st.booleans(), names
)


@st.composite
def plans(draw) -> Plan:
    axes = draw(st.lists(names.filter(lambda axis: axis != "?"), min_size=1, max_size=3, unique=True))
    mesh = MeshShape(tuple((axis, draw(st.integers(1, 4))) for axis in axes))

    def spec(rank: int, shape: list[int], open_dims: bool = False):
        left, entries = list(axes), []
        for d in range(draw(st.integers(0, rank))):
            chosen = draw(st.lists(st.sampled_from(left), unique=True, max_size=2)) if left else []
            left = [axis for axis in left if axis not in chosen]
            if shape:
                shape[d] *= mesh.size(tuple(chosen))
            single = len(chosen) == 1 and draw(st.booleans())
            entries.append(chosen[0] if single else tuple(chosen) if chosen or draw(st.booleans()) else None)
            if open_dims and draw(st.booleans()):
                entries[-1] = "?"
        return tuple(entries)

    leaves = []
    for path in draw(st.lists(names, max_size=5, unique=True)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        found = spec(len(shape), shape)
        dtype = draw(st.sampled_from(["float32", "bfloat16", "key<fry>"]))
        role = draw(st.sampled_from(["param", "optimizer", "batch", "input"]))
        size = draw(st.integers(0, 2**60))
        leaves.append(
            LeafPlan(path, tuple(shape), dtype, role, draw(st.booleans()), found, draw(names), draw(names), size)
        )
    layers = []
    for name in draw(st.lists(names, max_size=3)):
        used = draw(st.lists(st.sampled_from(leaves), max_size=2, unique=True)) if leaves else []
        layers.append(
            LayerPlan(name, "dense", tuple(x.path for x in used), tuple(x.spec for x in used), draw(names), draw(names))
        )
    constraints = draw(st.lists(st.builds(
        Constraint, st.lists(st.integers(0, 99), max_size=3).map(tuple), st.integers(-1, 3),
        st.just(spec(2, [], open_dims=True)), names, names,
    ), max_size=3))  # fmt: skip
    count = st.integers(0, 2**60)
    return Plan(
        mesh,
        draw(names),
        draw(st.sampled_from(["all", "data"])),
        tuple(axes[:1]),
        tuple(leaves),
        tuple(layers),
        tuple(constraints),
        tuple(draw(st.lists(names, max_size=2))),
        draw(st.builds(Memory, count, count, count)),
        tuple(draw(st.lists(st.builds(Collective, names, names, count, names, purposes), max_size=4))),
        tuple(draw(st.lists(names, max_size=2))),
        compute=draw(st.builds(Compute, count, count)),
        warnings=tuple(
            draw(
                st.lists(
                    st.builds(PlanWarning, st.sampled_from(["compute", "whole"]), st.floats(0, 1e6), names, names),
                    max_size=2,
                )
            )
        ),
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_json_round_trip_is_exact(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text and text.isascii()
    assert again.digest == plan.digest
    assert plan.diff(again) == ()


def tells_words(plan: Plan) -> bool:
    return any(collective.purpose.is_told for collective in plan.collectives)


@settings(max_examples=60, deadline=None)
@given(plans(), plans())
def test_diff_is_empty_exactly_for_equal_plans(a, b):
    # Of two plans one of which is from before purposes were data, purposes cannot be compared (tests/test_purpose.py).
    assume(tells_words(a) == tells_words(b))
    assert (a.diff(b) == ()) == (a == b) == (a.digest == b.digest)
    assert (b.diff(a) == ()) == (a == b)
    reordered = dataclasses.replace(
        a, leaves=a.leaves[::-1], collectives=a.collectives[::-1], constraints=a.constraints[::-1]
    )
    assert (a.diff(reordered) == ()) == (a == reordered)


def test_json_has_one_entry_a_line():
    lines = PLAN.to_json().splitlines()
    assert sum('"path"' in line for line in lines) == len(PLAN.leaves)
    assert '  "format": 1,' in lines


def edited(edit) -> str:
    data = json.loads(PLAN.to_json())
    edit(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("edit", "place", "words"),
    [
        (lambda d: d.pop("format"), "format", "not a plan"),
        (lambda d: d.update(format=99), "format", "format 1"),
        (lambda d: d.update(format=True), "format", "format 1"),
        (lambda d: d.pop("mesh"), "mesh", "lacks a key"),
        (lambda d: d.update(meshes=1), "meshes", "did you mean 'mesh'"),
        (lambda d: d["mesh"].append(["data", 3]), "mesh", "twice"),
        (lambda d: d["mesh"].append(["pipe", 0]), "mesh", "positive"),
        (lambda d: d["mesh"].append("pipe"), "mesh[2]", "a list"),
        (lambda d: d["mesh"].append(["pipe"]), "mesh[2]", "a name and a size"),
        (lambda d: d.update(rules=None), "rules", "a string"),
        (lambda d: d.update(replicated_batch="al"), "replicated_batch", "did you mean 'all'"),
        (lambda d: d.update(batch_axes=["dat"]), "batch_axes[0]", "no axis 'dat'"),
        (lambda d: d["leaves"][1].pop("shape"), "leaves[1].shape", "lacks a key"),
        (lambda d: d["leaves"][1].update(note2=""), "leaves[1].note2", "unknown key"),
        (lambda d: d["leaves"][0].update(shape=[8, -16]), "leaves[0].shape[1]", "not negative"),
        (lambda d: d["leaves"][0].update(shape=[8, True]), "leaves[0].shape[1]", "whole number"),
        (lambda d: d["leaves"][0].update(shape=[8, 16.0]), "leaves[0].shape[1]", "whole number"),
        (lambda d: d["leaves"][0].update(is_state=1), "leaves[0].is_state", "true or false"),
        (lambda d: d["leaves"][0].update(spec=[None, "modle"]), "leaves[0].spec[1]", "no axis 'modle'"),
        (lambda d: d["leaves"][0].update(spec=[None, 4]), "leaves[0].spec[1]", "null, an axis"),
        (lambda d: d["leaves"][0].update(spec=["model", "model"]), "leaves[0].spec", "twice"),
        (lambda d: d["leaves"][0].update(spec=[None, "?"]), "leaves[0].spec[1]", "only constraints"),
        (lambda d: d["leaves"][0].update(spec=[None, None, "model"]), "leaves[0].spec", "3 entries for 2 dims"),
        (lambda d: d["leaves"][0].update(shape=[8, 18]), "leaves[0].spec[1]", "18, does not divide by 4"),
        (lambda d: d["leaves"][1].update(path="params/Dense_0/kernel"), "leaves[1].path", "same path"),
        (
            lambda d: d["layers"][0].update(params=["params/Dense_0/kernal", "params/Dense_0/bias"]),
            "layers[0].params[0]",
            "did you mean",
        ),
        (lambda d: d["layers"][0].update(specs=[[], ["model"]]), "layers[0].specs[0]", "not that of its leaf"),
        (lambda d: d["layers"][0].update(specs=[]), "layers[0].specs", "one spec per parameter"),
        (lambda d: d["memory"].update(peak_bytes="1"), "memory.peak_bytes", "whole number"),
        (lambda d: d["collectives"][0].update(bytes=-1), "collectives[0].bytes", "not negative"),
        (lambda d: d["constraints"][0].update(spec=["nowhere"]), "constraints[0].spec", "no axis"),
        (lambda d: d.update(leaves={}), "leaves", "a list"),
        (lambda d: d["leaves"].insert(0, 3), "leaves[0]", "an object"),
    ],
)
def test_malformed_json_names_the_key_path(edit, place, words):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edited(edit))
    assert caught.value.place == place
    assert words in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"plan"', "plan.json", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", None, b"{}"]
)
def test_what_is_no_plan_is_an_error(text):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert caught.value.place and caught.value.remedy


def test_repeated_key_is_an_error():
    with pytest.raises(PlanError, match="twice"):
        Plan.from_json(PLAN.to_json().replace('"rules": "splitbrain"', '"rules": "splitbrain", "rules": "fsdp"'))


PARTIAL = PartialPlan("spatial", "count", True, 0, "branch", False, "global", "data", (1, 0), 0.75, "predicted",
                      tuple(SegmentPlan((name,), 1, 0.5, 4, 0, 2) for name in "ab"))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"first": [1, 2]}, "partial.first[1]", "behind the last segment"),
        ({"segments": [], "first": [0]}, "partial.first[0]", "behind the last segment"),
        ({"first": [0, -1]}, "partial.first[1]", "not negative"),
        ({"execution": "brunch"}, "partial.execution", "did you mean 'branch'"),
    ],
)
def test_depths_begin_with_one_of_the_segments(change, place, words):
    plan = dataclasses.replace(PLAN, partial=PARTIAL)
    assert Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    data["partial"].update(change)
    with pytest.raises(PlanError, match=words) as caught:
        Plan.from_json(json.dumps(data))
    assert caught.value.place == place and caught.value.remedy


def test_keys_with_defaults_may_be_left_out():
    def edit(data):
        for name in ("constraints", "gathered", "memory", "collectives", "notes"):
            del data[name]

    plan = Plan.from_json(edited(edit))
    assert plan.memory == Memory(0, 0, 0) and plan.collectives == () and plan.leaves == PLAN.leaves


def test_digest_changes_with_any_field():
    changes = {
        "mesh": MeshShape((("data", 8),)),
        "rules": "x",
        "replicated_batch": "data",
        "batch_axes": (),
        "leaves": (),
        "layers": (),
        "constraints": (),
        "gathered": (),
        "memory": Memory(1, 2, 3),
        "collectives": (),
        "notes": (),
        "group_comm": "modulo",
        "syncs": (SyncPlan("p/t", "zen", "data", 5, 1, 2, "asked for"),),
        "partial": PARTIAL,
        "boundaries": (BoundaryPlan((3,), "loss_fn at train.py:12", "microbatches", 4, ""),),
        "compute": Compute(8, 4),
        "warnings": (PlanWarning("whole", 0.5, "half of it is whole", "split it"),),
        "remat": (BlockRemat("params/block*", "dots_saveable"),),
        "saved": ("model",),
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(Plan)}
    others = [dataclasses.replace(PLAN, **{name: value}) for name, value in changes.items()]
    assert len({plan.digest for plan in (PLAN, *others)}) == len(others) + 1
    assert len(PLAN.digest) == 64 and int(PLAN.digest, 16)
    assert all(PLAN.diff(plan) for plan in others)


# ---- files


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(str(path)) == PLAN
    other = dataclasses.replace(PLAN, rules="fsdp")
    other.save(path)
    assert Plan.load(path) == other
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_leaves_the_old_plan(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PlanError, match="No space left") as caught:
        dataclasses.replace(PLAN, rules="fsdp").save(path)
    assert caught.value.place == str(path)
    assert Plan.load(path) == PLAN
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_errors_of_files_name_the_file(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="No such file") as caught:
        Plan.load(path)
    assert caught.value.place == str(path) and caught.value.remedy
    path.write_text(edited(lambda d: d.update(rules=3)))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.place == f"{path}: rules"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(path)
    with pytest.raises(PlanError, match="cannot be written"):
        PLAN.save(tmp_path / "missing" / "plan.json")


# ---- differences


def test_diff_says_here_and_there():
    other = replaced(PLAN, KERNEL.path, spec=("model", None), note="forced")
    assert PLAN.diff(other) == (
        "leaf params/Dense_0/kernel: spec: P(None, 'model') -> P('model')",
        "leaf params/Dense_0/kernel: note: '' -> 'forced'",
    )
    assert PLAN.diff(PLAN) == ()


def test_diff_names_added_and_missing_entries():
    other = dataclasses.replace(
        PLAN,
        leaves=(KERNEL, BIAS, dataclasses.replace(MOMENT, path="opt/nu"), IMAGE),
        collectives=PLAN.collectives * 3,
    )
    assert PLAN.diff(other) == (
        "leaf opt/mu/Dense_0/kernel: only in the first plan",
        "leaf opt/nu: only in the second plan",
        "collective all_reduce over data for params/Dense_0 (gradient): only in the second plan (1 -> 3 times)",
    )


def test_diff_sees_specs_that_lay_out_alike_and_order():
    assert PLAN.diff(replaced(PLAN, KERNEL.path, spec=(None, "model", None))) == (
        "leaf params/Dense_0/kernel: spec: (None, 'model') -> (None, 'model', None)",
    )
    assert PLAN.diff(dataclasses.replace(PLAN, leaves=PLAN.leaves[::-1])) == (
        "leaf entries: the same, in another order",
    )


def test_diff_order():
    other = Plan(MeshShape((("data", 8),)), "fsdp", "data", ("data",), (), (), memory=Memory(1, 2, 3))
    first_words = [line.split()[0].split(".")[0].rstrip(":") for line in PLAN.diff(other)]
    assert list(dict.fromkeys(first_words)) == [
        "mesh",
        "rules",
        "replicated_batch",
        "batch_axes",
        "leaf",
        "layer",
        "constraint",
        "gathered",
        "memory",
        "collective",
        "note",
    ]
    assert PLAN.diff(other)[0] == "mesh: data=2 x model=4 -> data=8"


# ---- pinning


@pytest.mark.parametrize(
    ("leaves", "mesh", "words"),
    [
        (PLAN.leaves, MESH, None),
        (PLAN.leaves[::-1], {"data": 2, "model": 4}, None),
        (PLAN.leaves, {"data": 4, "model": 2}, "mesh data=2 x model=4, the step runs on data=4 x model=2"),
        (PLAN.leaves, {"model": 4, "data": 2}, "mesh"),
        (PLAN.leaves[1:], MESH, "plan has a leaf 'params/Dense_0/kernel' that the step lacks"),
        (
            (dataclasses.replace(KERNEL, path="params/Dense_0/Kernel"), *PLAN.leaves),
            MESH,
            "did you mean 'params/Dense_0/kernel'",
        ),
        (
            (dataclasses.replace(KERNEL, shape=(8, 32)), *PLAN.leaves[1:]),
            MESH,
            "shape (8, 16) in the plan and (8, 32) in the step",
        ),
        (
            (dataclasses.replace(KERNEL, shape=(16, 16)), *PLAN.leaves[1:]),
            MESH,
            "shape (8, 16) in the plan and (16, 16) in the step",
        ),
        (
            (KERNEL, dataclasses.replace(BIAS, dtype="bfloat16"), *PLAN.leaves[2:]),
            MESH,
            "dtype float32 in the plan and bfloat16",
        ),
        (
            (KERNEL, dataclasses.replace(BIAS, role="statistic"), *PLAN.leaves[2:]),
            MESH,
            "role param in the plan and statistic",
        ),
        ((*PLAN.leaves[:3], dataclasses.replace(IMAGE, shape=(16, 8))), MESH, None),  # another number of examples
        (
            (*PLAN.leaves[:3], dataclasses.replace(IMAGE, shape=(12, 8))),
            MESH,
            "shape (32, 8) in the plan and (12, 8) in the step",
        ),
        ((*PLAN.leaves[:3], dataclasses.replace(IMAGE, shape=(32, 9))), MESH, "shape"),
        ((*PLAN.leaves[:3], dataclasses.replace(IMAGE, shape=(32,))), MESH, "shape"),
        ((*PLAN.leaves[:3], dataclasses.replace(IMAGE, shape=())), MESH, "shape"),
    ],
)
def test_first_mismatch(leaves, mesh, words):
    problem = first_mismatch(PLAN, leaves, mesh)
    if words is None:
        assert problem is None
        PLAN.check(leaves, mesh)
        return
    assert words in problem
    with pytest.raises(PlanError) as caught:
        PLAN.check(leaves, mesh)
    assert problem in str(caught.value) and caught.value.remedy


# ---- the value


def test_plan_is_a_value():
    assert hash(PLAN) == hash(Plan.from_json(PLAN.to_json()))
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.rules = "other"
    assert PLAN.digest[:12] in repr(PLAN) and "splitbrain" in repr(PLAN) and "\n" not in repr(PLAN)
