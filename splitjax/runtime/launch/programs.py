"""Tells from a command line whether it is a Python program, so that a process that was started ahead can become it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

# Options of the interpreter that change nothing about where modules are found; the last two take a value.
_FLAGS = frozenset({"-u", "-B", "-O", "-OO", "-q", "-b"})
_FLAGS_WITH_VALUE = frozenset({"-X", "-W"})
_PYTHON_NAME = re.compile(r"python(\d+(\.\d+)?)?")
_SHEBANG = re.compile(rb"#!\s*(/\S*python[0-9.]*)\s*$")


@dataclasses.dataclass(frozen=True)
class PythonProgram:
    """Holds a Python program as a command line starts it.

    - `interpreter`: the program that runs it, as the command names it, with its options.
    - `kind`: `"file"`, `"module"` (`-m`) or `"code"` (`-c`).
    - `target`: the script's path, the module's name, or the code.
    - `arguments`: what follows.
    """

    interpreter: tuple[str, ...]
    kind: str
    target: str
    arguments: tuple[str, ...]


def python_program(command: Sequence[str], base: Mapping[str, str]) -> PythonProgram | None:
    """Returns the Python program that `command` starts, in the environment `base`; None where it is none, or where its
    options say that modules are found elsewhere than usual."""
    path = found(command[0], base)
    if path is None:
        return None
    if not _PYTHON_NAME.fullmatch(os.path.basename(command[0])):
        interpreter = _shebang(path)
        return None if interpreter is None else PythonProgram((interpreter,), "file", path, tuple(command[1:]))
    flags, rest = [command[0]], list(command[1:])
    while rest and rest[0] in _FLAGS | _FLAGS_WITH_VALUE:
        count = 2 if rest[0] in _FLAGS_WITH_VALUE else 1
        flags += rest[:count]
        rest = rest[count:]
    if not rest:
        return None
    if rest[0] in ("-m", "-c"):
        kind = "module" if rest[0] == "-m" else "code"
        return PythonProgram(tuple(flags), kind, rest[1], tuple(rest[2:])) if len(rest) > 1 else None
    if rest[0].startswith("-") or not os.path.isfile(rest[0]):
        return None  # other options; a folder or an archive, which bring a path of their own
    return PythonProgram(tuple(flags), "file", rest[0], tuple(rest[1:]))


def found(name: str, base: Mapping[str, str]) -> str | None:
    """Returns the file that the command `name` means with the PATH of the environment `base`; None where there is
    none that can be executed."""
    if os.sep in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder or ".", name) for folder in base.get("PATH", os.defpath).split(os.pathsep)]
    return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _shebang(path: str) -> str | None:
    """The interpreter that the first line of a script names, where it is a Python by its whole path without options."""
    try:
        with open(path, "rb") as file:
            match = _SHEBANG.match(file.readline(512))
    except OSError:
        return None
    interpreter = match[1].decode() if match else None
    return interpreter if interpreter is not None and os.access(interpreter, os.X_OK) else None
