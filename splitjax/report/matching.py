"""Matches compiled collectives with planned ones, round by round, the surest first.

What is known of compiled collectives and the planned ones by number go in; which planned one each compiled one realises
comes out. A round is a rule for a single pair: each compiled collective that no round before it matched gets the
cheapest of the planned collectives that are left and that fit.

1. Exchanges of gradients that splitjax wrote out, by the parameter in their name.
2. What is of a leaf: gradients, gathers of weights, new state, however XLA realises them.
3. Activations, by layer and phase; of those where XLA names the operation of a neighbouring layer, by size.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from splitjax.cost.ring import carried_bytes
from splitjax.plan import Collective, Purpose, PurposeKind
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS
from splitjax.report.evidence import HANDED, ROWS, SUMMED, Evidence
from splitjax.report.groups import OTHER
from splitjax.report.in_parts import adding_up, dealt
from splitjax.report.known_step import Step
from splitjax.report.op_names import is_written_product, primitive
from splitjax.report.subject import (
    BACKWARD,
    BATCH,
    FORWARD,
    GRADIENT,
    MOVED,
    SAVED,
    STATE,
    STATISTIC,
    SUMS,
    UPDATE,
    VALUE,
    WEIGHT,
)

# By position of a compiled collective: the number of the planned one that it realises, and that with its share of the
# bytes.
Pairs = dict[int, tuple[int, Collective]]
Fits = Callable[[Evidence, Collective, Step], bool]
# What the evidence of a compiled collective says it is about, by the kind of the planned one; all others move values.
_ABOUT: Mapping[PurposeKind, str] = {
    PurposeKind.GRADIENT: GRADIENT,
    PurposeKind.GRADIENT_ONTO_STATE: GRADIENT,
    PurposeKind.GRADIENT_GROUPS: MOVED,
    PurposeKind.DEALT_GRADIENT: MOVED,
    PurposeKind.GRADIENT_HANDED: HANDED,
    PurposeKind.GRADIENT_ROWS: ROWS,
    PurposeKind.STORED_WEIGHT: WEIGHT,
    PurposeKind.NEW_VALUE: STATE,
    PurposeKind.TURN_EXAMPLES: BATCH,
    PurposeKind.SAVED_INPUT: SAVED,
    PurposeKind.STATISTIC: STATISTIC,
}
# The scope of an exchange that splitjax wrote out, by what the planned collective is about.
_WRITTEN_OUT: Mapping[str, str] = {ROWS: ROWS, GRADIENT: SUMMED, HANDED: HANDED}
_OF_HEADS = frozenset({PurposeKind.SHARED_HEADS, PurposeKind.WHOLE_HEADS})
# Exchanges of activations that are not those of a product's operands and results, and have rounds of their own.
_NAMELESS = _OF_HEADS | {PurposeKind.REDUCED_FEATURES, PurposeKind.STATISTIC_COTANGENT}
_OF_STREAMS = frozenset({PurposeKind.STREAM_TO_COLUMNS, PurposeKind.STREAM_COTANGENT})
# Layers further away than this are no neighbours.
_NEAR = 2


def about(purpose: Purpose) -> str:
    """Says what a planned collective of this purpose is about, in the terms of `Evidence.about`."""
    return _ABOUT.get(purpose.kind, VALUE)


def match(evidence: Sequence[Evidence], collectives: Mapping[int, Collective], step: Step) -> Pairs:
    """Returns which planned collective each compiled one realises, by position in `evidence`; several may realise one
    together.

    **Arguments:** `evidence`: what is known of each compiled collective. `collectives`: the planned ones by number.
    `step`: the planned step.
    """
    left = dict(collectives)
    pairs = _by_scope(evidence, left)
    for fits, cost in _ROUNDS_BY_LEAF:
        _add_round(pairs, left, evidence, step, fits, cost)
    _add_round(pairs, left, evidence, step, _all(_is_activation, _is_alike, _in_layer), _nothing)
    for number, planned in list(left.items()):
        for position in _parts(evidence, pairs, planned):
            left.pop(number, None)
            pairs[position] = number, dataclasses.replace(planned, bytes=evidence[position].collective.bytes)
    _add_in_parts(pairs, left, evidence, step)
    for fits, cost in _ROUNDS_OF_ACTIVATIONS:
        _add_round(pairs, left, evidence, step, fits, cost)
    return pairs


def _add_round(
    pairs: Pairs,
    left: dict[int, Collective],
    evidence: Sequence[Evidence],
    step: Step,
    fits: Fits,
    cost: Callable[[Evidence, Collective, Step], int],
) -> None:
    """Adds a round to `pairs`, and takes the planned collectives that it matches out of `left`."""
    for position, compiled in enumerate(evidence):
        if position in pairs:
            continue
        fitting = [number for number, planned in left.items() if fits(compiled, planned, step)]
        if fitting:
            best = min(fitting, key=lambda number: (cost(compiled, left[number], step), number))
            pairs[position] = best, left.pop(best)


def _add_in_parts(pairs: Pairs, left: dict[int, Collective], evidence: Sequence[Evidence], step: Step) -> None:
    """Adds reductions of split columns, and what takes a residual stream to columns, that are compiled in parts: those
    in a loop, say, and those of the turn before it. The layer that reads the values has them, which no planned one is
    of; so only parts of the same layer and shape that add up to the byte are one."""
    for number, planned in list(left.items()):
        alike: dict[tuple[str, tuple[int, ...]], list[int]] = collections.defaultdict(list)
        for position, compiled in enumerate(evidence):
            fits = position not in pairs and _is_same_operation(compiled, planned, step)
            if fits and (_is_reduction(compiled, planned, step) or _is_of_stream(compiled, planned, step)):
                alike[compiled.layer, compiled.collective.shape].append(position)
        for positions in alike.values():
            positions.sort(key=lambda position: -evidence[position].collective.bytes)
            parts = adding_up(positions, evidence, planned.bytes)
            if len(parts) > 1:
                del left[number]
                pairs |= {
                    position: (number, dataclasses.replace(planned, bytes=evidence[position].collective.bytes))
                    for position in parts
                }
                break


def _by_scope(evidence: Sequence[Evidence], left: dict[int, Collective]) -> Pairs:
    """Returns the pairs of exchanges that splitjax wrote out: all messages of a parameter realise its planned exchange.
    Takes the planned ones out of `left`."""
    pairs: Pairs = {}
    for number, planned in list(left.items()):
        wanted = _WRITTEN_OUT.get(about(planned.purpose))
        messages = [
            position
            for position, compiled in enumerate(evidence)
            if wanted is not None
            and position not in pairs
            and (compiled.about, compiled.leaf) == (wanted, planned.purpose.leaf)
            and (wanted != SUMMED or set(compiled.collective.axis.split("+")) & set(planned.axis.split("+")))
        ]
        if messages:
            del left[number]
        for position, part in dealt(planned, messages, evidence).items():
            op = evidence[position].collective.op if wanted == ROWS else part.op
            pairs[position] = number, dataclasses.replace(part, op=op)
    return pairs


def _all(*rules: Fits) -> Fits:
    """Returns the rule that all of `rules` fit."""
    return lambda compiled, planned, step: all(rule(compiled, planned, step) for rule in rules)


def _is_of_leaf(compiled: Evidence, planned: Collective, step: Step) -> bool:
    leaf = planned.purpose.leaf
    return compiled.leaf != "" and (compiled.about, compiled.leaf) == (about(planned.purpose), leaf)


def _is_of_phase(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return planned.purpose.phase in (compiled.phase, BACKWARD, UPDATE)


def _reads_in_phase(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return compiled.about != WEIGHT or compiled.phase == planned.purpose.phase


def _is_same_operation(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return (compiled.collective.op, compiled.collective.axis) == (planned.op, planned.axis)


def _is_gradient_of_layer(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both sum the gradient of some parameter of a layer: of the compiled one only its size is known."""
    is_unknown = (compiled.about, compiled.leaf) == (GRADIENT, "")
    if not is_unknown or about(planned.purpose) != GRADIENT:
        return False
    return compiled.collective.local_bytes == step.part_bytes.get(planned.purpose.leaf or "")


