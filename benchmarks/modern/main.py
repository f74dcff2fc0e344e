"""What steps in today's idioms send and hold, beside layouts written by hand: bytes of compiled programs, ours and
theirs.

    python -m benchmarks modern             all steps, for CPU devices and a TPU v5e (15 minutes on two cores)
    python -m benchmarks modern --cpu       all steps, for CPU devices alone
    python -m benchmarks modern --quick     two small steps, for CPU devices alone
    python -m benchmarks modern --only large [--case "LLaMA 8B, v5p"]
                                            shapes of large models, for large TPUs: a page of its own
    python -m benchmarks modern --only large --maxtext-python PATH
                                            MaxText's own programs of such shapes, beside those of that page
    python -m benchmarks modern --only numbers [--step NAME] [--quick]
                                            many more steps, run: their numbers beside one device's; a page of its own

Decoders of 4 layers in a scan with `jax.checkpoint`, and Adam, are compiled for 8 devices; nothing runs and no
parameter exists, so that the figures are the same on every machine. *Sent* is what each device sends in a step by the
ring formulas, all collectives together, as `splitjax.report.hlo` reads them from either program. *Temporary* is what
XLA sets aside beside the arguments; 0 where it all fits into a TPU's vector memory. Programs for a TPU v5e 2x4 are
compiled ahead of time, without one.

By hand means `jax.jit` with a `NamedSharding` for every leaf of the state and for the batch, and donation, once with
`with_sharding_constraint` on activations where MaxText has it and once without. Fused steps also have the rival that
keeps their weights apart, which is another program of the user's. The one that sends least is in the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks._common import RESULTS, table, virtual_devices, write_stored
from benchmarks.modern import large

STEPS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fused": True},
    "tied": {"tied": True},
    "grouped heads": {"kv_heads": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "experts": {"experts": 4},
}
SMALL = {"layers": 2, "width": 32, "hidden": 64, "vocab": 64, "seq": 8, "examples": 8, "heads": 4, "kv_heads": 4}
# By name the mesh of a layout, and which steps are compiled with it.
LAYOUTS: Mapping[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "megatron": ({"data": 2, "tensor": 4}, ("plain", "fused", "tied", "grouped heads", "bfloat16")),
    "transformer": ({"data": 2, "fsdp": 2, "tensor": 2}, ("plain", "fused", "tied", "bfloat16")),
    "fsdp": ({"fsdp": 8}, ("plain", "fused", "tied", "bfloat16")),
    "transformer with experts": ({"data": 2, "expert": 2, "tensor": 2}, ("experts",)),
}
QUICK = ("megatron", "fsdp")
TPU = "v5e:2x4"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled program sends and holds on each device, in bytes, and, by hand, which rival it is."""

    sent: int
    temporary: int
    rival: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step under a layout for a kind of device: our program, the plan's prediction, and the best one by hand."""

    target: str
    step: str
    layout: str
    ours: Compiled
    predicted: int
    theirs: Compiled

    @property
    def ratio(self) -> float:
        """Bytes sent, ours over theirs."""
        return self.ours.sent / self.theirs.sent


