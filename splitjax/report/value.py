"""Holds the `Report`: what a plan predicted beside what XLA compiled, as an immutable value that prints and serialises.

`make_report` makes it of a compiled step and its plan; `splitjax.display` shows it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax

from splitjax._plan_json import COLLECTIVE_FORM, MEMORY_FORM, MESH_FORM, PURPOSE_FORM
from splitjax.codec import Codec, Form, Wording, fields_of, without_nones
from splitjax.display import registry
from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, Compute, Memory, Plan, Purpose
from splitjax.report.attribute import ReportedCollective, attribute
from splitjax.report.depths import ReportedDepth, read_depths
from splitjax.report.hlo import CompiledCollective
from splitjax.report.memory.vector import vector_memory_bytes
from splitjax.report.parts import CompiledWorkers, read_parts
from splitjax.report.products.flops import read_flops
from splitjax.trace.graph import Graph

FORMAT = 1
_Listed = ReportedCollective | Collective
_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Says how much memory XLA set aside on each device for a step, in bytes.

    **Attributes:**

    - `argument_bytes`: states, batch and other arguments.
    - `temporary_bytes`: what lives only during the step: activations, gradients, buffers of collectives.
    - `output_bytes`: results, the new states among them.
    - `alias_bytes`: the part of the results that is written over arguments (donated states).
    - `peak_bytes`: the backend's own figure for the highest use; None where it gives none. On a CPU it is only the
      arguments, on a TPU it is the figure to trust.
    - `vector_bytes`: of a TPU, how much at most lies in the cores' own memory (VMEM) at any moment, which the backend's
      figure for the peak counts with it and the others do not; None elsewhere, and where it is not known.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    alias_bytes: int
    peak_bytes: int | None = None
    vector_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Sums up arguments, temporaries, and results that are not written over arguments."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.alias_bytes

    @classmethod
    def of(cls, compiled: jax.stages.Compiled | CompiledWorkers) -> CompiledMemory | None:
        """Reads the figures of `compiled`, what `step.lower(...).compile()` gives; None where the backend does not
        say."""
        stats = compiled.memory_analysis()
        if stats is None:
            return None
        return cls(
            int(stats.argument_size_in_bytes),
            int(stats.temp_size_in_bytes),
            int(stats.output_size_in_bytes),
            int(stats.alias_size_in_bytes),
            int(getattr(stats, "peak_memory_in_bytes", 0)) or None,
        )


@dataclasses.dataclass(frozen=True)
class ReportMemory:
    """Holds bytes per device.

    **Attributes:**

    - `predicted`: by the plan.
    - `compiled`: by XLA; None where its backend does not say.
    """

    predicted: Memory
    compiled: CompiledMemory | None


@dataclasses.dataclass(frozen=True)
class ReportCompute:
    """Holds flops per device and step; a multiply-add is two.

    **Attributes:**

    - `predicted`: by the plan: products with weights.
    - `compiled`: of all products and convolutions that XLA compiled, those in loops as often as they run. None where
      some are calls into a library, which do not say what they compute, and of a step of several programs.
    """

    predicted: Compute = Compute()
    compiled: int | None = None


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums up collectives. What runs in some steps only (`CompiledCollective.share`) counts for its share.

    **Attributes:**

    - `predicted_count`, `compiled_count`: how many run per step, by the plan and as compiled.
    - `predicted_bytes`, `compiled_bytes`: what each device sends for them per step.
    """

    predicted_count: int
    predicted_bytes: int
    compiled_count: int
    compiled_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Compares a step's plan with what XLA compiled. Print it, show it in a notebook, or keep it with `to_json`.

    **Attributes:**

    - `step`: the step's name.
    - `mesh`: axes and sizes.
    - `rules`: the rule set's name.
    - `platform`: what it was compiled for: `cpu`, `gpu`, `tpu`.
    - `plan_digest`: `Plan.digest` of the plan.
    - `memory`: bytes per device, predicted and compiled.
    - `collectives`: every collective of the compiled step, in the order of the program, with op, axis, bytes, layer,
      source line, cause and rule; those that the plan foresaw with their prediction.
    - `missing`: planned collectives that XLA did without.
    - `depths`: how far back each worker differentiates, where that is partial; else none.
    - `compute`: flops per device and step, predicted and compiled.
    """

    step: str
    mesh: MeshShape
    rules: str
    platform: str
    plan_digest: str
    memory: ReportMemory
    collectives: tuple[ReportedCollective, ...]
    missing: tuple[Collective, ...]
    depths: tuple[ReportedDepth, ...] = ()
    compute: ReportCompute = ReportCompute()

    @property
    def unplanned(self) -> tuple[ReportedCollective, ...]:
        """Lists what the compiled step sends beyond the plan, each with source line and cause."""
        return tuple(collective for collective in self.collectives if collective.planned is None)

    @property
    def unattributed(self) -> tuple[ReportedCollective, ...]:
        """Lists the collectives of which neither layer nor cause could be found. A hole in this report: please tell
        us."""
        return tuple(collective for collective in self.collectives if not collective.is_attributed)

    @property
    def rematerialised(self) -> tuple[ReportedCollective, ...]:
        """Lists the collectives that gather a whole array of which each device keeps a part, with layer, line and rule:
        what XLA's log calls involuntary full rematerializations, also of programs that come from a cache. How each may
        be removed is `collective.rematerialised.remedy`."""
        return tuple(collective for collective in self.collectives if collective.rematerialised is not None)

    @functools.cached_property
    def by_op(self) -> Mapping[tuple[str, str], Total]:
        """Maps (op, axis) to what the plan and the compiled step send by it, the largest first."""
        return _totals(self, lambda collective: (collective.op, collective.axis))

    @functools.cached_property
    def by_layer(self) -> Mapping[str, Total]:
        """Maps each layer to what the plan and the compiled step send for it, the largest first; `""` is what belongs
        to no layer, such as the loss."""
        return _totals(self, lambda collective: collective.layer)

    @property
    def total(self) -> Total:
        """Sums up all collectives."""
        return _totals(self, lambda collective: "").get("", Total(0, 0, 0, 0))

    def to_json(self) -> str:
        """Returns the report as JSON text (ASCII), a collective a line, read back by `Report.from_json`. All sizes are
        bytes per device, and what is sent is per step."""
        return _JSON.text(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads `text`, what `to_json` wrote. Raises `PlanError` for anything else, with the key path of the first
        problem."""
        return _JSON.parse(text)

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        return (
            f"<Report of {self.step} on {self.mesh} ({self.platform}): {len(self.collectives)} collectives,"
            f" {len(self.unplanned)} unplanned, {len(self.missing)} missing, {len(self.unattributed)} unattributed>"
        )

    def _repr_html_(self) -> str:
        return registry.html(self)


