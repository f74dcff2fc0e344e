"""Finds what a compiled collective is about, from the dataflow around it: the state leaf that it moves or sums.

A collective, its place in the dataflow and the planned step go in; what it is about comes out, in the words of
`Evidence.about`. The sum that ends in the new value of a kernel is that kernel's gradient, whatever it is called.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from splitjax.mesh import MeshShape
from splitjax.report.dataflow import MIXES, MOVES, SPREADS, Dataflow, Node
from splitjax.report.hlo import CompiledCollective
from splitjax.report.known_step import Step
from splitjax.report.op_names import is_crossing, is_of_saved, is_written_product, layer_scopes, primitive, shares_scope

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
GRADIENT, MOVED, WEIGHT, STATE, STATISTIC, BATCH, SAVED, VALUE = (
    "gradient",
    "moved gradient",
    "weight",
    "state",
    "statistic",
    "batch",
    "saved",
    "value",
)
SUMS: tuple[str, ...] = ("all_reduce", "reduce_scatter")
_STATE = ("param", "optimizer", "statistic")
_LEARNED = ("param", "optimizer")
_PRODUCTS = ("dot", "convolution")
# A gradient that a program returns is converted and scaled on its way, and no more.
_NEAR_RESULTS = 6


@dataclasses.dataclass(frozen=True)
class Around:
    """Holds a compiled collective with its surroundings.

    - `collective`: the collective. `node`: its place in the dataflow.
    - `flow`: the dataflow of the module that holds it. `step`: the planned step that the module was compiled from.
    - `phase`: of the step, in which it runs.
    """

    collective: CompiledCollective
    node: Node
    flow: Dataflow
    step: Step
    phase: str

    @property
    def is_sum(self) -> bool:
        """Returns whether it adds values of several devices up."""
        return self.collective.op in SUMS


def subject_of(here: Around) -> tuple[str, str]:
    """Returns (what the collective of `here` is about, path of the leaf), in the words of `Evidence.about`."""
    flow, step, node = here.flow, here.step, here.node
    if is_of_saved(here.collective.op_name) and not here.is_sum:
        return SAVED, ""
    if is_crossing(here.collective.op_name):  # also where all that follows is the parameter that was looked up
        return VALUE, ""
    if not here.is_sum and (moved := _moved_leaf(here)) is not None:
        return moved
    if here.collective.shape and _is_result(node, flow):
        # the TPU's compiler gathers small arrays by sums of zeros and a part
        leaf = _nearest_state(flow.sources(node), flow, step, _STATE, backward=True)
        return (STATE, leaf) if leaf else _gradient_of_layer(here)
    if here.phase == UPDATE and not here.collective.shape:
        # a norm over all gradients scales a scalar parameter's, too
        return VALUE, ""
    if here.phase == FORWARD:
        is_statistic = here.is_sum and not is_written_product(here.collective.op_name)
        leaf = _nearest_state((node,), flow, step, ("statistic",), backward=False) if is_statistic else ""
        return (STATISTIC, leaf) if leaf else (VALUE, "")
    return _gradient(here)


def _moved_leaf(here: Around) -> tuple[str, str] | None:
    """Returns (about, leaf) of what brings parts of a leaf together; None where it moves no leaf alone."""
    flow, step = here.flow, here.step
    if weight := step.stored(here.collective.op_name):
        return WEIGHT, weight
    if batch := shares_scope(here.collective.op_name):
        return BATCH, step.dotted(batch)
    origins = {step.leaf(flow.origin(source)) for source in flow.sources(here.node)}
    leaf = origins.pop() if len(origins) == 1 else None
    if leaf is None:
        return None
    role = step.roles.get(leaf, "input")
    return {"param": WEIGHT, "batch": BATCH, "input": VALUE}.get(role, STATE), leaf


def _gradient(here: Around) -> tuple[str, str]:
    """Returns (about, leaf) of what leads to the new value of a parameter."""
    step, collective = here.step, here.collective
    leaf = _nearest_state((here.node,), here.flow, step, _LEARNED, backward=False)
    if not leaf:
        return _gradient_of_layer(here)
    owner = step.follows.get(leaf, leaf)
    # A sum over axes that split the parameter holds the parts of all devices along them.
    axes = collective.axis.split("+")
    split = step.plan.mesh.size([axis for axis in step.axes.get(owner, ()) if axis in axes])
    part_bytes = step.part_bytes.get(owner, 0) * (split if collective.op == "all_reduce" else 1)
    sizes = (part_bytes, step.whole_bytes.get(owner))
    layer, is_layer = step.named(collective.op_name)
    # The cotangent of an activation to which a parameter was added leads to that one, too: it is of another layer's
    # product, and of another size. Where no layer is named (in a loop of which the layout says nothing), the axes tell:
    # examples that lie over none of them leave no summands of a gradient.
    is_other = layer != step.layer_of(leaf) if is_layer else set(axes).isdisjoint(step.plan.batch_axes)
    if here.is_sum and is_other and collective.local_bytes not in sizes:
        return VALUE, ""
    # Where a layer's activations are pinned, cotangents are: also those of rows that only the table's gradient reads.
    pinned = primitive(collective.op_name) == "sharding_constraint" and layer_scopes(collective.op_name)
    if pinned and not here.is_sum:
        return VALUE, ""
    return (GRADIENT if here.is_sum else MOVED), owner


def _gradient_of_layer(here: Around) -> tuple[str, str]:
    """Returns (about, "") of a sum that is the gradient of some parameter of its layer, as far as the module tells,
    which returns the sum for another module to update with."""
    layer, is_layer = here.step.named(here.collective.op_name)
    sizes = {here.step.part_bytes[path] for path in here.step.params_of(layer)} if is_layer else set()
    is_gradient = (
        here.is_sum
        and here.phase == BACKWARD
        and not here.step.argument_names
        and here.collective.local_bytes in sizes
        and _leads_to_result(here)
    )
    return (GRADIENT, "") if is_gradient else (VALUE, "")


def _leads_to_result(here: Around) -> bool:
    """Returns whether the module returns what a collective gives, perhaps converted and scaled."""
    flow = here.flow
    onward = lambda reached: [user for user in flow.users(reached) if flow.opcode(user) not in MIXES | SPREADS]
    nearby = ((distance, node) for distance, node in flow.walk([here.node], onward) if distance <= _NEAR_RESULTS)
    return any(node in flow.results for _, node in nearby)


def sharing(here: Around) -> tuple[str, ...]:
    """Returns the parameters whose gradients a sum holds together, nearest first; none where it is no sum of an array,
    or is of a single parameter.

    Side by side, the parts that a device has of several are as large as the sum: those of gates lie at several
    distances where some of them still have to be moved. Where they lie side by side, XLA may split their joint dim over
    axes over which it is not summed. The same gradient for several parameters is as large as the part of
    each, and leads to all of them alike.
    """
    collective, step = here.collective, here.step
    if not here.is_sum or not collective.shape or is_crossing(collective.op_name):
        return ()
    size, reached, shared = collective.local_bytes, list[str](), tuple[str, ...]()
    for _, leaves in _leaves_by_distance((here.node,), here.flow, step, _LEARNED, backward=False):
        is_nearest = not reached
        reached += sorted({step.follows.get(leaf, leaf) for leaf in leaves} - set(reached))
        parts = [step.part_bytes.get(owner, 0) for owner in reached]
        if is_nearest and len(reached) > 1 and set(parts) == {size}:
            return tuple(reached)
        if len(reached) > 1 and is_part_of(size, sum(parts), collective.axis, step.plan.mesh):
            shared = tuple(reached)
        if sum(parts) >= size * step.plan.mesh.num_devices:
            break
    return shared


def is_part_of(num_bytes: float, whole_bytes: float, axis: str, mesh: MeshShape) -> bool:
    """Tells whether `num_bytes` are all of what arrays of `whole_bytes` have side by side, or what a device has of
    that where it is split over axes of the `mesh` that a sum over `axis` leaves."""
    others = [size for name, size in mesh.axes if name not in axis.split("+")]
    parts = {math.prod(sizes) for count in range(len(others) + 1) for sizes in itertools.combinations(others, count)}
    return any(math.isclose(num_bytes * num_parts, whole_bytes, rel_tol=0.01) for num_parts in parts)


def rows_added_to(here: Around) -> str:
    """Returns the parameter to whose gradient the values that a gather brings together are added as rows: the ids of a
    table's lookups, or the cotangents of what was looked up. Empty where they are added to none.

    They go through elementwise operations and rearrangements alone before a scatter adds them up, or the loop that XLA
    makes of it, which writes one row after another into what it wrote before.
    """
    flow, step = here.flow, here.step

    def adds_rows(node: Node) -> bool:
        opcode = flow.opcode(node)
        return opcode == "scatter" or (opcode == "dynamic-update-slice" and node in flow.sources(node))

    def onward(node: Node) -> list[Node]:
        if adds_rows(node):
            return []
        return [user for user in flow.users(node) if adds_rows(user) or flow.opcode(user) not in MIXES]

    sums = [node for _, node in flow.walk([here.node], onward) if adds_rows(node)]
    owners = {_nearest_state((node,), flow, step, _LEARNED, backward=False) for node in sums}
    leaf = owners.pop() if len(owners) == 1 else ""
    return step.follows.get(leaf, leaf)


def product_behind(here: Around) -> str:
    """Returns the layer whose product gave the values that a collective moves, through elementwise operations,
    broadcasts and rearrangements alone; of several products the nearest. Empty where there is none."""
    flow = here.flow
    onward = lambda node: flow.sources(node) if node == here.node or flow.opcode(node) not in MIXES else ()
    for _, node in flow.walk([here.node], onward):
        if flow.opcode(node) in _PRODUCTS:
            layer, is_layer = here.step.named(flow.instruction(node).op_name)
            if is_layer:
                return layer
    return ""


def _is_result(node: Node, flow: Dataflow) -> bool:
    """Tells whether the step returns what a node gives, perhaps rearranged."""
    onward = lambda reached: [user for user in flow.users(reached) if flow.opcode(user) in MOVES]
    return any(reached in flow.results for _, reached in flow.walk([node], onward))


def _nearest_state(start: Iterable[Node], flow: Dataflow, step: Step, roles: Sequence[str], *, backward: bool) -> str:
    """Returns the state leaf of these roles that values meet element by element, in the fewest operations: the old
    value beside an update. Empty for none, or for several parameters at the same distance."""
    _, leaves = next(_leaves_by_distance(start, flow, step, roles, backward=backward), (0, set[str]()))
    owners = {step.follows.get(leaf, leaf) for leaf in leaves}
    if len(owners) != 1:
        return ""
    return min(leaves, key=lambda leaf: (step.roles[leaf] != "param", leaf)) if not backward else min(leaves)


def _leaves_by_distance(
    start: Iterable[Node], flow: Dataflow, step: Step, roles: Sequence[str], *, backward: bool
) -> Iterator[tuple[int, set[str]]]:
    """Yields (number of operations, leaves): the state leaves of these roles that values meet element by element,
    nearest first."""
    start = tuple(start)
    # The gradient of a weight that is stored along several dims is summed into parts along one after the other.
    is_in_parts = all(flow.opcode(node).startswith("reduce-scatter") for node in start)
    sums = ("all-reduce", "reduce-scatter") if is_in_parts else ("all-reduce",)

    def plain(node: Node) -> bool:
        opcode = flow.opcode(node)
        # A sum of sums is a sum, and the gradient of a weight that is read as its Fourier transform is summed as that.
        return opcode.startswith(sums) or opcode == "fft" or (opcode not in MIXES and opcode not in SPREADS)

    def onward(node: Node) -> list[Node]:
        if backward:
            return list(flow.sources(node)) if plain(node) else []
        return [user for user in flow.users(node) if plain(user)]

    reached, leaves = 0, set[str]()
    for distance, node in flow.walk(start, onward):
        if distance > reached and leaves:
            yield reached, leaves
            leaves = set()
        reached = distance
        if (
            flow.opcode(node) in MOVES
            or not plain(node)
            or (node in start and not backward)
            or flow.opcode(node).startswith(sums)
        ):
            continue
        for source in flow.sources(node):
            leaf = step.leaf(flow.scaled_origin(source))
            if leaf is not None and step.roles.get(leaf) in roles:
                leaves.add(leaf)
    if leaves:
        yield reached, leaves
