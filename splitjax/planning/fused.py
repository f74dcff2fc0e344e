"""Finds the products with fused weights (query, key and value in one; gate and up in one) whose columns are to be dealt
out to devices.

A `Draft` with a layout comes in; the products come out, with what `step.traced.with_dealt` needs to trace the step
anew. A weight is dealt out over the axes over which its rule computes its columns, where devices along these see the
same examples in its layer (they do not split the batch, or that of whole layers alone), and where the devices divide
each of the parts: then what is cut apart behind the product lies where it is used, as with
separate weights. Otherwise it stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from splitjax.cost.flow import used_axes
from splitjax.plan import LeafPlan, Spec, spec_entry
from splitjax.planning.draft import Draft
from splitjax.planning.jax_gradients import BY_SPLITJAX, taken_by_jax
from splitjax.primitives.walk import Site, equation_at
from splitjax.rules.match import first_match, param_kinds
from splitjax.step.dealing.rewriting import Parts, find_parts
from splitjax.step.dealing.values import FusedProduct
from splitjax.step.recurrent.rows_apart import find_side_by_side
from splitjax.trace.graph import Use

# How tracing names the dims of a weight that its columns and its rows lie along.
_COLUMNS = "out"
_ROWS = "in"


def fused_products(draft: Draft) -> tuple[tuple[FusedProduct, ...], tuple[str, ...]]:
    """Returns the products of a draft's step whose fused weights are to be dealt out, in program order, and notes for
    the plan on those that cannot be, as their parts do not divide, or JAX takes their gradient."""
    counts = _counts(draft)
    if not counts:
        return (), ()
    notes: list[str] = []
    found: dict[tuple[int, ...], FusedProduct] = {}
    specs = {leaf.path: _computed(draft, leaf) for leaf in draft.layout.leaves if leaf.path in counts}
    uses = [use for use in draft.graph.uses if use.param in counts and use.editable]
    uses = [use for use in uses if use.data is not None and not use.backward]
    # A backward pass that plain `jax.grad` has traced would read other shares than such a forward pass leaves.
    is_traced = any(use.backward for use in draft.graph.uses)
    # Where the devices of a group have examples of their own in other layers, they share no heads.
    is_apart = draft.layout.replicated_batch == "all"
    attentions = {layer.name for layer in draft.graph.layers if layer.kind == "attention" and not is_apart}
    for use, dim, parts in _in_parts(draft, [use for use in uses if use.in_boundary or not is_traced], counts, specs):
        num = counts[use.param]
        if use.site in found:
            continue
        if parts.fit(num):
            found[use.site] = FusedProduct(use.site, use.weight, dim, parts.sizes, parts.stored, num)
        elif use.layer in attentions and (copied := parts.copied(num)) is not None:
            found[use.site] = FusedProduct(use.site, use.weight, dim, parts.sizes, parts.stored, num, copied)
        elif max(parts.sizes) > 1:
            heads = sorted({count for count in parts.heads if count is not None and count % num})
            what = f" of {' and '.join(map(str, heads))} heads" if heads else ""
            notes.append(
                f"{use.param}: the weights{what} that it holds side by side ({', '.join(map(str, parts.sizes))}) do"
                f" not divide by {num} devices, which exchange activations; separate weights would not ask for it"
                + _remedy(draft, parts, num)
            )
    by_jax = taken_by_jax(draft.graph)
    left = [use for use in uses if use.param in by_jax and not use.in_boundary]
    for use, _, parts in _in_parts(draft, left, counts, specs):
        if parts.fit(counts[use.param]):
            notes.append(
                f"{use.param}: holds {len(parts.sizes)} weights side by side ({', '.join(map(str, parts.sizes))}), and"
                f" {counts[use.param]} devices exchange activations where what it makes is cut apart; {BY_SPLITJAX},"
                " which deals its columns out before they are used"
            )
    return tuple(found[site] for site in sorted(found)), tuple(dict.fromkeys(notes))


def side_by_side_products(draft: Draft) -> tuple[dict[Site, int], tuple[str, ...]]:
    """Returns the products of recurrent layers whose data are inputs and state side by side, by site with the position
    of these, where devices share the columns of the weight: they have parts of the state, and the inputs whole. Beside
    them notes for the plan on those that stay so, as JAX takes their gradient."""
    graph, counts, jaxpr = draft.graph, _counts(draft), draft.traced.jaxpr
    recurrent = {layer.name for layer in graph.layers if layer.kind == "recurrent"}
    by_columns = {leaf.path for leaf in draft.layout.leaves if leaf.path in counts and _is_by_columns(draft, leaf)}
    read = [
        (use, use.data)
        for use in graph.uses
        if use.layer in recurrent and use.param in by_columns and use.trips > 1 and use.primitive == "dot_general"
        if use.data is not None and use.editable and not use.backward
    ]
    if not read:
        return {}, ()
    is_traced = any(use.backward for use in graph.uses)
    data = {use.site: at for use, at in read}
    found = frozenset(find_side_by_side(jaxpr, data))
    apart = {use.site: at for use, at in read if use.site in found and (use.in_boundary or not is_traced)}
    notes = [
        f"{use.param}: reads inputs and state side by side, and {counts[use.param]} devices exchange both in each of"
        f" {use.trips} iterations; {BY_SPLITJAX}, which takes their products apart"
        for use, _ in read
        if use.site in found and use.site not in apart
    ]
    return apart, tuple(dict.fromkeys(notes))


def _is_by_columns(draft: Draft, leaf: LeafPlan) -> bool:
    """Tells whether a parameter is split while it is computed, and its rows are whole then: parts of these are what
    each device has, with nothing sent."""
    spec = _computed(draft, leaf)
    names = draft.graph.leaf(leaf.path).dim_names
    return any(spec) and not any(axes for name, axes in zip(names, spec, strict=True) if name == _ROWS)


def _in_parts(
    draft: Draft, uses: Sequence[Use], counts: Mapping[str, int], specs: Mapping[str, Spec]
) -> Iterator[tuple[Use, int, Parts]]:
    """Yields those of `uses` whose result is cut into parts along a dim of the weight, with the dim and the parts.
    `counts`, `specs`: by parameter, the number of devices that share its columns, and how it is split for that."""
    rounds: list[list[tuple[Use, int]]] = []
    for use in uses:
        for number, dim in enumerate(_columns(draft, use, specs[use.param])):
            rounds += [[]] if number == len(rounds) else []
            rounds[number].append((use, dim))
    for candidates in rounds:  # of several columns dims of a product, one at a time
        asked = [(use.site, use.weight, dim, counts[use.param]) for use, dim in candidates]
        for (use, dim), parts in zip(candidates, find_parts(draft.traced.jaxpr, asked), strict=True):
            if parts is not None:
                yield use, dim, parts


def _remedy(draft: Draft, parts: Parts, num: int) -> str:
    """Says how `num` devices could share the `parts` of a fused weight evenly, if padding does it."""
    is_enough = all(count > num for count in parts.counts if count % num)
    return ', and uneven="pad" would pad each of them' if draft.request.uneven != "pad" and is_enough else ""


def _computed(draft: Draft, leaf: LeafPlan) -> Spec:
    """Returns how a parameter is split while it is computed: without the axes over which it is stored alone."""
    layout = draft.layout
    used = used_axes(leaf, draft.shape, layout.batch_axes, layout.replicated_batch)
    return tuple(spec_entry([axis for axis in axes if axis in used]) for axes in leaf.axes_by_dim)


@dataclasses.dataclass(frozen=True)
class UnevenParts:
    """Describes the columns of a fused weight whose parts devices cannot share evenly.

    - `labels`: the soft labels of these columns. `sizes`: of the parts. `counts`: how many heads each has; how many
      columns where there are none.
    - `num`: of devices.
    """

    labels: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    num: int

    @property
    def uneven(self) -> frozenset[tuple[int, int]]:
        """The counts that do not divide, each with the number of devices."""
        return frozenset((count, self.num) for count in self.counts if count % self.num)

    def padded(self, known: Collection[tuple[int, int]]) -> int | None:
        """Returns the number of columns with as much padding behind every part as devices need; None where the layers
        that read them have not as much. `known`: sizes of dims, as they are and padded."""
        total = 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            more = -(-count // self.num) * self.num
            if more != count and (count, more) not in known:
                return None
            total += size // count * more
        return total


def find_uneven(draft: Draft) -> tuple[UnevenParts, ...]:
    """Returns the fused weights of a draft, of which nothing is decided, whose parts do not divide by the devices over
    which their rule computes the columns, where they can be dealt out (`fused_products`)."""
    graph, counts = draft.graph, _counts(draft)
    asked, columns = [], []
    is_traced = any(use.backward for use in graph.uses)
    for use in graph.uses:
        is_forward = use.data is not None and not use.backward and (use.in_boundary or not is_traced)
        if use.param in counts and use.editable and is_forward:
            for dim in _columns(draft, use, ()):
                asked.append((use.site, use.weight, dim, counts[use.param]))
                columns.append(tuple(graph.soft[atom] for atom in use.weight_dims[dim]))
    found = zip(asked, columns, find_parts(draft.traced.jaxpr, asked), strict=True)
    return tuple(
        UnevenParts(labels, parts.sizes, parts.counts, num)
        for (*_, num), labels, parts in found
        if parts is not None and not parts.fit(num)
    )


def _columns(draft: Draft, use: Use, spec: Spec) -> Iterator[int]:
    """Yields the dims of the weight of a product that its columns lie along. Where `spec`, of its parameter, splits
    others while it is computed, those that it leaves whole are left out, if the product reads the parameter in its own
    shape: halves of each head, which rotary positions ask for, lie together where heads are split."""
    eqn = equation_at(draft.traced.jaxpr, use.site)
    if eqn is None or eqn.primitive.name != "dot_general":
        return
    contracted, batch = (kind[use.weight] for kind in eqn.params["dimension_numbers"])
    shape = eqn.invars[use.weight].aval.shape
    is_split = shape == draft.graph.leaf(use.param).shape and any(spec)
    for dim in range(len(shape)):
        if dim not in contracted and dim not in batch and (not is_split or spec[dim]):
            yield dim


def _counts(draft: Draft) -> dict[str, int]:
    """Returns by path the number of devices over which the columns of a parameter are computed, where it is more than
    one, and see the same examples in its layer: as its rule says, or as a layout that is taken over has it."""
    graph, mesh, layout = draft.graph, draft.shape, draft.layout
    counts: dict[str, int] = {}
    if draft.request.pinned is not None or draft.request.followed is not None:
        for leaf in layout.leaves:
            computed = used_axes(leaf, mesh, layout.batch_axes, layout.replicated_batch)
            if leaf.role == "param" and computed:
                counts[leaf.path] = mesh.size(tuple(computed))
        return counts
    kinds, rules = param_kinds(graph), draft.request.rules
    # Where all axes split the batch of whole layers, the devices of a group share their examples in split ones.
    apart = set(mesh.storing if rules.replicated_batch == "all" else rules.batch_axes(mesh))
    for leaf in graph.params:
        rule = first_match(rules.rules, leaf, kinds[leaf.path])
        axes = next(
            (mesh.meant(names) for each in (rule.shard if rule else ()) for ref, names in each if ref == _COLUMNS), ()
        )
        if axes and apart.isdisjoint(axes):
            counts[leaf.path] = mesh.size(axes)
    return counts
