"""Defines the value that a step carries between its calls besides its states, for checkpoints to hold.

It has in it how the step's tables are synchronised, what was seen of them so far, what rounding on the wire took away,
and how many steps of partial backpropagation there were. JSON values and arrays come
out of it, and make it again.

A run that is resumed with it goes on with the numbers of a run that was not interrupted: the same schemes, the same
capacities, looks at the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from splitjax.codec import Codec, Wording
from splitjax.errors import CheckpointError
from splitjax.mesh import MeshShape
from splitjax.plan import Spec, SyncPlan
from splitjax.step.arguments import Bound

Residual = jax.Array | np.ndarray

_SAMPLES, _RESIDUALS = "samples", "residuals"


@dataclasses.dataclass(frozen=True)
class Seen:
    """Holds what is known of the tables of a signature's steps.

    **Attributes:**

    - `syncs`: how they are synchronised; empty while steps are observed.
    - `samples`: by table, the ids that n workers looked up in all observed steps, i32[steps, n, k].
    - `num_steps`: the number of steps since the last look at them.
    - `fell_back`: by table, in how many steps its capacities did not suffice since they were chosen.
    """

    syncs: tuple[SyncPlan, ...] = ()
    samples: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    num_steps: int = 0
    fell_back: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Carried:
    """Holds what a step keeps between calls besides its states: `ParallelStep.carried` reads it, `ParallelStep.resume`
    puts it back.

    It is false where there is nothing in it. Its parts are for checkpoints: `to_json`, `arrays`, `parse`.

    **Attributes:**

    - `seen`: what is known of the tables that are synchronised by rows, by signature (`inputs_of`).
    - `residuals`: for every table whose values are rounded on the wire, by its path, what that took away from each of n
      workers: f[n, num_rows, *row], split over the workers. A call of the step consumes them, as it does its states.
    - `num_steps`: how many steps of partial backpropagation have run; the assignment of depths goes on behind them.
    """

    seen: Mapping[str, Seen] = dataclasses.field(default_factory=dict)
    residuals: Mapping[str, Residual] = dataclasses.field(default_factory=dict)
    num_steps: int = 0

    def __bool__(self) -> bool:
        return bool(self.seen or self.residuals or self.num_steps)

    def arrays(self) -> dict[str, Any]:
        """Returns all arrays, by names by which `parse` finds them again."""
        samples = {
            f"{_SAMPLES}/{k}/{param}": ids
            for k, seen in enumerate(self.seen.values())
            for param, ids in seen.samples.items()
        }
        return samples | {f"{_RESIDUALS}/{param}": array for param, array in self.residuals.items()}

    def layouts(self) -> dict[str, Spec]:
        """Returns the spec of every array that lies over a mesh, by the names of `arrays`."""
        specs: dict[str, Spec] = {}
        for name, array in self.arrays().items():
            if isinstance(array, jax.Array) and isinstance(array.sharding, jax.sharding.NamedSharding):
                specs[name] = tuple(array.sharding.spec)
        return specs

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the arrays, as JSON values."""
        seen = (
            _SeenEntry(inputs, known.syncs, known.num_steps, known.fell_back) for inputs, known in self.seen.items()
        )
        return _JSON.values(_CarriedEntry(tuple(seen), self.num_steps))

    @staticmethod
    def parse(value: Mapping[str, Any], arrays: Mapping[str, Any]) -> Carried:
        """Makes the value again from what `to_json` gave (`value`) and what `arrays` gave (`arrays`). Raises
        `CheckpointError` for values that this version cannot read."""
        entry, seen = _JSON.read(value, "checkpoint.json, carried"), {}
        for k, known in enumerate(entry.seen):
            prefix = f"{_SAMPLES}/{k}/"
            samples = {
                name.removeprefix(prefix): np.asarray(array)
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
            seen[known.inputs] = Seen(known.syncs, samples, known.num_steps, known.fell_back)
        prefix = f"{_RESIDUALS}/"
        return Carried(
            seen,
            {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)},
            entry.num_steps,
        )


@dataclasses.dataclass(frozen=True)
class _SeenEntry:
    """Holds what JSON has of a `Seen`, with the signature that it is of."""

    inputs: str
    syncs: tuple[SyncPlan, ...]
    num_steps: int
    fell_back: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class _CarriedEntry:
    """Holds what JSON has of a `Carried`."""

    seen: tuple[_SeenEntry, ...]
    num_steps: int = 0


_JSON = Codec(
    _CarriedEntry,
    CheckpointError,
    Wording(
        "a value that a step carried",
        "resume with the version of splitjax that saved it, or leave it away: tables are then observed anew",
        lead="what the step carried cannot be read: ",
    ),
)


def inputs_of(bound: Bound, mesh: Mesh | AbstractMesh) -> str:
    """Describes the signature of the call `bound` on a `mesh` in words that are the same in every run of a program: its
    arrays that are no states, how many arrays the states have, the mesh."""
    inputs = [
        f"{argument.path}: {dtype}[{','.join(map(str, shape))}]"
        for argument, (shape, dtype, _) in zip(bound.arguments, bound.signature.avals, strict=True)
        if not argument.is_state
    ]
    num_state_arrays = sum(argument.is_state for argument in bound.arguments)
    return "; ".join([*inputs, f"{num_state_arrays} arrays of state", f"mesh {MeshShape.of(mesh)}"])
