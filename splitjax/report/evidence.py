"""What a compiled collective is about: its phase of the step, the state leaf that it moves or sums, its layer, and how
that is known.

Four sources, the surest first:

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

from splitjax.plan import Plan
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
_SCOPE = re.compile(r"splitjax:(?:enter|product|stored):([^/()]+)")
_ROWS = re.compile(r"splitjax:(rows|fallback|summed|handed):([^/()]+)")
_AGAIN = "splitjax:again"  # see `sync.owner`
_STORED = re.compile(r"splitjax:stored:([^/()]+)")
_SUMS = ("all_reduce", "reduce_scatter")
_STATE = ("param", "optimizer", "statistic")
# Operations of the step that are collectives, or ask for one.
_COLLECTIVE_PRIMITIVES = frozenset(
    {
        "all_gather",
        "all_gather_invariant",
        "reduce_scatter",
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "all_to_all",
        "ppermute",
        "pbroadcast",
        "ragged_all_to_all",
        "sharding_constraint",
    }
)
# Beyond this many operations a weight nearby says little about a collective.
_NEAR = 40


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of one compiled collective.

    **Attributes:**

    - `collective`: the collective.
    - `phase`: `forward` (of the differentiated function, or of a step without a derivative), `backward`, or `update`.
    - `about`: `gradient` (it sums one), `moved gradient` (it lays out one that is summed), `weight` (it brings the
      parts of one together), `state` (it lays out state, old or new), `statistic`, `batch`, `rows` (it synchronises a
      table's rows) or `fallback` (all of them, where the capacities of that did not suffice), `summed` (a gradient,
      over the workers that computed it) or `handed` (that sum, to one that did not), or `value` for any other value.
    - `leaf`: the path of the state or batch leaf that `about` speaks of; empty for a value.
    - `op_name`, `frames`: name and lines of the operation that it serves: what reads its result, or whose partial
      results it sums. XLA names a change of layout after either side of it, by version, or not at all.
    - `layer`: empty where unknown.
    - `known_by`: `dataflow`, `scope`, `name` or `line`: how the layer is known; empty where it is not.
    - `node`: its place in the dataflow; None where the module has no such instruction.
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


class Step:
    """What evidence is compared with: the names, layers and lines of a planned step.

    **Arguments:**

    - `plan`, `graph`: of the step.
    - `argument_names`: JAX's name of every array among the step's arguments (`args[0]['kernel']`) -> its path in the
      plan.
    - `flow`: of the compiled module: it knows lines of layers without products, such as norms, which the graph has none
      of.
    """

    def __init__(self, plan: Plan, graph: Graph, argument_names: Mapping[str, str], flow: Dataflow) -> None:
        self.plan, self.graph, self.argument_names = plan, graph, argument_names
        self.roles = {leaf.path: leaf.role for leaf in plan.leaves}
        self.follows = {leaf.path: leaf.follows for leaf in graph.leaves if leaf.follows}
        self.layers = {leaf.path: leaf.layer for leaf in graph.leaves if leaf.layer}
        self.layers |= {path: layer.name for layer in plan.layers for path in layer.params}
        self.kinds = {layer.name: layer.kind for layer in plan.layers}
        self.order = {layer.name: position for position, layer in enumerate(plan.layers)}
        self._named: dict[str, tuple[str, bool]] = {}
        self._scopes = {name.replace("/", "."): name for name in self.order}
        self._lines: dict[str, list[str]] = collections.defaultdict(list)
        self._products = {(one.layer, one.primitive) for one in graph.uses}
        stacks = tuple(self._stacks_of_weights(flow))
        callers = collections.Counter(line for _, lines in stacks for line in set(lines[1:]))
        for name, source in (
            *((one.layer, one.source) for one in graph.uses),
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
        """The plan's leaf behind one of the module's arguments."""
        return self.argument_names.get(argument or "")

    def layer_of(self, leaf: str) -> str:
        """The layer of a parameter, of what follows one, or of a statistic beside one; empty for none."""
        owner = self.follows.get(leaf, leaf)
        if owner in self.layers:
            return self.layers[owner]
        parent = leaf.split("/")[1:-1]  # batch_stats/norm1/mean stands beside params/norm1/scale
        found = [name for name in self.order if parent and name.split("/")[-len(parent) :] == parent]
        return found[0] if len(found) == 1 else ""

    def dotted(self, name: str) -> str:
        """The leaf whose path is this name with dots for slashes."""
        return next((leaf.path for leaf in self.plan.leaves if leaf.path.replace("/", ".") == name), name)

    def stored(self, op_name: str) -> str:
        """The weight that an operation gathers from where it is stored in parts; empty where it does something else."""
        scope = _STORED.search(op_name)
        layer = self._scopes.get(scope.group(1)) if scope else None
        return next((one.params[0] for one in self.plan.layers if one.name == layer), "")

    def named(self, op_name: str) -> tuple[str, bool]:
        """The layer in an operation's name, or else the module around it, and whether it is a layer."""
        if op_name not in self._named:
            self._named[op_name] = self._name(op_name)
        return self._named[op_name]

    def _name(self, op_name: str) -> tuple[str, bool]:
        scope = _SCOPE.search(op_name)
        if scope and scope.group(1) in self._scopes:
            return self._scopes[scope.group(1)], True
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
        """The layers on the innermost of these lines that any layer has: of several, those with a product of this kind,
        or those without one for any other operation."""
        found = next((self._lines[_line(frame)] for frame in frames if _line(frame) in self._lines), [])
        exact = [name for name in found if (name, operation) in self._products]
        return tuple(exact or [name for name in found if self.kinds.get(name) == "norm"] or found)

    def _stacks_of_weights(self, flow: Dataflow) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(layer, lines innermost first) where the compiled step reads a parameter in its forward pass."""
        for argument, start in flow.arguments():
            leaf = self.leaf(argument)
            if self.roles.get(leaf or "") != "param":
                continue
            onward = lambda one: flow.users(one) if one == start or flow.opcode(one) in MOVES | SPREADS else ()  # noqa: B023
            for _, one in flow.walk([start], onward):
                name = flow.instruction(one).op_name
                lines = flow.lines(one)
                if (
                    lines
                    and one != start
                    and flow.opcode(one) not in MOVES | SPREADS
                    and "jvp(" in name
                    and "transpose(" not in name
                ):
                    yield self.layer_of(leaf or ""), lines


def gather_evidence(one: CompiledCollective, flow: Dataflow, step: Step) -> Evidence:
    """All that is known of one collective."""
    node = flow.collective(one.name, one.member)
    if rows := _ROWS.search(one.op_name):
        leaf = step.dotted(rows.group(2))
        about = FALLBACK if _AGAIN in one.op_name else rows.group(1)
        return Evidence(one, BACKWARD, about, leaf, one.op_name, one.frames, step.layer_of(leaf), "scope", node)
    op_name, frames = _served(one, node, flow)
    phase = _phase(op_name, step)
    about, leaf = _subject(one, node, phase, flow, step) if node is not None else (VALUE, "")
    layer, known_by = step.layer_of(leaf) if leaf else "", "dataflow"
    if not layer:
        layer, known_by = _layer(one, op_name, frames, node, flow, step)
    return Evidence(one, phase, about, leaf, op_name, frames, layer, known_by if layer else "", node)


def _served(one: CompiledCollective, node: Node | None, flow: Dataflow) -> tuple[str, tuple[str, ...]]:
    """(name, lines) of the operation that a collective serves."""
    asked_for = primitive(one.op_name) in _COLLECTIVE_PRIMITIVES
    if node is None or (one.op_name and (asked_for or one.op in _SUMS)):
        return one.op_name, one.frames
    if one.op not in _SUMS:
        onward = lambda at: flow.users(at) if at == node or flow.opcode(at) in MOVES else ()
        readers = [
            at for _, at in flow.walk([node], onward) if flow.opcode(at) not in MOVES and flow.instruction(at).op_name
        ]
        # A weight that both passes read is there for the forward pass already.
        readers.sort(key=lambda at: "transpose(" in flow.instruction(at).op_name)
        if readers:
            return flow.instruction(readers[0]).op_name, flow.lines(readers[0]) or one.frames
    if one.op_name:
        return one.op_name, one.frames
    for distance, at in flow.walk([node], flow.sources):
        if distance > _NEAR:
            break
        if at != node and flow.instruction(at).op_name and flow.opcode(at) != "parameter":
            return flow.instruction(at).op_name, flow.lines(at)
    return "", one.frames


def name_parts(op_name: str) -> tuple[str, ...]:
    """The parts of an operation's name without what transformations wrap around them: `jit(f)/jvp(Net)/a/dot_general`
    -> `Net, a, dot_general`."""
    parts = []
    for part in op_name.split("/"):
        while match := re.fullmatch(r"(\w+)\((.*)\)", part):
            part = "" if match.group(1) == "jit" else match.group(2)
        if part:
            parts.append(part)
    return tuple(parts)


def primitive(op_name: str) -> str:
    """The operation in a name: its last part."""
    return op_name.rsplit("/", 1)[-1]


def _phase(op_name: str, step: Step) -> str:
    if "transpose(" in op_name:
        return BACKWARD
    differentiates = any(role == "optimizer" for role in step.roles.values()) or any(
        one.why.startswith("gradient") for one in step.plan.collectives
    )
    return FORWARD if "jvp(" in op_name or not differentiates else UPDATE


def _subject(one: CompiledCollective, node: Node, phase: str, flow: Dataflow, step: Step) -> tuple[str, str]:
    """(about, leaf) from the dataflow."""
    if one.op not in _SUMS:
        if weight := step.stored(one.op_name):
            return WEIGHT, weight
        origins = {step.leaf(flow.origin(source)) for source in flow.sources(node)}
        leaf = origins.pop() if len(origins) == 1 else None
        if leaf is not None:
            role = step.roles.get(leaf, "input")
            return {"param": WEIGHT, "batch": BATCH, "input": VALUE}.get(role, STATE), leaf
    if one.shape and _is_result(node, flow):  # the TPU's compiler gathers small arrays by sums of zeros and a part
        leaf = _nearest_state(flow.sources(node), flow, step, _STATE, backward=True)
        return (STATE, leaf) if leaf else (VALUE, "")
    if phase == UPDATE and not one.shape:  # a norm over all gradients scales a scalar parameter's, too
        return VALUE, ""
    if phase == FORWARD:
        leaf = _nearest_state((node,), flow, step, ("statistic",), backward=False) if one.op in _SUMS else ""
        return (STATISTIC, leaf) if leaf else (VALUE, "")
    leaf = _nearest_state((node,), flow, step, ("param", "optimizer"), backward=False)
    return (GRADIENT if one.op in _SUMS else MOVED, step.follows.get(leaf, leaf)) if leaf else (VALUE, "")


def _is_result(node: Node, flow: Dataflow) -> bool:
    """Whether the step returns what a node gives, perhaps rearranged."""
    onward = lambda one: [user for user in flow.users(one) if flow.opcode(user) in MOVES]
    return any(one in flow.results for _, one in flow.walk([node], onward))


def _nearest_state(start: Iterable[Node], flow: Dataflow, step: Step, roles: Sequence[str], *, backward: bool) -> str:
    """The state leaf of these roles that values meet element by element, in the fewest operations: the old value beside
    an update. Empty for none, or for several parameters at the same distance."""
    start = tuple(start)

    def plain(one: Node) -> bool:
        opcode = flow.opcode(one)
        # A sum of sums is one, and the gradient of a weight that is read as its Fourier transform is summed as that.
        return opcode.startswith("all-reduce") or opcode == "fft" or (opcode not in MIXES and opcode not in SPREADS)

    def onward(one: Node) -> list[Node]:
        if backward:
            return list(flow.sources(one)) if plain(one) else []
        return [user for user in flow.users(one) if plain(user)]

    best, found = None, set()
    for distance, one in flow.walk(start, onward):
        if best is not None and distance > best:
            break
        if (
            flow.opcode(one) in MOVES
            or not plain(one)
            or (one in start and not backward)
            or flow.opcode(one).startswith("all-reduce")
        ):
            continue
        for source in flow.sources(one):
            leaf = step.leaf(flow.scaled_origin(source))
            if leaf is not None and step.roles.get(leaf) in roles:
                best = distance
                found.add(leaf)
    owners = {step.follows.get(leaf, leaf) for leaf in found}
    if len(owners) != 1:
        return ""
    return min(found, key=lambda leaf: (step.roles[leaf] != "param", leaf)) if not backward else min(found)


def _layer(
    one: CompiledCollective, op_name: str, frames: Sequence[str], node: Node | None, flow: Dataflow, step: Step
) -> tuple[str, str]:
    """(layer, how it is known)."""
    name, is_layer = step.named(op_name)
    if is_layer:
        return name, "scope" if _SCOPE.search(op_name) else "name"
    lines = step.at_line(frames, primitive(op_name))
    if not one.shape:  # a loss may stand on the line of the last layer
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
    """The layers of the parameters that stand nearest to a collective in the dataflow, before or after it, nearest
    first."""
    distances: dict[str, int] = {}
    for before in (True, False):

        def onward(one: Node, before: bool = before) -> tuple[Node, ...]:
            if one != node and flow.opcode(one) in MIXES and flow.opcode(one) != "reduce":
                return ()
            return flow.sources(one) if before else flow.users(one)

        for distance, one in flow.walk([node], onward):
            if distance > _NEAR:
                break
            if one == node:
                continue
            for source in flow.sources(one):
                leaf = step.leaf(flow.origin(source, MOVES | SPREADS))
                layer = step.layer_of(leaf) if leaf is not None else ""
                if layer and distances.get(layer, distance + 1) > distance:
                    distances[layer] = distance
    return tuple(sorted(distances, key=lambda layer: (distances[layer], step.order[layer])))


def _line(source: str) -> str:
    """`file:line` of `file:line (function)`."""
    return source.split(" (", 1)[0]


def _within(path: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return any(parts[start : start + len(path)] == path for start in range(len(parts) - len(path) + 1))
