"""The parts that make up a plan, as values: they say where each array lives, what each layer got, what is predicted.

`splitjax.plan` puts them together as a `Plan` and gives all of them under its own name; `splitjax._plan_json` reads and
writes them. A spec is a tuple with one entry per dim: None, an axis name, or a tuple of axis names, as in
`jax.sharding.PartitionSpec`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from jax.sharding import PartitionSpec

from splitjax._plan_purpose import Purpose
from splitjax.codec import Called, Count, OneOf, ReadAs, Where
from splitjax.mesh import MeshShape

SpecEntry = Annotated[None | str | tuple[str, ...], Called("null, an axis, or a list of axes")]
Spec = tuple[SpecEntry, ...]
# among collectives: all messages by which one table's rows are synchronised, whatever the scheme
ROW_EXCHANGE = "row_exchange"


def _is_option(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_option, value))
    return not isinstance(value, dict) and (not isinstance(value, float) or math.isfinite(value))


# As the JSON of a plan holds them: an option's value, the sizes of a kind.
_Option = Annotated[Any, Where(_is_option, "an option is a number, a string, true, false, null, or a list of these")]
_Sizes = Annotated[Any, ReadAs(Count | list[Count])]


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """Returns the mesh axes that `spec` uses, in dim order; `?` (left to XLA) is none."""
    return tuple(axis for entry in spec if entry for axis in _entry_axes(entry))


def spec_entry(axes: Sequence[str]) -> SpecEntry:
    """Returns `axes` as an entry of a spec: None, a name, or several names."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _entry_axes(entry: SpecEntry) -> tuple[str, ...]:
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in axes if axis != "?") if "?" in axes else axes


