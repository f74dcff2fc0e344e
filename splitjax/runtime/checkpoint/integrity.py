"""Seals a folder of files: writes a manifest with size and SHA-256 of every file, so that damage is found before
anything is used.

Storage formats find some flipped bytes (OCDBT checks its own nodes, not the arrays' values), none in sharding or
metadata files. The manifest holds a digest of itself and is compared with its own canonical text, so that a byte
flipped in it is found too.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitjax.codec.nesting import is_shallow

MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_DEPTH = 16
_NUM_READERS = 8  # of `find_damage`: hashing leaves the interpreter free, and network file systems like several readers


def write_durably(path: Path, text: str) -> None:
    """Writes `text` to the file `path` so that after a crash it is there whole or not at all: temporary name, fsync,
    rename, fsync of the folder. Raises `OSError`."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a `folder` durable, where the system can (Windows cannot open folders)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes the manifest of a `folder` that is complete: `about`, and the size and digest of every file, which are
    made durable on the way. Raises `OSError`."""
    files = {}
    folders = {folder}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.add(path)
        elif path.name != MANIFEST or path.parent != folder:
            size_bytes, digest = _digest(path, durable=True)
            files[path.relative_to(folder).as_posix()] = {"bytes": size_bytes, "sha256": digest}
    for inner in folders:
        sync_folder(inner)
    write_durably(folder / MANIFEST, _canonical({"format": _FORMAT, "about": dict(about), "files": files}))


def read_about(folder: Path) -> dict[str, Any] | None:
    """Returns what `seal` was told about a `folder`; None where the manifest is missing or damaged."""
    manifest, _ = _read_manifest(folder)
    return None if manifest is None else manifest["about"]


def find_damage(folder: Path, *, only: str | None = None, digests: bool = True) -> str | None:
    """Returns what is wrong with a sealed folder, naming the first file; None for a good one.

    **Arguments:**

    - `folder`: the sealed folder.
    - `only`: one file, as the manifest names it, instead of all of them.
    - `digests`: read the files whole; otherwise only that they are there with the right sizes.
    """
    manifest, damage = _read_manifest(folder)
    if manifest is None:
        return damage
    files = manifest["files"]
    if only is not None:
        if only not in files:
            return f"{MANIFEST}: does not list {only}"
        files = {only: files[only]}
    for name, entry in files.items():
        try:
            status = (folder / name).stat()
            size_bytes = status.st_size
            if not stat.S_ISREG(status.st_mode):  # a device or a pipe has no end
                return f"{name}: no regular file"
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if size_bytes != entry["bytes"]:
            return f"{name}: {size_bytes} bytes, written were {entry['bytes']}"
    if not digests:
        return None

    def compare(name: str) -> str | None:
        try:
            _, digest = _digest(folder / name, durable=False)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        return (
            None
            if digest == files[name]["sha256"]
            else f"{name}: its bytes changed since they were written (SHA-256 differs)"
        )

    with concurrent.futures.ThreadPoolExecutor(_NUM_READERS) as readers:
        return next(filter(None, readers.map(compare, files)), None)


def _digest(path: Path, *, durable: bool) -> tuple[int, str]:
    with open(path, "r+b") if durable else open(path, "rb") as file:  # Windows syncs only what it could write
        if durable:
            os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _canonical(content: Mapping[str, Any]) -> str:
    """The one text of a manifest, with its own digest."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _read_manifest(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest, or None and what is wrong with it."""
    try:
        text = (folder / MANIFEST).read_bytes().decode("ascii")
        manifest = json.loads(text)
        is_canonical = (
            isinstance(manifest, dict)
            and is_shallow(manifest, _MAX_DEPTH)
            and _canonical({name: value for name, value in manifest.items() if name != "sha256"}) == text
        )
    except FileNotFoundError:
        return None, f"{MANIFEST}: missing"
    except OSError as error:
        return None, f"{MANIFEST}: {error.strerror or error}"
    except (ValueError, RecursionError):
        return None, f"{MANIFEST}: not readable as JSON"
    if not is_canonical:
        return None, f"{MANIFEST}: its bytes changed since they were written"
    if manifest.get("format") != _FORMAT:
        return (
            None,
            f"{MANIFEST}: format {str(manifest.get('format'))[:40]}, known is {_FORMAT}; a newer version wrote it",
        )
    files = manifest.get("files")
    if not isinstance(manifest.get("about"), dict) or not isinstance(files, dict):
        return None, f"{MANIFEST}: it lists no files"
    for name, entry in files.items():
        if not _is_inside(name):
            return None, f"{MANIFEST}: lists {name[:200]!r}, which is no file of the folder"
        if (
            not isinstance(entry, dict)
            or type(entry.get("bytes")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            return None, f"{MANIFEST}: says no size and digest of {name[:200]!r}"
    return manifest, None


def _is_inside(name: str) -> bool:
    """Tells whether a `name` of a manifest is that of a file in or below the folder, as `seal` writes it."""
    parts = name.split("/")
    return name.isprintable() and not any(part in ("", ".", "..") or "\\" in part for part in parts)
