"""What a step keeps between its calls besides its states, as one value that checkpoints hold.

How its tables are synchronised, what was seen of them so far, and what rounding on the wire took away, and how many
steps of partial backpropagation there were. A run that is resumed with it goes on with the numbers of one that was not
interrupted: the same schemes, the same capacities, looks at the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from splitjax._plan_json import parse_sync
from splitjax.errors import CheckpointError, PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import SyncPlan
from splitjax.step.arguments import Bound

_SAMPLES, _RESIDUALS = "samples", "residuals"


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of the tables of one signature's steps.

    - `syncs`: how they are synchronised; empty while steps are observed.
    - `samples`: by table, the ids of all observed steps, i32[steps, n, k].
    - `num_steps`: since the last look at them. `fell_back`: in how many of these the capacities of each table did not
      suffice.
    """

    syncs: tuple[SyncPlan, ...] = ()
    samples: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    num_steps: int = 0
    fell_back: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a step keeps between calls besides its states: `ParallelStep.carried` reads it, `ParallelStep.resume` puts
    it back.

    False where there is nothing. Its parts are for checkpoints: `to_json`, `arrays`, `parse`.

    **Attributes:**

    - `seen`: of the tables that are synchronised by rows, by signature (`inputs_of`).
    - `residuals`: by table whose values are rounded on the wire f[n, num_rows, *row], what that took away from each of
      n workers, split over the workers. A call of the step consumes them, as it does its states.
    - `num_steps`: how many steps of partial backpropagation have run; the assignment of depths goes on behind them.
    """

    seen: Mapping[str, Seen] = dataclasses.field(default_factory=dict)
    residuals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_steps: int = 0

    def __bool__(self) -> bool:
        return bool(self.seen or self.residuals or self.num_steps)

    def arrays(self) -> dict[str, Any]:
        """All arrays, by a name that `parse` finds them by."""
        samples = {
            f"{_SAMPLES}/{k}/{param}": ids
            for k, one in enumerate(self.seen.values())
            for param, ids in one.samples.items()
        }
        return samples | {f"{_RESIDUALS}/{param}": array for param, array in self.residuals.items()}

    def layouts(self) -> dict[str, list[Any]]:
        """Of the arrays that lie over a mesh the spec, as JSON values."""
        found = {}
        for name, array in self.arrays().items():
            if isinstance(array, jax.Array) and isinstance(array.sharding, jax.sharding.NamedSharding):
                found[name] = [list(entry) if isinstance(entry, tuple) else entry for entry in array.sharding.spec]
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON values."""
        seen = [
            {
                "inputs": inputs,
                "syncs": [_plain(dataclasses.asdict(sync)) for sync in one.syncs],
                "num_steps": one.num_steps,
                "fell_back": dict(one.fell_back),
            }
            for inputs, one in self.seen.items()
        ]
        return {"seen": seen, "num_steps": self.num_steps}

    @staticmethod
    def parse(value: Mapping[str, Any], arrays: Mapping[str, Any]) -> Carried:
        """The inverse of `to_json` and `arrays`. Raises `CheckpointError` for values that are none of this
        version's."""
        try:
            seen = {}
            for k, one in enumerate(value["seen"]):
                prefix = f"{_SAMPLES}/{k}/"
                samples = {
                    name.removeprefix(prefix): np.asarray(array)
                    for name, array in arrays.items()
                    if name.startswith(prefix)
                }
                syncs = tuple(
                    parse_sync(sync, f"seen[{k}].syncs[{number}]") for number, sync in enumerate(one["syncs"])
                )
                seen[one["inputs"]] = Seen(syncs, samples, one["num_steps"], one["fell_back"])
            num_steps = int(value.get("num_steps", 0))
        except (KeyError, TypeError, PlanError) as error:
            raise CheckpointError(
                f"what the step carried cannot be read: {error}",
                place="checkpoint.json, carried",
                remedy=(
                    "resume with the version of splitjax that saved it, or leave it away: tables are then observed anew"
                ),
            ) from error
        prefix = f"{_RESIDUALS}/"
        return Carried(
            seen,
            {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)},
            num_steps,
        )


def inputs_of(bound: Bound, mesh: Mesh) -> str:
    """A signature in words, the same in every run of a program: its arrays that are no states, how many arrays the
    states have, the mesh."""
    pairs = list(zip(bound.arguments, bound.signature.avals, strict=True))
    inputs = [
        f"{one.path}: {dtype}[{','.join(map(str, shape))}]" for one, (shape, dtype, _) in pairs if not one.is_state
    ]
    return "; ".join(
        [*inputs, f"{sum(one.is_state for one, _ in pairs)} arrays of state", f"mesh {MeshShape.of(mesh)}"]
    )


def _plain(value: Any) -> Any:
    """With lists for tuples, which JSON does not tell apart."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
