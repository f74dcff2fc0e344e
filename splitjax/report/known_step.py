"""Knows the names, layers and lines of a planned step, with which what is compiled is compared.

The plan, the traced graph and the dataflow of a compiled module come in; a `Step` answers which leaf an argument of the
module is, and which layer a leaf, an operation's name or a line of the user's belongs to.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from splitjax.plan import Plan
from splitjax.report.dataflow import MOVES, SPREADS, Dataflow
from splitjax.report.op_names import is_derivative, is_differentiated, layer_scopes, name_parts, stored_scope
from splitjax.trace.graph import Graph


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
    - `axes`: path of a leaf -> the axes that split it.
    - `kinds`: layer -> its kind.
    - `order`: layer -> its position in the program.
    - `has_backward`: whether it has a gradient boundary, or a backward pass that JAX traced.
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
        self.axes: dict[str, tuple[str, ...]] = {leaf.path: leaf.axes for leaf in plan.leaves}
        self.kinds: dict[str, str] = {layer.name: layer.kind for layer in plan.layers}
        self.order: dict[str, int] = {layer.name: position for position, layer in enumerate(plan.layers)}
        self.has_backward: bool = bool(graph.gradients) or any(use.backward for use in graph.uses)
        self._params = frozenset(leaf.path for leaf in plan.leaves if leaf.role == "param")
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

    def params_of(self, layer: str) -> tuple[str, ...]:
        """Returns the parameters of a `layer`; none of a name that is no layer's."""
        return tuple(path for path, its_layer in self.layers.items() if its_layer == layer and path in self._params)

    def dotted(self, name: str) -> str:
        """Returns the leaf whose path is `name` with dots for slashes, or `name` where there is none."""
        return next((leaf.path for leaf in self.plan.leaves if leaf.path.replace("/", ".") == name), name)

    def stored(self, op_name: str) -> str:
        """Returns the weight that the operation of the name `op_name` gathers from where it is stored in parts; empty
        where it does something else."""
        layer = self._scopes.get(stored_scope(op_name))
        return next((planned_layer.params[0] for planned_layer in self.plan.layers if planned_layer.name == layer), "")

    def named(self, op_name: str) -> tuple[str, bool]:
        """Returns the layer in `op_name`, an operation's name, or else the module around it, and whether it is a
        layer."""
        if op_name not in self._named:
            self._named[op_name] = self._name(op_name)
        return self._named[op_name]

    def _name(self, op_name: str) -> tuple[str, bool]:
        scopes = [scope for scope in layer_scopes(op_name) if scope in self._scopes]
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
                    and is_differentiated(name)
                    and not is_derivative(name)
                ):
                    yield self.layer_of(leaf or ""), lines


def _line(source: str) -> str:
    """Returns `file:line` of `file:line (function)`."""
    return source.split(" (", 1)[0]


def _within(path: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Tells whether `path` stands in `parts`, without gaps."""
    return any(parts[start : start + len(path)] == path for start in range(len(parts) - len(path) + 1))
