"""Runs commands in this process, as a user would type them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from splitjax.cli import main

_SETTINGS = ("jax_platforms", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


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
    before = {name: getattr(jax.config, name) for name in _SETTINGS}

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
