"""The rooms of docs/architecture.md: imports point downwards, in functions and under TYPE_CHECKING too, and folders
stay small."""

from __future__ import annotations

import ast
import collections
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_FILES = 25

# Every room may import from itself and from those before it. A module belongs to the longest name here that it begins
# with.
ROOMS = (
    "errors",
    "_compat",
    "_files",
    "_registry",
    "codec",
    "display",
    "search",
    "_static",
    "roles",
    "mesh",
    "auto_mesh",
    "machines",
    "plan",
    "kernels",
    "primitives",
    "partitioner",
    "trace",
    "rules",
    "cost",
    "choosing",
    "sync.costs",
    "partial",
    "report",
    "schedule.model",
    "schedule.policies",
    "schedule.simulation",
    "schedule.execution",
    "schedule",
    "step",
    "planning",
    "sync",
    "lower.gradient",
    "lower",
    "lower.products",
    "lower.way",
    "lower.microbatch",
    "lower.turns",
    "lower.tables",
    "lower.partial",
    "lower.strategies",
    "compile",
    "measure",
    "verify",
    "_measured_step",
    "parallel_step",
    "parallelize",
    "trade_offs",
    "_filtered",
    "_nnx_graph",
    "_nnx_gradient",
    "equinox",
    "nnx",
    "jax_kernels",
    "runtime.launch",
    "runtime.checkpoint",
    "runtime.training",
    "runtime.scheduled",
    "runtime",
    "data",
    "models",
    "splitjax",
    "cli",
)
SAME_ROOM = {
    "_plan_explained": "plan",
    "_layout_names": "plan",
    "_plan_differences": "plan",
    "_plan_json": "plan",
    "_plan_parts": "plan",
    "_plan_purpose": "plan",
    "runtime.network": "runtime.launch",
    **dict.fromkeys(("sync.analysis", "sync.masks", "sync.profile"), "sync.costs"),
}


def modules() -> dict[str, pathlib.Path]:
    """Name without `splitjax.` -> file; the package itself is `splitjax`."""
    found = {}
    for file in sorted((ROOT / "splitjax").rglob("*.py")):
        parts = file.relative_to(ROOT / "splitjax").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "splitjax"] = file
    return found


def imports(file: pathlib.Path, known: collections.abc.Container[str]) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            names = []
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("splitjax.")
                names.append(f"{node.module}.{alias.name}" if inner in known else node.module or "")
        else:
            continue
        found |= {name.removeprefix("splitjax.") for name in names if name.split(".")[0] == "splitjax"}
    return found


def room(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        name = SAME_ROOM.get(prefix, prefix)
        if name in ROOMS:
            return name
    raise AssertionError(
        f"splitjax/{module.replace('.', '/')} is in no room: name it in ROOMS and in docs/architecture.md"
    )


def graph() -> dict[str, set[str]]:
    known = modules()
    return {module: imports(file, known) - {module} for module, file in known.items()}


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set(), [start]
        while todo:
            for target in edges.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        reach[start] = seen
    return {frozenset({a, *(b for b in reach[a] if a in reach.get(b, ()))}) for a in edges if a in reach[a]}


def test_rooms_import_downwards():
    upward = {
        (module, target)
        for module, targets in graph().items()
        for target in targets
        if ROOMS.index(room(target)) > ROOMS.index(room(module))
    }
    assert upward == set(), "imported upwards"


def test_no_module_imports_one_that_imports_it():
    assert circles(graph()) == set(), "modules that import each other"


def test_a_circle_and_an_import_upwards_are_seen(tmp_path):
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    file = tmp_path / "x.py"
    file.write_text(
        "if TYPE_CHECKING:\n    from splitjax.plan import Plan\ndef f():\n    from splitjax import errors\n"
    )
    assert imports(file, {"errors", "plan"}) == {"plan", "errors"}
    with pytest.raises(AssertionError, match="in no room"):
        room("attic.boxes")


@pytest.mark.parametrize("top", ["splitjax", "benchmarks", "tests"])
def test_no_folder_is_a_flat_list(top):
    sizes = collections.Counter(file.parent.relative_to(ROOT) for file in (ROOT / top).rglob("*.py"))
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_every_package_says_what_it_is_for():
    for package in ("splitjax", "benchmarks"):
        for file in (ROOT / package).rglob("__init__.py"):
            assert len(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "") > 20, file
