"""Matches rules with parameters: which rule speaks of a parameter, which dim a reference means, and whether a dim
splits evenly.

Rules and leaves of a traced graph go in; all that decisions and findings ask about a single parameter comes out.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Sequence

from splitjax.mesh import MeshShape
from splitjax.rules.rule import LARGEST, DimRef, Rule, Shape
from splitjax.trace.graph import Dim, Graph, Leaf


@functools.cache
def glob_pattern(glob: str) -> re.Pattern[str]:
    """Returns a path `glob` as a regular expression for the whole path.

    `*`, `?` and `[...]` do not match `/`; `**` does, and `**/` also matches nothing, so that `**/kernel` finds
    `kernel` at the top level.
    """
    out, at = [], 0
    while at < len(glob):
        char = glob[at]
        if glob.startswith("**/", at) and (at == 0 or glob[at - 1] == "/"):
            out.append("(?:.*/)?")
            at += 3
        elif glob.startswith("**", at):
            out.append(".*")
            at += 2
        elif char == "*":
            out.append("[^/]*")
            at += 1
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[" and (end := glob.find("]", at + 2)) > 0:
            inside = glob[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            inside = "^" + inside[1:] if inside.startswith("!") else inside.replace("^", "\\^")
            out.append(f"(?!/)[{inside}]")
            at = end + 1
        else:
            out.append(re.escape(char))
            at += 1
    return re.compile("".join(out), re.DOTALL)


@functools.lru_cache(maxsize=1024)
def _regex_pattern(regex: str) -> re.Pattern[str]:
    """Compiles `regex`; a search asks for hundreds of them, each of which names its layers, again and again."""
    return re.compile(regex)


def matches(rule: Rule, leaf: Leaf, kind: str) -> bool:
    """Tells whether all matchers of `rule` hold for a parameter `leaf` of a layer of the kind `kind`."""
    return (
        (rule.kind is None or kind in rule.kind)
        and (rule.path is None or glob_pattern(rule.path).fullmatch(leaf.path) is not None)
        and (rule.regex is None or _regex_pattern(rule.regex).search(leaf.path) is not None)
        and (rule.shape is None or shape_matches(rule.shape, leaf.shape))
        and (rule.min_size is None or leaf.size >= rule.min_size)
        and (rule.max_size is None or leaf.size <= rule.max_size)
    )


def shape_matches(pattern: Shape, shape: tuple[int, ...]) -> bool:
    """Tells whether `shape` fits a `pattern` of sizes, None (any size) and at most one ellipsis (any number of
    dims)."""
    if ... in pattern:
        at = pattern.index(...)
        head, tail = pattern[:at], pattern[at + 1 :]
        if len(shape) < len(head) + len(tail):
            return False
        return shape_matches(head, shape[:at]) and shape_matches(tail, shape[len(shape) - len(tail) :])
    return len(pattern) == len(shape) and all(
        want is None or want == size for want, size in zip(pattern, shape, strict=True)
    )


def first_match(rules: Sequence[Rule], leaf: Leaf, kind: str) -> Rule | None:
    """Returns the first of `rules` that matches the parameter `leaf`, whose layer has the kind `kind`; None where
    none does."""
    return next((rule for rule in rules if matches(rule, leaf, kind)), None)


def unmatched_paths(rules: Sequence[Rule], graph: Graph) -> tuple[str, ...]:
    """Says which of `rules` name a path that no parameter of `graph` has, each with the nearest path: a misspelt path
    leaves to other rules what it was written for."""
    paths, notes = [leaf.path for leaf in graph.params], []
    for rule in rules:
        if rule.path is not None and not any(glob_pattern(rule.path).fullmatch(path) for path in paths):
            key, pattern, meant = "path", rule.path, rule.path.replace("**/", "").replace("*", "")
        elif rule.regex is not None and not any(re.search(rule.regex, path) for path in paths):
            key, pattern, meant = "regex", rule.regex, re.sub(r"\\(.)|[\^$.*+?()|\[\]{}]", r"\1", rule.regex)
        else:
            continue
        near = max(paths, key=lambda path: _likeness(meant, path), default=None)
        nearest = f"; the nearest is {near!r}" if near is not None else ""
        notes.append(f"rule {rule.name!r}: its {key} {pattern!r} matches no parameter{nearest}")
    return tuple(notes)


def _likeness(pattern: str, path: str) -> float:
    """Returns how alike a path is to what is left of a pattern without its wildcards: wholly, or in its last names."""
    ends = ["/".join(path.split("/")[start:]) for start in range(path.count("/") + 1)]
    return max(difflib.SequenceMatcher(None, pattern, end, autojunk=False).ratio() for end in ends)


def param_kinds(graph: Graph) -> dict[str, str]:
    """Returns the kind of every parameter of `graph` by path: that of the layer that uses it (the first in program
    order), or "other"."""
    by_name = {layer.name: layer.kind for layer in graph.layers}
    first: dict[str, str] = {}
    for layer in graph.layers:
        for path in layer.params:
            first.setdefault(path, layer.kind)
    return {leaf.path: by_name.get(leaf.layer or "") or first.get(leaf.path, "other") for leaf in graph.params}


def named_params(graph: Graph) -> dict[str, Leaf]:
    """Returns the parameters of `graph` by path, with a layer's dim names on all of its arrays.

    Tracing names the dims of weights, and a dim without name takes that of the weight's dim in the same local
    class (`out` where a square weight offers several).
    """
    named = {leaf.path: leaf for leaf in graph.params}
    for layer in graph.layers:
        names: dict[int, list[str]] = {}
        members = [named[path] for path in layer.params if path in named]
        for leaf in members:
            for atoms, name in zip(leaf.dims, leaf.dim_names, strict=False):
                if atoms and name:
                    names.setdefault(graph.local[atoms[0]], []).append(name)
        for leaf in members:
            known = (*leaf.dim_names, *(None,) * (len(leaf.shape) - len(leaf.dim_names)))
            offers = [names.get(graph.local[atoms[0]], []) if atoms else [] for atoms in leaf.dims]
            filled = tuple(
                name or ("out" if "out" in offer else next(iter(offer), None))
                for name, offer in zip(known, offers, strict=True)
            )
            named[leaf.path] = dataclasses.replace(leaf, dim_names=filled)
    return named


def candidates(leaf: Leaf, ref: DimRef, first: Collection[int] = ()) -> list[int]:
    """Returns the positions in `leaf` that a dim reference `ref` may mean, in order of preference; of the largest dims
    those in `first` come first.

    Empty where the parameter has no such dim.
    """
    if isinstance(ref, int):
        rank = len(leaf.shape)
        return [ref % rank] if -rank <= ref < rank else []
    if ref == LARGEST:
        return sorted(range(len(leaf.shape)), key=lambda dim: (dim not in first, -leaf.shape[dim]))
    return [dim for dim, name in enumerate(leaf.dim_names) if name == ref]


def whole_dims(graph: Graph, leaf: Leaf, dims: Sequence[Dim]) -> dict[int, int]:
    """Finds the dims of a parameter that are a dim of an operand made of it, each with its position there.

    **Arguments:**

    - `graph`: the traced step.
    - `leaf`: the parameter.
    - `dims`: of the operand, which may be a slice of the parameter, or a reshape of it.

    A dim that a reshape joined with a later one is the major part of that dim.
    """

    def local(dim: Dim) -> Dim:
        return tuple(graph.local[atom] for atom in dim)

    own, operand = [local(dim) for dim in leaf.dims], [local(dim) for dim in dims]
    positions: dict[int, int] = {}
    for dim, labels in enumerate(own):
        alike = [d for d, beside in enumerate(own) if beside[:1] == labels[:1]]
        places = [p for p, there in enumerate(operand) if there[:1] == labels[:1]]
        # Both dims of a square kernel may be in one class: they are in the order of the parameter.
        position = places[alike.index(dim)] if labels and len(places) == len(alike) else None
        if position is not None and operand[position][: len(labels)] == labels:
            positions[dim] = position
    return positions


def mapped_dims(graph: Graph, leaf: Leaf) -> tuple[int, ...]:
    """Finds the dims of the parameter `leaf` of `graph` that are dims of the operand wherever it meets examples: along
    these it can be gathered, and its gradient summed, as the operation needs it. The dim that a loop slices is none of
    them."""
    operands = [use.weight_dims for use in graph.uses if use.param == leaf.path and not use.backward]
    operands += [spread.dims for spread in graph.spreads if spread.param == leaf.path]
    everywhere = set(range(len(leaf.shape)))
    for dims in operands:
        everywhere &= set(whole_dims(graph, leaf, dims))
    return tuple(sorted(everywhere))


def divides(sizes: Sequence[int], num: int) -> bool:
    """Tells whether a dim splits into `num` equal parts without cutting through an atom that is not itself cut
    evenly.

    `sizes` are the sizes of its atoms, major first: `num` divides the first, or takes all of it and divides the
    rest.
    """
    if num == 1:
        return True
    if not sizes:
        return False
    first = sizes[0]
    return first % num == 0 or (num % first == 0 and divides(sizes[1:], num // first))


def dim_text(leaf: Leaf, dim: int) -> str:
    """Returns dim `dim` of `leaf` for people: its name, or `dim 1`."""
    name = leaf.dim_names[dim] if dim < len(leaf.dim_names) else None
    return name or f"dim {dim}"


def axes_text(mesh: MeshShape, axes: Sequence[str]) -> str:
    """Returns `axes` with their size on `mesh` for people: `model=4`, or `data x model=8`."""
    return f"{' x '.join(axes)}={mesh.size(tuple(axes))}"


def sized_text(graph: Graph, leaf: Leaf, dim: int) -> str:
    """Returns dim `dim` of `leaf` with its size for people: `out 10`, or `dim 1 of size 10` without a name.

    A dim of several atoms of `graph` shows them: `out 48 (3 x 16)`.
    """
    sizes = [graph.atom_sizes[atom] for atom in leaf.dims[dim]]
    named = dim < len(leaf.dim_names) and leaf.dim_names[dim]
    product = f" ({' x '.join(map(str, sizes))})" if len(sizes) > 1 else ""
    return f"{dim_text(leaf, dim)}{'' if named else ' of size'} {leaf.shape[dim]}{product}"