def spec_text(spec: Spec) -> str:
    """Writes `spec` for people: `P(None, 'model')`, without trailing None, or `replicated`."""
    used = [i for i, entry in enumerate(spec) if entry]
    return f"P({', '.join(map(repr, spec[: used[-1] + 1]))})" if used else "replicated"


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Says where one array of the step's arguments lives.

    - `path`, `shape`, `dtype`: of the array. `role`: as `trace.graph.Leaf.role`. `is_state`: whether it belongs to a
      state.
    - `spec`: how it is split. `rule`: the rule that fired, or `"follows PATH"`, `"batch"`, `"input"`.
    - `note`: why the spec is not what one might expect, such as `"out 10 does not divide by model=4"`.
    - `bytes_per_device`: of the piece that a device holds.
    - `gradient`: onto what a parameter's gradient is summed, with its optimizer state; None: as the parameter.
    - `logical`: the shape that the step knows, where the array is stored with zeros behind it (`uneven="pad"`); None
      where that is `shape`.
    - `example_dim`: of a batch, the dim that holds examples, where others count steps or microbatches before it; None
      for the first.
    """

    path: str
    shape: tuple[Count, ...]
    dtype: str
    role: str
    is_state: bool
    spec: Spec
    rule: str
    note: str = ""
    bytes_per_device: Count = 0
    gradient: Spec | None = None
    logical: tuple[Count, ...] | None = None
    example_dim: Count | None = None

    @property
    def padding_bytes(self) -> int:
        """The bytes of a device's piece that stand for what the array is padded with."""
        if self.logical is None:
            return 0
        return self.bytes_per_device - self.bytes_per_device * math.prod(self.logical) // math.prod(self.shape)

    @functools.cached_property
    def axes_by_dim(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dim of `spec`."""
        return tuple(map(_entry_axes, self.spec))

    @functools.cached_property
    def gradient_axes_by_dim(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dim of its gradient where it has a layout of its own."""
        return tuple(map(_entry_axes, self.gradient or ()))

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split it, in dim order."""
        return spec_axes(self.spec)

    @functools.cached_property
    def gradient_axes(self) -> tuple[str, ...]:
        """The mesh axes that split its gradient where it has a layout of its own, in dim order."""
        return spec_axes(self.gradient or ())

    def num_shards(self, mesh: MeshShape) -> int:
        """Returns into how many pieces the array is split over `mesh`."""
        return mesh.size(self.axes)

    def whole_bytes(self, mesh: MeshShape) -> int:
        """Returns the bytes of the whole array, as one device would hold it: planned dims always divide by `mesh`."""
        return self.bytes_per_device * self.num_shards(mesh)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Holds one layer with the specs of its parameters.

    - `name`, `kind`: of the layer. `params`: paths of its leaves, weight first. `specs`: one per parameter.
    - `rule`: the rule that decided its weight. `note`: as `LeafPlan.note`.
    """

    name: str
    kind: str
    params: tuple[str, ...]
    specs: tuple[Spec, ...]
    rule: str
    note: str = ""

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec` of the layer's weight (its first parameter)."""
        return PartitionSpec(*self.specs[0]) if self.specs else PartitionSpec()


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Describes an array that a device stores at the moment when it stores most.

    - `shape`: of the whole array, or of a device's part where the step itself computes with parts. `num_bytes`: what a
      device stores of it.
    - `made_by`: the name of the operation that made it. `layer`: the layer that it belongs to; empty where it belongs
      to none.
    """

    shape: tuple[Count, ...]
    num_bytes: Count
    made_by: str
    layer: str = ""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Holds predicted bytes per device.

    - `state_bytes`: of the states (parameters, optimizer state, statistics), exactly.
    - `activation_bytes`: of what lives only during the step, such as activations and gradients: what is stored beside
      the arguments at the peak.
    - `peak_bytes`: the most that is expected to be stored at any moment of the step, arguments among it.
    - `bound_bytes`: what the peak is not expected to go beyond. None where the step was not simulated, but arrays were
      added up as if all of them lived at the same time: a plan of an older version, a layout that is only predicted,
      a step whose workers run programs of their own.
    - `at_peak`: the largest arrays beside the arguments that are stored at the peak, the largest first.
    """

    state_bytes: Count
    activation_bytes: Count
    peak_bytes: Count
    bound_bytes: Count | None = None
    at_peak: tuple[StoredArray, ...] = ()

    @property
    def argument_bytes(self) -> int | None:
        """The bytes of the step's arguments (states, batch and others); None where the step was not simulated."""
        return None if self.bound_bytes is None else self.peak_bytes - self.activation_bytes


@dataclasses.dataclass(frozen=True)
class Compute:
    """Predicts the arithmetic of a step: its products with weights, forward and backward. A multiply-add is two flops.

    - `flops`: what the busiest device computes per step. `ideal_flops`: the same, if all devices shared every product
      evenly. What rematerialisation repeats, and products without a weight (attention scores), are in neither.
    """

    flops: Count = 0
    ideal_flops: Count = 0

    @property
    def over_ideal(self) -> float:
        """How many times its even share a device computes; 1 where nothing is computed twice."""
        return self.flops / self.ideal_flops if self.ideal_flops else 1.0


@dataclasses.dataclass(frozen=True)
class PlanWarning:
    """Says that a plan wastes something, and what to do about it.

    - `kind`: `compute`, where devices repeat each other's products; `whole`, where parameters do not lie as their rules
      would have them; `state`, where moments in blocks stay whole while their parameters are split.
    - `ratio`: for `compute` as `Compute.over_ideal`, for the others the share of all parameters, from 0 to 1.
    - `message`: what is wasted, and where. `remedy`: what helps.
    """

    kind: Annotated[str, OneOf(("compute", "whole", "state"))]
    ratio: float
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Collective:
    """Predicts one collective of the step.

    - `op`: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, or `ROW_EXCHANGE`.
    - `axis`: the mesh axis, or several joined by "+". `bytes`: what each device sends per step.
    - `layer`: whose it is. `purpose`: what it is for.
    """

    op: str
    axis: str
    bytes: Count
    layer: str
    purpose: Purpose

    @property
    def why(self) -> str:
        """Says in words what it is for: for people, whoever else asks compares `purpose`."""
        return self.purpose.sentence()


@dataclasses.dataclass(frozen=True)
class SyncPlan:
    """Says how the gradient of one table with row lookups is synchronised.

    - `scheme`: its name; `dense` also where the table's gradient has to stay whole.
    - `axis`: the mesh axes of the workers, joined by "+"; empty where there is nothing to exchange.
    - `rows`: of the table. `bytes`: what each worker sends per step, padding included; 0 while the first steps are
      observed.
    - `dense_bytes`: what the dense exchange of its gradient sends, or would send.
    - `why`: who chose it, or why it stays dense.
    - `lazy`: rows without gradient are left alone where the update would change them.
    - `options`: of the scheme, those that are not its defaults. `capacities`: its static sizes
      (`splitjax.sync.Capacities`) without zeros; empty while the first steps are observed, and for dense tables. A
      pinned plan that has them decides for the step.
    """

    param: str
    scheme: str
    axis: str
    rows: Count
    bytes: Count
    dense_bytes: Count
    why: str
    lazy: bool = False
    options: Mapping[str, _Option] = dataclasses.field(default_factory=dict)
    capacities: Mapping[str, _Sizes] = dataclasses.field(default_factory=dict)

    @property
    def is_decided(self) -> bool:
        """Tells whether its first steps need not be observed."""
        return bool(self.capacities) or self.scheme == "dense"


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """Layers that the same workers differentiate, in partial backpropagation.

    - `layers`: input side first. `contributors`: how many of the workers' slots differentiate them.
    - `backward`: their share of the time of the full backward pass.
    - `num_bytes`: of their gradients, as one worker holds them.
    - `summed_bytes`, `handed_bytes`: what a worker sends per step on average: to add them up, and to hand the sum to
      workers that did not compute it.
    """

    layers: Annotated[tuple[str, ...], Where(bool, "a segment is of layers", "name one at least")]
    contributors: Count
    backward: float
    num_bytes: Count
    summed_bytes: Count
    handed_bytes: Count


@dataclasses.dataclass(frozen=True)
class PartialPlan:
    """Says how far back each worker differentiates (`splitjax.PartialBackprop`). It changes the numbers.

    - `axis`: the mesh axes of the workers, joined by "+".
    - `first`: by slot the number of the first segment that is differentiated. Workers move on by one slot a step if
      `rotate`; in a temporal assignment all are in one slot.
    - `device_time`: predicted time of all workers over that of full backpropagation. `times`: `"predicted"` or
      `"measured"`.
    """

    assignment: Annotated[str, OneOf(("spatial", "temporal"))]
    estimator: Annotated[str, OneOf(("count", "mean"))]
    rotate: bool
    warmup_steps: Count
    execution: Annotated[str, OneOf(("branch", "program"))]
    rebalance: bool
    statistics: Annotated[str, OneOf(("global", "local"))]
    axis: str
    first: tuple[Count, ...]
    device_time: float
    times: Annotated[str, OneOf(("predicted", "measured"))]
    segments: tuple[SegmentPlan, ...]
    examples: tuple[Count, ...] = ()  # by slot, where `rebalance` gives them different shares


DOTS, NOTHING = "dots_saveable", "nothing_saveable"
EVERY_BLOCK = "*"


@dataclasses.dataclass(frozen=True)
class BlockRemat:
    """Says what repeated blocks of a loss keep for the backward pass, which computes the rest of them again.

    - `name`: of all blocks of one make, such as `params/block*`, or of a scan over layers; `*` for those that are not
      named.
    - `keeps`: the policy of `jax.checkpoint`: `dots_saveable` for products of matrices and convolutions (ragged
      products are computed again), `nothing_saveable` for their inputs alone.
    """

    name: str
    keeps: Annotated[str, OneOf((DOTS, NOTHING))]

    def __str__(self) -> str:
        kept = "products" if self.keeps == DOTS else "nothing"
        return f"{kept} of {'every block' if self.name == EVERY_BLOCK else self.name} kept"


@dataclasses.dataclass(frozen=True)
class BoundaryPlan:
    """Says how a gradient boundary runs.

    - `site`: of its equation. `label`: its function and the user's line.
    - `how`: `whole`, in `microbatches`, in `turns`, `truncated` by worker, or by the `own loss` of each worker.
    - `num_parts`: the number of microbatches, turns or depths; 1 for whole. `why`: the reason, as a clause.
    """

    site: tuple[Count, ...]
    label: str
    how: Annotated[str, OneOf(("whole", "microbatches", "turns", "truncated", "own loss"))]
    num_parts: Count
    why: str


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Describes a sharding that lowering pins on one operand (or result) of one operation.

    - `site`: of the operation. `operand`: the operand's position; -1 is the first result, -2 the second.
    - `spec`: an entry `?` leaves the dim to XLA. `layer`, `why`: for which layer, and what for.
    """

    site: tuple[Count, ...]
    operand: int
    spec: Spec
    layer: str
    why: str


class PlanParts(Protocol):
    """Describes the dataclass that the parts make up, `splitjax.plan.Plan`: what `_plan_json` reads of it."""

    @property
    def mesh(self) -> MeshShape:
        """Returns axes and sizes of the mesh."""
        ...

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Returns the axes that split the examples."""
        ...

    @property
    def leaves(self) -> tuple[LeafPlan, ...]:
        """Returns where each array of the step's arguments lives."""
        ...

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Returns what becomes of each layer."""
        ...

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """Returns the shardings that are pinned inside the step."""
        ...

    @property
    def partial(self) -> PartialPlan | None:
        """Returns how far back workers differentiate; None for a step that is differentiated in full."""
        ...
