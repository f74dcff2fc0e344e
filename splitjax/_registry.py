"""Names that other packages can fill: schemes, policies, models, rule sets, primitives.

A value registers itself under a name when its module is imported. So that the command line finds it without importing
anything by hand, an installed package may declare the name as an entry point (`importlib.metadata`) of the registry's
group, such as `splitjax.schemes`. Entry points are looked at when a name is asked for that nobody has registered, or
when all names are wanted (`sync="auto"`, a list): never while splitjax is imported.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from splitjax.errors import ExtensionError, SplitjaxError

Value = TypeVar("Value")


class NamedRegistry(Mapping[str, Value], Generic[Value]):
    """Maps names to what is registered under them, in the order of registration; reading it as a mapping loads nothing.

    **Arguments:**

    - `what`: the kind of value in errors, such as `"scheme"`.
    - `group`: the group of entry points that declare further names.
    - `error`: the `SplitjaxError` for a name that is unknown or taken.
    - `register`: how users write a registration, for the remedy.
    - `accept`: registers the object of an entry point of the given name, where importing its module has not done so;
      raises `TypeError` for an object that is no such value.
    """

    def __init__(
        self,
        what: str,
        *,
        group: str,
        error: type[SplitjaxError],
        register: str,
        accept: Callable[[str, Any], None],
    ) -> None:
        self._what, self._group, self._error, self._register, self._accept = what, group, error, register, accept
        self._values: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: Value, *, same: Callable[[Value, Value], bool] | None = None) -> None:
        """Registers `value` under `name`.

        **Arguments:** `name`: not empty. `value`: what it stands for. `same`: tells whether two values may follow each
        other under one name, as where a module is loaded again; by default only the very same object may.

        Raises the registry's error for a name that is no text, or that stands for another value.
        """
        if not isinstance(name, str) or not name.strip():
            raise self._error(
                f"a {self._what} needs a name", value=name, place=self._register, remedy="give it a name that is text"
            )
        known = self._values.get(name)
        if known is not None and known is not value and not (same is not None and same(known, value)):
            raise self._error(
                f"there is a {self._what} of this name",
                value=name,
                place=self._register,
                remedy="choose another name",
            )
        self._values[name] = value

    def remove(self, name: str) -> None:
        """Takes out what is registered under `name`, if there is anything."""
        self._values.pop(name, None)

    def knows(self, name: str) -> bool:
        """Tells whether `name` is registered, loading the entry point that declares it where nobody has registered it.

        Raises `ExtensionError` for an entry point that cannot be loaded.
        """
        if name not in self._values:
            for point in entry_points(self._group):
                if point.name == name:
                    self._load(point)
                    break
        return name in self._values

    def find(self, name: str, *, place: str | None = None, also: tuple[str, ...] = ()) -> Value:
        """Returns what `name` stands for, loading its entry point where nobody has registered it.

        **Arguments:** `name`: what is asked for. `place`: what an error names as its place. `also`: further names that
        an error lists, such as `"auto"`.

        Raises the registry's error for a name that there is not, with near matches and how to register it;
        `ExtensionError` for an entry point that cannot be loaded.
        """
        if not isinstance(name, str) or not self.knows(name):
            known = sorted({*self._values, *(point.name for point in entry_points(self._group)), *also})
            raise self._error(
                f"no {self._what} of this name{near(name, known)}",
                value=name,
                place=place,
                remedy=f"use one of {', '.join(known)}; or register your own with {self._register}, "
                f"in a module that is imported or named by an entry point of {self._group!r}",
            )
        return self._values[name]

    def load_all(self) -> None:
        """Loads every entry point of the registry's group whose name nobody has registered.

        Raises `ExtensionError` for the first that cannot be loaded.
        """
        for point in entry_points(self._group):
            if point.name not in self._values:
                self._load(point)

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        loaded = load_entry_point(point)
        if point.name in self._values:  # importing its module has registered it
            return
        try:
            self._accept(point.name, loaded)
        except TypeError as error:
            raise broken(point, str(error)) from error
        if point.name not in self._values:
            raise broken(point, f"it registers no {self._what} of the entry point's name")


def near(name: object, known: list[str]) -> str:
    """Returns `; did you mean 'x'?` for the closest of the `known` names to `name`, or nothing."""
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Returns the entry points of a `group` in the packages that are installed, sorted by name."""
    return _entry_points(group, tuple(sys.path))


@functools.lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Scans the folders of `path`, which is `sys.path` and stands here so that a longer one is scanned again."""
    return tuple(sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name))


def load_entry_point(point: importlib.metadata.EntryPoint) -> Any:
    """Imports the object that an entry `point` names. Raises `ExtensionError`, which names package and entry point, for
    whatever its module raises."""
    try:
        return point.load()
    except SplitjaxError:
        raise
    except Exception as error:  # whatever a stranger's module raises while it is imported
        raise broken(point, f"{type(error).__name__}: {error}") from error


def broken(point: importlib.metadata.EntryPoint, problem: str) -> ExtensionError:
    """Returns the error for an entry `point` that is of no use; `problem` says why."""
    package = f"package {point.dist.name}, " if point.dist is not None else ""
    return ExtensionError(
        f"an entry point cannot be loaded: {problem}",
        value=f"{point.name} = {point.value}",
        place=f"{package}entry points of {point.group!r}",
        remedy="repair the package that declares it, or uninstall it",
    )


def is_reference(text: object) -> bool:
    """Tells whether `text` is written as `package.module:name`."""
    if not isinstance(text, str):
        return False
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def load_reference(text: str, *, place: str, error: type[SplitjaxError]) -> Any:
    """Imports the object that `text`, `package.module:name`, refers to.

    **Arguments:** `text`: the reference. `place`: what an error names as its place. `error`: the class of errors.

    Raises `error` where there is no such module, where importing it fails, and where it has no such name.
    """
    module_name, _, path = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        missing = problem.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise error(
                f"there is no module {missing!r}",
                value=text,
                place=place,
                remedy="install the package, or run from the folder that holds it, and write package.module:name",
            ) from problem
        raise _failed(text, problem, place, error) from problem
    except SplitjaxError:
        raise
    except Exception as problem:  # whatever a stranger's module raises while it is imported
        raise _failed(text, problem, place, error) from problem
    value: Any = module
    for name in path.split("."):
        if not hasattr(value, name):
            known = [known for known in dir(value) if not known.startswith("_")]
            raise error(
                f"{module_name} has no {name!r}{near(name, known)}",
                value=text,
                place=place,
                remedy=f"name something that {getattr(module, '__file__', None) or module_name} defines",
            )
        value = getattr(value, name)
    return value


def _failed(text: str, problem: Exception, place: str, error: type[SplitjaxError]) -> SplitjaxError:
    return error(
        f"the module cannot be imported: {type(problem).__name__}: {problem}",
        value=text,
        place=place,
        remedy="repair the module; `python -c 'import ...'` shows where it fails",
    )
