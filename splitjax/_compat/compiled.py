"""Reads compiled programs, with the names and lines of the very step that they were compiled for."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

# Where JAX says, among what it logs for debugging, which program it begins to compile, and which it has compiled.
_BEGINS, _ENDS = logging.getLogger("jax._src.interpreters.pxla"), logging.getLogger("jax._src.dispatch")
# Whether XLA's compiler for CPUs drops optimization barriers before it merges equal operations.
CPU_DROPS_BARRIERS = jax.__version_info__ < (0, 11)
_NAME = re.compile(r"(?:jit|pjit)\((.*)\)$")


class _Programs(logging.Filter):
    """Tells the names of programs, as JAX logs them, and lets through what would be logged without it."""

    def __init__(self, tell: Callable[[str], None], level: int):
        super().__init__()
        self._tell, self._level = tell, level

    def filter(self, record: logging.LogRecord) -> bool:
        # The message itself is long: it has the types of all arguments.
        message = str(record.msg)
        if message.startswith("Compiling %s") and isinstance(record.args, tuple):
            name = str(record.args[0])
            known = _NAME.match(name)
            self._tell(known[1] if known else name)
        elif message.startswith("Finished XLA compilation"):
            self._tell("")
        return record.levelno >= self._level


@contextlib.contextmanager
def telling_programs(tell: Callable[[str], None]) -> Iterator[None]:
    """Calls `tell` with the name of each program that JAX begins to compile inside the block, and with an empty one
    when that is done; a program that is at hand already is not named. What JAX logs does not change."""
    before = [(logger, logger.level, _Programs(tell, logger.getEffectiveLevel())) for logger in (_BEGINS, _ENDS)]
    for logger, _, programs in before:
        logger.addFilter(programs)
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for logger, level, programs in before:
            logger.removeFilter(programs)
            logger.setLevel(level)


@contextlib.contextmanager
def metadata_in_cache_key(device: Any) -> Iterator[None]:
    """Compiles for `device` anew, or from a cache entry of the very same source lines and names: JAX's persistent cache
    otherwise returns an executable with the metadata of whatever program of the same operations was compiled first.

    Nothing is kept for a device of a topology description: JAX writes such programs into its cache and then cannot read
    them ("PjRtCompiler must be constructed with a Client"), of which it warns each time."""
    settings: dict[str, Any] = {"jax_compilation_cache_include_metadata_in_key": True}
    if is_compile_only(device):
        settings["jax_persistent_cache_min_compile_time_secs"] = math.inf
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def is_compile_only(device: Any) -> bool:
    """Returns whether `device` is of a topology description: programs are compiled for it and cannot run on it."""
    return getattr(device.client, "runtime_type", "") == "compile_only_runtime"


def serialized_modules(compiled: Any) -> list[bytes]:
    """Returns the optimised HLO modules of `compiled` (`jax.stages.Compiled`), each a serialised `HloModuleProto`."""
    return [module.as_serialized_hlo_module_proto() for module in compiled.runtime_executable().hlo_modules()]
