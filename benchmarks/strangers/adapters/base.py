"""What an adapter of a stranger's training step is made of, and how its code is loaded.

A stranger's code is read from a checkout that the user gives and is never copied into this repository. Three ways to
read it, all leaving the step as its authors wrote it:

- `example_module`: an example's folder goes on the import path and its module is imported whole;
- `pick`: from a script, a notebook or a Markdown page, the import statements and the named definitions are executed,
  also those inside a function (`"main.update"`) or under `if __name__ == "__main__":` (`"__main__.update"`);
- `undecorated`: what is under `jax.jit`, `nnx.jit` or `eqx.filter_jit`, because the decorator under test takes its
  place.

Packages that only bring data, plots or logs are replaced by empty stand-ins (`STUBBED`); batches are synthetic.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import linecache
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

STUBBED = (
    "albumentations",
    "datasets",
    "diffrax",
    "dm_env",
    "dp_accounting",
    "grain",
    "matplotlib",
    "mpl_toolkits",
    "pandas",
    "plotnine",
    "requests",
    "seaborn",
    "sentencepiece",
    "tensorboard",
    "tensorboardX",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
    "tiktoken",
    "torch",
    "torchvision",
    "tqdm",
    "transformers",
)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A stranger's step with everything that is needed to run it.

    `states` makes fresh states, `arguments(states, number)` the positional and keyword arguments of step `number`, and
    `results(outputs, states)` the next states and the losses. `options` go to `splitjax.parallelize`; the static ones
    among them also to the framework's own jit. Where a step returns no loss, `probe(states)` is the stranger's own loss
    function on a fixed batch.
    """

    step: Callable[..., Any]
    states: Callable[[], tuple]
    arguments: Callable[[tuple, int], tuple[tuple, dict]]
    results: Callable[[Any, tuple], tuple[tuple, Any]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    frontend: str = "plain"  # "plain", "nnx" or "equinox"
    probe: Callable[[tuple], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A public training step: where it is, what it has, and how to load it from a folder of checkouts."""

    name: str
    framework: str
    checkout: str
    source: str
    load: Callable[[pathlib.Path], Loaded]
    features: frozenset[str] = frozenset()

    def path(self, sources: pathlib.Path) -> pathlib.Path:
        return sources / self.checkout / self.source


def registrar(framework: str, checkout: str, strangers: list[Stranger]) -> Callable:
    """Return a decorator that appends `load(path_of_the_source) -> Loaded` to `strangers` as a `Stranger`."""

    def stranger(name: str, source: str, *features: str) -> Callable:
        def register(load: Callable[[pathlib.Path], Loaded]) -> Callable:
            def from_sources(sources: pathlib.Path) -> Loaded:
                path = sources / checkout / source
                if not path.is_file():
                    raise FileNotFoundError(f"no {source} in the checkout {sources / checkout}")
                return load(path)

            strangers.append(Stranger(name, framework, checkout, source, from_sources, frozenset(features)))
            return load

        return register

    return stranger


def undecorated(step: Callable) -> Callable:
    """Return the function that a jit or pmap decorator wraps."""
    return getattr(step, "__wrapped__", step)


def returns_state_first(outputs: Any, states: tuple) -> tuple[tuple, Any]:
    """Read the results of `state, losses = step(state, ...)`."""
    return (outputs[0],), outputs[1]


def returns_state_only(outputs: Any, states: tuple) -> tuple[tuple, Any]:
    """Read the result of `state = step(state, ...)`."""
    return (outputs,), None


def mutates_states(outputs: Any, states: tuple) -> tuple[tuple, Any]:
    """Read the results of a step that changes its NNX objects in place and returns losses, or nothing."""
    return states, outputs


# Synthetic data, by step number, the same in every process -----------------------------------------------------------


def generator(number: int, salt: int = 0) -> np.random.Generator:
    return np.random.default_rng(1000 * salt + number)


def images(number: int, *shape: int, salt: int = 1) -> np.ndarray:
    """Return pixels in [0, 1)."""
    return generator(number, salt).random(shape, dtype=np.float32)


def normals(number: int, *shape: int, salt: int = 2) -> np.ndarray:
    return generator(number, salt).standard_normal(shape).astype(np.float32)


def integers(number: int, high: int, *shape: int, low: int = 0, salt: int = 3) -> np.ndarray:
    return generator(number, salt).integers(low, high, shape).astype(np.int32)


def padded_tokens(number: int, vocabulary: int, *shape: int, salt: int = 4) -> np.ndarray:
    """Return token ids in [1, vocabulary) with a zero-padded tail of varying length."""
    tokens = integers(number, vocabulary, *shape, low=1, salt=salt)
    lengths = generator(number, salt + 100).integers(shape[-1] // 2, shape[-1] + 1, shape[:-1])
    return np.where(np.arange(shape[-1]) < lengths[..., None], tokens, 0).astype(np.int32)


# Stand-ins -----------------------------------------------------------------------------------------------------------


class _Nothing:
    """Stands for anything in a package that is not wanted: it can be called, read, subscripted, subclassed."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    def __iter__(self) -> Iterator:
        return iter(())


class _StubModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if any(fullname == name or fullname.startswith(name + ".") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def stubs(*more: str) -> Iterator[None]:
    """Replace the packages of `STUBBED`, and `more`, by empty stand-ins while a stranger's code is imported."""
    finder = _StubFinder((*STUBBED, *more))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StubModule)]:
            del sys.modules[name]  # other packages look for torch or tensorflow there


class StandIn:
    """A module or object with some attributes replaced; the original stays as it is."""

    def __init__(self, original: Any, **replaced: Any):
        self.__dict__.update(replaced)
        self.__original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__original, name)


