"""Says why a layer of a plan lies where it lies, and what every other layout of it would cost, as values.

`Plan.explain` gives an `Explanation`; the room `planning` makes it, from the prediction that the plan was made with.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from splitjax._plan_parts import Collective, Constraint, LeafPlan, Spec
from splitjax.display import registry


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Holds what a step is predicted to take of a device.

    **Attributes:**

    - `seconds`: of a step: arithmetic, memory traffic and collectives, one after the other.
    - `sent_bytes`: what a device sends in a step.
    - `state_bytes`: of its states, exactly.
    - `peak_bytes`: its memory, as a sum of all that the step stores, as if all of it lived at once. A plan's own
      `memory` looks at lifetimes, and is lower; the sum is what a layout changes is predicted by.
    """

    seconds: float
    sent_bytes: int
    state_bytes: int
    peak_bytes: int

    def beyond(self, other: StepCost) -> StepCost:
        """Returns by how much each figure is above that of `other`; negative where it is below."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return StepCost(*(here - there for here, there in zip(mine, theirs, strict=True)))


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Describes one layout of a layer, with everything else as planned.

    **Attributes:**

    - `name`: in words, such as `out split over model`. `is_planned`: whether it is the plan's own.
    - `specs`: path -> spec of the layer's parameters.
    - `along`: other layers whose layout changes with it, as their storage or their rule is tied to it.
    - `cost`: of the whole step with it; None where it cannot be had, and `refused` says why.
    - `rule`: the rule, as TOML, that gives this layout in front of the others; empty for the plan's own.
    """

    name: str
    is_planned: bool
    specs: tuple[tuple[str, Spec], ...]
    along: tuple[str, ...]
    cost: StepCost | None
    refused: str = ""
    rule: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Explains the layout of a layer. Print it, or show it in a notebook.

    **Attributes:**

    - `name`: what was asked for. `layer`, `kind`: the layer; empty for an array that belongs to none.
    - `alike`: the layers that repeat it in other blocks; they keep their layout in the alternatives.
    - `leaves`: its parameters, as planned; for an array of no layer, that array.
    - `reasons`: why they lie so, a sentence each: pins, rules, what they follow, what did not fit.
    - `constraints`: the shardings that lowering pins inside the step for it.
    - `collectives`: what is sent for it.
    - `machine`: whose figures the seconds are made of.
    - `planned`: the cost of the step as planned. `alternatives`: the plan's own layout first, then the others, the
      fastest first, and last those that cannot be had.
    """

    name: str
    layer: str
    kind: str
    alike: tuple[str, ...]
    leaves: tuple[LeafPlan, ...]
    reasons: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    collectives: tuple[Collective, ...]
    machine: str
    planned: StepCost
    alternatives: tuple[Alternative, ...]

    @property
    def cheaper(self) -> tuple[Alternative, ...]:
        """The alternatives that are predicted to be faster than what is planned, the fastest first."""
        return tuple(
            each for each in self.alternatives if each.cost is not None and each.cost.seconds < self.planned.seconds
        )

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


class Explainer(Protocol):
    """Explains the layers of the step that a plan was made from."""

    def __call__(self, name: str, on: str | None) -> Explanation:
        """Explains the layer or the array called `name`, in seconds of the machine `on`."""
        ...