def make_report(
    compiled: jax.stages.Compiled | CompiledWorkers,
    plan: Plan,
    graph: Graph,
    argument_names: Mapping[str, str],
    *,
    step: str,
    platform: str,
) -> Report:
    """Makes the report of a compiled step.

    **Arguments:**

    - `compiled`: what `step.lower(...).compile()` gives, a program or the programs of several workers, with its
      metadata (`_compat.metadata_in_cache_key`).
    - `plan`, `graph`: what it was compiled from.
    - `argument_names`: JAX's name of every array among the step's arguments -> its path in the plan.
    - `step`, `platform`: names for the report.

    Raises `report.protobuf.WireError` where the compiled modules cannot be read.
    """
    parts = read_parts(compiled, plan, argument_names)
    collectives, missing = attribute(parts, plan, graph)
    needed = CompiledMemory.of(compiled)
    if needed is not None and platform == "tpu" and len(parts) == len(parts[0].modules) == 1:
        needed = dataclasses.replace(needed, vector_bytes=vector_memory_bytes(parts[0].modules[0]))
    memory = ReportMemory(plan.memory, needed)
    return Report(
        step,
        plan.mesh,
        plan.rules,
        platform,
        plan.digest,
        memory,
        collectives,
        missing,
        read_depths(parts, plan),
        ReportCompute(plan.compute, read_flops(parts)),
    )


