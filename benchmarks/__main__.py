"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME [options]` runs one."""

from __future__ import annotations

import ast
import difflib
import importlib
import pathlib
import sys

_FOLDER = pathlib.Path(__file__).resolve().parent
_HELPERS = ("__init__", "__main__", "machine")


def registry() -> dict[str, str]:
    """Name -> first paragraph of the docstring, of every benchmark; none is imported, so that listing them is quick."""
    lines = {}
    for file in [*_FOLDER.glob("*.py"), *_FOLDER.glob("*/__init__.py"), *_FOLDER.glob("*/main.py")]:
        is_package = file.parent != _FOLDER
        name = file.parent.name if is_package else file.stem
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if name in _HELPERS or name.startswith("_") or (is_package and not _has_main(tree)):
            continue
        lines[name] = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return dict(sorted(lines.items()))


def _has_main(tree: ast.Module) -> bool:
    """Tells a benchmark that is a package from a package of helpers: its `main.py` or its `__init__.py` defines
    `main`."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark that the first argument names with the rest; returns its exit status, 2 for an unknown
    name."""
    arguments = sys.argv[1:] if argv is None else argv
    known = registry()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [options]    (NAME --help shows its options)\n")
        width = max(map(len, known), default=0)
        for name, line in known.items():
            print(f"  {name:<{width}}  {line}")
        return 0
    name, *rest = arguments
    module = name.replace("-", "_")
    if module not in known:
        close = difflib.get_close_matches(module, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        print(f"error: there is no benchmark {name!r}{hint}\n  remedy: name one of {', '.join(known)}", file=sys.stderr)
        return 2
    inner = (_FOLDER / module / "main.py").is_file()
    return importlib.import_module(f"benchmarks.{module}.main" if inner else f"benchmarks.{module}").main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
