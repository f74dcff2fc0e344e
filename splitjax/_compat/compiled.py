"""Reads compiled programs, with the names and lines of the very step that they were compiled for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def metadata_in_cache_key() -> Iterator[None]:
    """Compiles anew, or from a cache entry of the very same source lines and names: JAX's persistent cache otherwise
    returns an executable with the metadata of whatever program of the same operations was compiled first."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def serialized_modules(compiled: Any) -> list[bytes]:
    """Returns the optimised HLO modules of `compiled` (`jax.stages.Compiled`), each a serialised `HloModuleProto`."""
    return [module.as_serialized_hlo_module_proto() for module in compiled.runtime_executable().hlo_modules()]
