"""Finds where a backward pass can end: a traced forward pass goes in, its layers come out by their distance from the
loss, with times and with what crosses between them.

A *stage* is what one more step back differentiates: the operands of one layer. Stages are ordered by the predicted time
of the longest way from the layer to the loss, so that the branches of a network are cut side by side. A parameter that
is used twice counts where it is farthest from the loss. Differentiating the last stages alone needs no edit of the
forward pass: automatic differentiation goes back to their operands and no further. Cuts: Kumar et al., arXiv
2111.10672; there by fractions of the parameters, here of time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from splitjax.trace.flatten import FlatStep, Op, flatten
from splitjax.trace.graph import itemsize
from splitjax.trace.uses import product_flops

# Predicted time counts in flops: an operation that only moves values takes as long as so many flops for each of its
# bytes. Devices of today are between 5 (a CPU core) and 300; for cuts only the order of magnitude between convolutions
# and norms matters. Measured times replace it.
FLOPS_PER_BYTE = 16
# A node of the graph that `_LossWalk` walks: ("op", number of the operation) or ("loop", the loop).
_Node = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A layer as a place where a backward pass can end, behind which it does not go.

    - `name`: of the layer.
    - `operands`: positions of its operands in the gradient boundary.
    - `num_bytes`: of their gradients.
    - `backward`: time that going back through this stage adds, its own weights' gradients and what they need of the
      stages behind; in flops where it is predicted, in seconds where it is measured.
    - `crossing_values`, `crossing_bytes`: what a cut in front of this stage separates: values of the front that it or
      later ones read, for the traced number of examples.
    """

    name: str
    operands: tuple[int, ...]
    num_bytes: int
    backward: float
    crossing_values: int
    crossing_bytes: int


@dataclasses.dataclass(frozen=True)
class BackpropStages:
    """The stages of a gradient boundary.

    - `stages`: input side first.
    - `forward`: the time of the whole forward pass, in the unit of their `backward` (flops or seconds).
    """

    stages: tuple[Stage, ...]
    forward: float

    @property
    def backward(self) -> float:
        """The time of the full backward pass."""
        return sum(stage.backward for stage in self.stages)

    def share(self, first: int) -> float:
        """Gives the share of the backward pass's time that going back as far as stage number `first` takes."""
        whole = self.backward
        return sum(stage.backward for stage in self.stages[first:]) / whole if whole else 1.0


def find_stages(forward: Any, positions: Sequence[int], names: Mapping[int, str]) -> BackpropStages:
    """Finds the stages of a boundary.

    **Arguments:**

    - `forward`: its closed jaxpr, operands -> value, *aux.
    - `positions`: the operands that it differentiates.
    - `names`: by position the layer that the operand belongs to; those of one layer make one stage.

    Returns the stages, input side first, with predicted times in flops and crossings for the traced number of examples.
    Operands that the loss does not depend on belong to the stage nearest to it: they cost nothing.
    """
    flat = flatten(forward)
    walk = _LossWalk(flat, flat.outputs[0])
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for position in positions:
        groups[names[position]].append(position)
    value_of = {position: flat.inputs[position] for position in positions}
    distance = {name: max(walk.distance_from(value_of[p]) for p in members) for name, members in groups.items()}
    order = sorted(groups, key=lambda name: (-distance[name], groups[name]))
    costs = [0.0]  # of going back through the last 0, 1, 2, ... stages
    for k in range(1, len(order) + 1):
        chosen = {value_of[p] for name in order[len(order) - k :] for p in groups[name]}
        costs.append(walk.backward(chosen))
    stages = []
    for index, name in enumerate(order):
        behind = len(order) - 1 - index
        crossing = walk.crossing(distance[name]) if index else []
        size = lambda v: math.prod(flat.shapes[v]) * itemsize(flat.dtypes[v])
        own = tuple(sorted(groups[name]))
        stages.append(
            Stage(
                name,
                own,
                sum(size(value_of[p]) for p in own),
                max(costs[behind + 1] - costs[behind], 0.0),
                len(crossing),
                sum(size(v) for v in crossing),
            )
        )
    return BackpropStages(tuple(stages), walk.forward)


def with_times(stages: BackpropStages, seconds: Mapping[str, float], forward_seconds: float) -> BackpropStages:
    """Replaces predicted times by measured ones.

    **Arguments:** `stages`: with predicted times. `seconds`: by stage name, the time that going back through it adds.
    `forward_seconds`: of the whole forward pass.
    """
    timed = tuple(dataclasses.replace(stage, backward=seconds[stage.name]) for stage in stages.stages)
    return BackpropStages(timed, forward_seconds)


