"""The `Plan`: every decision about a step's layout as one immutable value that prints, serialises, diffs and can be
pinned.

What a plan consists of (leaves, layers, collectives, ...) is defined in `splitjax._plan_parts` and has its names here.
How a plan looks when it is printed is registered with `splitjax.display` by the room that shows plans.

The text of a plan (`to_json`) is made to live in a repository beside the training script: stable order, one leaf, layer
or collective a line, so that a version control diff reads like `Plan.diff`. What it has besides the types
of the fields is in `splitjax._plan_json`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from jax.sharding import Mesh, PartitionSpec

from splitjax._plan_differences import comparable, of_entries, of_partial, of_value
from splitjax._plan_explained import Alternative, Explainer, Explanation, StepCost
from splitjax._plan_json import FORMAT, codec_of
from splitjax._plan_parts import (
    ROW_EXCHANGE,
    BlockRemat,
    BoundaryPlan,
    Collective,
    Compute,
    Constraint,
    LayerPlan,
    LeafPlan,
    Memory,
    PartialPlan,
    PlanWarning,
    SegmentPlan,
    Spec,
    SpecEntry,
    StoredArray,
    SyncPlan,
    spec_axes,
    spec_entry,
    spec_text,
)
from splitjax._plan_purpose import DENSE_GRADIENTS, GRADIENT_SUMS, Phase, Purpose, PurposeKind, beside
from splitjax.codec import OneOf
from splitjax.display import registry
from splitjax.errors import PlanError, UnavailableError
from splitjax.mesh import MeshShape

__all__ = [
    "DENSE_GRADIENTS",
    "FORMAT",
    "GRADIENT_SUMS",
    "ROW_EXCHANGE",
    "Alternative",
    "BlockRemat",
    "BoundaryPlan",
    "Collective",
    "ComingMemory",
    "Compute",
    "Constraint",
    "Explanation",
    "LayerPlan",
    "LeafLike",
    "LeafPlan",
    "Memory",
    "PartialPlan",
    "Phase",
    "Plan",
    "PlanWarning",
    "Purpose",
    "PurposeKind",
    "SegmentPlan",
    "Spec",
    "SpecEntry",
    "StepCost",
    "StoredArray",
    "SyncPlan",
    "beside",
    "first_mismatch",
    "spec_axes",
    "spec_entry",
    "spec_text",
]

T = TypeVar("T")


class LeafLike(Protocol):
    """Describes what `first_mismatch` reads of a step's leaf: `LeafPlan` and `trace.graph.Leaf` both fit."""

    @property
    def path(self) -> str:
        """Returns its path in the pytree."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the sizes of its dims."""
        ...

    @property
    def dtype(self) -> Any:
        """Returns the type of its elements."""
        ...

    @property
    def role(self) -> str:
        """Returns its role, as `trace.graph.Leaf.role`."""
        ...


@dataclasses.dataclass(frozen=True)
class ComingMemory:
    """Stands in a step's plan for its memory, which is predicted when it is first read. `predict`: predicts it.
    `summed`: what a quick sum says of it."""

    predict: Callable[[], Memory]
    summed: Memory

    def __call__(self) -> Memory:
        """Returns the memory."""
        return self.predict()


