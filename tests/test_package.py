"""What the package promises as a whole: its names, a quiet import, its data files and its metadata."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import get_args

import pytest

import splitjax
from splitjax.step import keywords
from splitjax.step.keywords import ParallelizeOptions

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


# What is loaded when it is used: other libraries, JAX's kernels, and rooms that a plain step does not need.
HEAVY = (
    "equinox",
    "flax",
    "jax.experimental.pallas",
    "jax.experimental.mosaic",
    "matplotlib",
    "optax",
    "orbax",
    "rich",
    "sklearn",
    "splitjax.cli",
    "splitjax.data",
    "splitjax.measure",
    "splitjax.models",
    "splitjax.report",
    "splitjax.runtime.checkpoint",
    "splitjax.runtime.training",
    "splitjax.verify",
)
# And what is loaded when a step is decorated.
ON_DECORATION = ("splitjax.compile", "splitjax.lower", "splitjax.sync", "splitjax.trace", "splitjax.parallel_step")
DECORATE = "import splitjax; splitjax.parallelize(lambda state, batch: (state, 0.0))"


@pytest.mark.parametrize(
    ("script", "unwanted"),
    [("import splitjax", (*HEAVY, *ON_DECORATION)), (DECORATE, HEAVY), ("import splitjax.kernels", HEAVY)],
    ids=["import", "decorated", "kernels"],
)
def test_what_is_loaded_when_it_is_used(script, unwanted):
    loaded = in_fresh_process(f"{script}; import sys; print(*sys.modules)").split()
    assert "splitjax.step.keywords" in loaded
    light = {"splitjax.report", "splitjax.report.registration"}  # it says who shows what, and loads neither
    assert [name for name in loaded if name.startswith(unwanted) and name not in light] == []


def test_what_decorates_is_loaded_by_decorating():
    loaded = in_fresh_process(f"{DECORATE}; import sys; print(*sys.modules)").split()
    assert set(ON_DECORATION) <= set(loaded)


def test_options_of_the_decorators():
    names = ["fn", *ParallelizeOptions.__annotations__]
    for decorator in (splitjax.parallelize, splitjax.nnx.parallelize, splitjax.equinox.parallelize):
        assert list(inspect.signature(decorator).parameters) == names
        with pytest.raises(TypeError, match=r"parallelize\(\) got an unexpected keyword argument 'mehs'.*'mesh'"):
            decorator(mehs={"data": 2})
    assert inspect.signature(splitjax.parallelize).parameters["state_argnums"].default == (0,)
    assert inspect.signature(splitjax.nnx.parallelize).parameters["state_argnums"].default is None
    assert inspect.signature(splitjax.equinox.parallelize).parameters["state_argnums"].default == (0, 1)


def test_names_in_the_types_are_those_that_exist():
    from splitjax.rules import available
    from splitjax.step import options
    from splitjax.sync import SCHEMES

    assert set(get_args(keywords.RuleSetName)) == set(available())
    assert set(get_args(keywords.SyncName)) == {*SCHEMES, "auto"}
    assert set(get_args(keywords.GroupComm)) == set(options._GROUP_COMM)


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


def test_kinds_of_dtypes_are_asked_of_jax():
    """numpy does not count bfloat16 and float8 among floating point."""
    asked = re.compile(r"(?<!j)np\.issubdtype|(?<!jax\.)numpy\.issubdtype")
    files = sorted((ROOT / "splitjax").rglob("*.py"))
    assert files and [str(file) for file in files if asked.search(file.read_text())] == []
