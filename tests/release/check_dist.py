"""Installs what `make dist` built, each into an environment of its own, as a stranger would: without extras the command
line plans a model; with `demo` it trains one. Ends with an error where one does not.

    python tests/release/check_dist.py dist
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import venv

PLAN = ("plan", "--model", "vgg11", "--mesh", "data=2,model=4")
DEMO = ("demo", "--width", "0.0625", "--head-features", "64", "--batch-size", "16", "--steps", "3")


def check(archive: pathlib.Path, folder: pathlib.Path, extra: str, commands: list[tuple[str, ...]]) -> None:
    """Installs an `archive` with an `extra` (empty for none) into a new environment in `folder`, and runs `commands`
    there, outside of the checkout."""
    venv.create(folder, with_pip=True)
    wanted = f"{archive.resolve()}[{extra}]" if extra else str(archive.resolve())
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, wanted], check=True)
    outside = folder / "elsewhere"
    outside.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    for command in commands:
        line = [folder / "bin/splitjax", *command]
        done = subprocess.run(line, cwd=outside, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{archive.name}: splitjax {' '.join(command)} ended with {done.returncode}\n{done.stderr}")
        print(f"{archive.name}{f'[{extra}]' if extra else ''}: splitjax {command[0]} runs")


def main() -> None:
    """Checks the wheel and the source archive in the folder that the command line names."""
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch)
        check(wheel, place / "wheel", "", [("--version",), PLAN])
        check(source, place / "source", "", [("--version",), PLAN])
        check(wheel, place / "demo", "demo", [DEMO])


if __name__ == "__main__":
    main()
