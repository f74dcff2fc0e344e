"""The codec by itself: what type hints mean, what errors say, how texts are laid out."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.codec import Called, Codec, Count, Form, OneOf, ReadAs, Where, Wording, without_nones
from splitjax.errors import PlanError
from splitjax.partial.advice import AdviceRow, Recommendation, StageAdvice
from splitjax.plan import Collective, Constraint, LayerPlan, LeafPlan, Memory, PartialPlan, SyncPlan
from splitjax.report.depths import ReportedDepth
from splitjax.report.hlo import CompiledCollective
from splitjax.report.value import CompiledMemory, ReportMemory
from splitjax.runtime.checkpoint.state_match import StateLeaf
from splitjax.runtime.training.ledger import RecordedAttempt
from splitjax.schedule.model.jobs import Depth, Stages
from splitjax.sync.analysis import Figures
from splitjax.verify.result import ComparedValue, DimSize, Finding, VerifiedRun


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0


@dataclasses.dataclass(frozen=True)
class Everything:
    flag: bool
    number: int
    share: float
    name: str
    count: Count
    pair: tuple[int, str]
    pairs: tuple[tuple[int, float], ...]
    items: list[Point]
    by_name: Mapping[str, Point]
    entry: Annotated[None | str | tuple[str, ...], Called("null, an axis, or a list of axes")]
    kind: Literal["a", "b"]
    way: Annotated[str, OneOf(("left", "right"))]
    anything: Any = None
    size: Annotated[Any, ReadAs(Count | list[Count])] = 0
    even: Annotated[int, Where(lambda number: number % 2 == 0, "the number is odd", "double it")] = 0
    perhaps: Point | None = None


VALUE = Everything(
    True, -3, 0.5, "\u00fc", 2, (1, "x"), ((1, 2.0), (3, 4)), [Point(1.0)], {"p": Point(2, 3.0)}, ("data",), "a",
    "left", {"a": [1, None]}, [1, 2], 4, Point(5.0),
)  # fmt: skip
JSON = Codec(Everything, PlanError, Wording("a value", "pass what was written"), format=3, finite=True)


def test_every_hint_is_read_back():
    text = JSON.text(VALUE)
    assert text.isascii() and JSON.parse(text) == VALUE and JSON.text(JSON.parse(text)) == text
    assert list(json.loads(text)) == ["format", *(field.name for field in dataclasses.fields(Everything))]
    assert JSON.read(JSON.values(VALUE)) == VALUE


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"flag": 1}, "flag", "true or false"),
        ({"number": True}, "number", "a whole number"),
        ({"number": 1.0}, "number", "a whole number"),
        ({"number": None}, "number", "a whole number"),
        ({"number": 10**31}, "number", "a whole number of at most 30 digits"),
        ({"share": "0.5"}, "share", "a number"),
        ({"share": False}, "share", "a number"),
        ({"share": math.nan}, "share", "a number"),
        ({"share": -math.inf}, "share", "a number"),
        ({"share": 10**400}, "share", "a number"),
        ({"name": 3}, "name", "a string"),
        ({"count": -1}, "count", "not negative"),
        ({"pair": [1]}, "pair", "a list of 2 values"),
        ({"pair": [1, 2]}, "pair[1]", "a string"),
        ({"pairs": [[1, 2.0], 3]}, "pairs[1]", "a list"),
        ({"pairs": {}}, "pairs", "a list"),
        ({"items": [{"x": 1, "z": 2}]}, "items[0].z", "unknown key"),
        ({"items": [{"y": 1}]}, "items[0].x", "lacks a key"),
        ({"items": [3]}, "items[0]", "an object"),
        ({"by_name": {"p": {"x": "1"}}}, "by_name.p.x", "a number"),
        ({"by_name": []}, "by_name", "an object"),
        ({"entry": 3}, "entry", "null, an axis, or a list of axes"),
        ({"entry": ["a", 3]}, "entry[1]", "a string"),
        ({"kind": "c"}, "kind", "one of a, b"),
        ({"kind": []}, "kind", "one of a, b"),
        ({"way": "lft"}, "way", "did you mean 'left'"),
        ({"size": "1"}, "size", "a whole number or a list"),
        ({"size": [1, -1]}, "size[1]", "not negative"),
        ({"even": 3}, "even", "the number is odd"),
        ({"perhaps": "no"}, "perhaps", "an object"),
        ({"perhaps": {"x": None}}, "perhaps.x", "a number"),
        ({"nmae": 1}, "nmae", "did you mean 'name'"),
        ({"format": 4}, "format", "format 3"),
        ({"format": 3.0}, "format", "format 3"),
    ],
)
def test_what_does_not_fit_is_named(change, place, words):
    data = {**json.loads(JSON.text(VALUE)), **change}
    with pytest.raises(PlanError) as caught:
        JSON.parse(json.dumps(data))
    assert caught.value.place == place and words in str(caught.value) and caught.value.remedy
    with pytest.raises(PlanError) as caught:
        JSON.parse(json.dumps(data), "file.json")
    assert caught.value.place == f"file.json: {place}"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "line 1, column 1", "is not JSON"),
        ('{"a":\n1,}', "line 2", "is not JSON"),
        ("[" * 100_000, "value", "is not JSON"),
        ('{"n": ' + "9" * 5000 + "}", "value", "is not JSON"),
        ("[]", "format", "not a value"),
        ('{"number": 1}', "format", "not a value"),
        ('{"format": 3, "format": 3}', "format", "stands twice"),
        ('{"format": 3, "items": [{"x": 1, "x": 2}]}', "x", "stands twice"),
        (None, "value", "is a string"),
        (b"{}", "value", "is a string"),
    ],
)
def test_what_is_no_document_is_an_error(text, place, words):
    with pytest.raises(PlanError) as caught:
        JSON.parse(text)
    assert caught.value.place.startswith(place) and words in str(caught.value) and caught.value.remedy


def test_a_repeated_key_is_told_with_its_file():
    with pytest.raises(PlanError, match="stands twice") as caught:
        JSON.parse('{"format": 3, "name": "a", "name": "b"}', "file.json")
    assert caught.value.place == "file.json: name" and caught.value.value == "name"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"share": math.nan}, "share"),
        ({"anything": [{"deep": math.inf}]}, "anything[0].deep"),
        ({"anything": {1: 2}}, "anything"),
        ({"anything": np.zeros(2)}, "anything"),
        ({"items": [object()]}, "items[0]"),
    ],
)
def test_what_json_cannot_hold_is_not_written(change, place):
    with pytest.raises(PlanError, match=r"cannot hold|keys of JSON objects") as caught:
        JSON.text(dataclasses.replace(VALUE, **change))
    assert caught.value.place == place


def test_numbers_stay_as_they_stand():
    point = Codec(Point, PlanError, Wording("a point", "give one"))
    assert point.text(point.parse('{"x": 1, "y": NaN}')) == '{\n "x": 1,\n "y": NaN\n}\n'
    assert point.values(Point(np.int32(3), np.float64(0.5))) == {"x": 3, "y": 0.5}
    assert type(point.values(Point(np.int32(3)))["x"]) is int


def test_texts_are_laid_out_as_asked():
    @dataclasses.dataclass(frozen=True)
    class Listed:
        name: str
        points: tuple[Point, ...]
        others: tuple[Point, ...] = ()

    listed = Codec(Listed, PlanError, Wording("a list", "give one"), entries=("points", "others"))
    assert listed.text(Listed("a", (Point(1.0), Point(2.0)))) == (
        '{\n  "name": "a",\n  "points": [\n    {"x": 1.0, "y": 0.0},\n    {"x": 2.0, "y": 0.0}\n  ],\n'
        '  "others": []\n}\n'
    )
    flat = dataclasses.replace(listed, entries=(), indent=0, end="")
    assert flat.text(Listed("a", ())) == '{\n"name": "a",\n"points": [],\n"others": []\n}'


def test_forms_stand_for_types_of_their_own():
    @dataclasses.dataclass(frozen=True)
    class Named:
        name: str
        value: int | None = None

    form = Form(
        lambda point: (point.x, point.y),
        lambda codec, value, place: Point(*codec.hinted(tuple[float, float], value, place)),
    )
    listed = Codec(Point, PlanError, Wording("a point", "give one"), forms={Point: form})
    assert listed.values(Point(1.0, 2.0)) == [1.0, 2.0] and listed.read([1.0, 2.0]) == Point(1.0, 2.0)
    with pytest.raises(PlanError, match="a list of 2 values"):
        listed.read([1.0])
    named = Codec(Named, PlanError, Wording("a name", "give one"), forms={Named: without_nones("value")})
    assert named.values(Named("a")) == {"name": "a"} and named.read({"name": "a"}) == Named("a")
    shown = Form(lambda point: {"x": point.x, "twice": 2 * point.x}, unread=("twice",))
    doubled = Codec(Point, PlanError, Wording("a point", "give one"), forms={Point: shown})
    assert doubled.values(Point(2.0)) == {"x": 2.0, "twice": 4.0} and doubled.read({"x": 2.0, "twice": 9}) == Point(2.0)


def test_a_type_that_json_is_not_known_for_is_a_mistake_of_the_program():
    codec = Codec(Unreadable, PlanError, Wording("a mistake", "mend it"))
    with pytest.raises(TypeError, match="no JSON is known"):
        codec.read({"values": []})


@dataclasses.dataclass(frozen=True)
class Unreadable:
    values: typing.Generator[int, None, None]


def test_files_are_whole_and_errors_name_them(tmp_path):
    point = Codec(Point, PlanError, Wording("a point", "give one"))
    point.save(Point(1.0), tmp_path / "p.json")
    assert point.load(tmp_path / "p.json") == Point(1.0) and [*tmp_path.iterdir()] == [tmp_path / "p.json"]
    with pytest.raises(PlanError, match="the point cannot be written"):
        point.save(Point(1.0), tmp_path / "none" / "p.json")
    with pytest.raises(PlanError, match="the point cannot be read"):
        point.load(tmp_path / "none.json")
    (tmp_path / "p.json").write_bytes(b"\xff")
    with pytest.raises(PlanError, match="the point cannot be read") as caught:
        point.load(tmp_path / "p.json")
    assert caught.value.place == str(tmp_path / "p.json")


TEXT = st.text(max_size=5)
PARTS = (
    AdviceRow, Collective, ComparedValue, CompiledCollective, CompiledMemory, Constraint, Depth, DimSize,
    Figures, Finding, LayerPlan, StateLeaf, LeafPlan, Memory, PartialPlan, Recommendation, ReportedDepth, ReportMemory,
    RecordedAttempt, StageAdvice, Stages, SyncPlan, VerifiedRun,
)  # fmt: skip


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint, such as a program may make them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        for how in arguments[1:]:
            if isinstance(how, OneOf):
                return st.sampled_from(how.options)
            if isinstance(how, ReadAs):
                return of_hint(how.hint)
        made = of_hint(arguments[0])
        for how in arguments[1:]:
            made = made.filter(how.holds) if isinstance(how, Where) else made
        return made
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(of_hint(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of_hint, arguments))
    if origin is list:
        return st.lists(of_hint(arguments[0]), max_size=3)
    if origin in (dict, Mapping, typing.get_origin(Mapping[str, int])):
        return st.dictionaries(TEXT, of_hint(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(of_hint, arguments))
    if dataclasses.is_dataclass(hint):
        return parts(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    scalars = {
        bool: st.booleans(),
        int: st.integers(0, 2**60),
        float: st.floats(allow_nan=False) | st.integers(-9, 9),
        str: TEXT,
        type(None): st.none(),
        Any: st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    }
    return scalars[hint]


def parts(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: of_hint(hints[field.name]) for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_documents_are_read_back(kind):
    codec = Codec(kind, PlanError, Wording("a part", "give one"))

    @settings(max_examples=40, deadline=None)
    @given(parts(kind))
    def check(part):
        text = codec.text(part)
        assert text == json.dumps(dataclasses.asdict(part), indent=1) + "\n"
        again = codec.parse(text)
        assert again == part and codec.text(again) == text

    check()


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "z"]), inner),
        max_leaves=8,
    )
)
def test_any_json_is_read_or_refused(values):
    point = Codec(Point, PlanError, Wording("a point", "give one"), finite=True)
    try:
        read = point.read(values)
    except PlanError as error:
        assert error.place and error.remedy
    else:
        assert math.isfinite(read.x) and math.isfinite(read.y) and values.keys() <= {"x", "y"}
