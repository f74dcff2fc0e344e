"""The figures of `python -m benchmarks house`, each against a small package whose figure is known."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from benchmarks.house import commands, figures, graphs, imports, main, prose, words
from benchmarks.house.definitions import find_definitions, unnamed_parameters
from benchmarks.house.source import Module, read_package


def package(folder: pathlib.Path, files: dict[str, str]) -> tuple[Module, ...]:
    """Writes a package `splitjax` of `files` (path within it -> text) into `folder` and reads it."""
    for path, text in files.items():
        file = folder / "splitjax" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return read_package(folder)


def measured(folder: pathlib.Path, files: dict[str, str]) -> figures.House:
    """Measures a package of `files`, and its file `alone.py` that imports nothing."""
    package(folder, {"alone.py": "", **files})
    return figures.measure(folder)


def test_a_circle_through_a_lazy_import_is_seen_and_named(tmp_path):
    house = measured(
        tmp_path,
        {
            "values/plan.py": "def show():\n    from splitjax.report import text\n    return text.render\n",
            "report/__init__.py": "",
            "report/text.py": "from splitjax.values.plan import show\n",
        },
    )
    assert (house.values["circles"], house.values["modules_in_circles"], house.values["eager_circles"]) == (1, 2, 0)
    assert (house.values["room_circles"], house.values["room_pairs"], house.values["lazy_imports"]) == (1, 1, 1)
    assert house.lists["circles"] == [
        "circle of 2 modules: splitjax.report.text, splitjax.values.plan",
        "splitjax.report.text:1 imports splitjax.values.plan when imported",
        "splitjax.values.plan:2 imports splitjax.report.text in a function",
    ]


def test_a_circle_for_types_alone_is_seen_and_its_else_branch_is_not_for_types(tmp_path):
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from splitjax import second\n"
        "else:\n    import splitjax.third\n"
    )
    modules = package(tmp_path, {"first.py": text, "second.py": "import splitjax.first\n", "third.py": ""})
    edges = imports.find_imports(modules)
    assert [(it.source, it.target, it.way) for it in edges] == [
        ("splitjax.first", "splitjax.second", imports.FOR_TYPES),
        ("splitjax.first", "splitjax.third", imports.AT_IMPORT),
        ("splitjax.second", "splitjax.first", imports.AT_IMPORT),
    ]
    assert figures.measure(tmp_path).values["circles"] == 1


@pytest.mark.parametrize(
    "text, target",
    [
        ("from . import sibling", "splitjax.room.sibling"),
        ("from .sibling import value", "splitjax.room.sibling"),
        ("from ..top import value", "splitjax.top"),
        ("from splitjax.room import value", "splitjax.room"),
        ("from .. import room", "splitjax.room"),
        ("import importlib\nimportlib.import_module('splitjax.top')", "splitjax.top"),
        ("import importlib\nimportlib.import_module('.sibling', __package__)", "splitjax.room.sibling"),
    ],
)
def test_imports_are_resolved_to_modules(tmp_path, text, target):
    files = {"__init__.py": "", "top.py": "", "room/__init__.py": "", "room/sibling.py": "", "room/reader.py": text}
    assert [it.target for it in imports.find_imports(package(tmp_path, files))] == [target]


def test_relative_imports_of_a_package_start_at_itself(tmp_path):
    modules = package(tmp_path, {"room/__init__.py": "from .inner import value\n", "room/inner.py": "import jax\n"})
    edges = imports.edges_between(imports.find_imports(modules))
    assert edges == {("splitjax.room", "splitjax.room.inner")}


def test_the_longest_chain_counts_a_circle_once(tmp_path):
    house = measured(
        tmp_path,
        {
            "a.py": "import splitjax.b\nimport splitjax.d\n",
            "b.py": "import splitjax.c\n",
            "c.py": "def late():\n    import splitjax.b\nimport splitjax.d\n",
            "d.py": "",
        },
    )
    assert house.lists["chain"] == ["splitjax.a", "circle of 2: splitjax.b, splitjax.c", "splitjax.d"]
    assert (house.values["chain"], house.values["eager_chain"]) == (3, 4)
    assert house.lists["floors"][-1] == "floor 1: splitjax.alone, splitjax.d"


def test_components_of_a_long_path_and_of_nested_circles():
    names = [f"n{number:05}" for number in range(2000)]  # longer than Python's stack
    path = list(zip(names, names[1:], strict=False))
    assert len(graphs.longest_chain(names, path)) == 2000 and not graphs.circles(names, path)
    assert graphs.circles(names, [*path, (names[-1], names[0])]) == [tuple(names)]
    edges = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "c"), ("c", "e")]
    assert graphs.circles("abcde", edges) == [("a", "b"), ("c", "d")]
    assert graphs.floors("abcde", edges) == {"a": 3, "b": 3, "c": 2, "d": 2, "e": 1}


def test_rooms_have_their_own_files_lines_and_floors(tmp_path):
    rooms = measured(
        tmp_path,
        {
            "lower/__init__.py": "",
            "lower/low.py": "x = 1\n",
            "lower/high.py": "from splitjax.lower.low import x\nfrom splitjax.lower.turns import cut\n",
            "lower/turns/cut.py": "y = 1\nz = 1\n",
        },
    ).rooms
    assert rooms["lower"] == figures.Room(files=3, lines=3, floors=2)
    assert rooms["lower/turns"] == figures.Room(files=1, lines=2, floors=1)
    assert rooms["alone.py"] == figures.Room(files=1, lines=0, floors=1)


def test_nested_rooms_that_import_each_other_are_a_circle_of_folders_only(tmp_path):
    files = {
        "lower/low.py": "",
        "lower/high.py": "import splitjax.lower.turns.cut\n",
        "lower/turns/cut.py": "import splitjax.lower.low\n",
    }
    values = measured(tmp_path, files).values
    assert (values["circles"], values["room_circles"], values["top_room_circles"]) == (0, 1, 0)


def test_parameters_are_counted_without_self_and_catch_alls(tmp_path):
    names = "a, b, c, d, e, f, g"
    house = measured(
        tmp_path,
        {
            "many.py": f"def seven({names}, *rest, **more): pass\n"
            f"def eight({names}, *, h): pass\n"
            f"class Step:\n    def seven(self, {names}): pass\n"
            f"    @staticmethod\n    def eight({names}, h): pass\n"
        },
    )
    assert house.lists["many_parameters"] == ["splitjax/many.py:2 `eight`: 8", "splitjax/many.py:6 `Step.eight`: 8"]
    assert house.values["most_parameters"] == 8


def test_classes_functions_and_files_that_share_a_name(tmp_path):
    house = measured(
        tmp_path,
        {
            "lower/cut.py": "class Turns: pass\ndef run():\n    class Local: pass\n",
            "lower/rows.py": "class Turns: pass\nclass Alone: pass\ndef run():\n    class Local: pass\n",
            "report/rows.py": "class Turns:\n    class Alone: pass\ndef run(): pass\n",
        },
    )
    assert house.lists["classes_in_room"] == ["`Turns`: splitjax/lower/cut.py:1, splitjax/lower/rows.py:1"]
    assert [line.split(":")[0] for line in house.lists["classes_across"]] == ["`Turns`"]
    assert house.lists["functions_in_room"] == ["`run`: splitjax/lower/cut.py:2, splitjax/lower/rows.py:3"]
    assert house.lists["file_names"] == ["`rows.py`: splitjax/lower, splitjax/report"]


def test_a_docstring_names_its_arguments_as_words(tmp_path):
    text = (
        'def good(count, *, axis):\n    """Counts `count` over axis."""\n'
        'def part(count, axes):\n    """Counts accounts over the axis."""\n'
        "def bare(value): pass\n"
        "def empty(): pass\n"
        "def _private(value): pass\n"
        'class Plan:\n    """Holds."""\n    def show(self, _, width):\n        """Shows in width."""\n'
        "    @property\n    def text(self): pass\n"
    )
    definitions = {it.name: it for it in find_definitions(package(tmp_path, {"it.py": text}))}
    assert not unnamed_parameters(definitions["good"]) and not unnamed_parameters(definitions["Plan.show"])
    assert unnamed_parameters(definitions["part"]) == ("count", "axes")
    house = figures.measure(tmp_path)
    assert house.values["with_arguments"] == 4 and house.values["naming_percent"] == 50
    assert house.lists["unnamed_arguments"] == [
        "splitjax/it.py:3 `part`: count, axes",
        "splitjax/it.py:5 `bare`: value",
    ]
    assert [line.split("`")[1] for line in house.lists["undocumented"]] == ["bare", "empty", "Plan.text"]


@pytest.mark.parametrize(
    "docstring, expected",
    [
        ("Adds rows.", False),
        ("Adds rows", True),
        ("Adds rows:\n\n- of tables", False),
        ("Adds rows, e.g. of tables", True),
        ("Whether it fits.", True),
        ("Theirs for a `shard_map`.", True),
        ("For each layer, returns its cost.", False),
        ("In a kernel: starts copies.", True),
        ("Which rows does a worker own?", False),
        ("Reads v0.1 of a file\nover two lines. Of no matter.", False),
    ],
)
def test_fragments(docstring, expected):
    assert prose.begins_with_fragment(docstring) is expected


def test_first_sentences_and_articles():
    assert prose.first_sentence("Adds\n rows of t.w. Then stops.") == "Adds rows of t.w."
    assert prose.begins_with_article("The lines of a table.") and not prose.begins_with_article("Gives the lines.")


def test_long_lines_are_counted_in_characters_by_file(tmp_path):
    (tmp_path / "tests").mkdir()
    line = "# " + "é" * 118
    (tmp_path / "tests" / "a.py").write_text(f"{line}\n{line}x\n{line}xy\n", encoding="utf-8")
    places = prose.long_lines(tmp_path, "tests")
    assert places == ["tests/a.py:2 has 121", "tests/a.py:3 has 122"] and prose.by_file(places) == ["tests/a.py: 2"]


def test_vague_names_are_counted_where_they_are_variables(tmp_path):
    text = (
        "one = 1\ndef same(one, other): return one is other\n"
        "class Value:\n    other = None\n    def __eq__(self, other): return self.one is other\n"
        "call(one=2)  # one, other\n"
    )
    modules = package(tmp_path, {"it.py": text})
    assert len(words.uses_of("one", modules)) == 3 and len(words.uses_of("found", modules)) == 0
    assert words.uses_of("other", modules) == ["splitjax/it.py:2", "splitjax/it.py:2", "splitjax/it.py:4"]


def test_sets_of_primitive_names(tmp_path):
    text = (
        "A = frozenset({'add', 'mul', 'sin'})\n"
        "B: set[str] = set('jit custom_jvp_call remat2 notes'.split())\n"
        "C = {'dot_general': 1, 'reshape': 2, 'scan': 3}\n"
        "D = ('jit', 'closed_call')\n"
        "E = ('add', 'mul', 'rows', 'tables')\n"
        "F = {'first': 'add', 'second': 'mul', 'third': 'sin'}\n"
        "def inside():\n    return {'add', 'mul', 'sin'}\n"
    )
    modules = package(tmp_path, {"it.py": text})
    assert [it.split("`")[1] for it in words.primitive_sets(modules)] == ["A", "B", "C"]
    assert [it.split("`")[1] for it in words.call_like_sets(modules)] == ["B", "D"]


def test_any_and_ignores(tmp_path):
    text = (
        "from typing import Any\nimport typing\nRow = dict[str, Any]\n"
        "def f(x: 'list[Any]', y: Any) -> typing.Any:\n    return x  # type: ignore\n"
        "z: int = ''  # pyright: ignore[reportAssignmentType] the library's stub is wrong\n"
        "w: int = ''  # pyright: ignore[reportAssignmentType]\n"
        "text = '# type: ignore'\n"
    )
    modules = package(tmp_path, {"it.py": text})
    assert len(words.uses_of_any(modules)) == 4
    assert words.ignores(modules) == [f"splitjax/it.py:{line}" for line in (5, 6, 7)]
    assert [it.split(": ")[0] for it in words.bare_ignores(modules)] == ["splitjax/it.py:5", "splitjax/it.py:7"]


def test_full_folders_and_long_modules(tmp_path):
    files = {f"lower/m{number}.py": "" for number in range(26)} | {"long.py": "\n" * 401, "short.py": "\n" * 400}
    house = measured(tmp_path, files)
    assert house.lists["large_folders"] == ["splitjax/lower: 26"] and house.values["largest_folder"] == 26
    assert house.lists["long_modules"] == ["splitjax/long.py: 401"]


@pytest.fixture
def pyright(tmp_path) -> str:
    """A stand-in that prints what pyright's --outputjson prints, for a package with three errors and a warning."""
    script = tmp_path / "pyright.py"
    script.write_text(
        "import json, os, sys\n"
        "top = os.getcwd()\n"
        "def say(file, rule, severity='error'):\n"
        "    return {'file': top + '/splitjax/' + file, 'severity': severity, 'rule': rule}\n"
        "said = [say('a.py', 'reportX'), say('b.py', 'reportX'), say('b.py', 'reportY'), say('b.py', 'w', 'warning')]\n"
        "assert '--outputjson' in sys.argv and sys.argv[-1] in ('splitjax', '--ignoreexternal')\n"
        "score = {'typeCompleteness': {'packageRootDirectory': top + '/splitjax', 'completenessScore': 0.875}}\n"
        "answer = {'version': '1.2', 'generalDiagnostics': said}\n"
        "print(json.dumps(answer | score if '--verifytypes' in sys.argv else answer))\n"
    )
    return f"{sys.executable} {script}"


