"""The check of the package's types: which lines ignore an error, and when a figure breaks its bound."""

from __future__ import annotations

import json
import pathlib

import splitjax
from tests.typing.check_package import HERE, IGNORE_WITH_REASON, broken, ignores

PACKAGE = pathlib.Path(splitjax.__file__).parent
# Files with lines that ignore an error in mypy's words, without a reason. None should be added.
WITHOUT_REASON = {
    "splitjax/cli/__init__.py",
    "splitjax/cli/simulate.py",
    "splitjax/lower/partial/uneven.py",
    "splitjax/runtime/launch/output.py",
    "splitjax/schedule/execution/threads.py",
}


def test_figures_against_bounds():
    bounds = {"num_errors": 3, "completeness_percent": 98.0}
    assert broken({"num_errors": 3, "completeness_percent": 98.0}, bounds) == []
    assert broken({"num_errors": 4, "completeness_percent": 99.0}, bounds) == ["num_errors is 4, and the bound is 3"]
    assert len(broken({"num_errors": 4, "completeness_percent": 97.9}, bounds)) == 2


def test_an_ignored_error_is_seen(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "x.py").write_text("a = 1\nb = a  # type: ignore\nc = b  # pyright: ignore[reportX]  # a reason\n")
    found = ignores(package)
    assert [place for place, _ in found] == ["package/x.py:2", "package/x.py:3"]
    assert [bool(IGNORE_WITH_REASON.search(line)) for _, line in found] == [False, True]


def test_the_package_ignores_few_errors_each_with_its_code_and_reason():
    bounds = json.loads((HERE / "bounds.json").read_text())
    found = ignores(PACKAGE)
    assert len(found) <= bounds["num_ignores"] <= 40
    bare = {place.split(":")[0] for place, line in found if not IGNORE_WITH_REASON.search(line)}
    assert bare <= WITHOUT_REASON
