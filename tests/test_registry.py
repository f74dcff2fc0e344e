"""Names that other packages fill: registered on import, declared as entry points, or written as references."""

from __future__ import annotations

import sys
import textwrap

import pytest

from splitjax import _registry
from splitjax._registry import NamedRegistry, is_reference, load_reference
from splitjax.errors import ExtensionError, SyncError

GROUP = "splitjax.test_numbers"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`package(points, **modules)`: installs a distribution with these entry points and modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(points: str, **modules: str) -> None:
        info = tmp_path / "stranger-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
        for name, text in modules.items():
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    _registry._entry_points.cache_clear()
    yield install
    _registry._entry_points.cache_clear()


def numbers() -> NamedRegistry[int]:
    def accept(name, loaded):
        if not isinstance(loaded, int):
            raise TypeError(f"{loaded!r} is no number")
        if loaded >= 0:
            made.add(name, loaded)

    made = NamedRegistry("number", group=GROUP, error=SyncError, register="add", accept=accept)
    return made


def test_registered_names_are_a_mapping_and_taken_once():
    known = numbers()
    known.add("two", 2)
    known.add("two", 2)
    assert dict(known) == {"two": 2} and known.find("two") == 2 and len(known) == 1
    with pytest.raises(SyncError, match="there is a number of this name"):
        known.add("two", 3)
    known.add("two", 4, same=lambda old, new: new == 2 * old)
    assert known["two"] == 4
    with pytest.raises(SyncError, match="needs a name"):
        known.add(" ", 3)
    known.remove("two")
    assert not known


def test_an_unknown_name_gets_near_matches_and_how_to_register():
    known = numbers()
    known.add("three", 3)
    with pytest.raises(SyncError, match=r"no number of this name; did you mean 'three'\?") as caught:
        known.find("thre", place="here", also=("auto",))
    assert caught.value.place == "here" and "auto, three" in caught.value.remedy
    assert GROUP in caught.value.remedy and "with add" in caught.value.remedy


def test_an_entry_point_is_loaded_when_its_name_is_asked_for(package):
    package("five = strange_five:FIVE\nsix = strange_six:SIX", strange_five="FIVE = 5", strange_six="SIX = 6")
    known = numbers()
    assert not known and "strange_five" not in sys.modules
    assert known.knows("five") and known.find("five") == 5 and "strange_six" not in sys.modules
    known.load_all()
    assert dict(known) == {"five": 5, "six": 6}
    assert not known.knows("seven")


def test_a_registered_name_comes_before_an_entry_point(package):
    package("five = strange_raises:FIVE", strange_raises="raise ValueError('never imported')")
    known = numbers()
    known.add("five", 55)
    known.load_all()
    assert known.find("five") == 55


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise ValueError('broken on purpose')", "ValueError: broken on purpose"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("OTHER = 5", "AttributeError"),
        ("FIVE = 'five'", "'five' is no number"),
        ("FIVE = -5", "registers no number of the entry point's name"),
    ],
)
def test_a_broken_entry_point_is_named(package, text, problem):
    package("five = strange_broken:FIVE", strange_broken=text)
    for ask in (lambda known: known.find("five"), lambda known: known.knows("five"), lambda known: known.load_all()):
        with pytest.raises(ExtensionError) as caught:
            ask(numbers())
        assert problem in str(caught.value) and "'five = strange_broken:FIVE'" in str(caught.value)
        assert caught.value.place == f"package stranger, entry points of {GROUP!r}"
        assert isinstance(caught.value, ImportError)


def test_references():
    assert is_reference("package.module:name") and is_reference("module:Class.method")
    for text in ("vgg16", "a/b.toml", "C:\\rules.toml", "module:", ":name", "module:na me", None, 3, "a:b:c"):
        assert not is_reference(text), text


def test_a_reference_is_imported_or_says_why_not(package):
    package(
        "", strange_names="size = 5\nclass Box:\n    size = 6\n", strange_raise="1 / 0", strange_lacks="import nix_da"
    )

    def load(text):
        return load_reference(text, place="--model", error=SyncError)

    assert load("strange_names:size") == 5 and load("strange_names:Box.size") == 6
    for text, words in (
        ("strange_absent:size", "there is no module 'strange_absent'"),
        ("strange_absent.inner:size", "there is no module 'strange_absent'"),
        ("strange_names:sice", "strange_names has no 'sice'; did you mean 'size'?"),
        ("strange_raise:size", "cannot be imported: ZeroDivisionError"),
        ("strange_lacks:size", "cannot be imported: ModuleNotFoundError: No module named 'nix_da'"),
    ):
        with pytest.raises(SyncError) as caught:
            load(text)
        assert words in str(caught.value) and caught.value.value == text and caught.value.place == "--model"
        assert caught.value.remedy