class _WhenRead:
    """A field of a dataclass that may be given a function in place of its value: it is called when the field is first
    read, and the field has what it returned from then on. A field's default may be such a descriptor
    (docs.python.org/3/library/dataclasses.html#descriptor-typed-fields)."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._default
        value = instance.__dict__[self._name]
        if callable(value):
            value = instance.__dict__[self._name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


def _when_read(default: T) -> T:
    """Returns a `_WhenRead` with this `default`, which type checkers take for a value."""
    descriptor: Any = _WhenRead(default)
    return descriptor


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds every decision about a step's layout. Print it, show it in a notebook, keep it with `save`, pin it with
    `parallelize(plan=...)`.

    **Attributes:**

    - `mesh`: the axes and sizes that it is for. `rules`: the name of the rule set.
    - `replicated_batch`: `"all"` or `"data"`: over which axes replicated layers have the batch split.
    - `batch_axes`: the axes over which batch arguments are split.
    - `leaves`: every array of the step's arguments. `layers`: in program order.
    - `constraints`: the shardings that lowering pins inside the step.
    - `gathered`: unknown operations that run replicated, as `"primitive at file:line"`.
    - `memory`, `collectives`: what is predicted. `notes`: what to know besides. The memory of a step's plan is
      predicted when it is first looked at, as the text, the JSON and a comparison of the plan do.
    - `group_comm`: how examples cross into split layers: `"gather"`, `"turns"` or `"modulo"`.
    - `syncs`: tables with row lookups, where another synchronisation than the dense one was asked for.
    - `partial`: partial backpropagation, where it was asked for.
    - `boundaries`: how the step's gradient boundaries run, in program order.
    - `compute`: what a device computes, over an even share of it. `warnings`: what is wasted, each with its remedy.
    - `remat`: which repeated blocks are computed again in the backward pass, beside what the step says itself.
    - `saved`: axes over which the inputs of rematerialised layers lie in parts from the forward to the backward pass.

    `explainer` explains the step that the plan is made from; it is no field, so that a copy, a plan that was read from
    a file and a changed one have none.
    """

    mesh: MeshShape
    rules: str
    replicated_batch: Annotated[str, OneOf(("all", "data"))]
    batch_axes: tuple[str, ...]
    leaves: tuple[LeafPlan, ...]
    layers: tuple[LayerPlan, ...]
    constraints: tuple[Constraint, ...] = ()
    gathered: tuple[str, ...] = ()
    memory: Memory = _when_read(Memory(0, 0, 0))
    collectives: tuple[Collective, ...] = ()
    notes: tuple[str, ...] = ()
    group_comm: Annotated[str, OneOf(("gather", "turns", "modulo"))] = "gather"
    syncs: tuple[SyncPlan, ...] = ()
    partial: PartialPlan | None = None
    boundaries: tuple[BoundaryPlan, ...] = ()
    compute: Compute = Compute()
    warnings: tuple[PlanWarning, ...] = ()
    remat: tuple[BlockRemat, ...] = ()
    saved: tuple[str, ...] = ()
    explainer: dataclasses.InitVar[Explainer | None] = None

    def __post_init__(self, explainer: Explainer | None) -> None:
        self.__dict__["_explainer"] = explainer

    @functools.cached_property
    def _by_path(self) -> Mapping[str, LeafPlan]:
        return {leaf.path: leaf for leaf in self.leaves}

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process cannot predict anything.
        return {**self.__dict__, "memory": self.memory, "_explainer": None}

    def with_summed_memory(self) -> Plan:
        """Returns the plan with the quick sum of its memory where that was not read yet, and itself otherwise. What
        lifetimes say follows from the step, and takes as long as tracing it: comparisons of many plans leave it out."""
        coming = self.__dict__["memory"]
        return dataclasses.replace(self, memory=coming.summed) if isinstance(coming, ComingMemory) else self

    def leaf(self, path: str) -> LeafPlan:
        """Returns the planned leaf at a `path` such as `params/Dense_0/kernel`. Raises `PlanError` for a path that
        the plan lacks."""
        try:
            return self._by_path[path]
        except (KeyError, TypeError):
            raise PlanError(
                "the plan has no such leaf",
                value=path,
                place="Plan.spec",
                remedy=_did_you_mean(str(path), self._by_path) or "see the paths in `plan.leaves`",
            ) from None

    def spec(self, path: str) -> PartitionSpec:
        """Returns the `PartitionSpec` of any leaf of the step's arguments, by `path`. Raises `PlanError` for a path the
        plan lacks."""
        return PartitionSpec(*self.leaf(path).spec)

    def explain(self, name: str, on: str | None = None) -> Explanation:
        """Explains why a layer lies where it lies, and what each other layout of it would cost: milliseconds, bytes
        sent and bytes of memory, predicted as a change of this plan.

        **Arguments:**

        - `name`: of a layer, or the path of an array, which stands for its layer. The end serves where only one ends
          so: `dense1` for `params/dense1`.
        - `on`: a target such as `tpu:v5e:4x4`, of as many devices as the mesh has, whose published figures the seconds
          are made of; None for those of the target that the step is for, or figures that stand for the platform.

        Raises `PlanError` for a name that the plan lacks, `TargetError` for what is no target of this mesh, and
        `UnavailableError` for a plan that does not have its step: one that was read from a file, or changed."""
        explainer: Explainer | None = self.__dict__["_explainer"]
        if explainer is None:
            raise UnavailableError(
                "this plan was read, copied or changed, and does not know the step that it was made from",
                value=name,
                place="Plan.explain",
                remedy="ask the plan of a step: parallelize(step, plan=PLAN).plan(state, batch).explain(...)",
            )
        return explainer(name, on)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON: equal in all processes exactly when their plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the plan as JSON text (ASCII, stable order, one entry a line), read back exactly by
        `Plan.from_json`."""
        return _JSON.text(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads `text`, what `to_json` wrote, possibly edited by hand. Raises `PlanError` naming the key path of the
        first problem."""
        return _JSON.parse(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to the file `path`, whole or not at all: a reader never sees half a plan, a crash leaves the
        old one.

        Raises `PlanError` when the file cannot be written."""
        _JSON.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote to `path`. Raises `PlanError` naming the file and the key path of the first
        problem."""
        return _JSON.load(path)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """Returns what differs between this plan and `other`, as sentences `thing: here -> there`; empty exactly when
        they are equal, as far as they can be compared: of a plan from before purposes were data, what its collectives
        are for is only told in words, and is left out.

        Ordered mesh, rules, leaves, layers, constraints, memory, collectives: what comes first usually explains the
        rest."""
        return tuple(_differences(self, other))

    def check(self, leaves: Sequence[LeafLike], mesh: MeshShape | Mesh | Mapping[str, int]) -> None:
        """Raises `PlanError` unless this (pinned) plan fits a step with these leaves on this mesh; see
        `first_mismatch`."""
        problem = first_mismatch(self, leaves, mesh)
        if problem:
            raise PlanError(
                f"the pinned plan does not fit the step: {problem}",
                place="plan",
                remedy=(
                    "make the plan anew from this step (`step.plan(...).save(path)`), or run the step it was made for"
                ),
            )

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.rules!r} on {self.mesh}: {len(self.layers)} layers, {len(self.leaves)} leaves, "
            f"{len(self.collectives)} collectives, digest {self.digest[:12]}>"
        )

    def _repr_html_(self) -> str:
        return registry.html(self)


