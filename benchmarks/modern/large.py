"""Shapes of today's large models beside the layout that MaxText has for them: what both compile to for large TPUs.

    python -m benchmarks modern --only large                          all of them
    python -m benchmarks modern --only large --case "LLaMA 8B, v5p"   one; the others stay as they are stored
    python -m benchmarks modern --only large --maxtext-python PATH    MaxText's own programs alone

The cases are LLaMA 8B and the shape of Mixtral 8x7B, of 32 layers in a scan with `jax.checkpoint`, in bfloat16 over
float32 parameters, with Adam. They are compiled ahead of time for TPUs; nothing runs and no parameter exists. Attention
is plain JAX, experts have a capacity of twice an even share. *Sent* is what each device sends in a step by the ring
formulas, all collectives together, as `splitjax.report.hlo` reads them from either program. *Memory* is what either
program takes of a device's main memory (HBM): arguments, temporary buffers, and results that are not written over
arguments; a TPU's vector memory is not in it. *Peak* is the compiler's own figure for what is alive at once, vector
memory among it.

By hand means `jax.jit` with a `NamedSharding` for every leaf of the state and for the batch, donation, and
`with_sharding_constraint` on activations, as the logical axis rules of MaxText's `base.yml` have them: weights are
stored over `fsdp`, those that are no expert's over `expert` too, and are whole over `data`; features of the residual
stream and of experts' tokens are split over `tensor`, and so are the scales of norms. Ours is the same step, without
any sharding in it, under the rule set `transformer`, on the same mesh. What the two store differs where the mesh has an
axis `data`: by hand every device of that axis has the same weights and the same state of Adam, as MaxText's rules have
it; `transformer` stores both in parts over `data`, too, and gathers a weight over `data` and `fsdp` before it is used.
In the cases without such an axis both store the same, which is the rival's best setting for memory.

The compiler packs temporary buffers loosely while a device has memory to spare, and closely where it must. So either
program is compiled twice: for the memory that the TPU has, and limited to the smaller of the two programs' memories,
by the compiler's option `xla_tpu_max_hbm_size_mib`. The compiler takes that limit as an aim: a program may come out
above it.

Seconds are the processor time of one call of `step.plan`, after all imports and while other programs ran on the
machine. They cover tracing the step and planning it with what it sends; the memory of a plan, which is predicted when
it is first read, is not in them.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks._common import table, write_stored

if TYPE_CHECKING:
    from benchmarks.modern.layouts import Layout

PAGE = "modern_large"
LIMIT = 1.02  # goal, as a part of what the program by hand sends, and of the memory that it takes
SECONDS = 5.0  # goal, to trace and plan
_LLAMA: dict[str, Any] = {
    "layers": 32, "width": 4096, "hidden": 14336, "vocab": 128256, "seq": 4096, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "dtype": "bfloat16", "rotary": True,
}  # fmt: skip
_MIXTRAL = {**_LLAMA, "vocab": 32000, "experts": 8}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the TPUs that it is compiled for, their mesh, and the examples of a batch."""

    topology: str
    mesh: Mapping[str, int]
    model: Mapping[str, Any]
    examples: int