def test_type_errors_are_read_from_pyright(tmp_path, pyright):
    package(tmp_path, {"a.py": ""})
    typing = commands.measure_typing(tmp_path, pyright)
    assert (typing.num_errors, typing.completeness_percent, typing.version) == (3, 87.5, "1.2")
    assert typing.by_rule == ("reportX: 2", "reportY: 1")
    assert typing.by_file == ("splitjax/b.py: 2", "splitjax/a.py: 1")
    with pytest.raises(commands.CommandError, match="remedy"):
        commands.measure_typing(tmp_path, f"{sys.executable} -c pass")


def test_import_times_are_of_the_checkout(tmp_path, monkeypatch):
    package(tmp_path, {"__init__.py": "import time\nimport jax\ntime.sleep(0.2)\n"})
    (tmp_path / "jax.py").write_text("import time\ntime.sleep(0.2)\n")
    times = commands.measure_imports(tmp_path, 1)
    assert 0.2 <= times.jax_seconds < times.package_seconds and times.package_seconds >= 0.4
    assert times.ratio == times.package_seconds / times.jax_seconds
    (tmp_path / "jax.py").write_text("raise ValueError('broken')\n")
    with pytest.raises(commands.CommandError, match="broken"):
        commands.measure_imports(tmp_path, 1)


