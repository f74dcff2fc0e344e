"""Keeps the compiled programs of those processes of a run for which JAX keeps none.

JAX's persistent compilation cache is written by process 0 alone, for all: a program for GPUs or TPUs has the same name
in each process. On CPU the name of an entry depends on the process (measured with jax 0.10.2: the fingerprint of its
topology differs), so that every other process compiles anew whenever a run starts again. Theirs are kept here, in the
same folder, by `jax.experimental.serialize_executable`, as JAX keeps its own. Reading an executable runs what is in it:
the folder has to be one into which nobody else writes, as JAX says of its cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import pathlib
import pickle
import time
import uuid
from importlib import metadata
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, Mesh

from splitjax import _compat
from splitjax.mesh import platform_of

logger: logging.Logger = logging.getLogger("splitjax")

_COMPILED = "/jax/core/compile/backend_compile_duration"  # what JAX calls the time of a compilation, or of a read


@dataclasses.dataclass(eq=False)
class KeptProgram:
    """Is a jitted program whose executable is read from a folder, or written there once it is compiled.

    **Attributes:** `jitted`: the program. `folder`: of the executables. `mesh`: whose devices it runs on.
    """

    jitted: Any
    folder: pathlib.Path
    mesh: Mesh
    _compiled: Any = None

    def __call__(self, *args: Any) -> Any:
        """Runs the program on its operands `args`; those of another signature as `jax.jit` does."""
        self.prepare(*args)
        if self._compiled is not self.jitted:
            try:
                return self._compiled(*args)
            except (TypeError, ValueError):  # other operands than it was compiled for: nothing has run, nor is consumed
                logger.debug("splitjax: a kept program got other operands", exc_info=True)
        return self.jitted(*args)

    def prepare(self, *args: Any) -> None:
        """Reads or compiles the executable for operands `args`, and does not run it."""
        if self._compiled is None:
            self._compiled = self._made(args)

    def lower(self, *args: Any) -> Any:
        """Lowers the program for operands `args`, as `jax.jit(fn).lower` does."""
        return self.jitted.lower(*args)

    def _made(self, args: tuple[Any, ...]) -> Any:
        """The executable for `args`, read or compiled; the jitted program itself where it cannot be kept."""
        lowered = self.jitted.lower(*args)
        path = self.folder / f"splitjax-{_digest(lowered.as_text(), self.mesh)}"
        trees = lowered.in_tree, lowered.out_tree
        try:
            data = path.read_bytes()
        except OSError:
            return self._compiled_anew(lowered, path)
        began = time.monotonic()
        try:
            devices = list(self.mesh.devices.flat)
            compiled = serialize_executable.deserialize_and_load(_checked(data), *trees, execution_devices=devices)
            jax.monitoring.record_event_duration_secs(_COMPILED, time.monotonic() - began)
            return compiled
        except Exception as error:  # written by half, or by a library that is no more: whatever reading it raises
            logger.warning("splitjax: the kept program %s cannot be read (%s): it is compiled anew", path, error)
            return self._compiled_anew(lowered, path)

    def _compiled_anew(self, lowered: Any, path: pathlib.Path) -> Any:
        compiled = lowered.compile()
        try:
            data, _, _ = serialize_executable.serialize(compiled)
            _write(path, hashlib.sha256(data).digest() + data)
        except (ValueError, NotImplementedError, OSError, pickle.PickleError) as error:
            logger.debug("splitjax: a program is not kept: %s", error)
        return compiled


def kept(program: Any, mesh: Mesh | AbstractMesh, has_static: bool) -> Any:
    """Returns `program`, a jitted one over `mesh`, as one that is kept where JAX keeps none: on CPU, in a process other
    than the first, with a cache. `has_static`: whether it has static operands, which an executable does not take."""
    flags: Any = jax.config  # most of whose flags type checkers do not know
    folder = flags.jax_compilation_cache_dir
    if (
        not folder
        or not flags.jax_enable_compilation_cache
        or has_static
        or not isinstance(mesh, Mesh)
        or _compat.place_in_run()[0] == 0
    ):
        return program
    return KeptProgram(program, pathlib.Path(folder), mesh) if platform_of(mesh) == "cpu" else program


def _write(path: pathlib.Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all. Raises `OSError`."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _checked(data: bytes) -> bytes:
    """What was written, without its digest. Raises `ValueError` where it is not what was written."""
    digest, rest = data[:32], data[32:]
    if hashlib.sha256(rest).digest() != digest:
        raise ValueError("it is damaged")
    return rest


def _digest(text: str, mesh: Mesh) -> str:
    """Names a program by its `text`, and by all that its executable hangs on beside: versions, flags, devices, this
    process."""
    device = mesh.devices.flat[0]
    facts = (
        jax.__version__,
        metadata.version("jaxlib"),
        device.client.platform_version,
        os.environ.get("XLA_FLAGS", ""),
        [int(one.id) for one in mesh.devices.flat],
        _compat.place_in_run(),
        text,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()
