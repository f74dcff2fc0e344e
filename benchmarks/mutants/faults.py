"""Reads the faults, and checks them against a checkout without running anything of it.

`faults.toml` goes in, `Fault`s and sentences about what does not hold come out: a text that is not in its file exactly
once, a test that does not exist, a room without a fault.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import json
import pathlib
import tomllib
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]  # the top of the checkout that this file stands in
FAULTS = pathlib.Path(__file__).resolve().parent / "faults.toml"
PACKAGE = "splitjax"
TOP = "top"  # the room of the files that stand in the package's own folder


@dataclasses.dataclass(frozen=True)
class Fault:
    """Describes a fault: a change of a single line, and the tests that have to notice it.

    **Attributes:**

    - `name`: what `--only` takes.
    - `file`: relative to the checkout, such as `splitjax/cost/ring.py`.
    - `old`, `new`: a piece of one line that is in the file exactly once, and what stands there instead.
    - `breaks`: what goes wrong, in a sentence.
    - `tests`: pytest ids, of which at least one has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder of the package that the file is in, such as `lower/turns`; `top` for the package's own."""
        return room_of(self.file)

    @property
    def digest(self) -> str:
        """A hash of all attributes: the same as long as nothing of the fault was edited."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def applied(self, text: str) -> str | None:
        """Returns the file's `text` with the fault; None where `old` is not in it exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


class FaultError(Exception):
    """Says what is wrong with the file of faults, or with what is asked of it, and what helps."""


def read_faults(file: pathlib.Path = FAULTS) -> tuple[Fault, ...]:
    """Reads the faults of a TOML `file`, in its order.

    Raises `FaultError` for an entry that lacks something, has something else, or changes more than one line.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("fault", [])
    names = {field.name for field in dataclasses.fields(Fault)}
    faults = []
    for number, entry in enumerate(entries, 1):
        place = f"{file.name}, fault {number} ({entry.get('name', 'without a name')})"
        if set(entry) != names:
            raise FaultError(f"{place}: the entries must be {', '.join(sorted(names))}, not {', '.join(sorted(entry))}")
        fault = Fault(**{**entry, "tests": tuple(entry["tests"])})
        if "\n" in fault.old + fault.new or not fault.old.strip() or fault.old == fault.new or not fault.tests:
            raise FaultError(f"{place}: a fault changes a piece of one line, and names at least one test")
        faults.append(fault)
    twice = [name for name, count in collections.Counter(fault.name for fault in faults).items() if count > 1]
    if twice:
        raise FaultError(f"{file.name}: two faults have the same name: {', '.join(twice)}; rename one of each")
    return tuple(faults)


def room_of(file: str) -> str:
    """Returns the room of a `file` of the package, given relative to the checkout."""
    folder = pathlib.PurePosixPath(file).parent.relative_to(PACKAGE).as_posix()
    return TOP if folder == "." else folder


def rooms(checkout: pathlib.Path = ROOT) -> tuple[str, ...]:
    """Lists the rooms of the package in a `checkout`: folders with a module in them, an `__init__.py` not counted."""
    folders = {
        room_of(file.relative_to(checkout).as_posix())
        for file in (checkout / PACKAGE).rglob("*.py")
        if not file.name.startswith("__")
    }
    return tuple(sorted(folders))


def problems(faults: Sequence[Fault], checkout: pathlib.Path = ROOT) -> list[str]:
    """Says what does not hold of `faults` in a `checkout`, a line for each: texts, tests, and rooms without a fault."""
    lines = [line for fault in faults for line in _problems_of(fault, checkout)]
    without = sorted(set(rooms(checkout)) - {fault.room for fault in faults})
    return lines + [f"room {room} has no fault: add one to {FAULTS.name}" for room in without]


def _problems_of(fault: Fault, checkout: pathlib.Path) -> Iterator[str]:
    file = checkout / fault.file
    if not file.is_file():
        yield f"{fault.name}: there is no {fault.file}; name the file that the line has moved to"
    else:
        count = file.read_text(encoding="utf-8").count(fault.old)
        if count != 1:
            yield f"{fault.name}: {fault.file} has {fault.old!r} {count} times, not once"
        elif not _is_python(fault.applied(file.read_text(encoding="utf-8")) or ""):
            yield f"{fault.name}: with it {fault.file} is no Python any more, which any test would notice"
    for test in fault.tests:
        if not has_test(checkout, test):
            yield f"{fault.name}: there is no test {test}"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def has_test(checkout: pathlib.Path, test: str) -> bool:
    """Tells from the syntax tree whether a `checkout` has the `test` of this pytest id, whatever its parameters."""
    path, *names = test.partition("[")[0].split("::")
    file = checkout / path
    if not names or not file.is_file():
        return False
    body: Sequence[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for name in names:
        node = next(
            (
                node
                for node in body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name
            ),
            None,
        )
        if node is None:
            return False
        body = node.body
    return names[-1].startswith("test")
