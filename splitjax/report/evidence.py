"""Gathers what is known of each compiled collective: its phase of the step, the state leaf that it moves or sums, its
layer, and how that is known.

A compiled collective, the dataflow around it and the planned step go in; an `Evidence` comes out. XLA does not say why
a collective is there, so four sources are asked, the surest first:

- `dataflow`: where its values come from and where they go (`report.dataflow`): the sum that ends in the new value of a
  kernel is that kernel's gradient, whatever it is called.
- `scope`: splitjax's own name scopes around explicit collectives (`lower.products.groups.scope`).
- `name`: the module path in the name that JAX gave the operation. Flax Linen and Haiku write one, Flax NNX does not.
- `line`: the user's lines on its stack, where layers have a line in common narrowed down by the weights nearby.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from splitjax.plan import DENSE_GRADIENTS, Plan
from splitjax.report.dataflow import MIXES, MOVES, SPREADS, Dataflow, Node
from splitjax.report.hlo import CompiledCollective
from splitjax.trace.graph import Graph

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
GRADIENT, MOVED, WEIGHT, STATE, STATISTIC, BATCH, VALUE = (
    "gradient",
    "moved gradient",
    "weight",
    "state",
    "statistic",
    "batch",
    "value",
)
ROWS, FALLBACK = "rows", "fallback"
SUMMED, HANDED = "summed", "handed"
_SCOPE = re.compile(r"splitjax:(?:enter|product|stored|layer):([^/()]+)")
_PRODUCT = "splitjax:product:"  # a product with its collectives written out
_ENTERS = re.compile(r"splitjax:enter:[^/()]+")  # an exchange of activations or their cotangents, written out
_ROWS = re.compile(r"splitjax:(rows|fallback|summed|handed):([^/()]+)")
_AGAIN = "splitjax:again"  # see `sync.owner`
_STORED = re.compile(r"splitjax:stored:([^/()]+)")
_SUMS = ("all_reduce", "reduce_scatter")
_STATE = ("param", "optimizer", "statistic")
# Operations of the step that are collectives, or ask for one.
_COLLECTIVE_PRIMITIVES = frozenset(
    "all_gather all_gather_invariant reduce_scatter psum psum_invariant pmax pmin all_to_all ppermute pbroadcast "
    "ragged_all_to_all sharding_constraint".split()
)
# Beyond this many operations a weight nearby says little about a collective.
_NEAR = 40


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Says what is known of a compiled collective.

    **Attributes:**

    - `collective`: the collective.
    - `phase`: `forward` (of the differentiated function, or of a step without a derivative), `backward`, or `update`.
    - `about`: `gradient` (it sums a gradient), `moved gradient` (it changes the layout of a gradient that is summed),
      `weight` (it brings the parts of a weight together), `state` (it changes the layout of state, old or new),
      `statistic`, `batch`, `rows` (it synchronises a table's rows) or `fallback` (all rows, where the capacities of
      that did not suffice), `summed` (a gradient, over the workers that computed it) or `handed` (that sum, to a worker
      that did not), or `value` for any other value.
    - `leaf`: the path of the state or batch leaf that `about` speaks of; empty for a value.
    - `op_name`, `frames`: name and lines of the operation that it serves: what reads its result, or whose partial
      results it sums. XLA names a change of layout after either side of it, by version, or not at all.
    - `layer`: empty where unknown.
    - `known_by`: `dataflow`, `scope`, `name` or `line`: how the layer is known; empty where it is not.
    - `node`: its place in the dataflow; None where the module has no such instruction.
    - `shared_by`: the paths of parameters whose gradients a value may hold together: those of a recurrent cell's gates,
      which are computed as one product, or of biases that get the same gradient, which XLA sums once. Empty for
      anything but a sum that leads to several parameters alike.
    """

    collective: CompiledCollective
    phase: str
    about: str
    leaf: str
    op_name: str
    frames: tuple[str, ...]
    layer: str
    known_by: str
    node: Node | None
    shared_by: tuple[str, ...] = ()


