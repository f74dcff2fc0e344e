"""Finds vague names, sets of primitive names, `Any` and ignored type errors: modules go in, places come out."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator

from benchmarks.house.source import Function, Module, enclosing, parents

VAGUE_NAMES = ("one", "other", "found")
# Primitives whose parameter is a program that they call once; control flow is a subject of its own.
CALL_LIKE = frozenset(
    "jit pjit closed_call core_call core_closed_call call xla_call remat remat2 checkpoint shard_map run_state "
    "custom_jvp_call custom_vjp_call custom_jvp_call_jaxpr custom_vjp_call_jaxpr custom_vmap_call custom_lin "
    "custom_transpose_call".split()
)
_IGNORE = re.compile(r"#\s*(?:pyright|type):\s*ignore(?P<code>\[[\w\-, ]+\])?(?P<rest>.*)")


def uses_of(name: str, modules: Iterable[Module]) -> list[str]:
    """Gives the places where `name` is a variable or a parameter in `modules`.

    Dunder methods are left out for `other`, which is what Python calls their second operand.
    """
    places = []
    for module in modules:
        parent_of = parents(module.tree)
        lines = []
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Name | ast.arg):
                continue
            used = node.id if isinstance(node, ast.Name) else node.arg
            if used == name and not (name == "other" and _in_dunder(node, parent_of)):
                lines.append(node.lineno)
        places += [f"{module.path}:{line}" for line in sorted(lines)]
    return places


@functools.cache
def primitive_names() -> frozenset[str]:
    """Reads the names of JAX's primitives from `primitives.txt`."""
    lines = (pathlib.Path(__file__).parent / "primitives.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def primitive_sets(modules: Iterable[Module]) -> list[str]:
    """Describes each assignment at the top of a module to a collection of primitive names.

    A collection counts that has at least three strings (elements of sets, lists and tuples, keys of dicts, words of
    `"...".split()`), more than half of them names of primitives.
    """
    return _collections(modules, primitive_names(), at_least=3)


def call_like_sets(modules: Iterable[Module]) -> list[str]:
    """Describes each assignment at the top of a module to at least two strings, mostly of call-like primitives."""
    return _collections(modules, CALL_LIKE, at_least=2)


def uses_of_any(modules: Iterable[Module]) -> list[str]:
    """Gives the places of `Any` in annotations, type aliases and casts: all uses of the name but its imports."""
    places = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                used = node.id if isinstance(node, ast.Name) else node.attr
                places += [f"{module.path}:{node.lineno}"] if used == "Any" else []
            elif isinstance(node, ast.arg | ast.AnnAssign | Function):
                quoted = node.returns if isinstance(node, Function) else node.annotation
                places += [f"{module.path}:{node.lineno}"] * _num_quoted(quoted)
    return places


def ignores(modules: Iterable[Module]) -> list[str]:
    """Gives the places of `# type: ignore` and `# pyright: ignore`."""
    return [place for place, _ in _ignore_comments(modules)]


def bare_ignores(modules: Iterable[Module]) -> list[str]:
    """Gives the places of those ignores that lack a code in brackets or, after it, words that give the reason."""
    return [f"{place}: {match.group()[:60]}" for place, match in _ignore_comments(modules) if not _is_explained(match)]


def _is_explained(match: re.Match[str]) -> bool:
    return bool(match["code"]) and len(re.findall(r"[A-Za-z]{2,}", match["rest"])) >= 2


def _ignore_comments(modules: Iterable[Module]) -> Iterator[tuple[str, re.Match[str]]]:
    for module in modules:
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                yield f"{module.path}:{token.start[0]}", match


def _collections(modules: Iterable[Module], names: frozenset[str], at_least: int) -> list[str]:
    """Describes assignments at the top of modules to collections of at least `at_least` strings, mostly of `names`."""
    places = []
    for module in modules:
        for node in module.tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            strings = set(_strings(node.value))
            if len(strings) >= at_least and 2 * len(strings & names) > len(strings):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                places.append(f"{module.path}:{node.lineno} `{ast.unparse(target)}` ({len(strings)} names)")
    return places


def _strings(value: ast.expr) -> Iterator[str]:
    """Yields the strings that a literal collects, however deep."""
    for node in ast.walk(value):
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            elements: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            elements = [*node.keys]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            text = node.func.value
            yield from text.value.split() if isinstance(text, ast.Constant) and isinstance(text.value, str) else ()
            continue
        else:
            continue
        yield from (it.value for it in elements if isinstance(it, ast.Constant) and isinstance(it.value, str))


def _num_quoted(annotation: ast.expr | None) -> int:
    """Counts `Any` in the strings of an annotation, as in `x: "dict[str, Any]"`."""
    if annotation is None:
        return 0
    texts = (it.value for it in ast.walk(annotation) if isinstance(it, ast.Constant) and isinstance(it.value, str))
    return sum(len(re.findall(r"\bAny\b", text)) for text in texts)


def _in_dunder(node: ast.AST, parent_of: dict[ast.AST, ast.AST]) -> bool:
    function = next((outer for outer in enclosing(node, parent_of) if isinstance(outer, Function)), None)
    return function is not None and function.name.startswith("__")
