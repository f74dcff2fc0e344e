"""Holds what is compared for a step, a rule set on a mesh with how the step runs, and what a search says of it."""

from __future__ import annotations

import dataclasses
import math

from splitjax.mesh import MeshShape
from splitjax.plan import BlockRemat
from splitjax.rules.ruleset import AUTO, RuleSet


@dataclasses.dataclass(frozen=True)
class Variable:
    """Is one decision: how a layer is laid out, or all layers that repeat it.

    **Attributes:** `name`: of the first layer. `layers`: all of them. `values`: what it could have been, in words.
    `chosen`: which of these it is.
    """

    name: str
    layers: tuple[str, ...]
    values: tuple[str, ...]
    chosen: str


@dataclasses.dataclass(frozen=True)
class CompiledFigures:
    """Holds what the compiler of a machine made of a candidate.

    **Attributes:**

    - `needed_bytes`: what a device needs; None where the compiler does not say.
    - `fits`: whether that is within the budget, and what a device has; None where neither is known.
    - `sent_bytes`: what a device sends in a step, as compiled; None where the compiler refused the program.
    - `planned_bytes`: what a device sends in a step by the plan.
    - `more_seconds`: what a step takes longer for what is sent beyond the plan, as if nothing were computed meanwhile;
      less than 0 where less is sent.
    - `compile_seconds`: how long it took to compile.
    """

    needed_bytes: int | None
    fits: bool | None
    sent_bytes: int | None
    planned_bytes: int
    more_seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Is a rule set on a mesh, and how the step runs under it, with what it was predicted to take.

    **Attributes:**

    - `shards_state`: whether optimizer state and summed gradients of whole parameters lie in parts over the axes of the
      batch (`shard_state`). `microbatches`: in how many parts a device differentiates its examples. `remat`: which
      blocks are computed again in the backward pass, and what they keep.
    - `seconds`: of a step, as a sum of its parts. `state_bytes`: of a device's states, exactly. `peak_bytes`: of a
      device, as a sum of all that the step stores.
    - `bound_bytes`: what a device needs at most, by the lifetimes of the lowered step; None where it was not lowered to
      find out. `program_seconds`: of the lowered step on its machine, as `step.time` says; None where it was not
      lowered, or nothing is known of the machine.
    - `compiled`: what the machine's compiler made of it; None where it was not compiled to find out.
    """

    rules: RuleSet
    mesh: MeshShape
    seconds: float
    state_bytes: int
    peak_bytes: int
    bound_bytes: int | None = None
    program_seconds: float | None = None
    shards_state: bool = False
    microbatches: int = 1
    remat: tuple[BlockRemat, ...] = ()
    compiled: CompiledFigures | None = None

    @property
    def name(self) -> str:
        """The name of the rule set, what tells answers of the search from each other, and how the step runs."""
        state = " with sharded state" if self.shards_state else ""
        again = f" with {self.kept}" if self.remat else ""
        parts = f" in {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self._layout}{state}{again}{parts}"

    @property
    def _layout(self) -> str:
        if self.rules.name != AUTO:
            return self.rules.name
        batch = self.rules.replicated_batch
        over = "all devices" if batch == "all" else batch if isinstance(batch, str) else "+".join(batch)
        return f"{AUTO} (examples of whole layers over {over})"

    @property
    def kept(self) -> str:
        """What blocks keep for the backward pass, in words."""
        return " and ".join(map(str, self.remat)) if self.remat else "everything kept as the step is written"

    @property
    def needed_bytes(self) -> int:
        """What a device needs: as compiled, where that is known, or else at most, or else as a sum."""
        if self.compiled is not None and self.compiled.needed_bytes is not None:
            return self.compiled.needed_bytes
        return self.peak_bytes if self.bound_bytes is None else self.bound_bytes

    @property
    def best_known_seconds(self) -> float:
        """What a step takes: by its program, where that is known, and as a sum else; with what is sent beyond its plan,
        where it was compiled."""
        seconds = self.seconds if self.program_seconds is None else self.program_seconds
        return seconds if self.compiled is None else max(seconds + self.compiled.more_seconds, 0.0)

    def fits(self, budget_bytes: float) -> bool:
        """Whether a device needs at most `budget_bytes`; and, where it was compiled, its compiler does not say
        otherwise."""
        return self.needed_bytes <= budget_bytes and (self.compiled is None or self.compiled.fits is not False)

    def is_as(self, other: Candidate) -> bool:
        """Whether it is the same rules on the same mesh as `other`, and runs alike."""
        return self.holds_as(other) and self.microbatches == other.microbatches

    def holds_as(self, other: Candidate) -> bool:
        """Whether it is the same as `other` but for the number of microbatches."""
        return self.stores_as(other) and self.remat == other.remat

    def stores_as(self, other: Candidate) -> bool:
        """Whether it is the same rules on the same mesh as `other`, with the states in the same places."""
        return self.lies_as(other) and self.shards_state == other.shards_state

    def lies_as(self, other: Candidate) -> bool:
        """Whether it is the same rules on the same mesh as `other`, however each runs."""
        return self.mesh == other.mesh and self.rules == other.rules


@dataclasses.dataclass(frozen=True)
class Answer:
    """Is what the search says of a network: the rules as a whole, the variables, and the proof.

    **Attributes:** `network_seconds`, `bound_seconds`: what it costs as a sum over layers and neighbours, and what no
    assignment that fits costs less than. `solver`: who proved it. `clock_struck`: whether the clock and not the limit
    of work ended the search. `within_bytes`: what it was to store at most, as a sum; infinity for no limit.
    """

    candidate: Candidate
    variables: tuple[Variable, ...]
    network_seconds: float
    bound_seconds: float
    solver: str
    clock_struck: bool
    within_bytes: float = math.inf

    @property
    def gap(self) -> float:
        """How much cheaper the best assignment could be, relative to this one; 0 is proven best."""
        if not self.network_seconds > self.bound_seconds:
            return 0.0
        return (self.network_seconds - self.bound_seconds) / self.network_seconds


@dataclasses.dataclass(frozen=True)
class Refused:
    """Is a rule set that was no candidate on a mesh. `mesh`: None for any of them. `why`: in words."""

    rules: str
    mesh: MeshShape
    why: str
