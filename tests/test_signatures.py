"""What travels together is one value: no function inside of the package takes more than seven arguments."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_PARAMETERS = 7

# What users call: an option is a keyword there, and docs/ lists them.
PUBLIC = {
    "data/streams.py: stream",
    "models/spec.py: from_linen",
    "primitives/register.py: register_primitive",
    "runtime/training/loop.py: train",
    "schedule/model/jobs.py: JobProfile.uniform",
}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    """Names of the parameters of a function, without those that stand for the instance or the class."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [argument.arg for argument in (*named, *variadic) if argument.arg not in ("self", "cls")]


def functions(tree: ast.AST, around: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Qualified name and parameters of every function, method and lambda below a node."""
    for node in ast.iter_child_nodes(tree):
        inside = around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = (*around, getattr(node, "name", "<lambda>"))
            yield ".".join(inside), parameters(node)
        elif isinstance(node, ast.ClassDef):
            inside = (*around, node.name)
        yield from functions(node, inside)


def test_what_travels_together_is_one_value():
    long = {
        f"{file.relative_to(ROOT / 'splitjax').as_posix()}: {name}"
        for file in sorted((ROOT / "splitjax").rglob("*.py"))
        for name, taken in functions(ast.parse(file.read_text(encoding="utf-8")))
        if len(taken) > MOST_PARAMETERS
    }
    assert long == PUBLIC


def test_parameters_are_counted():
    tree = ast.parse(
        "class A:\n"
        "    def long(self, a, /, b, c, *d, e, f, **g):\n"
        "        return lambda h, i: h\n"
        "    async def short(cls, a): ...\n"
    )
    assert dict(functions(tree)) == {
        "A.long": ["a", "b", "c", "e", "f", "d", "g"],
        "A.long.<lambda>": ["h", "i"],
        "A.short": ["a"],
    }
