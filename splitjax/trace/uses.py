"""Which operation uses which parameter as its weight, with flops, and what is special about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from splitjax import _compat
from splitjax.trace.flatten import Flat, Op
from splitjax.trace.flow import Argument, Flow
from splitjax.trace.links import Linked

# What a weight may pass through between its leaf and the operation that uses it, without being another representation.
_MAX_SOURCES = 64


@dataclasses.dataclass(frozen=True)
class RawUse:
    """One mixing operation between a weight (made of state alone) and example-carrying data."""

    op: int
    weight: int  # operand position
    data: int | None
    leaves: tuple[int, ...]  # leaf indices of the parameters that make the weight, largest first
    names: tuple[str | None, ...]  # per dim of the weight operand
    flops: int
    backward: bool
    recurrent: bool
    attention: bool


def find_uses(flat: Flat, linked: Linked, flow: Flow, arguments: Sequence[Argument]) -> list[RawUse]:
    """All uses in program order."""
    sources = weight_sources(flat, flow)
    carried = _carry_dependence(flat)
    raw: list[RawUse] = []
    for index, op in enumerate(flat.ops):
        if not linked.mixing[index] or op.primitive not in _WEIGHTS or len(op.inputs) < 2:
            continue
        found = _weight_operand(op, flat, flow, sources)
        if found is None:
            continue
        weight, data = found
        leaves = tuple(sorted(sources[op.inputs[weight]], key=lambda i: -math.prod(flat.shapes[flat.inputs[i]])))
        names = _WEIGHTS[op.primitive](op, weight, flat)
        stack = _compat.name_stack(op.eqn)
        recurrent = bool(op.loops) and op.inputs[data] in carried.get(op.loops[-1], ()) and not _scanned(flat, op.inputs[weight])
        raw.append(
            RawUse(index, weight, data, leaves, names, _flops(op, flat), "transpose(" in stack, recurrent, False)
        )
    return _mark_attention(flat, linked, flow, raw)


def weight_sources(flat: Flat, flow: Flow) -> list[frozenset[int]]:
    """Per value that neither carries examples nor depends on the batch: the parameters it is made of."""
    sources: list[frozenset[int]] = [frozenset()] * len(flat.shapes)
    for index, value in enumerate(flat.inputs):
        if flow.is_param[index]:
            sources[value] = frozenset((index,))
    for op in flat.ops:
        if op.primitive in ("_carry_back", "_gradient"):
            continue
        made = frozenset().union(*(sources[v] for v in op.inputs if not flow.carrying[v]))
        if made and len(made) <= _MAX_SOURCES:
            for v in op.outputs:
                if not flow.carrying[v] and not flow.data[v]:
                    sources[v] = made
    return sources


def _weight_operand(op: Op, flat: Flat, flow: Flow, sources) -> tuple[int, int] | None:
    candidates = (0, 1) if op.primitive != "gather" else (0,)
    for weight in candidates:
        data = 1 - weight
        if sources[op.inputs[weight]] and not flow.carrying[op.inputs[weight]]:
            if flow.carrying[op.inputs[data]] or (flow.data[op.inputs[data]] and op.primitive == "gather"):
                return weight, data
    return None


def _dot_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    contract, batch = (side[weight] for side in op.params["dimension_numbers"])
    rank = len(flat.shapes[op.inputs[weight]])
    return tuple("in" if d in contract else "expert" if d in batch else "out" for d in range(rank))


def _conv_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    if weight != 1:
        return (None,) * len(flat.shapes[op.inputs[weight]])
    out, in_, *spatial = op.params["dimension_numbers"].rhs_spec
    space = {d: name for d, name in zip(spatial, ("height", "width", "depth"), strict=False)}
    return tuple("out" if d == out else "in" if d == in_ else space.get(d) for d in range(len(flat.shapes[op.inputs[1]])))


def _gather_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    numbers = op.params["dimension_numbers"]
    looked_up = set(numbers.start_index_map)
    return tuple("vocab" if d in looked_up else "features" for d in range(len(flat.shapes[op.inputs[0]])))


def _ragged_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    return ("expert", "in", "out") if weight == 1 and len(flat.shapes[op.inputs[1]]) == 3 else (None,) * len(flat.shapes[op.inputs[weight]])


_WEIGHTS = {"dot_general": _dot_names, "conv_general_dilated": _conv_names, "gather": _gather_names, "ragged_dot": _ragged_names,
            "ragged_dot_general": _ragged_names}


def _flops(op: Op, flat: Flat) -> int:
    """Multiply-adds counted as two, of all repetitions of one operation."""
    out = math.prod(flat.shapes[op.outputs[0]])
    if op.primitive == "dot_general":
        (contract, _), _ = op.params["dimension_numbers"]
        return 2 * out * math.prod(flat.shapes[op.inputs[0]][d] for d in contract) * op.trips
    if op.primitive == "conv_general_dilated":
        rhs_out, *rest = op.params["dimension_numbers"].rhs_spec
        return 2 * out * math.prod(flat.shapes[op.inputs[1]][d] for d in rest) * op.trips
    if op.primitive.startswith("ragged_dot"):
        return 2 * out * flat.shapes[op.inputs[0]][-1] * op.trips
    return 0


def _carry_dependence(flat: Flat) -> dict[int, set[int]]:
    """Per loop, the values of its body that depend on what the loop carries."""
    inside: dict[int, set[int]] = {}
    for loop, value in flat.carried:
        inside.setdefault(loop, set()).add(value)
    for op in flat.ops:
        for loop in op.loops:
            if loop in inside and any(v in inside[loop] for v in op.inputs):
                inside[loop].update(op.outputs)
    return inside


def _scanned(flat: Flat, value: int) -> bool:
    """Whether a value is (a view of) one slice of a scanned operand: a stack of layers, not a recurrent weight."""
    made = {v: op for op in flat.ops for v in op.outputs}
    while value in made:
        op = made[value]
        if op.primitive == "_scan_in":
            return True
        if not op.inputs:
            return False
        value = op.inputs[0]
    return False


def _mark_attention(flat: Flat, linked: Linked, flow: Flow, uses: list[RawUse]) -> list[RawUse]:
    """Marks the projections around a softmax between two products of activations: what feeds them, and what reads the
    result (Vaswani et al. 2017, section 3.2)."""
    use_at = {use.op: k for k, use in enumerate(uses)}
    tags: list[frozenset] = [frozenset()] * len(flat.shapes)
    feeds: dict[int, frozenset] = {}
    attention: set[int] = set()
    for index, op in enumerate(flat.ops):
        incoming = frozenset().union(*(tags[v] for v in op.inputs)) if op.inputs else frozenset()
        if index in use_at:
            k = use_at[index]
            if any(tag[0] == "result" for tag in tags[op.inputs[uses[k].data]]):
                attention.add(k)
            out = frozenset({("use", k)})
        elif op.primitive == "dot_general" and all(flow.carrying[v] for v in op.inputs[:2]):
            probabilities = [tag[1] for tag in incoming if tag[0] == "softmax"]
            mine = frozenset(tag for tag in incoming if tag[0] == "use")
            if probabilities:
                for j in probabilities:
                    attention.update(tag[1] for tag in feeds[j] | mine)
                out = frozenset({("result", index)})
            else:
                feeds[index] = mine
                out = frozenset({("score", index)})
        elif linked.mixing[index]:
            out = frozenset()
        elif op.primitive in ("exp", "exp2"):
            out = frozenset(("softmax", tag[1]) if tag[0] == "score" else tag for tag in incoming)
        elif linked.joins[index] and sum(1 for v in op.inputs if flow.carrying[v]) > 1:
            out = frozenset(tag for tag in incoming if tag[0] != "result" or all(tag in tags[v] for v in op.inputs if flow.carrying[v]))
        else:
            out = incoming
        for v in op.outputs:
            tags[v] = out
    return [dataclasses.replace(use, attention=k in attention) for k, use in enumerate(uses)]