def test_the_page_has_before_beside_after_and_keeps_what_is_not_measured_again(tmp_path, pyright, capsys):
    checkout, output = tmp_path / "checkout", tmp_path / "results"
    package(checkout, {"first.py": "import splitjax.second\n", "second.py": "import splitjax.first\n"})
    options = ["--checkout", str(checkout), "--output", str(output)]
    assert main([*options, "--label", "before", "--pyright", pyright]) == 0
    assert main([*options, "--label", "before"]) == 0  # measures no types
    (checkout / "splitjax" / "second.py").write_text("")
    assert main(options) == 0
    page = (output / "house.md").read_text()
    assert "| circles of modules | 0 | 1 | 0 |" in page
    assert "| type errors (pyright) | 0 | 3 | not measured |" in page
    assert "| first.py | 1 | 1 | 1 | 1 | 1 | 1 |" in page
    assert "### Longest chain of imports, in modules\n\n- splitjax.first\n- splitjax.second\n" in page
    assert [entry["label"] for entry in json.loads((output / "house.json").read_text()).values()] == ["before", "after"]
    capsys.readouterr()
    assert main([*options, "--list", "chain"]) == 0
    assert capsys.readouterr().out == "splitjax.first\nsplitjax.second\n"
    assert main([*options, "--list", "nothing"]) == 2 and "there are: any" in capsys.readouterr().err
    assert main(["--checkout", str(output)]) == 2 and "--checkout" in capsys.readouterr().err


def test_every_figure_is_measured_and_every_row_has_a_figure(tmp_path):
    assert {spec.key for spec in figures.SPECS} <= set(measured(tmp_path, {}).values)