def main(argv: list[str] | None = None) -> int:
    """Compiles what `argv` asks for (None: the arguments of the process), writes the page; returns 1 where ours sends
    more than the best program by hand, by more than two in a hundred."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks modern", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small steps, for CPU devices alone")
    parser.add_argument("--cpu", action="store_true", help="all steps, for CPU devices alone")
    parser.add_argument("--output", type=pathlib.Path, help="where the page goes, instead of benchmarks/results")
    parser.add_argument("--only", choices=("large", "numbers"), help="another part, with a page of its own")
    parser.add_argument(
        "--case", action="append", choices=tuple(large.CASES), help="of the large ones; can be given again"
    )
    parser.add_argument(
        "--maxtext-python",
        type=pathlib.Path,
        metavar="PATH",
        help="a Python that has maxtext: with `--only large`, MaxText's own programs alone are compiled by it",
    )
    parser.add_argument("--step", action="append", metavar="NAME", help="of `numbers`; can be given again")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, of `numbers`")
    parser.add_argument(
        "--work", type=pathlib.Path, help="where `numbers` keeps outcomes, so that a run that was ended goes on"
    )
    options = parser.parse_args(argv)
    if options.maxtext_python is not None and options.only != "large":
        parser.error("--maxtext-python needs --only large")
    virtual_devices()
    if options.only == "numbers":
        from benchmarks.modern import numbers

        return numbers.run(options.step, options.quick, options.output, options.jobs, options.work)
    output = options.output or RESULTS
    if options.maxtext_python is not None:
        from benchmarks.modern import beside_maxtext

        return beside_maxtext.run(options.case, options.maxtext_python, output)
    if options.only:
        return large.run(options.case, output)
    from benchmarks import machine

    cells = []
    for cell in measured(options.quick, options.cpu):
        print(f"{cell.target}, {cell.layout}, {cell.step}: {cell.ratio:.3f} of {cell.theirs.sent:,} bytes", flush=True)
        cells.append(cell)
    stored: dict[str, Any] = {"cells": [dataclasses.asdict(cell) for cell in cells]}
    command = "python -m benchmarks modern" + "".join(
        f" --{name}" for name in ("quick", "cpu") if getattr(options, name)
    )
    stored["header"] = machine.header(machine.this_machine(), command).rstrip()
    print("wrote", write_stored("modern", stored, page_lines, output))
    return int(any(cell.ratio > 1.02 for cell in cells))


def measured(quick: bool, cpu: bool) -> Iterator[Cell]:
    """Yields the cells, as they are compiled. `quick`, `cpu`: as the options."""
    from benchmarks.modern.models import Decoder

    has_tpu = not quick and not cpu and importlib.util.find_spec("libtpu") is not None
    for target in ("cpu", TPU) if has_tpu else ("cpu",):
        for name, (sizes, steps) in LAYOUTS.items():
            for step in steps if not quick else steps[:1]:
                if not quick or name in QUICK:
                    decoder = Decoder(**(SMALL if quick else {}), **STEPS[step])
                    yield _cell(target, name, sizes, step, decoder)


def _cell(target: str, name: str, sizes: Mapping[str, int], step: str, decoder: Any) -> Cell:
    import jax
    from jax.sharding import AxisType, Mesh

    import splitjax
    from benchmarks.modern.layouts import Layout, by_hand
    from benchmarks.modern.models import make_step, state_of

    devices = np.array(jax.devices() if target == "cpu" else _topology())
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    storage = tuple(axis for axis in sizes if axis in ("data", "fsdp"))
    batch = tuple(axis for axis in sizes if axis != "tensor")
    layout = Layout(
        batch,
        () if name == "megatron" else storage,
        ("tensor",) if "tensor" in sizes else (),
        ("expert",) if "expert" in sizes else (),
        largest=name == "fsdp",
    )
    ours = splitjax.parallelize(make_step(decoder, splitjax.value_and_grad), mesh=mesh, rules=name.split()[0])
    arguments = state_of(decoder), decoder.batch()
    predicted = sum(each.bytes for each in ours.plan(*arguments).collectives)
    rivals = {
        "constrained": by_hand(decoder, layout, mesh, True),
        "shardings alone": by_hand(decoder, layout, mesh, False),
    }
    if decoder.fused:
        rivals["weights apart"] = by_hand(dataclasses.replace(decoder, fused=False), layout, mesh, True)
    theirs = [_compiled(lowered, mesh, rival) for rival, lowered in rivals.items()]
    best = min(theirs, key=lambda each: (each.sent, each.temporary))
    return Cell(target, step, name, _compiled(ours.lower(*arguments), mesh), predicted, best)


def _topology() -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=TPU).devices


def _compiled(lowered: Any, mesh: Any, rival: str = "") -> Compiled:
    from splitjax.mesh import MeshShape
    from splitjax.report.hlo import compiled_collectives
    from splitjax.report.value import CompiledMemory

    program = lowered.compile()
    memory = CompiledMemory.of(program)
    assert memory is not None, "XLA says what memory its CPU and TPU programs take"
    sent = sum(each.bytes for each in compiled_collectives(program, MeshShape.of(mesh)))
    return Compiled(sent, memory.temporary_bytes, rival)


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `modern.json` holds."""
    cells = [
        Cell(**{**cell, "ours": Compiled(**cell["ours"]), "theirs": Compiled(**cell["theirs"])})
        for cell in stored["cells"]
    ]
    lines = ["# Modern steps beside layouts written by hand", "", stored["header"], ""]
    lines += [*(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), ""]
    for target in dict.fromkeys(cell.target for cell in cells):
        own = [cell for cell in cells if cell.target == target]
        lines += [f"## {'CPU devices' if target == 'cpu' else f'TPU {target}, compiled ahead of time'}", ""]
        ordered = sorted(own, key=lambda cell: cell.ratio)
        best, worst = ordered[0], ordered[-1]
        middle = math.exp(statistics.fmean(math.log(cell.ratio) for cell in own))
        lines += [
            f"Of the bytes that the best program by hand sends, ours sends {worst.ratio:.3f} at worst ({worst.step},"
            f" {worst.layout}), {best.ratio:.3f} at best ({best.step}, {best.layout}), {middle:.3f} in the geometric"
            " mean.",
            "",
        ]
        titles = (
            "step", "layout", "sent, ours (kB)", "sent, planned (kB)", "sent, by hand (kB)", "ours / by hand",
            "temporary, ours (kB)", "temporary, by hand (kB)", "ours / by hand", "the rival",
        )  # fmt: skip
        lines += [*table(titles, map(_row, own)), ""]
    return lines


def _row(cell: Cell) -> tuple[str, ...]:
    kilobytes = lambda size: f"{size / 1000:,.1f}"
    return (
        cell.step,
        cell.layout,
        kilobytes(cell.ours.sent),
        kilobytes(cell.predicted),
        kilobytes(cell.theirs.sent),
        f"{cell.ratio:.3f}",
        kilobytes(cell.ours.temporary),
        kilobytes(cell.theirs.temporary),
        # A TPU's compiler keeps what is small in the vector memory of the chip, and then counts nothing.
        f"{cell.ours.temporary / cell.theirs.temporary:.3f}" if cell.theirs.temporary else "",
        cell.theirs.rival,
    )


if __name__ == "__main__":
    sys.exit(main())
