"""Keeps what programs give on one device, so that the next run over the same programs needs not compile them again.

Compiling a program for one device takes half of the time of a run, and several runs (partitioners, ways, versions of
JAX) compare with the same numbers. Numbers kept by another version of JAX can only confirm a program: what differs from
them is run again alone, against one device of the version that runs, which decides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from benchmarks.partitioner.draw import Draw


class Traced(Protocol):
    """A drawn program with a jitted function and its arguments."""

    @property
    def draw(self) -> Draw: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def arguments(self) -> tuple[dict[str, Any], ...]: ...


Program = TypeVar("Program", bound=Traced)


@dataclasses.dataclass(frozen=True)
class References:
    """A folder with a file of arrays for each program, named by what the program is. Without a `folder` nothing is
    kept."""

    folder: str = ""

    def of(self, programs: Sequence[Program], evaluate: Callable[[Sequence[Program]], Sequence[Any]]) -> list[Any]:
        """The results of `programs` on one device: those that are kept, and for the rest what `evaluate` gives of them,
        which is kept from now on."""
        if not self.folder:
            return list(evaluate(programs))
        kept = [self._read(program) for program in programs]
        missing = [k for k, value in enumerate(kept) if value is None]
        if missing:
            for k, value in zip(missing, evaluate([programs[k] for k in missing]), strict=True):
                kept[k] = value
                self._write(programs[k], value)
        return kept

    def _path(self, program: Traced) -> pathlib.Path:
        digest = hashlib.sha256(program.draw.to_json().encode()).hexdigest()[:16]
        return pathlib.Path(self.folder) / f"{program.draw.number}-{digest}.npz"

    def _read(self, program: Traced) -> Any:
        path = self._path(program)
        if not path.exists():
            return None
        leaves, structure = jax.tree.flatten(jax.eval_shape(program.function, *program.arguments))
        with np.load(path) as arrays:
            values = [_restored(arrays[f"leaf{k}"], leaf) for k, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, values)

    def _write(self, program: Traced, value: Any) -> None:
        path = self._path(program)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        with unfinished.open("wb") as file:
            arrays = {f"leaf{k}": _plain(np.asarray(leaf)) for k, leaf in enumerate(jax.tree.leaves(value))}
            np.savez(file, allow_pickle=False, **arrays)
        unfinished.replace(path)


NOTHING_KEPT = References()


def _plain(array: np.ndarray) -> np.ndarray:
    """The same values in a dtype that `np.load` reads without help: the bytes of dtypes that numpy does not know, such
    as bfloat16; zeros for the gradients of integers, whose dtype (float0) has no bytes."""
    if array.dtype.kind in "biufc":
        return array
    if array.dtype.itemsize == 0:
        return np.zeros(array.shape, bool)
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def _restored(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """What `_plain` was given: an array of the shape and dtype of `leaf`."""
    dtype = np.dtype(leaf.dtype)
    if dtype.itemsize == 0:
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return array.view(dtype).reshape(leaf.shape)
