"""The cells of the corpus: which models, rule sets and options there are, and which of them combine.

A cell's name is its values in the order of its fields, joined by slashes, such as
`mlp/linen/splitbrain/2x4/dense/full/gather/1/whole`. Nothing here imports splitjax.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

MODELS = (
    "mlp", "transformer", "lstm", "deepfm", "dlrm", "vgg11", "vgg16", "resnet18", "resnet50", "mobilenet_v2",
    "mobilenet_v3_large", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny",
)  # fmt: skip
LIBRARIES = ("linen", "nnx")
MESHES: dict[str, dict[str, int]] = {
    "8": {"data": 8},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SYNCS = ("dense", "auto", "row_exchange", "zen")
FULL, BRANCHES, PROGRAMS = "full", "branches", "programs"
PARTIALS = (FULL, BRANCHES, PROGRAMS)
GROUP_COMMS = ("gather", "modulo", "turns")
MICROBATCHES = ("1", "4")
STATES = ("whole", "sharded")

# Tables with row lookups: what `sync` speaks of, and what `embedding_owner` splits. Other models have nothing to which
# a scheme could apply: their plans are those of "dense".
WITH_TABLES = ("transformer", "lstm", "deepfm", "dlrm")
# Batch statistics are of the whole batch: a step with them is refused with microbatches.
WITH_BATCH_NORM = (
    "vgg11", "resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "efficientnet_b0",
)  # fmt: skip
# Of these, those whose loss draws random numbers: a worker that differentiates a part of it would draw what all draw.
DRAWS_BESIDE_BATCH_NORM = ("efficientnet_b0",)
# Rule sets with the meshes that have the axes they split over. Only under splitbrain and splitbrain_fsdp do examples
# cross between layouts, so that `group_comm` decides anything; they cross in the same way, and in turns under one of
# them.
LAYOUTS = (
    ("splitbrain", "2x4"), ("megatron", "2x4"), ("data_parallel", "8"), ("data_parallel", "2x4"),
    ("fsdp", "8"), ("fsdp", "2x4"), ("embedding_owner", "8"), ("embedding_owner", "2x4"), ("transformer", "2x2x2"),
    ("splitbrain_fsdp", "2x4"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, order=True)
class Unit:
    """Cells that share one training step: they are planned in one process, in their order."""

    model: str
    library: str
    microbatches: str

    @property
    def name(self) -> str:
        """Its values, joined by slashes."""
        return f"{self.model}/{self.library}/{self.microbatches}"

    @property
    def file(self) -> str:
        """Its name as part of a file's name."""
        return self.name.replace("/", ",")


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination.

    **Attributes:**

    - `model`, `library`: as `splitjax.models.build` takes them.
    - `rules`, `mesh`: the name of a rule set, and a key of `MESHES`.
    - `sync`, `group_comm`: as `splitjax.parallelize` takes them.
    - `partial`: `"full"` backpropagation, or partial in `"branches"` of one program or in `"programs"` of their own.
    - `microbatches`: `"1"` or `"4"`, of the gradient boundary.
    - `state`: `"whole"`, or `"sharded"` by `shard_state=True`.
    """

    model: str
    library: str
    rules: str
    mesh: str
    sync: str = "dense"
    partial: str = FULL
    group_comm: str = "gather"
    microbatches: str = "1"
    state: str = "whole"

    @property
    def name(self) -> str:
        """Its values, joined by slashes."""
        return "/".join(dataclasses.astuple(self))

    @property
    def file(self) -> str:
        """Its name as part of a file's name."""
        return self.name.replace("/", ",")

    @property
    def unit(self) -> Unit:
        """The cells that it shares a training step with."""
        return Unit(self.model, self.library, self.microbatches)

    @classmethod
    def parse(cls, name: str) -> Cell:
        """The cell of a name. Raises `ValueError` for a name that has not as many values as a cell."""
        values = name.split("/")
        if len(values) != len(FIELDS):
            raise ValueError(f"a cell's name has {len(FIELDS)} values joined by slashes, not {name!r}")
        return cls(*values)


FIELDS = tuple(field.name for field in dataclasses.fields(Cell))


# Cells that every cover has: they compile in a second or two, and the tests compare them with what is stored.
GUARDS = tuple(
    Cell.parse(name)
    for name in (
        "mlp/linen/splitbrain/2x4/dense/full/gather/1/whole",
        "deepfm/linen/data_parallel/8/auto/full/gather/1/whole",
        "mlp/nnx/data_parallel/8/dense/branches/gather/1/sharded",
    )
)


def combines(cell: Cell) -> bool:
    """Whether a cell's values can each make a difference beside the others (tests show that those left out make
    none)."""
    if cell.model not in WITH_TABLES and (cell.sync != "dense" or cell.rules == "embedding_owner"):
        return False
    return cell.group_comm == "gather" or cell.rules == "splitbrain"


def compiles(cell: Cell) -> bool:
    """Whether a cell can be planned and compiled, as far as its values tell."""
    if cell.model in WITH_BATCH_NORM and cell.microbatches != "1":
        return False
    return cell.model not in DRAWS_BESIDE_BATCH_NORM or cell.partial == FULL


def product() -> Iterator[Cell]:
    """All cells that combine, those of one unit together and in one order."""
    for unit in units():
        yield from cells_of(unit)


def units() -> tuple[Unit, ...]:
    """All units."""
    return tuple(Unit(model, library, count) for model in MODELS for library in LIBRARIES for count in MICROBATCHES)


def cells_of(unit: Unit) -> tuple[Cell, ...]:
    """The cells of a unit, in the order in which they are planned."""
    every = (
        Cell(unit.model, unit.library, rules, mesh, sync, partial, group_comm, unit.microbatches, state)
        for (rules, mesh), sync, partial, group_comm, state in itertools.product(
            LAYOUTS, SYNCS, PARTIALS, GROUP_COMMS, STATES
        )
    )  # fmt: skip
    return tuple(cell for cell in every if combines(cell))


def takes_effect(cell: Cell, plan: dict[str, Any]) -> bool:
    """Whether a plan (the values of its JSON) has what its cell asks for: what splitjax planned otherwise, such as a
    crossing in turns where nothing crosses, is recorded, but is no example of what was asked for."""
    if cell.group_comm != plan["group_comm"] or (cell.partial != FULL) != (plan["partial"] is not None):
        return False
    return cell.sync == "dense" or any(table["scheme"] != "dense" for table in plan["syncs"])
