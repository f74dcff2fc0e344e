"""Files of the contest, good and bad."""

from __future__ import annotations

import copy
import gzip
import json
import math

import pytest

from splitjax.errors import SearchError
from splitjax.search.contest import problem_of, read_problem

EXAMPLE = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [0, 0]],
            "costs": [[1, 2], [0, 10**18, 3], [5]],
            "usages": [[4, 1], [3, 3, 2], [9]],
        },
        "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[0, 1, 2, 3, 10**18, 5], [7, 8, 9]]},
        "usage_limit": 6,
    }
}


@pytest.mark.parametrize("packed", [False, True])
def test_a_problem_is_read(tmp_path, packed):
    text = json.dumps(EXAMPLE).encode()
    path = tmp_path / "problem.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    network = read_problem(path)
    assert [costs.tolist() for costs in network.costs] == [[1, 2], [0, math.inf, 3], [5]]
    assert network.pairs[0].costs.tolist() == [[0, 1, 2], [3, math.inf, 5]]
    assert network.cost([1, 2, 0]) == 2 + 3 + 5 + 5 + 9
    assert network.peaks_bytes([0, 0, 0]) == (7,)  # the third is never alive
    assert not network.fits([0, 0, 0])
    assert network.fits([0, 2, 0])


def edited(edit):
    document = copy.deepcopy(EXAMPLE)
    edit(document["problem"])
    return document


BAD = {
    "no nodes": lambda p: p.pop("nodes"),
    "one interval too few": lambda p: p["nodes"]["intervals"].pop(),
    "an interval of three": lambda p: p["nodes"]["intervals"][0].append(3),
    "an interval that ends before it begins": lambda p: p["nodes"]["intervals"][0].reverse(),
    "an interval before time": lambda p: p["nodes"].update(intervals=[[-2, -1], [1, 3], [0, 0]]),
    "an interval without end": lambda p: p["nodes"].update(intervals=[[0, 10**15], [1, 3], [0, 0]]),
    "no strategies": lambda p: p["nodes"]["costs"].__setitem__(0, []),
    "a usage too few": lambda p: p["nodes"]["usages"][0].pop(),
    "negative memory": lambda p: p["nodes"]["usages"].__setitem__(0, [-4, 1]),
    "a cost that is text": lambda p: p["nodes"]["costs"].__setitem__(0, ["1", 2]),
    "a cost that is a truth": lambda p: p["nodes"]["costs"].__setitem__(0, [True, 2]),
    "a cost that is no number": lambda p: p["nodes"]["costs"].__setitem__(0, [math.nan, 2]),
    "a cost of minus infinity": lambda p: p["nodes"]["costs"].__setitem__(0, [-math.inf, 2]),
    "a usage beyond floats": lambda p: p["nodes"]["usages"].__setitem__(0, [10**400, 2]),
    "an edge to nowhere": lambda p: p["edges"]["nodes"].__setitem__(0, [0, 3]),
    "an edge from below": lambda p: p["edges"]["nodes"].__setitem__(0, [-1, 1]),
    "an edge to itself": lambda p: p["edges"].update(nodes=[[0, 0], [2, 1]], costs=[[1, 2, 3, 4], [7, 8, 9]]),
    "a table too small": lambda p: p["edges"]["costs"][0].pop(),
    "an edge without costs": lambda p: p["edges"]["costs"].pop(),
    "a limit that is text": lambda p: p.update(usage_limit="6"),
    "a limit below nothing": lambda p: p.update(usage_limit=-6),
    "a limit without end": lambda p: p.update(usage_limit=math.inf),
}


@pytest.mark.parametrize("edit", BAD.values(), ids=BAD.keys())
def test_bad_problems_are_typed_errors(edit):
    with pytest.raises(SearchError) as caught:
        problem_of(edited(edit), "problem.json")
    assert caught.value.place


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\x1f\x8b\x08\x00", b"[" * 100_000, b"\xff\xfe"])
def test_damaged_files_are_typed_errors(tmp_path, data):
    path = tmp_path / "problem.json"
    path.write_bytes(data)
    with pytest.raises(SearchError):
        read_problem(path)
    with pytest.raises(SearchError, match="cannot be read"):
        read_problem(tmp_path / "missing.json")