def _is_written_gradient(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both sum the gradient of a weight, the compiled one in a product that splitjax wrote out: where a
    loop stacks what it gives, nothing leads from there to the parameter."""
    is_sum = compiled.collective.op in SUMS and compiled.phase == BACKWARD and bool(compiled.collective.shape)
    is_unknown = compiled.about == VALUE and is_written_product(compiled.op_name)
    return is_sum and is_unknown and about(planned.purpose) == GRADIENT


def _is_gathered_by_sums(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether parts of a gradient are brought together by a sum of zeros and a part, as a TPU's compiler does
    with small arrays."""
    of_leaf = (compiled.about, compiled.leaf) == (GRADIENT, planned.purpose.leaf)
    is_gather = planned.purpose.kind == PurposeKind.GRADIENT_GROUPS and compiled.collective.op in SUMS
    return of_leaf and is_gather and compiled.collective.axis == planned.axis


def _is_activation(compiled: Evidence, planned: Collective, step: Step) -> bool:
    sums = compiled.collective.op in SUMS
    carries = bool(compiled.collective.shape) and (not sums or _carries(primitive(compiled.op_name)))
    is_exchange = about(planned.purpose) == VALUE and planned.purpose.kind not in _NAMELESS
    # Of a batch, too, rows are gathered that are sorted by expert.
    moves = compiled.about in (VALUE, WEIGHT, BATCH) and is_exchange
    return moves and compiled.phase == planned.purpose.phase and carries


def _is_reduction(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both reduce split columns to a value for each example. Its size alone says nothing: of what has no
    name, none is known."""
    of_value = compiled.about == VALUE and compiled.phase in (planned.purpose.phase, UPDATE) and compiled.op_name != ""
    return planned.purpose.kind == PurposeKind.REDUCED_FEATURES and of_value


def _is_of_stream(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both take a residual stream to columns, or its cotangents back."""
    is_value = compiled.about == VALUE and compiled.phase == planned.purpose.phase
    return planned.purpose.kind in _OF_STREAMS and is_value


def _is_read_back(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both gather a stored weight for the backward pass. In a loop this reads what the forward loop
    handed it, turn by turn: the dataflow ends there, and only the line says of which layer that is."""
    is_weight = planned.purpose.kind == PurposeKind.STORED_WEIGHT and compiled.about == VALUE
    return is_weight and compiled.phase == planned.purpose.phase == BACKWARD


def _is_statistic(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both sum a statistic of the batch: XLA sums what several running averages are made of."""
    return compiled.about == STATISTIC and planned.purpose.kind == PurposeKind.STATISTIC


def _is_cotangent_of_statistic(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both sum the cotangent of something that is made of a batch's statistics."""
    is_sum = compiled.collective.op in SUMS and compiled.phase == BACKWARD and bool(compiled.collective.shape)
    return is_sum and planned.purpose.kind == PurposeKind.STATISTIC_COTANGENT


def _is_of_saved(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both gather what devices kept in parts for a rematerialised layer."""
    return (about(planned.purpose), compiled.about) == (SAVED, SAVED) and _in_layer(compiled, planned, step)


def _is_of_heads(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both bring cotangents of heads together that devices share: a reduction over the heads that read
    them, or a gather, for whose operation XLA names no layer."""
    of_value = compiled.about == VALUE and compiled.phase == planned.purpose.phase
    return planned.purpose.kind in _OF_HEADS and of_value and bool(compiled.collective.shape)


def _carries(name: str) -> bool:
    """Tells whether a planned exchange of activations sums partial results of the primitive `name`: not of the
    statistics of a norm, say."""
    operation = OPERATIONS.get(name)
    return operation is not None and any(operation.has(trait) for trait in _CARRYING)


_CARRYING = (Trait.PRODUCT, Trait.LOOKUP, Trait.ADDS_ROWS, Trait.COLLECTIVE)


def _is_alike(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both are the same operation and send as many bytes."""
    sent = compiled.collective.bytes
    return _is_same_operation(compiled, planned, step) and any(
        sent * wider == planned.bytes for wider in _widths(compiled)
    )


def _has_same_size(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both carry the same array, by whatever operation."""
    mine = carried_bytes(compiled.collective.op, compiled.collective.group_size, compiled.collective.bytes)
    theirs = carried_bytes(planned.op, step.plan.mesh.size(tuple(planned.axis.split("+"))), planned.bytes)
    return mine > 0 and any(math.isclose(mine * wider, theirs, rel_tol=0.01) for wider in _widths(compiled))


def _shares_axes(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both go over some axis together. One that sums examples, over `data`, may carry an array as large
    as one that is planned over `model`, and is another."""
    if compiled.collective.axis == OTHER:
        return True
    axes_of = lambda names: {name.split(":")[0] for name in names.split("+")}
    return not axes_of(compiled.collective.axis).isdisjoint(axes_of(planned.axis))


def _has_same_axis(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return compiled.collective.axis == planned.axis


def _in_layer(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return compiled.layer == planned.layer


def _has_layer(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return bool(compiled.layer)


def _has_no_layer(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether nothing says of which layer a value is: that of an elementwise operation behind a product."""
    return not compiled.layer and compiled.about == VALUE


def _is_near(compiled: Evidence, planned: Collective, step: Step) -> bool:
    return _distance(compiled, planned, step) <= _NEAR


def _is_made_of(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether a gather brings together what the product of the planned one's layer gave, which XLA moved behind
    the elementwise operations and broadcasts that follow: then it is larger than planned."""
    return compiled.collective.op == planned.op and compiled.made_by == planned.layer != ""


def _is_gathered_once(compiled: Evidence, planned: Collective, step: Step) -> bool:
    """Tells whether both move values, the planned one in the forward pass: where the backward pass reads the gathered
    array, too, XLA gathers it once, and may name that after the reader in the backward pass (JAX 0.12 does)."""
    is_exchange = about(planned.purpose) == VALUE and planned.purpose.kind not in _NAMELESS
    in_order = (planned.purpose.phase, compiled.phase) == (FORWARD, BACKWARD)
    return is_exchange and in_order and compiled.about == VALUE and bool(compiled.collective.shape)


def _distance(compiled: Evidence, planned: Collective, step: Step) -> int:
    """Returns how many layers lie between the two."""
    return abs(step.order.get(compiled.layer, 0) - step.order.get(planned.layer, 0))


def _nothing(compiled: Evidence, planned: Collective, step: Step) -> int:
    """Costs the same for every pair: the first planned collective wins."""
    return 0


def _widths(compiled: Evidence) -> tuple[int, ...]:
    """Returns the factors by which the step's own values may be wider than what is sent: a TPU's compiler sends float32
    as bfloat16 where a product rounds it anyway."""
    return (1, 2) if compiled.collective.dtype in ("bfloat16", "float16") else (1,)


_ROUNDS_BY_LEAF = (
    (_all(_is_of_saved, _is_alike), _nothing),
    (_is_of_saved, _nothing),
    (_all(_is_of_leaf, _is_alike, _is_of_phase), _nothing),
    (_all(_is_of_leaf, _is_same_operation, _is_of_phase), _nothing),
    (_all(_is_of_leaf, _reads_in_phase), _nothing),
    (_is_of_leaf, _nothing),
    (_is_gathered_by_sums, _nothing),
    (_all(_is_gradient_of_layer, _in_layer, _is_same_operation), _nothing),
    (_all(_is_written_gradient, _is_alike, _in_layer), _nothing),
    (_all(_is_written_gradient, _has_same_size, _has_same_axis, _in_layer), _nothing),
    (_all(_is_read_back, _is_alike, _in_layer), _nothing),
    (_all(_is_statistic, _is_alike, _in_layer), _nothing),
    (_all(_is_cotangent_of_statistic, _is_alike, _in_layer), _nothing),
)
_ROUNDS_OF_ACTIVATIONS = (
    (_all(_is_reduction, _is_alike, _in_layer), _nothing),
    (_all(_is_reduction, _is_alike), _nothing),
    (_all(_is_of_heads, _is_alike, _in_layer), _nothing),
    (_all(_is_of_heads, _is_alike), _nothing),
    (_all(_is_activation, _has_same_size, _shares_axes, _in_layer), _nothing),
    (_all(_is_activation, _is_alike, _has_layer), _distance),
    (_all(_is_activation, _has_same_size, _has_same_axis, _has_layer, _is_near), _distance),
    (_all(_is_activation, _is_alike, _has_no_layer), _nothing),
    (_all(_is_activation, _has_same_axis, _is_made_of), _distance),
    (_all(_is_gathered_once, _is_alike, _is_made_of), _distance),
    # Where features are split, a device sums the statistics of its own.
    (_all(_is_cotangent_of_statistic, _has_same_axis, _in_layer), _nothing),
    (_all(_is_cotangent_of_statistic, _is_alike), _distance),
    (_all(_is_cotangent_of_statistic, _has_same_axis, _has_no_layer), _nothing),
)


def _parts(evidence: Sequence[Evidence], paired: Mapping[int, object], planned: Collective) -> tuple[int, ...]:
    """Returns the positions of collectives that together are a planned one: those in a loop, say, and the last beside
    it, of arrays of one shape. Their bytes add up to the byte, or there are none. Outside a derivative both passes read
    `update`, and come in the program's order."""
    by_shape: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for position, compiled in enumerate(evidence):
        fits = (
            position not in paired
            and about(planned.purpose) == VALUE == compiled.about
            and compiled.layer == planned.layer
            and compiled.phase in (planned.purpose.phase, UPDATE)
            and (compiled.collective.op, compiled.collective.axis) == (planned.op, planned.axis)
        )
        if fits:
            by_shape[compiled.collective.shape].append(position)
    added = (adding_up(positions, evidence, planned.bytes) for positions in by_shape.values())
    return next(filter(None, added), ())
