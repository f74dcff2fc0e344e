"""Compiles a signature of a step for a machine that need not be here, and holds it against the memory of its devices.

An entry comes in, whose plan is for the same sizes of a mesh; the step is planned anew for the machine's devices and
compiled by their own compiler, and a `TargetCheck` comes out. Nothing runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from splitjax.compile.building import begin, compile_draft
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.reporting import step_report
from splitjax.compile.topologies import LIMIT_UNIT, compiler_options, compiler_version, target_mesh
from splitjax.errors import CompilerError, TargetError
from splitjax.machines.targets import Target
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.planning.draft import KnownTables
from splitjax.planning.passes import with_tables
from splitjax.report.target.refusal import OutOfMemory, read_refusal
from splitjax.report.target.value import CompilerRun, TargetCheck
from splitjax.report.value import Report
from splitjax.step.traced import trace_step


def check_on_target(
    recipe: Recipe,
    entry: CompiledEntry,
    target: Target,
    budget_bytes: int | None,
    layouts: Mapping[str, LeafPlan] | None = None,
) -> TargetCheck:
    """Compiles a step for a machine.

    **Arguments:** `recipe`: the step, of which nothing is left to be chosen. `entry`: its signature. `target`: the
    machine. `budget_bytes`: what a device may need; None for what it has. `layouts`: by path, the layout of the
    training step that an evaluation follows; None for a training step.

    Raises `TargetError` for a machine with another number of devices than the mesh, and `CompilerError` where its
    compiler is not installed or refuses its topology, or the program for another reason than its memory."""
    shape = MeshShape.of(entry.mesh)
    if shape.num_devices != target.num_devices:
        raise TargetError(
            f"the mesh has {shape.num_devices} devices and the target {target.num_devices}",
            value=str(target),
            place=f"{recipe.name}.check_target",
            remedy=f"name a machine of {shape.num_devices} devices, or decorate the step for it:"
            f' parallelize(mesh="auto", target="{target}")',
        )
    compiler = compiler_version(target)
    mesh = target_mesh(target, shape, entry.mesh.axis_types)
    recipe = dataclasses.replace(recipe, target=target, calibration=None)
    entry = _entry_on(recipe, mesh, entry, layouts)
    limit = _limit(target, budget_bytes)
    options = compiler_options(target, limit)
    started = time.perf_counter()
    report: Report | None = None
    refusal: OutOfMemory | None = None
    try:
        report = step_report(recipe, entry, entry.abstract_args, mesh.devices.flat[0], options)
        report = _within_vector_memory(report, target.kind.fast_memory_bytes)
    except jax.errors.JaxRuntimeError as error:
        refusal = read_refusal(str(error))
        if refusal is None:
            raise CompilerError(
                f"{compiler} does not compile the step: {str(error).splitlines()[0][:300]}",
                value=str(target),
                place=f"{recipe.name}.check_target",
                remedy="the cause above has all that it says; another version of the compiler may do",
            ) from error
    seconds = time.perf_counter() - started
    needed, available = (None, None) if refusal is None else (refusal.needed_bytes, refusal.available_bytes)
    plan = entry.plan
    return TargetCheck(
        recipe.name,
        str(target),
        plan.mesh,
        plan.rules,
        budget_bytes,
        target.kind.memory_bytes,
        plan.memory,
        plan.collectives,
        CompilerRun(compiler, seconds, limit, options, needed, available),
        report,
    )


def _within_vector_memory(report: Report, capacity_bytes: int) -> Report:
    """Bounds what a report says of vector memory by what a device has of it; 0 for not known."""
    compiled = report.memory.compiled
    if compiled is None or compiled.vector_bytes is None or not capacity_bytes:
        return report
    compiled = dataclasses.replace(compiled, vector_bytes=min(compiled.vector_bytes, capacity_bytes))
    return dataclasses.replace(report, memory=dataclasses.replace(report.memory, compiled=compiled))


def _limit(target: Target, budget_bytes: int | None) -> int | None:
    """Returns what the compiler of a machine is to be held to: a budget below what its devices have, where it knows
    such a limit."""
    if target.kind.platform != "tpu" or budget_bytes is None:
        return None
    is_below = not target.kind.memory_bytes or budget_bytes < target.kind.memory_bytes
    return max(budget_bytes // LIMIT_UNIT, 1) * LIMIT_UNIT if is_below else None


def _entry_on(
    recipe: Recipe, mesh: Mesh, entry: CompiledEntry, layouts: Mapping[str, LeafPlan] | None
) -> CompiledEntry:
    """Builds the entry of the same call over the devices of another mesh of the same sizes. What is pinned by where an
    array lies on the step's own mesh is pinned there, too."""
    traced = dataclasses.replace(trace_step(recipe, entry.call, mesh=mesh), said=entry.traced.said)
    tables = KnownTables(carried=entry.plan.syncs if entry.is_decided else ())
    return compile_draft(recipe, mesh, with_tables(begin(recipe, mesh, traced, layouts), tables))