_JSON = codec_of(Plan)


def first_mismatch(plan: Plan, leaves: Sequence[LeafLike], mesh: MeshShape | Mesh | Mapping[str, int]) -> str | None:
    """Returns the first difference between a pinned `plan` and the step it meets, as a sentence; None when it fits.

    Looks at the mesh, then at the step's leaves in order (path, role, dtype, shape), then at leaves that only the plan
    has. A batch array may have another number of examples than the plan saw, as long as its shards divide: a plan
    describes a layout, and the last batch of an epoch is often smaller.
    """
    shape = MeshShape.of(mesh)
    if plan.mesh != shape:
        return f"the plan is for the mesh {plan.mesh}, the step runs on {shape}"
    for leaf in leaves:
        planned = plan._by_path.get(leaf.path)
        if planned is None:
            hint = _did_you_mean(leaf.path, plan._by_path)
            return f"the step has a leaf {leaf.path!r} that the plan lacks" + (f" ({hint})" if hint else "")
        for name in ("role", "dtype"):
            if str(getattr(planned, name)) != str(getattr(leaf, name)):
                return (
                    f"{leaf.path!r} has {name} {getattr(planned, name)} in the plan and {getattr(leaf, name)} in the"
                    " step"
                )
        if not _shapes_fit(planned, tuple(leaf.shape), shape):
            return f"{leaf.path!r} has shape {planned.shape} in the plan and {tuple(leaf.shape)} in the step"
    present = {leaf.path for leaf in leaves}
    for planned in plan.leaves:
        if planned.path not in present:
            return f"the plan has a leaf {planned.path!r} that the step lacks"
    return None


def _shapes_fit(planned: LeafPlan, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    if planned.shape == shape:
        return True
    if planned.role != "batch" or not shape or len(planned.shape) != len(shape) or planned.shape[1:] != shape[1:]:
        return False
    return shape[0] % mesh.size(spec_axes(planned.spec[:1])) == 0


def _did_you_mean(path: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(path, list(known), n=3, cutoff=0.6)
    return f"did you mean {', '.join(map(repr, close))}?" if close else ""


def _differences(a: Plan, b: Plan) -> Iterator[str]:
    yield from of_value("mesh", a.mesh, b.mesh, str)
    yield from of_value("rules", a.rules, b.rules)
    yield from of_value("replicated_batch", a.replicated_batch, b.replicated_batch)
    yield from of_value("batch_axes", a.batch_axes, b.batch_axes)
    yield from of_value("group_comm", a.group_comm, b.group_comm)
    yield from of_entries("leaf", a.leaves, b.leaves, lambda leaf: leaf.path)
    yield from of_entries("layer", a.layers, b.layers, lambda layer: layer.name)
    yield from of_entries(
        "constraint", a.constraints, b.constraints, lambda c: f"{c.site} operand {c.operand} ({c.layer})"
    )
    yield from of_entries("gathered operation", a.gathered, b.gathered, str)
    for field in dataclasses.fields(Memory):
        yield from of_value(f"memory.{field.name}", getattr(a.memory, field.name), getattr(b.memory, field.name))
    for field in dataclasses.fields(Compute):
        yield from of_value(f"compute.{field.name}", getattr(a.compute, field.name), getattr(b.compute, field.name))
    yield from of_entries(
        "collective",
        *comparable(a.collectives, b.collectives),
        lambda c: (c.op, c.axis, c.layer, c.purpose),
        lambda c: f"{c.op} over {c.axis} for {c.layer}" + (f" ({c.why})" if c.why else ""),
    )
    yield from of_entries("table", a.syncs, b.syncs, lambda sync: sync.param)
    yield from of_partial(a.partial, b.partial)
    yield from of_entries("gradient", a.boundaries, b.boundaries, lambda boundary: boundary.site)
    yield from of_entries("block computed again", a.remat, b.remat, lambda each: each.name)
    yield from of_value("saved", a.saved, b.saved)
    yield from of_entries("warning", a.warnings, b.warnings, lambda warning: warning.kind)
    yield from of_entries("note", a.notes, b.notes, repr)
