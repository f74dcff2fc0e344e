"""Choices that are kept beside JAX's programs: another process does not search again, and chooses the same."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.compile.choosing import asked as asking
from splitjax.compile.choosing import deciding
from splitjax.search import toulbar

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
STATE, BATCH = {"up": f32(64, 512), "down": f32(512, 64)}, f32(256, 64)
TARGET = "tpu:v5e:2x4"


def step(state, batch):
    loss_of = lambda state: jnp.mean((jax.nn.relu(batch @ state["up"]) @ state["down"]) ** 2)
    loss, grads = splitjax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def searches(monkeypatch):
    """How often a search was made."""
    made, rank = [], deciding.rank
    monkeypatch.setattr(deciding, "rank", lambda *args, **options: (made.append(1), rank(*args, **options))[1])
    return made


def chosen(fn=step, batch=BATCH, **options):
    decorated = splitjax.parallelize(fn, **{"mesh": "auto", "rules": "auto", "target": TARGET} | options)
    return decorated.plan(STATE, batch), decorated.choice


def files(folder):
    return sorted(folder.glob("splitjax-choice-*.json"))


OPTIONS = {
    "target": {},
    "given rules": {"rules": "megatron"},
    "mesh": {"mesh": {"data": 2, "model": 4}, "target": None},
    "here": {"target": None},
    "roles": {
        "mesh": splitjax.AutoMesh(axes=("rows", "columns")), "roles": {"rows": "data", "columns": "tensor"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_kept_choice_is_the_same_and_not_searched_again(name, folder, searches):
    first = chosen(**OPTIONS[name])
    assert len(files(folder)) == 1 and len(searches) == 1
    again = chosen(**OPTIONS[name])
    assert len(searches) == 1 and again[1] == first[1] and str(again[1]) == str(first[1])
    assert again[0].notes == first[0].notes and again[0].digest == first[0].digest


def test_within_a_budget_what_is_kept_is_the_same(folder, searches):
    least = min(each.state_bytes for each in chosen()[1].candidates)
    first = chosen(memory_budget=8 * least + 2**20)
    count = len(searches)
    assert chosen(memory_budget=8 * least + 2**20)[1] == first[1] and len(searches) == count


def test_whatever_a_choice_depends_on_has_a_file_of_its_own(folder, searches):
    def other(state, batch):
        return step(state, 2.0 * batch)

    calls = [
        {}, {"fn": other}, {"batch": f32(512, 64)}, {"target": "tpu:v5p:2x2x2"}, {"memory_budget": "1GiB"},
        {"shard_state": True}, {"rules": "fsdp"}, {"mesh": splitjax.AutoMesh(axes=("data", "model"))},
    ]  # fmt: skip
    for number, options in enumerate(calls[:-1], 1):
        chosen(**options)
        assert len(searches) == number == len(files(folder)), options
    chosen(**calls[-1])  # the same as "auto"
    assert len(searches) == len(calls) - 1


def test_another_version_searches_again(folder, searches, monkeypatch):
    chosen()
    monkeypatch.setattr(asking, "_sources", lambda: "another version")
    chosen()
    assert len(searches) == 2 == len(files(folder))


def test_another_solver_searches_again(folder, searches, monkeypatch):
    chosen()
    there = toulbar.is_installed()
    monkeypatch.setattr(toulbar, "is_installed", lambda: not there)
    monkeypatch.setattr(deciding, "rank", lambda *args, **options: pytest.fail("searched"))
    with pytest.raises(pytest.fail.Exception, match="searched"):
        chosen()


@pytest.mark.parametrize("harm", ["cut", "edited", "another's", "numbers"])
def test_a_damaged_file_is_left_aside(harm, folder, searches, caplog):
    _, first = chosen()
    (file,) = files(folder)
    document = json.loads(file.read_text())
    if harm == "cut":
        file.write_text(file.read_text()[:-50])
    elif harm == "edited":
        file.write_text(json.dumps(document | {"rules": ["name = 3"]}))
    elif harm == "another's":
        file.write_text(json.dumps(document | {"key": "0" * 64}))
    else:
        file.write_text(json.dumps(document | {"best": document["best"] | {"rules": 99}}))
    assert chosen()[1] == first and len(searches) == 2
    assert "it is made anew" in caplog.text
    assert chosen()[1] == first and len(searches) == 2  # what was made anew is kept


def test_nothing_is_kept_where_jax_keeps_nothing(folder, searches):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        chosen()
        chosen()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert len(searches) == 2 and files(folder) == []


def test_a_folder_that_cannot_be_written_is_no_error(folder, searches):
    jax.config.update("jax_compilation_cache_dir", str(folder / "file" / "below"))
    (folder / "file").write_text("")
    assert chosen()[1] == chosen()[1] and len(searches) == 2


def test_another_process_finds_the_same_name(folder):
    """Names do not depend on the order of sets, nor on where a process was started."""
    script = f"""
import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})
from tests.compile.test_kept_choice import *
jax.config.update("jax_compilation_cache_dir", {str(folder)!r})
print(chosen()[1].mesh)
"""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, timeout=120)
    assert len(files(folder)) == 1
