"""Holds the memory timelines of a step, predicted and compiled, as a value that prints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax

from splitjax import _compat
from splitjax.cost.memory.moments import MemoryTimeline
from splitjax.display import registry
from splitjax.plan import Plan
from splitjax.report.dataflow import Dataflow
from splitjax.report.known_step import Step
from splitjax.report.memory.assignment import read_assignment
from splitjax.report.memory.living import compiled_timeline
from splitjax.report.wire import read_module
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class MemoryTimelines:
    """Says what a device stores at each moment of a step. Print it, or show it in a notebook.

    **Attributes:**

    - `step`: its name.
    - `predicted`: by how long the arrays of the step's program live; its peak is the estimate of `step.memory(...)`.
    - `compiled`: by XLA's schedule and buffer assignment. None where nothing was compiled, and where XLA does not hand
      them out: on a CPU it does, its compiler for TPUs does not, nor that for GPUs where it compiles ahead of time.
    """

    step: str
    predicted: MemoryTimeline
    compiled: MemoryTimeline | None = None

    def __repr__(self) -> str:
        compiled = "" if self.compiled is None else f", {self.compiled.peak_bytes} compiled"
        return f"<MemoryTimelines of {self.step}: {self.predicted.peak_bytes} bytes at the peak predicted{compiled}>"

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)

    def svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the picture of what is stored when as the text of an SVG file, for light and dark pages.

        `path`: also written there. Raises `PlanError` where the file cannot be written."""
        return registry.draw(self, path)


def read_timeline(
    compiled: jax.stages.Compiled, plan: Plan, graph: Graph, argument_names: Mapping[str, str]
) -> MemoryTimeline | None:
    """Returns what a device stores at each moment of a compiled step; None where XLA does not hand it out.

    **Arguments:** as of `report.value.make_report`.

    Raises `report.protobuf.WireError` where the module or its assignment cannot be read."""
    data = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    modules = _compat.serialized_modules(compiled)
    if not data or len(modules) != 1:
        return None
    module = read_module(modules[0])
    return compiled_timeline(module, read_assignment(data), Step(plan, graph, argument_names, Dataflow(module)))