class Step:
    """Holds what evidence is compared with: the names, layers and lines of a planned step.

    **Arguments:**

    - `plan`, `graph`: of the step.
    - `argument_names`: JAX's name of every array among the step's arguments (`args[0]['kernel']`) -> its path in the
      plan.
    - `flow`: of the compiled module: it knows lines of layers without products, such as norms, of which the graph has
      none.

    **Attributes**, besides the first three of these:

    - `roles`: path of a leaf -> its role: `param`, `optimizer`, `statistic`, `batch`, `input`, ...
    - `follows`: path of a leaf of the optimizer -> the parameter that it belongs to.
    - `layers`: path of a leaf -> its layer.
    - `part_bytes`, `whole_bytes`: path of a leaf -> the bytes of the part that a device has of it, and of all of it.
    - `kinds`: layer -> its kind.
    - `order`: layer -> its position in the program.
    """

    def __init__(self, plan: Plan, graph: Graph, argument_names: Mapping[str, str], flow: Dataflow) -> None:
        self.plan: Plan = plan
        self.graph: Graph = graph
        self.argument_names: Mapping[str, str] = argument_names
        self.roles: dict[str, str] = {leaf.path: leaf.role for leaf in plan.leaves}
        self.follows: dict[str, str] = {leaf.path: leaf.follows for leaf in graph.leaves if leaf.follows}
        self.layers: dict[str, str] = {leaf.path: leaf.layer for leaf in graph.leaves if leaf.layer}
        self.layers |= {path: layer.name for layer in plan.layers for path in layer.params}
        self.part_bytes: dict[str, int] = {leaf.path: leaf.bytes_per_device for leaf in plan.leaves}
        self.whole_bytes: dict[str, int] = {leaf.path: leaf.whole_bytes(plan.mesh) for leaf in plan.leaves}
        self.kinds: dict[str, str] = {layer.name: layer.kind for layer in plan.layers}
        self.order: dict[str, int] = {layer.name: position for position, layer in enumerate(plan.layers)}
        self._named: dict[str, tuple[str, bool]] = {}
        self._scopes = {name.replace("/", "."): name for name in self.order}
        self._lines: dict[str, list[str]] = collections.defaultdict(list)
        self._products = {(use.layer, use.primitive) for use in graph.uses}
        stacks = tuple(self._stacks_of_weights(flow))
        callers = collections.Counter(line for _, lines in stacks for line in set(lines[1:]))
        for name, source in (
            *((use.layer, use.source) for use in graph.uses),
            *((name, lines[0]) for name, lines in stacks),
        ):
            # A line that most layers are called from is no layer's (JAX traces some functions once, and keeps an outer
            # line of them).
            if name and source and 2 * callers[source] <= len(stacks) and name not in self._lines[_line(source)]:
                self._lines[_line(source)].append(name)
        split = [tuple(part for part in name.split("/") if part != "~") for name in self.order]
        shared = min((len(name) - 1 for name in split), default=0)
        while any(name[:shared] != split[0][:shared] for name in split):
            shared -= 1
        self._paths = {name[shared:]: whole for name, whole in zip(split, self.order, strict=True)}

    def leaf(self, argument: str | None) -> str | None:
        """Returns the plan's leaf behind `argument`, JAX's name of an argument of the module; None for None and for an
        argument that the plan does not have."""
        return self.argument_names.get(argument or "")

    def layer_of(self, leaf: str) -> str:
        """Returns the layer of `leaf`: of a parameter, of what follows one, or of a statistic beside one; empty where
        there is none."""
        owner = self.follows.get(leaf, leaf)
        if owner in self.layers:
            return self.layers[owner]
        parent = leaf.split("/")[1:-1]  # batch_stats/norm1/mean stands beside params/norm1/scale
        layers = [name for name in self.order if parent and name.split("/")[-len(parent) :] == parent]
        return layers[0] if len(layers) == 1 else ""

    def dotted(self, name: str) -> str:
        """Returns the leaf whose path is `name` with dots for slashes, or `name` where there is none."""
        return next((leaf.path for leaf in self.plan.leaves if leaf.path.replace("/", ".") == name), name)

    def stored(self, op_name: str) -> str:
        """Returns the weight that the operation of the name `op_name` gathers from where it is stored in parts; empty
        where it does something else."""
        scope = _STORED.search(op_name)
        layer = self._scopes.get(scope.group(1)) if scope else None
        return next((planned_layer.params[0] for planned_layer in self.plan.layers if planned_layer.name == layer), "")

    def named(self, op_name: str) -> tuple[str, bool]:
        """Returns the layer in `op_name`, an operation's name, or else the module around it, and whether it is a
        layer."""
        if op_name not in self._named:
            self._named[op_name] = self._name(op_name)
        return self._named[op_name]

    def _name(self, op_name: str) -> tuple[str, bool]:
        scopes = [scope for scope in _SCOPE.findall(op_name) if scope in self._scopes]
        if scopes:  # the innermost
            return self._scopes[scopes[-1]], True
        parts = tuple(part for part in name_parts(op_name) if part != "~")
        fits = [path for path in self._paths if _within(path, parts)]
        if fits:
            return self._paths[max(fits, key=len)], True
        modules = {path[:size] for path in self._paths for size in range(1, len(path)) if _within(path[:size], parts)}
        if not modules:
            return "", False
        longest = max(modules, key=len)
        whole = next(self._paths[path] for path in self._paths if path[: len(longest)] == longest)
        rest = next(path for path in self._paths if path[: len(longest)] == longest)[len(longest) :]
        return "/".join(whole.split("/")[: -len(rest)]), False

    def at_line(self, frames: Sequence[str], operation: str) -> tuple[str, ...]:
        """Returns the layers on the innermost of the lines `frames` that any layer has.

        Of several layers on it, these are those with a product of the kind `operation`, or for any other operation
        those of norms; where none is left, all of them.
        """
        names = next((self._lines[_line(frame)] for frame in frames if _line(frame) in self._lines), [])
        exact = [name for name in names if (name, operation) in self._products]
        return tuple(exact or [name for name in names if self.kinds.get(name) == "norm"] or names)

    def _stacks_of_weights(self, flow: Dataflow) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields (layer, lines innermost first) where the compiled step reads a parameter in its forward pass."""
        for argument, start in flow.arguments():
            leaf = self.leaf(argument)
            if self.roles.get(leaf or "") != "param":
                continue
            onward = lambda node: flow.users(node) if node == start or flow.opcode(node) in MOVES | SPREADS else ()  # noqa: B023
            for _, node in flow.walk([start], onward):
                name = flow.instruction(node).op_name
                lines = flow.lines(node)
                if (
                    lines
                    and node != start
                    and flow.opcode(node) not in MOVES | SPREADS
                    and "jvp(" in name
                    and "transpose(" not in name
                ):
                    yield self.layer_of(leaf or ""), lines


def gather_evidence(collective: CompiledCollective, flow: Dataflow, step: Step) -> Evidence:
    """Gathers what is known of a collective.

    **Arguments:**

    - `collective`: the collective.
    - `flow`: the dataflow of the module that holds it.
    - `step`: the planned step that the module was compiled from.
    """
    node = flow.collective(collective.name, collective.member)
    if rows := _ROWS.search(collective.op_name):
        leaf = step.dotted(rows.group(2))
        about = FALLBACK if _AGAIN in collective.op_name else rows.group(1)
        shared_by = _sharing(collective, node, flow, step) if node is not None and about == SUMMED else ()
        name, layer = collective.op_name, step.layer_of(leaf)
        return Evidence(collective, BACKWARD, about, leaf, name, collective.frames, layer, "scope", node, shared_by)
    op_name, frames = _served(collective, node, flow)
    phase = _phase(op_name, step)
    about, leaf = _subject(collective, node, phase, flow, step) if node is not None else (VALUE, "")
    shared_by = _sharing(collective, node, flow, step) if node is not None and phase != FORWARD else ()
    if shared_by:
        about, leaf = VALUE, ""
    layer, known_by = step.layer_of(leaf) if leaf else "", "dataflow"
    if not layer:
        layer, known_by = _layer(collective, op_name, frames, node, flow, step)
    return Evidence(collective, phase, about, leaf, op_name, frames, layer, known_by if layer else "", node, shared_by)


def _served(collective: CompiledCollective, node: Node | None, flow: Dataflow) -> tuple[str, tuple[str, ...]]:
    """Returns (name, lines) of the operation that a collective serves."""
    asked_for = primitive(collective.op_name) in _COLLECTIVE_PRIMITIVES
    if node is None or (collective.op_name and (asked_for or collective.op in _SUMS)):
        return collective.op_name, collective.frames
    if collective.op not in _SUMS:
        onward = lambda at: flow.users(at) if at == node or flow.opcode(at) in MOVES else ()
        readers = [
            at for _, at in flow.walk([node], onward) if flow.opcode(at) not in MOVES and flow.instruction(at).op_name
        ]
        # A weight that both passes read is there for the forward pass already.
        readers.sort(key=lambda at: "transpose(" in flow.instruction(at).op_name)
        if readers:
            return flow.instruction(readers[0]).op_name, flow.lines(readers[0]) or collective.frames
    if collective.op_name:
        return collective.op_name, collective.frames
    for distance, at in flow.walk([node], flow.sources):
        if distance > _NEAR:
            break
        if at != node and flow.instruction(at).op_name and flow.opcode(at) != "parameter":
            return flow.instruction(at).op_name, flow.lines(at)
    return "", collective.frames


def name_parts(op_name: str) -> tuple[str, ...]:
    """Returns the parts of `op_name`, an operation's name, without what transformations wrap around them:
    `jit(f)/jvp(Net)/a/dot_general` -> `Net, a, dot_general`."""
    parts = []
    for part in op_name.split("/"):
        while match := re.fullmatch(r"(\w+)\((.*)\)", part):
            part = "" if match.group(1) == "jit" else match.group(2)
        if part:
            parts.append(part)
    return tuple(parts)


def primitive(op_name: str) -> str:
    """Returns the operation in `op_name`: its last part."""
    return op_name.rsplit("/", 1)[-1]


def _phase(op_name: str, step: Step) -> str:
    if "transpose(" in op_name:
        return BACKWARD
    differentiates = any(role == "optimizer" for role in step.roles.values()) or any(
        planned.purpose.kind in DENSE_GRADIENTS for planned in step.plan.collectives
    )
    return FORWARD if "jvp(" in op_name or not differentiates else UPDATE


def _subject(collective: CompiledCollective, node: Node, phase: str, flow: Dataflow, step: Step) -> tuple[str, str]:
    """Returns (about, leaf) from the dataflow."""
    if _ENTERS.search(collective.op_name):  # also where all that follows is the parameter that was looked up
        return VALUE, ""
    if collective.op not in _SUMS:
        if weight := step.stored(collective.op_name):
            return WEIGHT, weight
        origins = {step.leaf(flow.origin(source)) for source in flow.sources(node)}
        leaf = origins.pop() if len(origins) == 1 else None
        if leaf is not None:
            role = step.roles.get(leaf, "input")
            return {"param": WEIGHT, "batch": BATCH, "input": VALUE}.get(role, STATE), leaf
    if collective.shape and _is_result(
        node, flow
    ):  # the TPU's compiler gathers small arrays by sums of zeros and a part
        leaf = _nearest_state(flow.sources(node), flow, step, _STATE, backward=True)
        return (STATE, leaf) if leaf else (VALUE, "")
    if phase == UPDATE and not collective.shape:  # a norm over all gradients scales a scalar parameter's, too
        return VALUE, ""
    if phase == FORWARD:
        is_statistic = collective.op in _SUMS and _PRODUCT not in collective.op_name
        leaf = _nearest_state((node,), flow, step, ("statistic",), backward=False) if is_statistic else ""
        return (STATISTIC, leaf) if leaf else (VALUE, "")
    leaf = _nearest_state((node,), flow, step, ("param", "optimizer"), backward=False)
    sizes = (step.part_bytes.get(step.follows.get(leaf, leaf)), step.whole_bytes.get(step.follows.get(leaf, leaf)))
    layer, is_layer = step.named(collective.op_name)
    # The cotangent of an activation to which a parameter was added leads to that one, too: it is of another layer's
    # product, and of another size.
    if collective.op in _SUMS and is_layer and layer != step.layer_of(leaf) and collective.local_bytes not in sizes:
        return VALUE, ""
    return (GRADIENT if collective.op in _SUMS else MOVED, step.follows.get(leaf, leaf)) if leaf else (VALUE, "")


def _sharing(collective: CompiledCollective, node: Node, flow: Dataflow, step: Step) -> tuple[str, ...]:
    """Returns the parameters whose gradients a sum holds together, nearest first; none where it is no sum of an array,
    or is of a single parameter.

    Side by side, the parts that a device
    has of several are as large as the sum: those of gates lie at several distances where some of them still have to be
    moved. The same gradient for several parameters is as large as the part of each, and leads to all of them alike.
    """
    if collective.op not in _SUMS or not collective.shape or _ENTERS.search(collective.op_name):
        return ()
    size, reached = collective.local_bytes, list[str]()
    for _, leaves in _leaves_by_distance((node,), flow, step, ("param", "optimizer"), backward=False):
        is_nearest = not reached
        reached += sorted({step.follows.get(leaf, leaf) for leaf in leaves} - set(reached))
        parts = [step.part_bytes.get(owner, 0) for owner in reached]
        same = is_nearest and set(parts) == {size}
        if len(reached) > 1 and (same or sum(parts) == size):
            return tuple(reached)
        if sum(parts) >= size:
            break
    return ()


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

    def plain(node: Node) -> bool:
        opcode = flow.opcode(node)
        # A sum of sums is a sum, and the gradient of a weight that is read as its Fourier transform is summed as that.
        return opcode.startswith("all-reduce") or opcode == "fft" or (opcode not in MIXES and opcode not in SPREADS)

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
            or flow.opcode(node).startswith("all-reduce")
        ):
            continue
        for source in flow.sources(node):
            leaf = step.leaf(flow.scaled_origin(source))
            if leaf is not None and step.roles.get(leaf) in roles:
                leaves.add(leaf)
    if leaves:
        yield reached, leaves


def _layer(
    collective: CompiledCollective, op_name: str, frames: Sequence[str], node: Node | None, flow: Dataflow, step: Step
) -> tuple[str, str]:
    """Returns (layer, how it is known) from the names and lines of the operation that a collective serves."""
    name, is_layer = step.named(op_name)
    if is_layer:
        return name, "scope" if _SCOPE.search(op_name) else "name"
    lines = step.at_line(frames, primitive(op_name))
    if not collective.shape:  # a loss may stand on the line of the last layer
        lines = ()
    if len(lines) == 1:
        return lines[0], "line"
    if not name and not lines:
        return "", ""
    near = _layers_nearby(node, flow, step) if node is not None else ()
    inside = [layer for layer in near if layer in lines or (name and layer.startswith(name + "/"))]
    if inside:
        return inside[0], "line" if lines else "name"
    return name, "name"


def _layers_nearby(node: Node, flow: Dataflow, step: Step) -> tuple[str, ...]:
    """Returns the layers of the parameters that stand nearest to a collective in the dataflow, before or after it,
    nearest first."""
    distances: dict[str, int] = {}
    for before in (True, False):

        def onward(reached: Node, before: bool = before) -> tuple[Node, ...]:
            if reached != node and flow.opcode(reached) in MIXES and flow.opcode(reached) != "reduce":
                return ()
            return flow.sources(reached) if before else flow.users(reached)

        for distance, reached in flow.walk([node], onward):
            if distance > _NEAR:
                break
            if reached == node:
                continue
            for source in flow.sources(reached):
                leaf = step.leaf(flow.origin(source, MOVES | SPREADS))
                layer = step.layer_of(leaf) if leaf is not None else ""
                if layer and distances.get(layer, distance + 1) > distance:
                    distances[layer] = distance
    return tuple(sorted(distances, key=lambda layer: (distances[layer], step.order[layer])))


def _line(source: str) -> str:
    """Returns `file:line` of `file:line (function)`."""
    return source.split(" (", 1)[0]


def _within(path: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Tells whether `path` stands in `parts`, without gaps."""
    return any(parts[start : start + len(path)] == path for start in range(len(parts) - len(path) + 1))
