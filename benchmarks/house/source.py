"""Reads the Python files of a checkout: their text and syntax trees go in, `Module` values come out.

Nothing of the checkout is imported, so it is measured whatever JAX it needs, and also where it is broken.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

PACKAGE = "splitjax"
FOLDERS = (PACKAGE, "tests", "benchmarks", "notebooks")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """Holds a module of the package: its file, its dotted name and its syntax tree.

    `name` is that of the package for an `__init__.py`. `path` is relative to the checkout and uses `/`.
    """

    path: str
    name: str
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Tells whether the module is the `__init__.py` of a package."""
        return self.path.endswith("/__init__.py")

    @property
    def package(self) -> str:
        """Names the package that relative imports of the module start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        """Names the room: the folder below the package's, such as `lower/turns`.

        A file directly in the package's folder is a room of its own, since some of these files stand below every room
        and some above; it is named by its file, such as `plan.py`.
        """
        folder, _, file = self.path.rpartition("/")
        _, _, room = folder.partition("/")
        return room or file

    @property
    def num_lines(self) -> int:
        """Counts the lines of the file."""
        return len(self.text.splitlines())


def python_files(checkout: pathlib.Path, folder: str) -> list[str]:
    """Lists the Python files below `folder` of `checkout`, as sorted paths relative to the checkout.

    Hidden folders and caches are left out. A folder that does not exist has no files.
    """
    files = (file.relative_to(checkout) for file in (checkout / folder).rglob("*.py"))
    return sorted(file.as_posix() for file in files if not any(_is_skipped(part) for part in file.parts))


def read_text(checkout: pathlib.Path, path: str) -> str:
    """Reads the file at `path` of `checkout` as UTF-8."""
    return (checkout / path).read_text(encoding="utf-8")


def read_package(checkout: pathlib.Path, package: str = PACKAGE) -> tuple[Module, ...]:
    """Reads and parses every module of `package`, a folder at the top of `checkout`.

    Raises `SyntaxError` with the file's name where a file is not valid Python, and `FileNotFoundError` where `checkout`
    holds no such package.
    """
    modules = []
    for path in python_files(checkout, package):
        text = read_text(checkout, path)
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        modules.append(Module(path, name, text, ast.parse(text, filename=path)))
    if not modules:
        raise FileNotFoundError(f"{checkout} has no Python files in {package}/; --checkout names the top of a checkout")
    return tuple(modules)


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    """Maps every node of `tree` but the top to the node that holds it."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def enclosing(node: ast.AST, parent_of: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes that hold `node`, from the inside out. `parent_of` comes from `parents`."""
    while node in parent_of:
        node = parent_of[node]
        yield node


def _is_skipped(part: str) -> bool:
    return part == "__pycache__" or part.startswith(".")
