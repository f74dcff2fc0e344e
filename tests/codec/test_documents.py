"""Documents as splitjax 6c17a8a saved them: they load, are written alike, and what is malformed is a typed error."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from splitjax.cli.launch import _JSON as TRAFFIC
from splitjax.cli.launch import _NetworkTraffic
from splitjax.data import Position, Vocabulary
from splitjax.errors import (
    CheckpointError,
    DataError,
    PartialError,
    PlanError,
    ProfileError,
    ScheduleError,
    SplitjaxError,
    SyncError,
    VerificationError,
)
from splitjax.partial.advice import Advice
from splitjax.plan import Plan
from splitjax.planning.carried import Carried
from splitjax.report.target.value import TargetCheck
from splitjax.report.value import Report
from splitjax.runtime.checkpoint.carrying import put_together, targets
from splitjax.runtime.checkpoint.description import Description
from splitjax.runtime.launch.outcome import Traffic
from splitjax.runtime.training.ledger import _JSON as LEDGER
from splitjax.runtime.training.ledger import Ledger
from splitjax.schedule import JobProfile, read_profiles, write_profiles
from splitjax.sync.analysis import Profile
from splitjax.sync.profile import Sparsity
from splitjax.verify.result import _JSON as VERIFICATION
from tests.codec import samples

DATA = samples.DATA


def text_of(name: str) -> str:
    return (DATA / f"{name}.json").read_text(encoding="utf-8")


def test_every_kind_of_document_is_written_as_before(tmp_path):
    def vocabulary_text(vocabulary):
        vocabulary.save(tmp_path / "vocabulary.json")
        return (tmp_path / "vocabulary.json").read_text()

    def profiles_text(profiles):
        write_profiles(tmp_path / "profiles.json", profiles)
        return (tmp_path / "profiles.json").read_text()

    texts = samples.texts(vocabulary_text, profiles_text)
    assert texts.keys() <= {path.stem for path in DATA.glob("*.json")}
    for name, text in texts.items():
        assert text == text_of(name), name
        assert text.isascii()


@pytest.mark.parametrize(
    ("kind", "name", "sample"),
    [
        (Plan, "plan", samples.PLAN),
        (Plan, "bare_plan", samples.BARE_PLAN),
        (Plan, "real_plan", None),
        (Plan, "real_plan_rows", None),
        (Plan, "real_plan_partial", None),
        (Report, "report", samples.REPORT),
        (Report, "bare_report", samples.BARE_REPORT),
        (TargetCheck, "target_check", samples.TARGET_CHECK),
        (Report, "real_report", None),
        (Report, "real_report_partial", None),
        (Advice, "advice", samples.ADVICE),
        (Advice, "real_advice", None),
        (Profile, "profile", samples.PROFILE),
        (Profile, "real_profile", None),
    ],
)
def test_texts_are_read_back_and_written_alike(kind, name, sample):
    read = kind.from_json(text_of(name))
    assert read.to_json() == text_of(name)
    assert sample is None or read == sample


@pytest.mark.parametrize(
    ("kind", "name", "sample"),
    [
        (JobProfile, "job_profile", samples.JOB_PROFILE),
        (Position, "position", Position(3, 4)),
        (Sparsity, "sparsity", samples.SPARSITY),
    ],
)
def test_values_are_read_back_and_written_alike(kind, name, sample):
    read = kind.from_json(json.loads(text_of(name)))
    assert read == sample and json.dumps(read.to_json()) == text_of(name)


def test_files_are_read_back(tmp_path):
    assert Vocabulary.load(DATA / "vocabulary.json") == samples.VOCABULARY
    profiles = read_profiles(DATA / "job_profiles.json")
    assert profiles["model"] == samples.JOB_PROFILE and list(profiles) == ["model", "even"]
    description = Description.read(DATA / "checkpoint.json")
    assert description.to_json() == text_of("checkpoint")
    assert description.step == 3 and description.extra == samples.EXTRA and description.carried is None
    assert [str(leaf) for leaf in description.leaves] == [str(leaf) for leaf in samples.LEAVES]
    assert math.isnan(description.leaves[3].value)
    (tmp_path / "goodput.json").write_text(text_of("goodput"))
    assert Ledger(tmp_path / "goodput.json").summary().num_attempts == 3
    assert LEDGER.text(LEDGER.parse(text_of("goodput"))) == text_of("goodput")
    assert VERIFICATION.text(VERIFICATION.parse(text_of("verification"))) == text_of("verification")


def test_what_a_step_carried_is_put_together_again():
    for name in ("carrying_checkpoint", "real_checkpoint"):
        description = Description.read(DATA / f"{name}.json")
        assert description.to_json() == text_of(name)
        parts = targets(description.carried, ())
        again = put_together(description.carried, parts.arrays)
        assert again is not None and again.seen
        assert {**description.carried, **again.to_json()} == description.carried
    arrays = samples.CARRIED.arrays()
    read = Carried.parse(json.loads(text_of("carried")), arrays)
    assert json.dumps(read.to_json()) == text_of("carried")
    assert read.num_steps == 7 and read.arrays().keys() == arrays.keys()


def test_traffic_is_written_as_it_was():
    traffic = (Traffic(0, 10, 20), Traffic(1, 20, 10))
    before = {"bits_per_second": 1000, "workers": [dataclasses.asdict(one) for one in traffic]}
    assert TRAFFIC.text(_NetworkTraffic(1000, traffic)) == json.dumps(before, indent=1)


def read_as_file(kind: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        import tempfile

        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text)
            file.flush()
            return kind(file.name)

    return read


# Reader of a document's text, and what it raises.
READERS: dict[str, tuple[Callable[[str], Any], type[SplitjaxError]]] = {
    "plan": (Plan.from_json, PlanError),
    "real_plan": (Plan.from_json, PlanError),
    "report": (Report.from_json, PlanError),
    "target_check": (TargetCheck.from_json, PlanError),
    "advice": (Advice.from_json, PartialError),
    "profile": (Profile.from_json, ProfileError),
    "job_profile": (lambda text: JobProfile.from_json(json.loads(text)), ScheduleError),
    "position": (lambda text: Position.from_json(json.loads(text)), DataError),
    "sparsity": (lambda text: Sparsity.from_json(json.loads(text)), SyncError),
    "vocabulary": (lambda text: Vocabulary.from_json(json.loads(text)), DataError),
    "verification": (VERIFICATION.parse, VerificationError),
    "carried": (lambda text: Carried.parse(json.loads(text), {}), CheckpointError),
    "checkpoint": (read_as_file(lambda name: Description.read(name)), CheckpointError),
    "goodput": (LEDGER.parse, DataError),
}
JUNK = (None, True, -1, 1.5, "junk", [], {}, [[]], {"junk": 1}, 10**400)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        for rest in places(inner):
            yield (key, *rest)


def changed(data: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Documents with a value that is replaced, left out, or has a key that nobody knows."""
    for path in places(data):
        for junk in (*JUNK, ...):
            copied = copy.deepcopy(data)
            inner = copied
            for key in path[:-1]:
                inner = inner[key]
            if junk is not ...:
                inner[path[-1]] = junk
            elif isinstance(inner, dict):
                del inner[path[-1]]
            else:
                inner.pop(path[-1])
            yield path, copied


