"""What every test relies on: eight virtual CPU devices, set before JAX is imported, and a quiet TPU compiler."""

from __future__ import annotations

import gc
import importlib.util
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import _compiling

# Most of the suite's time is the CPU backend's, and about half of that is gone this way. Processes that tests start
# inherit it. Tests marked `optimised` have the optimisations on in `make test-core`, which CI runs on another Python.
for _variable, _value in _compiling.ENVIRONMENT.items():
    os.environ.setdefault(_variable, _value)
FLAGS = f"--xla_force_host_platform_device_count=8 {_compiling.flags()}"
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# All virtual devices share one pool of threads, by default as many as there are devices. Steps in flight can take all
# of them and wait for each other forever ("may be stuck", then an abort); from twice as many threads on that was not
# seen.
os.environ.setdefault("NPROC", "32")
# libtpu looks for a TPU host's metadata unless told not to, and refuses to be loaded by two processes at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# A shell has what it runs in the background (`make test &`) ignore Ctrl-C, and commands under test would rightly do so,
# too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By default Python looks for garbage after every 700 objects more, and tracing makes millions: 0.7 of 36 processor
# seconds of steps in test_entry.py, and 0.3 of them so. Processes that tests start keep the default.
gc.set_threshold(20_000, 10, 10)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

# A plugin may have imported JAX before the variable was set.
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("SPLITJAX_TEST_ONE_OF_EACH"):
        _keep_one_of_each(config, items)
    compilers = {
        "tpu_aot": ("libtpu", ["libtpu"], "tpu"),
        "gpu_aot": ("the CUDA plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"], "gpu"),
    }
    for marker, (what, modules, extra) in compilers.items():
        if any(importlib.util.find_spec(module) for module in modules):
            continue
        absent = pytest.mark.skip(reason=f"needs {what}: pip install 'splitjax[{extra}]'")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(absent)


def _keep_one_of_each(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves of a test that is run with many parameters the first: what is repeated on another Python and another JAX
    calls the same functions of JAX with the others."""
    kept: dict[str, pytest.Item] = {}
    for item in items:
        kept.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if kept[item.nodeid.partition("[")[0]] is not item])
    items[:] = kept.values()


def pytest_collection_finish() -> None:
    """What imports have made stays until the end: each full collection would look through all of it for garbage."""
    gc.collect()
    gc.freeze()


_SETTINGS = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in _SETTINGS}


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """What a test sets for the whole process it sets back: with a cache left on, later tests would read what another
    run of the suite has compiled."""
    before = _settings()
    yield
    assert _settings() == before


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> Iterator[Callable[[str], tuple[int, str, str]]]:
    """`run("plan --model mlp")` -> (exit status, standard output, standard error). A command sets up JAX for its
    process; all of that is undone afterwards, and nothing is written outside the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    # Remembered, so that what a command sets is unset again.
    for variable in ("XLA_FLAGS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "NPROC"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    before = _settings()

    from splitjax.cli import main

    def command(line: str) -> tuple[int, str, str]:
        try:
            status = main(shlex.split(line))
        except SystemExit as stop:
            status = int(stop.code or 0)
        return (status, *capsys.readouterr())

    yield command
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # once begun, it is used whatever the settings say


@pytest.fixture(scope="module")
def programs_are_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test of a module compiled no other compiles again: JAX's cache in a folder of the module's own. Source
    lines and names are part of the key, so that a program is found that would be compiled to the last byte."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_include_metadata_in_key": True,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def strict_promotion():
    """Mixed dtypes are an error inside the test, so that no operation widens a dtype by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def _optimised(request: pytest.FixtureRequest):
    if not (os.environ.get("SPLITJAX_TEST_OPTIMISED") and request.node.get_closest_marker("optimised")):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0")
