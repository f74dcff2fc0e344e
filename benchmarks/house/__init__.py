"""How the package is built: lines by room, circles of imports, names, docstrings and types, before beside after.

    python -m benchmarks house --label after --pyright "pyright --pythonpath PYTHON" --imports 15

It reads the syntax trees of a checkout (`--checkout`, by default the one that it stands in), imports nothing of it, and
writes `benchmarks/results/house.json` and `house.md`. Type errors and import times are optional: `--pyright` names the
command that starts pyright (`pip install "pyright[nodejs]"` brings it with Node), `--imports` how often
`import splitjax` and `import jax` are timed. `--list KEY` prints all that a figure counts, such as
`--list unnamed_arguments`, and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys


def main(argv: list[str] | None = None) -> int:
    """Measures a checkout as the arguments `argv` say (None: those of the process), writes the page, returns 0.

    Returns 2 where the checkout cannot be read or another program fails.
    """
    from benchmarks.house import page
    from benchmarks.house.commands import CommandError, measure_imports, measure_typing
    from benchmarks.house.figures import SPECS, measure

    options = _options(argv)
    try:
        typing = measure_typing(options.checkout, options.pyright) if options.pyright else None
        times = measure_imports(options.checkout, options.imports, options.python) if options.imports else None
        house = measure(options.checkout, typing, times)
    except (CommandError, FileNotFoundError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        entries = house.lists.get(options.list)
        if entries is None:
            print(f"error: no list {options.list!r}; there are: {', '.join(sorted(house.lists))}", file=sys.stderr)
            return 2
        print("\n".join(entries))
        return 0
    for spec in SPECS:
        value = house.values[spec.key]
        print(f"{spec.title:<80} {'not measured' if value is None else f'{value:,.{spec.digits}f}':>12}")
    kept = page.read(options.output)
    commit, header = _header(options, typing.version if typing else "")
    page.add(kept, page.make_entry(options.label, commit, header, house))
    print("wrote", page.write(kept, options.output))
    return 0


_HERE = pathlib.Path(__file__).resolve().parents[2]  # the top of the checkout that this file stands in


def _options(argv: list[str] | None) -> argparse.Namespace:
    from benchmarks._common import RESULTS

    parser = argparse.ArgumentParser("house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=pathlib.Path, default=_HERE, help="top of the checkout that is measured")
    parser.add_argument("--label", choices=("before", "after"), default="after", help="column of the page")
    parser.add_argument("--pyright", default="", metavar="CMD", help="starts pyright, with options")
    parser.add_argument("--imports", type=int, default=0, metavar="N", help="runs of each import")
    parser.add_argument("--python", default=sys.executable, help="interpreter of these runs")
    parser.add_argument("--list", default="", metavar="KEY", help="print all that a figure counts, and write nothing")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the page")
    return parser.parse_args(argv)


def _header(options: argparse.Namespace, pyright_version: str) -> tuple[str, str]:
    """Gives the checkout's commit, and the header of its figures: machine, versions, command."""
    from benchmarks._common import quiet_tpu_compiler
    from benchmarks.house.commands import checkout_commit
    from benchmarks.machine import header, this_machine

    quiet_tpu_compiler()
    machine = dataclasses.replace(this_machine(("jax", "jaxlib")), commit=checkout_commit(options.checkout))
    if pyright_version:
        machine = dataclasses.replace(machine, versions=(*machine.versions, ("pyright", pyright_version)))
    command = f"python -m benchmarks house --label {options.label}"
    command += " --checkout CHECKOUT" if options.checkout.resolve() != _HERE else ""
    command += ' --pyright "pyright --pythonpath PYTHON"' if options.pyright else ""
    command += f" --imports {options.imports}" if options.imports else ""
    return machine.commit, header(machine, command)
