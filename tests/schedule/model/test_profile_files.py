"""Files of profiles and of Gavel's throughputs: what is read, and what is said of what cannot be read."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from splitjax.errors import TraceFileError
from splitjax.schedule import JobProfile, Stages, read_gavel, read_profiles, write_profiles


@pytest.fixture
def write(tmp_path):
    def put(text, name="profiles.json"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return put


def test_gavel(write):
    table = {
        "v100": {
            "('ResNet-18 (batch size 16)', 1)": {"null": 4.0, "('A3C (batch size 4)', 1)": [2.5, 3.0]},
            "('Odd, name', 2)": {"null": 0.0},
        }
    }
    found = read_gavel(write(json.dumps(table), "g.json.gz"))
    job = ("ResNet-18 (batch size 16)", 1)
    assert found.alone["v100"] == {job: 4.0, ("Odd, name", 2): 0.0} and found.pairs["v100"] == {
        (job, ("A3C (batch size 4)", 1)): (2.5, 3.0)
    }
    assert found.profile("v100", job).iteration_seconds == pytest.approx(0.25)
    for missing in (("Odd, name", 2), ("absent", 1)):
        with pytest.raises(TraceFileError, match="no throughput was measured"):
            found.profile("v100", missing)
    with pytest.raises(TraceFileError, match="not a table of throughputs") as caught:
        read_gavel(write('{"k80": {"(\'x\', 1)": {"null": 1, "(\'y\', 1)": [1]}}}', "g.json"))
    assert "k80, ('x', 1), ('y', 1)" in caught.value.place
    with pytest.raises(TraceFileError, match="not a job"):
        read_gavel(write('{"k80": {"x": {"null": 1}}}', "g.json"))
    with pytest.raises(TraceFileError, match="not JSON"):
        read_gavel(write("{", "g.json"))


def test_profile_files(write, tmp_path):
    profiles = [
        JobProfile.uniform("a", 0.3, num_depths=3, memory_bytes=10),
        JobProfile.uniform("b", 0.1, num_depths=1, stages=Stages(0.1)),
    ]
    write_profiles(tmp_path / "p.json", profiles)
    assert read_profiles(tmp_path / "p.json") == {"a": profiles[0], "b": profiles[1]}
    write_profiles(tmp_path / "p.json", profiles[1:])
    (tmp_path / "one.json").write_text(json.dumps(profiles[0].to_json()))
    assert list(read_profiles(tmp_path / "one.json")) == ["a"] and list(read_profiles(tmp_path / "p.json")) == ["b"]


DEPTH = '{"fraction": 1, "backward_seconds": 1}'


@pytest.mark.parametrize(
    ("text", "said", "place"),
    [
        ('{"name": "a"}', "a field is missing", "entry 0, forward_seconds"),
        ("[3]", "is a JSON object", "entry 0, the whole"),
        ("{", "not JSON", ":1"),
        ("[]", "no profile is in it", "bad.json"),
        ('{"name": "a", "forward_seconds": 1, "depths": 3}', "depths are a list", "entry 0, depths"),
        (
            '{"name": "a", "forward_seconds": 1, "depths": [{"fraction": 0.5, "backward_seconds": 1}]}',
            "depths have to fall",
            "entry 0, profile 'a'",
        ),
        (
            '{"name": "a", "forward_seconds": 1, "depths": [{"fraction": "x", "backward_seconds": 1}]}',
            "fraction is a number",
            "entry 0, depths[0].fraction",
        ),
        (
            f'{{"name": "a", "forward_seconds": NaN, "depths": [{DEPTH}]}}',
            "forward_seconds is a number",
            "entry 0, forward_seconds",
        ),
        (
            f'{{"name": "a", "forward_seconds": 1, "state_bytes": 0.5, "depths": [{DEPTH}]}}',
            "is a whole number",
            "entry 0, state_bytes",
        ),
        (
            f'{{"name": "a", "forward_seconds": 1, "state_bytes": -5, "depths": [{DEPTH}]}}',
            "less memory than none",
            "entry 0, profile 'a'",
        ),
        (
            f'{{"name": "a", "forward_second": 1, "depths": [{DEPTH}]}}',
            "did you mean 'forward_seconds'",
            "entry 0, forward_second",
        ),
        (
            f'{{"name": "a", "forward_seconds": 1, "stages": {{"cpu": 1}}, "depths": [{DEPTH}]}}',
            "no such field",
            "entry 0, stages.cpu",
        ),
        (
            (
                f'[{{"name": "a", "forward_seconds": 1, "depths": [{DEPTH}]}}, {{"name": "a", "forward_seconds": 1,'
                f' "depths": [{DEPTH}]}}]'
            ),
            "two profiles of one name",
            "entry 1, name",
        ),
    ],
)
def test_malformed_profiles_are_told_with_entry_and_field(write, text, said, place):
    with pytest.raises(TraceFileError, match=re.escape(said)) as caught:
        read_profiles(write(text, "bad.json"))
    assert "bad.json" in caught.value.place and caught.value.place.endswith(place) and caught.value.remedy
