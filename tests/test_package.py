"""What the package promises as a whole: its names, a quiet import, its data files and its metadata."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import splitjax

ROOT = pathlib.Path(__file__).resolve().parents[1]


def in_fresh_process(script: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_starts_no_backend():
    # JAX keeps its number of virtual devices open until a backend starts, and refuses to change it afterwards.
    script = (
        "import jax, splitjax, splitjax.cli; jax.config.update('jax_num_cpu_devices', 3);"
        " jax.config.update('jax_platforms', 'cpu'); "
    )
    assert in_fresh_process(script + "print(len(jax.devices()))") == "3"


def test_import_loads_neither_flax_nor_equinox_nor_the_command_line():
    script = (
        "import sys, splitjax; print([name for name in ('flax', 'flax.nnx', 'equinox', 'tyro', 'sklearn') if name in"
        " sys.modules])"
    )
    assert in_fresh_process(script) == "[]"


def test_every_public_name_is_there():
    for name in splitjax.__all__:
        assert getattr(splitjax, name) is not None
    assert set(splitjax.__all__) <= set(dir(splitjax))
    assert callable(splitjax.parallelize)  # the function, not the module of the same name
    importlib.import_module("splitjax.parallelize")
    assert callable(splitjax.parallelize)


def test_submodules_on_first_use():
    assert splitjax.models.build("mlp").name == "mlp"
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        splitjax.paralelize  # noqa: B018


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_library_modules_decorate(name):
    assert callable(getattr(splitjax, name).parallelize)


def test_versions_agree():
    assert re.fullmatch(r"\d+\.\d+\.\d+", splitjax.__version__)
    assert splitjax.__version__ in (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]


def test_shipped_rule_sets_are_found():
    from splitjax.rules import available, load_rules

    assert {"splitbrain", "megatron", "fsdp", "data_parallel"} <= set(available())
    for name in available():
        assert load_rules(name).name == name


def test_types_are_marked():
    assert (pathlib.Path(splitjax.__file__).parent / "py.typed").is_file()


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
@pytest.mark.network
def test_a_wheel_carries_the_rule_sets(tmp_path):
    import zipfile

    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "splitjax/_sharding_rules/splitbrain.toml" in names and "splitjax/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_benchmarks_are_listed_and_misspelt_names_explained():
    from benchmarks.__main__ import main, registry

    assert all(registry().values()), "every benchmark says in its first paragraph what it measures"
    assert main([]) == 0
    assert main(["no-such-benchmark"]) == 2


def test_the_header_of_a_result_page_names_machine_and_versions():
    import jax

    from benchmarks.machine import header, this_machine

    text = header(this_machine(), "python -m benchmarks example")
    assert f"jax {jax.__version__}" in text and "8 x cpu (virtual)" in text and "`python -m benchmarks example`" in text