CASES: Mapping[str, Case] = {
    "LLaMA 8B, v5p": Case("v5p:4x4x4", {"data": 4, "fsdp": 4, "tensor": 4}, _LLAMA, 64),
    "LLaMA 8B, v5e": Case("v5e:16x16", {"data": 4, "fsdp": 16, "tensor": 4}, _LLAMA, 128),
    "LLaMA 8B, v5p, no data axis": Case("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, _LLAMA, 64),
    "LLaMA 8B, v5e, no data axis": Case("v5e:16x16", {"fsdp": 64, "tensor": 4}, _LLAMA, 128),
    "Mixtral, v5p": Case("v5p:4x4x4", {"fsdp": 4, "expert": 8, "tensor": 2}, _MIXTRAL, 64),
    "Mixtral, v5e": Case("v5e:16x16", {"fsdp": 8, "expert": 8, "tensor": 4}, _MIXTRAL, 128),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program needs on each device, in bytes.

    - `sent`: in a step, by collective and axes, such as `all_reduce over tensor`.
    - `arguments`, `temporary`, `results`: in main memory; results are those that are not written over arguments.
    - `peak`: what is alive at once by the compiler, vector memory among it.
    """

    sent: Mapping[str, int]
    arguments: int
    temporary: int
    results: int
    peak: int

    @property
    def sent_bytes(self) -> int:
        """All collectives together."""
        return sum(self.sent.values())

    @property
    def memory(self) -> int:
        """What the program takes of the main memory."""
        return self.arguments + self.temporary + self.results


@dataclasses.dataclass(frozen=True)
class Measured:
    """A case: our program, what its plan says, how long planning took, and the program by hand.

    - `limit`: the memory in bytes that the compiler is told a device has, for the programs that are `limited`. Such a
      program is None where the compiler cannot make it fit."""

    name: str
    commit: str
    date: str
    parameters: int
    ours: Program
    planned_sent: int
    planned_memory: int
    seconds: float
    by_hand: Program
    limit: int
    ours_limited: Program | None
    by_hand_limited: Program | None

    @property
    def ratios(self) -> tuple[float, float]:
        """Bytes sent and memory, ours over those of the program by hand."""
        theirs = self.by_hand
        return self.ours.sent_bytes / theirs.sent_bytes, self.ours.memory / theirs.memory

    @property
    def limited_ratio(self) -> float | None:
        """Memory of ours over that of the program by hand, both compiled with the limit."""
        if self.ours_limited is None or self.by_hand_limited is None:
            return None
        return self.ours_limited.memory / self.by_hand_limited.memory

    @property
    def holds(self) -> bool:
        """Whether the goals are met."""
        return max(self.ratios) <= LIMIT and self.seconds <= SECONDS


def run(names: list[str] | None, folder: pathlib.Path) -> int:
    """Compiles the cases `names` (None: all), and writes the page with them into `folder` after each; returns 1 where
    one misses a goal. What is stored of the other cases stays."""
    from benchmarks import machine

    file = folder / f"{PAGE}.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"cases": {}}
    packages = (*machine.PACKAGES, "libtpu")
    held = True
    for name in names or CASES:
        found = measure(name, machine.this_commit(), machine.this_machine().date)
        stored["cases"][name] = dataclasses.asdict(found)
        stored["header"] = machine.header(
            machine.this_machine(packages), "python -m benchmarks modern --only large"
        ).rstrip()
        print("wrote", write_stored(PAGE, stored, page_lines, folder), flush=True)
        held = held and found.holds
    return int(not held)


def measure(name: str, commit: str, date: str) -> Measured:
    """Plans and compiles the case `name`."""
    import jax
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import AxisType, Mesh

    import splitjax
    from benchmarks.modern.layouts import by_hand
    from benchmarks.modern.models import Decoder, make_step, state_of

    case = CASES[name]
    decoder = Decoder(examples=case.examples, **case.model)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    sizes = tuple(case.mesh.values())
    arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    mesh = Mesh(arranged, tuple(case.mesh), axis_types=(AxisType.Auto,) * len(sizes))
    arguments = state_of(decoder), decoder.batch()
    ours = splitjax.parallelize(make_step(decoder, splitjax.value_and_grad), mesh=mesh, rules="transformer")
    started = time.process_time()
    plan = ours.plan(*arguments)
    seconds = time.process_time() - started
    planned_sent = sum(each.bytes for each in plan.collectives)
    print(f"{name}: planned in {seconds:.2f} s", flush=True)
    lowered = {"ours": ours.lower(*arguments)}
    jax.clear_caches()
    lowered["by hand"] = by_hand(decoder, layout(case), mesh, True)
    loose = {which: _compiled(f"{name}, {which}", program, mesh) for which, program in lowered.items()}
    limit = min(each.memory for each in loose.values())
    tight = {which: _fitted(f"{name}, {which}", program, mesh, limit) for which, program in lowered.items()}
    return Measured(
        name, commit, date, decoder.num_parameters, loose["ours"], planned_sent, plan.memory.peak_bytes, seconds,
        loose["by hand"], limit, tight["ours"], tight["by hand"],
    )  # fmt: skip


def layout(case: Case) -> Layout:
    """The layout of a case by hand, as MaxText's rules have it."""
    from benchmarks.modern.layouts import Layout

    return Layout(
        batch=tuple(axis for axis in case.mesh if axis != "tensor"),
        store=("fsdp",),
        tensor=("tensor",),
        expert=("expert",) if "expert" in case.mesh else (),
        features=("tensor",),
        stored_by_expert=True,
    )


def _fitted(what: str, lowered: Any, mesh: Any, limit: int) -> Program | None:
    """The program that the compiler makes for devices of `limit` bytes; None where it says that none fits."""
    import jax

    options = {"xla_tpu_max_hbm_size_mib": limit // 2**20}
    try:
        return _compiled(f"{what}, limited to {_gigabytes(limit)} GB", lowered, mesh, options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _compiled(what: str, lowered: Any, mesh: Any, options: Mapping[str, Any] | None = None) -> Program:
    from splitjax.mesh import MeshShape
    from splitjax.report.hlo import compiled_collectives
    from splitjax.report.value import CompiledMemory

    program = lowered.compile(compiler_options=dict(options or {}))
    memory = CompiledMemory.of(program)
    assert memory is not None, "XLA says what memory its TPU programs take"
    sent: collections.Counter[str] = collections.Counter()
    for each in compiled_collectives(program, MeshShape.of(mesh)):
        sent[f"{each.op} over {each.axis}"] += each.bytes
    found = Program(
        dict(sent.most_common()),
        memory.argument_bytes,
        memory.temporary_bytes,
        memory.output_bytes - memory.alias_bytes,
        memory.peak_bytes or 0,
    )
    print(f"{what}: {found.sent_bytes / 1e9:.3f} GB sent, {found.memory / 1e9:.3f} GB held", flush=True)
    return found


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `modern_large.json` holds."""
    from benchmarks.modern import beside_maxtext

    cases = [_read(stored["cases"][name]) for name in CASES if name in stored["cases"]]
    lines = ["# Large models beside MaxText's layout", "", stored["header"], ""]
    lines += [*(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), ""]
    sent, memory = (max(case.ratios[which] for case in cases) for which in (0, 1))
    seconds = max(case.seconds for case in cases)
    lines += [
        f"Goals: ours sends at most {LIMIT:g} of what the program by hand sends, takes at most {LIMIT:g} of its memory,"
        f" and is traced and planned within {SECONDS:g} s. What is beyond its goal is marked as missed; the command"
        " exits with 1 where it compiles such a case.",
        "",
        f"Of what the program by hand sends ours sends {sent:.3f} at worst{_mark(sent, LIMIT)}, and of its memory it"
        f" takes {memory:.3f} at worst{_mark(memory, LIMIT)}{_where_limited(cases)}. Tracing and planning take"
        f" {seconds:.2f} s at most{_mark(seconds, SECONDS)}.",
        "",
    ]
    missing = [name for name in CASES if name not in stored["cases"]]
    lines += [f"Not compiled yet: {'; '.join(missing)}.", ""] if missing else []
    titles = (
        "step", "sent, ours (GB)", "sent, planned (GB)", "sent, by hand (GB)", "sent, ours / by hand",
        "memory, ours (GB)", "memory, by hand (GB)", "memory, ours / by hand",
    )  # fmt: skip
    lines += ["## Beside programs by hand", "", *table(titles, map(_row, cases)), ""]
    titles = (
        "step", "limit (GB)", "memory, ours (GB)", "memory, by hand (GB)", "memory, ours / by hand",
        "sent, ours, limited / not", "sent, by hand, limited / not",
    )  # fmt: skip
    lines += ["## Where memory is limited", "", *table(titles, map(_limited_row, cases)), ""]
    titles = (
        "step", "program", "arguments (GB)", "temporary (GB)", "results (GB)", "peak (GB)", "peak, planned (GB)",
    )  # fmt: skip
    lines += ["## Memory", "", *table(titles, (row for case in cases for row in _memory_rows(case))), ""]
    titles = ("step", "collective", "ours (GB)", "by hand (GB)")
    lines += ["## What is sent", "", *table(titles, (row for case in cases for row in _sent_rows(case))), ""]
    titles = ("step", "TPU", "mesh", "parameters", "examples", "trace and plan (s)", "commit", "date")
    lines += ["## Steps", "", *table(titles, map(_step_row, cases)), ""]
    return [*lines, *beside_maxtext.section(stored, {case.name: case for case in cases})]


def _read(stored: Mapping[str, Any]) -> Measured:
    programs = {
        field: stored[field] and Program(**stored[field])
        for field in ("ours", "by_hand", "ours_limited", "by_hand_limited")
    }
    return Measured(**{**stored, **programs})


def _where_limited(cases: Sequence[Measured]) -> str:
    """What the first lines say of programs that are compiled for limited memory."""
    ratios = [ratio for case in cases if (ratio := case.limited_ratio) is not None]
    if any(case.ours_limited is None for case in cases):
        return "; where memory is limited, not all of ours fit (missed)"
    if not ratios:
        return ""
    where = "memory is limited" if len(ratios) == len(cases) else "memory is limited and both fit"
    return f", or {max(ratios):.3f}{_mark(max(ratios), LIMIT)} where {where}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f}"


def _mark(figure: float, goal: float) -> str:
    return "" if figure <= goal else " (missed)"


def _row(case: Measured) -> tuple[str, ...]:
    sent, memory = (f"{ratio:.3f}{_mark(ratio, LIMIT)}" for ratio in case.ratios)
    ours, theirs = case.ours, case.by_hand
    return (
        case.name, _gigabytes(ours.sent_bytes), _gigabytes(case.planned_sent), _gigabytes(theirs.sent_bytes), sent,
        _gigabytes(ours.memory), _gigabytes(theirs.memory), memory,
    )  # fmt: skip


def _limited_row(case: Measured) -> tuple[str, ...]:
    programs = case.ours_limited, case.by_hand_limited
    sizes = ["does not fit" if each is None else _gigabytes(each.memory) for each in programs]
    ratio = case.limited_ratio
    sent = [
        f"{each.sent_bytes / full.sent_bytes:.3f}" if each else ""
        for each, full in zip(programs, (case.ours, case.by_hand), strict=True)
    ]
    shown = "" if ratio is None else f"{ratio:.3f}{_mark(ratio, LIMIT)}"
    return case.name, _gigabytes(case.limit), *sizes, shown, *sent


def _memory_rows(case: Measured) -> Iterator[tuple[str, ...]]:
    for which, program, planned in (("ours", case.ours, case.planned_memory), ("by hand", case.by_hand, None)):
        sizes = (program.arguments, program.temporary, program.results, program.peak)
        yield case.name, which, *map(_gigabytes, sizes), "" if planned is None else _gigabytes(planned)


def _sent_rows(case: Measured) -> Iterator[tuple[str, ...]]:
    for kind in dict.fromkeys((*case.ours.sent, *case.by_hand.sent)):
        amounts = [program.sent.get(kind, 0) for program in (case.ours, case.by_hand)]
        if max(amounts) >= 5e5:  # less than half a megabyte reads 0.000
            yield case.name, kind, *map(_gigabytes, amounts)


def _step_row(case: Measured) -> tuple[str, ...]:
    of = CASES[case.name]
    mesh = " x ".join(f"{axis} {size}" for axis, size in of.mesh.items())
    return (
        case.name, of.topology, mesh, f"{case.parameters:,}", str(of.examples),
        f"{case.seconds:.2f}{_mark(case.seconds, SECONDS)}", case.commit, case.date,
    )  # fmt: skip
