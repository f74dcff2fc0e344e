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
    """Name -> first line of the docstring, of every benchmark; none is imported, so that listing them is quick."""
    found = {}
    for file in sorted(_FOLDER.glob("*.py")):
        if file.stem in _HELPERS or file.stem.startswith("_"):
            continue
        found[file.stem] = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark that the first argument names with the rest; returns its exit status, 2 for an unknown name."""
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
    return importlib.import_module(f"benchmarks.{module}").main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