def _totals(report: Report, key: Callable[[_Listed], _Key]) -> dict[_Key, Total]:
    """Sums up the collectives with the same `key`, largest first. A planned collective counts under its own op, axis
    and layer, however XLA realised it."""
    sums: dict[_Key, list[float]] = {}
    realised = [
        (planned, collective.compiled.share) for collective in report.collectives for planned in collective.realised
    ]
    planned: Iterable[tuple[_Listed, float]] = (*realised, *((collective, 1.0) for collective in report.missing))
    compiled = [(collective, collective.compiled.share) for collective in report.collectives]
    for offset, entries in ((0, planned), (2, compiled)):
        for collective, share in entries:
            entry = sums.setdefault(key(collective), [0, 0, 0, 0])
            entry[offset] += share
            entry[offset + 1] += collective.bytes
    totals = {name: Total(*map(round, entry)) for name, entry in sums.items()}
    return dict(sorted(totals.items(), key=lambda item: -max(item[1].predicted_bytes, item[1].compiled_bytes)))


def _written(report: Report) -> dict[str, Any]:
    """Gives what is written of a report: sums over its collectives too, for whoever reads the text."""
    fields = fields_of(report)
    lists = {name: fields.pop(name) for name in ("depths", "collectives", "missing")}
    by_op = [{"op": op, "axis": axis, **fields_of(total)} for (op, axis), total in report.by_op.items()]
    by_layer = [{"layer": layer, **fields_of(total)} for layer, total in report.by_layer.items()]
    return {**fields, "by_op": by_op, "by_layer": by_layer, **lists}


def _written_collective(collective: ReportedCollective) -> dict[str, Any]:
    """Gives a collective as one flat object that begins with what people look for."""
    fields, compiled = fields_of(collective), fields_of(collective.compiled)
    del fields["compiled"], compiled["source"]  # the first of its frames; the object's own `source` is never less
    first = {name: compiled.pop(name) for name in ("op", "axis", "bytes")}
    planned, also, beside = fields.pop("planned"), fields.pop("also"), fields.pop("cause_beside")
    kept = fields.pop("rematerialised")
    # Left out where there is none, as by reports of before.
    late = (("also", also), ("cause_beside", beside), ("rematerialised", kept))
    more = {name: value for name, value in late if value}
    return {**first, **fields, "planned": planned, **more, **compiled}


def _read_collective(codec: Codec[Any], values: Any, place: str) -> ReportedCollective:
    names = {field.name for field in dataclasses.fields(CompiledCollective)} - {"source"}
    known = codec.object(ReportedCollective, values, place)
    of_compiled = {name: value for name, value in known.items() if name in names}
    fields = {name: value for name, value in known.items() if name not in names}
    compiled = codec.instance(CompiledCollective, of_compiled, place)
    if not 0 <= compiled.share <= 1:
        codec.fail("a share of the time is between 0 and 1", compiled.share, f"{place}.share")
    compiled = dataclasses.replace(compiled, source=compiled.frames[0] if compiled.frames else "")
    return ReportedCollective(compiled, **codec.arguments(ReportedCollective, fields, place, ("compiled",)))


_JSON = Codec(
    Report,
    PlanError,
    Wording.of_result("a report", "report"),
    format=FORMAT,
    finite=True,
    forms={
        MeshShape: MESH_FORM,
        Memory: MEMORY_FORM,
        Collective: COLLECTIVE_FORM,
        Purpose: PURPOSE_FORM,
        CompiledMemory: without_nones("vector_bytes"),
        Report: Form(_written, unread=("by_op", "by_layer")),
        ReportedCollective: Form(_written_collective, _read_collective),
    },
    entries=("collectives", "missing"),
    unless_empty=("compute",),
)
# A report within another document.
REPORT_FORM: Form[Report] = Form(_JSON.values, lambda codec, values, place: _JSON.read(values, place))
