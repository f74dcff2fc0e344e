"""Compiles cells and keeps what their compilers say of memory: `python -m benchmarks.planner.truth FILE [CELL ...]`.

CELL: a cell's name, or the beginning of targets, such as `tpu` (all cells that are compiled for TPUs), or NAME@MIB, a
cell for TPUs whose compiler may use no more than so many MiB of a chip's memory.
Cells that the file has are not compiled again. On the CPU the memory-optimised scheduler is asked for, as a user would
who is short of memory; LLVM's optimisations, which come behind buffer assignment, are off."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

from benchmarks._common import virtual_devices
from benchmarks.planner.cells import CPU, Cell, every_cell

MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def compiled_memory(cell: Cell, limit_mib: int | None = None) -> dict[str, Any]:
    """What the compiler of a cell's target says, in bytes a device, and the seconds that it took; of a TPU also
    `vector`, how much at most lies in the cores' vector memory at any moment, as its program shows.

    **Arguments:** `limit_mib`: what a TPU's compiler may use; None for what the chip has."""
    from benchmarks.planner.steps import made

    step, arguments = made(cell)
    started = time.perf_counter()
    options = {} if limit_mib is None else {"xla_tpu_max_hbm_size_mib": limit_mib}
    compiled = step.lower(*arguments).compile(compiler_options=MEMORY_SCHEDULER if cell.target == CPU else options)
    sizes = compiled.memory_analysis()
    found = {name: getattr(sizes, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    found = {**found, "peak": sizes.peak_memory_in_bytes, "seconds": round(time.perf_counter() - started, 2)}
    return {**found, "vector": vector_bytes(compiled, cell.target)} if cell.target.startswith("tpu") else found


def vector_bytes(compiled: Any, target: str) -> int | None:
    """The most that a program for a TPU can keep in its vector memory; None where that is not known."""
    from splitjax import _compat
    from splitjax.machines.targets import parse_target
    from splitjax.report.memory.vector import vector_memory_bytes
    from splitjax.report.wire import read_module

    (data,) = _compat.serialized_modules(compiled)
    found = vector_memory_bytes(read_module(data))
    return None if found is None else min(found, parse_target(target).kind.fast_memory_bytes)


def _asked(name: str) -> tuple[Cell, int | None]:
    """The cell that a name asks for, and the limit."""
    cell, _, limit = name.partition("@")
    return Cell.parse(cell), int(limit) if limit else None


def main(file: str, names: list[str]) -> int:
    """Compiles cells, all where none is named, and adds them to the file as they come."""
    virtual_devices()
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    import jax

    path = pathlib.Path(file)
    known = json.loads(path.read_text()) if path.exists() else {}
    cells = [_asked(name) for name in names if "/" in name]
    targets = tuple(name for name in names if "/" not in name) if names else ("",)
    cells += [(cell, None) for cell in every_cell() if cell.target.startswith(targets)]
    for cell, limit in cells:
        name = cell.name if limit is None else f"{cell.name}@{limit}"
        if name in known:
            continue
        try:
            known[name] = compiled_memory(cell, limit)
        except Exception as error:
            known[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        path.write_text(json.dumps(known, indent=1) + "\n")
        print(name, known[name], flush=True)
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