class _LossWalk:
    """The operations that the loss depends on, as nodes of a graph: all operations of a loop are one node."""

    def __init__(self, flat: FlatStep, loss: int) -> None:
        self.flat = flat
        self.ops = _needed(flat, loss)
        self.node = {
            id(op): ("loop", op.loops[0]) if op.loops else ("op", number) for number, op in enumerate(self.ops)
        }
        self.cost: dict[_Node, float] = collections.defaultdict(float)
        self.readers: dict[int, set[_Node]] = collections.defaultdict(set)
        made: dict[_Node, set[int]] = collections.defaultdict(set)
        self.flops, self.costs = {id(op): _flops(op, flat) for op in self.ops}, dict[int, float]()
        for op in self.ops:
            at = self.node[id(op)]
            self.costs[id(op)] = _cost(op, self.flops[id(op)], flat)
            self.cost[at] += self.costs[id(op)]
            made[at].update(op.outputs)
            for v in op.inputs:
                self.readers[v].add(at)
        self.forward = sum(self.cost.values())
        # Nodes in program order: a loop stands where its first operation does, and what follows it reads its results.
        self.distance: dict[_Node, float] = {}
        last = {self.node[id(op)]: number for number, op in enumerate(self.ops)}
        for at in sorted(last, key=last.__getitem__, reverse=True):
            behind = max(
                (self.distance[r] for v in made[at] for r in self.readers[v] if r != at and r in self.distance),
                default=0.0,
            )
            self.distance[at] = behind + max(self.cost[at], 1.0)

    def distance_from(self, value: int) -> float:
        """Gives the time from the first use of a value to the loss; 0 for what the loss does not depend on."""
        return max((self.distance[at] for at in self.readers[value]), default=0.0)

    def backward(self, chosen: set[int]) -> float:
        """Predicts the time of a backward pass to the values `chosen`, in flops: products count once for each operand
        that depends on them, the rest once."""
        live, total, before = set(chosen), 0.0, -1
        while before != len(live):  # a carried value is live once the loop's body makes it so
            before, total = len(live), 0.0
            for op in self.ops:
                reached = [v for v in op.inputs if v in live]
                if not reached or op.primitive == "stop_gradient":
                    continue
                if op.primitive == "_carry_back":
                    live.update(op.inputs)
                    continue
                live.update(v for v in op.outputs if _is_inexact(self.flat.dtypes[v]))
                flops = self.flops[id(op)]
                total += flops * len(set(reached)) + (self.costs[id(op)] - flops)
        return total

    def crossing(self, distance: float) -> list[int]:
        """Gives the values that nodes farther than `distance` from the loss hand to those at most so far from it."""
        values = []
        for op in self.ops:
            at = self.node[id(op)]
            if self.distance[at] > distance:
                values += [
                    v
                    for v in op.outputs
                    if any(self.distance[r] <= distance for r in self.readers[v] if r in self.distance and r != at)
                ]
        return list(dict.fromkeys(values))


def _needed(flat: FlatStep, loss: int) -> list[Op]:
    """Gives the operations that the loss depends on, in program order."""
    wanted, kept = {loss}, []
    again = True
    while again:  # a loop's result depends on what its body writes later
        again, kept = False, []
        for op in reversed(flat.ops):
            if any(v in wanted for v in op.outputs) or (op.primitive == "_carry_back" and op.inputs[1] in wanted):
                kept.append(op)
                new = set(op.inputs) - wanted
                wanted |= new
                again = again or (bool(new) and bool(op.loops))
    return kept[::-1]


def _cost(op: Op, flops: float, flat: FlatStep) -> float:
    """Predicts the forward time of an operation, in flops. `flops`: of its product."""
    moved = sum(math.prod(flat.shapes[v]) * itemsize(flat.dtypes[v]) for v in op.outputs if flat.dtypes[v] != "token")
    return flops + (0.0 if op.primitive.startswith("_") else float(FLOPS_PER_BYTE * moved * op.trips))


def _flops(op: Op, flat: FlatStep) -> float:
    """Counts the flops of a product; what a loop carries around is none, nor what has no operands."""
    return product_flops(op, flat) if op.inputs and op.outputs else 0.0


def _is_inexact(dtype: str) -> bool:
    return not dtype.startswith("key<") and dtype != "token" and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.inexact))
