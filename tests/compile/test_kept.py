"""Programs that are kept for processes for which JAX keeps none."""

from __future__ import annotations

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from splitjax.compile import kept as kept_module
from splitjax.compile.kept import KeptProgram, kept
from splitjax.mesh import make_mesh


@contextlib.contextmanager
def lowered_to_xla():
    """The compilations that XLA does within the block; none for what is read."""
    seen: list[str] = []

    def note(event: str, duration_secs: float, fun_name: str = "", **_) -> None:
        if event.endswith("backend_compile_duration") and fun_name:
            seen.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture
def mesh():
    return make_mesh({"data": 4})


def program(mesh, folder):
    split = NamedSharding(mesh, PartitionSpec("data"))

    def kept_step(state, batch):
        return state + batch.sum(), (state * 2).sum()

    return KeptProgram(jax.jit(kept_step, in_shardings=(split, split), donate_argnums=(0,)), folder, mesh)


def operands(mesh, size=8):
    split = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put(jnp.arange(size, dtype=jnp.float32), split), jax.device_put(jnp.ones(size), split)


def test_what_was_compiled_is_read_the_next_time_and_computes_the_same(mesh, tmp_path):
    with lowered_to_xla() as compiled:
        state, total = program(mesh, tmp_path)(*operands(mesh))
    assert compiled.count("jit(kept_step)") == 1 and len(list(tmp_path.iterdir())) == 1
    again, given = program(mesh, tmp_path), operands(mesh)
    with lowered_to_xla() as compiled:
        state_again, total_again = again(*given)
    assert "jit(kept_step)" not in compiled and given[0].is_deleted()
    np.testing.assert_array_equal(state, state_again)
    assert float(total) == float(total_again) == 56.0 and state_again.sharding == state.sharding
    for _ in range(2):
        state_again, total_again = again(state_again, given[1])
    assert float(total_again) == 2 * float((np.arange(8) + 16).sum())


def test_a_damaged_program_is_compiled_anew_and_mended(mesh, tmp_path, caplog):
    program(mesh, tmp_path)(*operands(mesh))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:400] + bytes([whole[400] ^ 1]) + whole[401:], b""):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="splitjax"):
            _, total = program(mesh, tmp_path)(*operands(mesh))
        assert float(total) == 56.0 and "compiled anew" in caplog.text
    caplog.clear()
    program(mesh, tmp_path)(*operands(mesh))
    assert not caplog.records


def test_other_operands_go_the_usual_way(mesh, tmp_path):
    step = program(mesh, tmp_path)
    step(*operands(mesh))
    _, total = step(*operands(mesh, 12))
    assert float(total) == 132.0
    assert float(step(*operands(mesh))[1]) == 56.0


def test_a_folder_that_cannot_be_written_keeps_nobody_from_training(mesh, tmp_path):
    (tmp_path / "file").write_text("")
    assert float(program(mesh, tmp_path / "file" / "x")(*operands(mesh))[1]) == 56.0


def test_programs_are_kept_where_jax_keeps_none_and_nowhere_else(mesh, tmp_path, monkeypatch):
    jitted = jax.jit(jnp.sin)
    monkeypatch.setattr(kept_module._compat, "place_in_run", lambda: (1, 2))
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert isinstance(kept(jitted, mesh, False), KeptProgram)
        assert kept(jitted, mesh, True) is jitted and kept(jitted, mesh.abstract_mesh, False) is jitted
        monkeypatch.setattr(kept_module._compat, "place_in_run", lambda: (0, 2))
        assert kept(jitted, mesh, False) is jitted
        monkeypatch.setattr(kept_module._compat, "place_in_run", lambda: (1, 2))
        jax.config.update("jax_compilation_cache_dir", None)
        assert kept(jitted, mesh, False) is jitted
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