@pytest.mark.parametrize("name", READERS)
def test_no_change_to_a_document_is_another_error(name):
    read, error = READERS[name]
    num_refused = 0
    for path, data in changed(json.loads(text_of(name))):
        try:
            read(json.dumps(data))
        except error as caught:
            num_refused += 1
            assert type(caught) is error and caught.message and caught.place, path
    assert num_refused > 10


@pytest.mark.parametrize("name", READERS)
def test_an_unknown_key_is_named(name):
    read, error = READERS[name]
    data = json.loads(text_of(name))
    with pytest.raises(error) as caught:
        read(json.dumps({**data, "raed": 1}))
    assert caught.value.value == "raed" and caught.value.place.endswith("raed") and caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "change", "place"),
    [
        (Report, lambda d: d["collectives"][0].update(trips="2"), "collectives[0].trips"),
        (Report, lambda d: d["collectives"][0]["planned"].pop("why"), "collectives[0].planned.why"),
        (Report, lambda d: d["mesh"].append(["pipe", 0]), "mesh"),
        (Advice, lambda d: d["rows"][1]["cuts"].append(3), "rows[1].cuts[2]"),
        (Profile, lambda d: d["tensors"][0]["sparsity"].update(rows_max=1.5), "tensors[0].sparsity.rows_max"),
        (Profile, lambda d: d["tensors"][0]["sparsity"].pop("num_rows"), "tensors[0].sparsity.num_rows"),
        (Profile, lambda d: d["tensors"][1]["steps"][0]["unions"][0].append(1), "tensors[1].steps[0].unions[0]"),
    ],
)
def test_errors_name_the_key_path(kind, change, place):
    data = json.loads(text_of(kind.__name__.lower()))
    change(data)
    with pytest.raises(SplitjaxError, match="this is not the JSON of") as caught:
        kind.from_json(json.dumps(data))
    assert caught.value.place == place and caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "change", "place"),
    [
        (Profile, lambda d: d.update(num_examples=[], tensors=[]), "num_examples"),
        (Profile, lambda d: d["tensors"][0]["steps"][0].update(overlap=float("nan")), "tensors[0].steps[0].overlap"),
        (Advice, lambda d: d["rows"][1].update(mean_memory_bytes=float("nan")), "rows[1].mean_memory_bytes"),
        (Advice, lambda d: d["rows"][0].update(sent_bytes=float("inf")), "rows[0].sent_bytes"),
        (Advice, lambda d: d["rows"][0].update(max_memory_bytes=-1.0), "rows[0].max_memory_bytes"),
    ],
)
def test_figures_that_cannot_be_shown_are_refused(kind, change, place):
    data = json.loads(text_of(kind.__name__.lower()))
    change(data)
    with pytest.raises(SplitjaxError) as caught:
        kind.from_json(json.dumps(data))
    assert caught.value.place == place and caught.value.remedy


def test_an_advice_without_layers_prints():
    data = json.loads(text_of("advice"))
    data["stages"] = []
    assert "recommended" in str(Advice.from_json(json.dumps(data)))


def test_a_file_is_named_with_the_key_path(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(
        text_of("profile").replace('"num_workers": 2, ', '"num_workers": 2.5, ', 1).replace("8, 8", "8, 8.5")
    )
    with pytest.raises(ProfileError) as caught:
        Profile.load(file)
    assert caught.value.place == f"{file}: num_examples[1]"
    file.write_text("{\n")
    with pytest.raises(ProfileError) as caught:
        Profile.load(file)
    assert caught.value.place == f"{file}:2"


def test_keys_that_earlier_versions_did_not_write_may_be_missing():
    data = json.loads(text_of("report"))
    for name in ("depths", "by_op", "by_layer"):
        del data[name]
    assert Report.from_json(json.dumps(data)) == dataclasses.replace(samples.REPORT, depths=())
    data = json.loads(text_of("profile"))
    del data["notes"], data["tensors"][0]["means"]
    assert Profile.from_json(json.dumps(data)) == dataclasses.replace(samples.PROFILE, notes=())
    data = json.loads(text_of("plan"))
    del data["syncs"], data["partial"], data["group_comm"]
    assert Plan.from_json(json.dumps(data)).group_comm == "gather"
