"""Keeps the programs that a launched run has compiled, so that workers which are started again read them.

JAX's persistent compilation cache does it, in a folder of its own for each version of jaxlib and kind of processor:
JAX names entries after the program, its options and its own version, and a program for one processor may not run on
another.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
from collections.abc import Mapping
from importlib import metadata

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
MIN_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_ENTRY_ENDS_WITH = "-cache"  # what JAX calls a file of its own; anything else in the folder is left alone
# JAX writes an entry in place: one that was written when its process was killed may be half of one.
_WRITTEN_WITHIN_SECONDS = 2.0


def kept_programs(base: Mapping[str, str], folder: pathlib.Path | None) -> dict[str, str]:
    """Returns the variables by which workers keep what they compile.

    **Arguments:** `base`: the environment of the launcher; a cache that is named there stays. `folder`: the run's, in
    which programs are kept; the user's (`cache_dir`) if None."""
    named = base.get(DIRECTORY)
    if not named:
        parent = cache_dir(base) if folder is None else folder / "compiled"
        named = str(parent / f"jaxlib-{metadata.version('jaxlib')}-{processor_digest()}")
    return {DIRECTORY: named, MIN_SECONDS: base.get(MIN_SECONDS, "0")}


def cache_dir(base: Mapping[str, str]) -> pathlib.Path:
    """Returns the folder where compiled programs are kept between runs, by the environment `base`: that of
    `JAX_COMPILATION_CACHE_DIR`, `SPLITJAX_CACHE`, or a folder in the user's cache directory (XDG base directory
    specification)."""
    for variable in (DIRECTORY, "SPLITJAX_CACHE"):
        if base.get(variable):
            return pathlib.Path(base[variable])
    parent = base.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(parent) / "splitjax" / "compiled"


def drop_unfinished(directory: pathlib.Path, killed_unix_seconds: float) -> None:
    """Removes the entries of the cache in `directory` that were being written when their process was killed, at
    `killed_unix_seconds` or later."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        try:
            is_entry = entry.name.endswith(_ENTRY_ENDS_WITH) and entry.is_file()
            if is_entry and entry.stat().st_mtime >= killed_unix_seconds - _WRITTEN_WITHIN_SECONDS:
                os.unlink(entry.path)
        except OSError:
            pass  # another run has removed it


def processor_digest() -> str:
    """Returns a short digest of the kind of this machine's processor and of what it can do."""
    said = [platform.machine(), platform.system()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            seen = {line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))}
        said += sorted(seen)
    except OSError:
        said.append(platform.processor())
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]
