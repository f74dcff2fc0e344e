"""Puts the figures of a checkout together: a checkout goes in, a `House` of numbers and lists comes out."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.house import definitions as defined
from benchmarks.house import graphs, imports, prose, words
from benchmarks.house.commands import ImportTime, Typing
from benchmarks.house.source import FOLDERS, PACKAGE, Module, python_files, read_package

MAX_MODULE_LINES = 400
MAX_FILES = 25
MAX_PARAMETERS = 7


@dataclasses.dataclass(frozen=True)
class Spec:
    """Describes a row of the table: the key of its figure, its title, the goal in words, and decimals."""

    key: str
    title: str
    goal: str = ""
    digits: int = 0


@dataclasses.dataclass(frozen=True)
class Room:
    """Counts a room's own files and lines, without rooms inside it.

    `floors` is the length of the longest chain of imports among these files, in modules.
    """

    files: int
    lines: int
    floors: int


@dataclasses.dataclass(frozen=True)
class House:
    """Holds what was measured in a checkout.

    `values` has figures by key (None: not measured), `rooms` the rooms by name, `lists` by key what a figure counts.
    """

    values: Mapping[str, float | None]
    rooms: Mapping[str, Room]
    lists: Mapping[str, Sequence[str]]


SPECS: tuple[Spec, ...] = (
    Spec("modules", f"modules of {PACKAGE}"),
    Spec("lines", f"lines of {PACKAGE}"),
    Spec("long_modules", f"modules of more than {MAX_MODULE_LINES} lines"),
    Spec("large_folders", f"folders of more than {MAX_FILES} files in `splitjax/`, tests and benchmarks", "0"),
    Spec("largest_folder", "files in the largest folder of `splitjax/`, tests and benchmarks", f"at most {MAX_FILES}"),
    Spec("imports", "imports between modules"),
    Spec("lazy_imports", "imports between modules, in functions alone"),
    Spec("typing_imports", "imports between modules, for types alone"),
    Spec("circles", "circles of modules", "0"),
    Spec("modules_in_circles", "modules that stand in circles", "0"),
    Spec("eager_circles", "circles of modules, by imports that run when a module is imported", "0"),
    Spec("room_circles", "circles of rooms, each folder a room", "0"),
    Spec("room_pairs", "pairs of rooms that import each other", "0"),
    Spec("top_room_circles", "circles of rooms, each with the rooms inside it", "0"),
    Spec("chain", "longest chain of imports, in modules"),
    Spec("eager_chain", "longest chain of imports that run when a module is imported"),
    Spec("room_floors", "longest chain of imports between rooms"),
    Spec("tallest_room", "longest chain of imports inside a room"),
    Spec("many_parameters", f"functions of more than {MAX_PARAMETERS} parameters"),
    Spec("most_parameters", "most parameters of a function"),
    Spec("classes_in_room", "class names defined twice in a room", "0"),
    Spec("classes_across", "class names defined in several rooms", "one meaning each"),
    Spec("functions_in_room", "names of public functions defined twice in a room"),
    Spec("file_names", "file names that recur in other folders"),
    *(Spec(f"long_lines_{it}", f"lines of more than {prose.MAX_LINE} in {it}/", "0") for it in FOLDERS),
    Spec("undocumented", "public functions, methods and classes without a docstring", "0"),
    Spec("with_arguments", "public functions and methods with arguments"),
    Spec("unnamed_arguments", "public functions and methods whose docstring does not name all arguments", "0"),
    Spec("naming_percent", "docstrings that name all arguments, % of the functions that have any", "100", 1),
    Spec("fragments", "public docstrings that begin with a fragment", "0"),
    Spec("private_fragments", "other docstrings that begin with a fragment"),
    Spec("articles", "public functions whose docstring begins with an article"),
    *(Spec(f"uses_of_{it}", f"uses of `{it}` as a variable or parameter") for it in words.VAGUE_NAMES),
    Spec("primitive_sets", "sets of primitive names at the top of modules"),
    Spec("call_like_sets", "sets of call-like primitives at the top of modules", "at most 1"),
    Spec("any", "uses of `Any`"),
    Spec("type_errors", "type errors (pyright)", "0"),
    Spec("ignores", "ignored type errors", "at most 40"),
    Spec("bare_ignores", "ignored type errors without code or reason", "0"),
    Spec("completeness", "exported symbols of known type (`--verifytypes`), %", "at least 98", 1),
    Spec("import_ratio", "time of `import splitjax` over that of `import jax`", "at most 1.3", 2),
    Spec("package_seconds", "`import splitjax`, s", "", 2),
    Spec("jax_seconds", "`import jax`, s", "", 2),
)


def measure(checkout: pathlib.Path, typing: Typing | None = None, times: ImportTime | None = None) -> House:
    """Takes every figure of `checkout`; `typing` and `times` are what other programs measured, None where none did."""
    modules = read_package(checkout)
    lists: dict[str, Sequence[str]] = {
        **_structure_lists(checkout, modules),
        **_definition_lists(checkout, modules),
        "primitive_sets": words.primitive_sets(modules),
        "call_like_sets": words.call_like_sets(modules),
        "any": words.uses_of_any(modules),
        "ignores": words.ignores(modules),
        "bare_ignores": words.bare_ignores(modules),
    }
    values: dict[str, float | None] = {key: len(entries) for key, entries in lists.items()}
    rooms = _import_figures(modules, values, lists)
    folders = _files_per_folder(checkout)
    every = defined.find_definitions(modules)
    num_with_arguments = sum(defined.needs_docstring(it) and bool(it.parameters) for it in every)
    num_naming = num_with_arguments - len(lists["unnamed_arguments"])
    values |= {
        "modules": len(modules),
        "lines": sum(module.num_lines for module in modules),
        "largest_folder": max(folders.values()),
        "most_parameters": max((len(it.parameters) for it in every), default=0),
        "with_arguments": num_with_arguments,
        "naming_percent": 100 * num_naming / num_with_arguments if num_with_arguments else None,
        "type_errors": typing.num_errors if typing else None,
        "completeness": typing.completeness_percent if typing else None,
        "import_ratio": times.ratio if times else None,
        "package_seconds": times.package_seconds if times else None,
        "jax_seconds": times.jax_seconds if times else None,
    }
    if typing:
        lists |= {"type_errors": typing.by_file, "type_errors_by_rule": typing.by_rule}
    return House(values, rooms, lists)


def _structure_lists(checkout: pathlib.Path, modules: Sequence[Module]) -> dict[str, Sequence[str]]:
    long = sorted((it for it in modules if it.num_lines > MAX_MODULE_LINES), key=lambda it: -it.num_lines)
    folders = _files_per_folder(checkout).items()
    return {
        "long_modules": [f"{module.path}: {module.num_lines}" for module in long],
        "large_folders": [f"{folder}: {count}" for folder, count in folders if count > MAX_FILES],
        **{f"long_lines_{it}": prose.long_lines(checkout, it) for it in FOLDERS},
    }


def _definition_lists(checkout: pathlib.Path, modules: Sequence[Module]) -> dict[str, Sequence[str]]:
    every = defined.find_definitions(modules)
    public = [it for it in every if defined.needs_docstring(it)]
    crowded = sorted((it for it in every if len(it.parameters) > MAX_PARAMETERS), key=lambda it: -len(it.parameters))
    return {
        "many_parameters": [f"{it}: {len(it.parameters)}" for it in crowded],
        "classes_in_room": defined.classes_twice_in_a_room(every),
        "classes_across": defined.classes_in_several_rooms(every),
        "functions_in_room": defined.functions_twice_in_a_room(every),
        "file_names": defined.files_in_several_rooms(modules),
        "undocumented": [str(it) for it in public if it.docstring is None],
        "unnamed_arguments": [
            f"{it}: {', '.join(unnamed)}" for it in public if (unnamed := defined.unnamed_parameters(it))
        ],
        "fragments": prose.fragments(modules, every, is_public=True),
        "private_fragments": prose.fragments(modules, every, is_public=False),
        "articles": prose.articles(every),
        **{f"uses_of_{it}": words.uses_of(it, modules) for it in words.VAGUE_NAMES},
    }


def _import_figures(
    modules: Sequence[Module], values: dict[str, float | None], lists: dict[str, Sequence[str]]
) -> dict[str, Room]:
    """Adds what the imports between `modules` show to `values` and `lists`, and gives the rooms by name."""
    names = [module.name for module in modules]
    room_of = {module.name: module.room for module in modules}
    top_of = {module.name: module.room.split("/")[0] for module in modules}
    known = imports.find_imports(modules)
    edges, eager = imports.edges_between(known), imports.edges_between(known, (imports.AT_IMPORT,))
    lazy = imports.edges_between(known, (imports.LAZY,)) - eager
    groups, eager_groups = graphs.circles(names, edges), graphs.circles(names, eager)
    between, between_tops = imports.between_rooms(known, room_of), imports.between_rooms(known, top_of)
    room_names = sorted(set(room_of.values()))
    room_groups = graphs.circles(room_names, between)
    top_groups = graphs.circles(set(top_of.values()), between_tops)
    pairs = graphs.mutual_pairs(between)
    rooms = {name: _room(name, modules, edges) for name in room_names}
    chain, eager_chain = graphs.longest_chain(names, edges), graphs.longest_chain(names, eager)
    room_chain = graphs.longest_chain(room_names, between)
    tallest = sorted(rooms.items(), key=lambda item: -item[1].floors)
    floor_of = graphs.floors(names, edges)
    values |= {
        "imports": len(edges),
        "lazy_imports": len(lazy),
        "typing_imports": len(edges - eager - lazy),
        "circles": len(groups),
        "modules_in_circles": sum(map(len, groups)),
        "eager_circles": len(eager_groups),
        "room_circles": len(room_groups),
        "room_pairs": len(pairs),
        "top_room_circles": len(top_groups),
        "chain": len(chain),
        "eager_chain": len(eager_chain),
        "room_floors": len(room_chain),
        "tallest_room": tallest[0][1].floors,
    }
    lists |= {
        "circles": [line for group in groups for line in _circle(group, known)],
        "eager_circles": [", ".join(group) for group in eager_groups],
        "room_circles": [", ".join(group) for group in room_groups],
        "room_pairs": [line for pair in pairs for line in _pair(pair, known, room_of)],
        "top_room_circles": [", ".join(group) for group in top_groups],
        "chain": [_say_step(step) for step in chain],
        "eager_chain": [_say_step(step) for step in eager_chain],
        "room_floors": [_say_step(step) for step in room_chain],
        "tallest_room": [f"{name}: {room.floors}" for name, room in tallest if room.floors > 1],
        "floors": [
            f"floor {floor}: {', '.join(sorted(it for it in names if floor_of[it] == floor))}"
            for floor in sorted(set(floor_of.values()), reverse=True)
        ],
    }
    return rooms


def _room(name: str, modules: Sequence[Module], edges: set[tuple[str, str]]) -> Room:
    inside = {module.name: module for module in modules if module.room == name}
    own = {(source, target) for source, target in edges if source in inside and target in inside}
    lines = sum(module.num_lines for module in inside.values())
    return Room(len(inside), lines, len(graphs.longest_chain(list(inside), own)))


def _circle(group: graphs.Component, known: Sequence[imports.Import]) -> list[str]:
    inside = [edge for edge in known if edge.source in group and edge.target in group]
    return [f"circle of {len(group)} modules: {', '.join(group)}", *map(str, inside)]


def _pair(pair: graphs.Edge, known: Sequence[imports.Import], room_of: Mapping[str, str]) -> list[str]:
    """Describes how two rooms import each other, by the fewer of the imports one way."""
    ways = [[it for it in known if (room_of[it.source], room_of[it.target]) == way] for way in (pair, pair[::-1])]
    fewer = min(ways, key=len)
    return [f"{pair[0]} and {pair[1]}: {len(ways[0])} and {len(ways[1])} imports; the fewer:", *map(str, fewer[:5])]


def _say_step(step: graphs.Component) -> str:
    return step[0] if len(step) == 1 else f"circle of {len(step)}: {', '.join(step)}"


def _files_per_folder(checkout: pathlib.Path) -> dict[str, int]:
    """Counts Python files by folder, those of folders inside it left out; the fullest folder comes first."""
    files = [path for folder in (PACKAGE, "tests", "benchmarks") for path in python_files(checkout, folder)]
    counts = collections.Counter(path.rpartition("/")[0] for path in files)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