def _unchanged(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def without_pmap_collectives(module: types.ModuleType) -> None:
    """Make `pmean` and `psum` in a stranger's module the identity: what they are for a step over the global batch."""
    import jax

    lax = StandIn(jax.lax, pmean=_unchanged, psum=_unchanged)
    if hasattr(module, "jax"):
        module.jax = StandIn(jax, lax=lax)
    if hasattr(module, "lax"):
        module.lax = lax


# Loading -------------------------------------------------------------------------------------------------------------


def example_module(folder: pathlib.Path, name: str, *, keep: tuple[str, ...] = ()) -> types.ModuleType:
    """Import `name` with `folder` on the import path and without the packages that bring data."""
    sys.path.insert(0, str(folder))
    with stubs(*({"clu"} - set(keep))):
        return importlib.import_module(name)


def pick(path: pathlib.Path, *names: str, given: Mapping[str, Any] | None = None, keep: tuple[str, ...] = (),
         stub: tuple[str, ...] = (), lazy_annotations: bool = False, **replaced: Any) -> types.ModuleType:  # fmt: skip
    """Execute the imports of a script, notebook or page and the first definition of each name, in their order.

    `"name*"` takes every definition of the name. `given` are globals that the code expects; a name in `replaced` has
    that value in place of the one that the code assigns. `lazy_annotations` leaves annotations unevaluated, for pages
    whose annotations are no types. `keep` and `stub` change which packages are replaced by stand-ins.
    """
    flags = annotations.compiler_flag if lazy_annotations else 0
    text = _code(path)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(True), str(path))
    module = types.ModuleType("stranger_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    module.__dict__.update(given or {}, **replaced)
    every = {name.removesuffix("*") for name in names if name.endswith("*")}
    wanted = {name.removesuffix("*") for name in names} - set(replaced)
    missing = set(wanted)
    with stubs(*stub, *({"clu"} - set(keep))):
        for bound, statement in _statements(ast.parse(text, str(path)).body):
            matched = wanted.intersection(bound)
            if not matched and not isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            wanted -= matched - every
            missing -= matched
            code = compile(ast.Module([statement], []), str(path), "exec", flags, dont_inherit=True)
            exec(code, module.__dict__)
    if missing:
        raise LookupError(f"{path} defines no {', '.join(sorted(missing))}")
    return module


def _statements(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[list[str], ast.stmt]]:
    """Yield each statement with the dotted names that it binds, inner statements after outer ones."""
    for statement in body:
        yield [prefix + name for name in _bound(statement)], statement
        if isinstance(statement, ast.FunctionDef):
            yield from _statements(_without_imports(statement.body), f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.If):
            main = "__name__" in ast.dump(statement.test)
            yield from _statements(_without_imports(statement.body), prefix + "__main__." if main else prefix)


def _without_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    return [statement for statement in body if not isinstance(statement, (ast.Import, ast.ImportFrom))]


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    leaves = [leaf for target in targets for leaf in ast.walk(target)]
    return [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]


def _code(path: pathlib.Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        return "\n".join(_without_magics(cell) for cell in cells)
    if path.suffix == ".md":
        fences = re.findall(r"^```(?:python|\{code-cell\})[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        return "\n".join(_without_magics(re.sub(r"^:\S+:.*$", "", fence, flags=re.MULTILINE)) for fence in fences)
    return text


def _without_magics(cell: str) -> str:
    return re.sub(r"^\s*[%!].*$", "", cell, flags=re.MULTILINE)
