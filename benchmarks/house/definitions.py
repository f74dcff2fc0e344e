"""Finds what modules define: modules go in, functions and classes with their arguments and docstrings come out."""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.house.source import Function, Module

# Decorators of definitions that another definition of the same name documents.
_DOCUMENTED_ELSEWHERE = ("overload", "override", "setter", "deleter")


@dataclasses.dataclass(frozen=True)
class Definition:
    """Describes a function, method or class of a module.

    `name` is dotted inside the module, such as `Plan.show`. `parameters` are those that a caller may name or place,
    without `self` and `cls` of methods, `*args` and `**kwargs`; a class has none. `is_public` tells whether neither the
    name nor a class around it begins with an underscore, and nothing but classes stands around it; dunder methods are
    not public.
    """

    path: str
    line: int
    name: str
    room: str
    kind: str  # "function", "method", "class"
    parameters: tuple[str, ...]
    docstring: str | None
    is_public: bool
    is_nested: bool  # inside a function
    is_documented_elsewhere: bool = False  # an overload, an override that says so, or a property's setter

    def __str__(self) -> str:
        return f"{self.path}:{self.line} `{self.name}`"


def find_definitions(modules: Iterable[Module]) -> tuple[Definition, ...]:
    """Finds every function, method and class of `modules`, nested ones included, in the order of the files."""
    return tuple(definition for module in modules for definition in _inside(module, module.tree, (), False, True))


def needs_docstring(definition: Definition) -> bool:
    """Tells whether whoever uses the package meets `definition` and no other definition documents it."""
    return definition.is_public and not definition.is_documented_elsewhere


def unnamed_parameters(definition: Definition) -> tuple[str, ...]:
    """Gives the parameters that do not occur as a word in the docstring; those with a leading underscore may miss."""
    words = set(_words(definition.docstring or ""))
    return tuple(name for name in definition.parameters if not name.startswith("_") and name not in words)


def classes_twice_in_a_room(definitions: Sequence[Definition]) -> list[str]:
    """Describes each class name that several modules of a room define, with its places."""
    places: dict[tuple[str, str], list[Definition]] = collections.defaultdict(list)
    for definition in _top_classes(definitions):
        places[definition.room, definition.name].append(definition)
    return [_say(name, group) for (_, name), group in sorted(places.items()) if _num_files(group) > 1]


def classes_in_several_rooms(definitions: Sequence[Definition]) -> list[str]:
    """Describes each class name that several rooms define, with its places."""
    places: dict[str, list[Definition]] = collections.defaultdict(list)
    for definition in _top_classes(definitions):
        places[definition.name].append(definition)
    return [_say(name, group) for name, group in sorted(places.items()) if len({it.room for it in group}) > 1]


def functions_twice_in_a_room(definitions: Sequence[Definition]) -> list[str]:
    """Describes each name of a public function at the top of several modules of a room, with its places."""
    places: dict[tuple[str, str], list[Definition]] = collections.defaultdict(list)
    for definition in definitions:
        if definition.kind == "function" and definition.is_public:
            places[definition.room, definition.name].append(definition)
    return [_say(name, group) for (_, name), group in sorted(places.items()) if _num_files(group) > 1]


def files_in_several_rooms(modules: Iterable[Module]) -> list[str]:
    """Describes each file name of `modules` that recurs in several folders; `__init__.py` and the like may recur."""
    folders: dict[str, list[str]] = collections.defaultdict(list)
    for module in modules:
        folder, _, file = module.path.rpartition("/")
        if not file.startswith("__"):
            folders[file].append(folder)
    return [f"`{file}`: {', '.join(rooms)}" for file, rooms in sorted(folders.items()) if len(rooms) > 1]


def _inside(
    module: Module, holder: ast.AST, outer: tuple[str, ...], in_function: bool, is_public: bool
) -> Iterable[Definition]:
    """Yields the definitions inside `holder`, whose dotted name is `outer`."""
    for node in ast.iter_child_nodes(holder):
        if not isinstance(node, Function | ast.ClassDef):
            yield from _inside(module, node, outer, in_function, is_public)  # under an `if`, a `try` or a `with`
            continue
        name = (*outer, node.name)
        decorators = {_last_name(decorator) for decorator in node.decorator_list}
        is_shown = is_public and not in_function and not node.name.startswith("_")
        is_class = isinstance(node, ast.ClassDef)
        is_method = isinstance(holder, ast.ClassDef)
        yield Definition(
            path=module.path,
            line=node.lineno,
            name=".".join(name),
            room=module.room,
            kind="class" if is_class else "method" if is_method else "function",
            parameters=() if is_class else _parameters(node, is_method and "staticmethod" not in decorators),
            docstring=ast.get_docstring(node),
            is_public=is_shown,
            is_nested=in_function,
            is_documented_elsewhere=not decorators.isdisjoint(_DOCUMENTED_ELSEWHERE),
        )
        yield from _inside(module, node, name, in_function or not is_class, is_shown)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, has_self: bool) -> tuple[str, ...]:
    placed = [*node.args.posonlyargs, *node.args.args]
    return tuple(argument.arg for argument in [*placed[1 if has_self else 0 :], *node.args.kwonlyargs])


def _last_name(decorator: ast.expr) -> str:
    """Gives the last part of a decorator's name: `setter` for `value.setter`, `cache` for `functools.cache(...)`."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()


def _top_classes(definitions: Iterable[Definition]) -> list[Definition]:
    return [it for it in definitions if it.kind == "class" and not it.is_nested and "." not in it.name]


def _num_files(group: Iterable[Definition]) -> int:
    return len({definition.path for definition in group})


def _say(name: str, group: Iterable[Definition]) -> str:
    return f"`{name}`: " + ", ".join(f"{definition.path}:{definition.line}" for definition in group)
