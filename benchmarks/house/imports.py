"""Finds which module imports which: the modules of a package go in, edges come out.

Every import counts, wherever it stands: at the top of a file, in a function (lazy) or for a type checker alone. An
import that is hidden in a function is still a dependency of whoever reads or tests the module.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.house.source import Function, Module, enclosing, parents

WAYS = AT_IMPORT, LAZY, FOR_TYPES = "when imported", "in a function", "for types"


@dataclasses.dataclass(frozen=True, order=True)
class Import:
    """Says that the module `source` imports the module `target`, and in which of the `WAYS`."""

    source: str
    target: str
    way: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target} {self.way}"


def find_imports(modules: Sequence[Module]) -> tuple[Import, ...]:
    """Finds every import between `modules`, absolute and relative, once per line.

    `from package import name` is an import of the module `package.name` where there is such a module, and otherwise of
    `package`. `importlib.import_module` counts where its argument is a string in the source. That importing `a.b` also
    runs `a/__init__.py` does not count, or every module would depend on all that the package offers at its top.
    """
    known = frozenset(module.name for module in modules)
    edges: set[Import] = set()
    for module in modules:
        parent_of = parents(module.tree)
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
                continue
            for target in _targets(node, module, known):
                if target != module.name:
                    edges.add(Import(module.name, target, _way(node, parent_of), node.lineno))
    return tuple(sorted(edges))


def edges_between(imports: Iterable[Import], ways: Sequence[str] = WAYS) -> set[tuple[str, str]]:
    """Gives the pairs (importing module, imported module) of those `imports` that are of one of `ways`."""
    return {(edge.source, edge.target) for edge in imports if edge.way in ways}


def between_rooms(imports: Iterable[Import], room_of: dict[str, str]) -> set[tuple[str, str]]:
    """Gives the pairs (importing room, imported room); `room_of` maps a module's name to its room."""
    pairs = {(room_of[edge.source], room_of[edge.target]) for edge in imports}
    return {(source, target) for source, target in pairs if source != target}


def _targets(node: ast.Import | ast.ImportFrom | ast.Call, module: Module, known: frozenset[str]) -> Iterator[str]:
    """Yields the modules of the package that `node` imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _nearest(alias.name, known)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node.module or "", node.level, module.package)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            yield from [name] if name in known else _nearest(base, known)
    elif _is_import_module(node.func) and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            level = len(name.value) - len(name.value.lstrip("."))
            yield from _nearest(_absolute(name.value.lstrip("."), level, module.package), known)


def _absolute(name: str, level: int, package: str) -> str:
    """Resolves a relative import of `level` dots, as seen from `package`; level 0 is an absolute import."""
    if not level:
        return name
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - level + 1])
    return f"{base}.{name}" if name else base


def _nearest(name: str, known: frozenset[str]) -> list[str]:
    """Gives `name`, or the longest known module above it; nothing where it is outside the package."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return [name] if name else []


def _is_import_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _way(node: ast.AST, parent_of: dict[ast.AST, ast.AST]) -> str:
    """Decides when an import runs; one for types in a function is for types."""
    way, inner = AT_IMPORT, node
    for outer in enclosing(node, parent_of):
        if isinstance(outer, ast.If) and _is_type_checking(outer.test) and inner in outer.body:
            return FOR_TYPES
        if isinstance(outer, Function | ast.Lambda):
            way = LAZY
        inner = outer
    return way


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"
