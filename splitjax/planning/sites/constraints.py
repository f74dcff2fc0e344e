"""Decides where XLA is told a sharding inside the step, beyond those of its arguments.

A step's graph and the specs of its leaves come in; `Constraint`s come out, each with the operation and operand that it
pins. They exist because XLA chooses among layouts by rules that know nothing of layers.

Few on purpose: XLA carries the arguments' shardings through the program, and a constraint that says what it would infer
anyway buys nothing. Needed are the places where two layouts meet:

- *crossing* (SplitBrain, arXiv 2112.15317; "one weird trick", arXiv 1404.5997, scheme a): activations that enter a
  layer sharded over `model` have their examples over the other batch axes only, and are whole (or split like the
  weight's contracted dim) in their features;
- *back*: activations that enter a replicated layer behind a sharded one have their examples over all batch axes again;
- *gathered weights* (ZeRO-3, arXiv 1910.02054): where a weight is itself split over axes of the role data or storage,
  or stored over others of the batch, the activations keep their examples split, so that XLA gathers the weight and not
  the activations.

All go by dim class: a dim is an example dim if its leading atom is, wherever it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from splitjax.cost.flow import used_axes
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint, LeafPlan, Spec, SpecEntry, spec_axes, spec_entry
from splitjax.primitives.walk import Site
from splitjax.rules.match import divides
from splitjax.trace.graph import Dim, Graph, Use

FREE = "?"
_READ = ("in", "features")  # the dims of a weight that a product contracts, of a table that is a head, too


def derive_constraints(
    graph: Graph,
    leaves: Mapping[str, LeafPlan],
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
    replicated_batch: str,
    of_experts: Collection[Site] = (),
) -> tuple[Constraint, ...]:
    """Derives the constraints of every forward use of a weight that needs them, in program order.

    **Arguments:**

    - `graph`: of the step.
    - `leaves`: the plan's leaves by path.
    - `mesh`: the shape of the mesh.
    - `batch_axes`: the mesh axes over which replicated layers split the examples, major first.
    - `replicated_batch`: over which axes replicated layers split it, as the plan has it.
    - `of_experts`: sites of uses whose tokens travel, which have constraints of their own (`experts.py`).
    """
    constraints: list[Constraint] = []
    crossed = False
    for use in graph.uses:
        if not use.editable or use.data is None:
            continue
        axes = mesh.present(spec_axes(leaves[use.param].spec))
        stored = _storing(graph, leaves[use.param], mesh, batch_axes, replicated_batch)
        used = tuple(_without(entry, stored) for entry in leaves[use.param].spec)
        if use.backward:
            constraints += _cotangent(graph, use, used, batch_axes) if stored and use.site not in of_experts else ()
            continue
        if use.site in of_experts:
            crossed = True
        elif stored:
            constraints += _gathered(graph, use, use.data, used, batch_axes, " x ".join(stored))
        elif set(axes) & set(batch_axes):
            crossed = True
            constraints += _crossing(graph, use, use.data, leaves[use.param].spec, axes, batch_axes)
        elif crossed:
            spec = example_spec(graph, use.data_dims, batch_axes)
            if spec is not None:
                constraints.append(
                    Constraint(use.site, use.data, spec, use.layer, "replicated layer: every device is a worker")
                )
    return (*_scanned(graph, leaves, mesh, batch_axes), *constraints)


def _scanned(
    graph: Graph, leaves: Mapping[str, LeafPlan], mesh: MeshShape, batch_axes: tuple[str, ...]
) -> Iterator[Constraint]:
    """Yields the constraints of what loops around the gradient scan: turns of a loop run on all devices, so that the
    examples of each turn are split, and the dim that counts the turns is not. They lie over the axes over which the
    batches do that they are made of: fewer, where split layers alone read them (`place_batches`)."""
    for scanned in graph.scanned:
        placed = {axes for path in scanned.fed_by if (axes := mesh.present(leaves[path].axes))}
        axes = placed.pop() if len(placed) == 1 else batch_axes
        spec = example_spec(graph, scanned.dims, axes)
        examples = next((dim for dim in scanned.dims if graph.is_example(dim)), ())
        if spec is not None and divides([graph.atom_sizes[atom] for atom in examples], mesh.size(axes)):
            why = f"a loop around the gradient: the examples of every turn over {_text(axes)}"
            yield Constraint(scanned.site, scanned.operand, (None, *spec[1:]), "", why)


def _storing(
    graph: Graph, leaf: LeafPlan, mesh: MeshShape, batch_axes: tuple[str, ...], replicated_batch: str
) -> tuple[str, ...]:
    """Returns the axes over which a weight is stored in parts: those of the role data or storage, and other axes of the
    batch over which it is used whole. Experts are computed where they are stored."""
    names = graph.leaf(leaf.path).dim_names
    experts = {axis for name, axes in zip(names, leaf.axes_by_dim, strict=False) if name == "expert" for axis in axes}
    used = {*used_axes(leaf, mesh, batch_axes, replicated_batch), *experts}
    return tuple(
        axis
        for axis in mesh.present(spec_axes(leaf.spec))
        if mesh.roles.store((axis,)) or (axis in batch_axes and axis not in used)
    )


def place_batches(
    graph: Graph,
    leaves: tuple[LeafPlan, ...],
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
    replicated_batch: str,
) -> tuple[LeafPlan, ...]:
    """Returns the leaves with every batch where its first layers want it.

    **Arguments:**

    - `graph`: of the step.
    - `leaves`: of the plan, with the batches over all of `batch_axes`.
    - `mesh`: the shape of the mesh.
    - `batch_axes`: the mesh axes over which replicated layers split the examples, major first.
    - `replicated_batch`: over which axes replicated layers split it, as the plan has it.

    A batch that no replicated layer reads (labels, tokens of a split embedding) meets only values whose examples are
    over the axes that the split layers leave free. Over all batch axes it would be gathered for them, or worse, the
    loss would be computed in its layout and every cotangent resharded."""
    by_path = {leaf.path: leaf for leaf in leaves}
    split: set[str] = set()
    wanted_whole: set[str] = set()
    for use in graph.uses:
        axes = mesh.present(spec_axes(by_path[use.param].spec))
        stored = _storing(graph, by_path[use.param], mesh, batch_axes, replicated_batch)
        if not stored and set(axes) & set(batch_axes):
            split.update(set(axes) & set(batch_axes))
        elif not use.backward:
            wanted_whole.update(use.fed_by)
    if not split:
        return leaves

    def place(leaf: LeafPlan) -> LeafPlan:
        if leaf.role != "batch" or not leaf.shape or leaf.path in wanted_whole:
            return leaf
        rest = tuple(axis for axis in spec_axes(leaf.spec) if axis not in split)
        entry = spec_entry(rest)
        return dataclasses.replace(
            leaf,
            spec=tuple(entry if axes else None for axes in leaf.spec),
            rule="batch (of split layers)",
            bytes_per_device=leaf.whole_bytes(mesh) // mesh.size(rest),
        )

    return tuple(place(leaf) for leaf in leaves)


def example_spec(graph: Graph, dims: tuple[Dim, ...], axes: tuple[str, ...]) -> Spec | None:
    """Returns the spec that splits the first example dim over `axes` and leaves all other dims to XLA.

    `dims` are the dims of a value of the step that `graph` describes. None where no dim leads with the example atom.
    """
    for position, dim in enumerate(dims):
        if graph.is_example(dim):
            entry = spec_entry(axes)
            return tuple(entry if p == position else FREE for p in range(len(dims)))
    return None


def _gathered(
    graph: Graph, use: Use, data_operand: int, used: Spec, batch_axes: tuple[str, ...], stored: str
) -> list[Constraint]:
    """Keeps the examples of a use split, whose weight is stored in parts and gathered. `data_operand`: the position of
    the activations. `used`: how the weight is split while it is used. `stored`: the axes over which it is stored, in
    words.

    What a product reads and gives is split along the weight's dims as that is used. A result that lies over the axis of
    the contracted dim XLA gets wrong where its examples lie over several axes (`partitioner.DEFECTS`,
    contracted-axis-in-result), and it would choose that where a layer behind wants such parts."""
    why = f"weight split over {stored}: gather the weight, keep the examples split"
    data, out = (example_spec(graph, dims, batch_axes) for dims in (use.data_dims, use.out_dims))
    if use.primitive == "dot_general" and len(batch_axes) > 1 and spec_axes(used):
        contracted = contracted_entries(graph, use, used, None)
        free = _free_entries(graph, use, used)
        data = data and tuple(contracted.get(d, entry) if entry == FREE else entry for d, entry in enumerate(data))
        out = out and tuple(free.get(d, entry) if entry == FREE else entry for d, entry in enumerate(out))
        left = _left(graph, use, used)
        if out and left:
            ends = zip(out[-len(left) :], left, strict=True)
            out = (*out[: -len(left)], *(entry if own == FREE else own for own, entry in ends))
    pairs = ((data_operand, data), (-1, out))
    return [Constraint(use.site, operand, spec, use.layer, why) for operand, spec in pairs if spec is not None]


def _cotangent(graph: Graph, use: Use, used: Spec, batch_axes: tuple[str, ...]) -> list[Constraint]:
    """Pins the cotangent that a product of a backward pass which plain JAX traced gives, as `_gathered` pins what the
    forward pass reads: no constraint there is differentiated. The arguments are those of `_gathered`."""
    out = example_spec(graph, use.out_dims, batch_axes)
    if out is None or use.primitive != "dot_general" or len(batch_axes) < 2 or not spec_axes(used):
        return []
    left = _left(graph, use, used)
    if left is None:
        return []
    spec = (*out[: len(out) - len(left)], *left)
    why = "weight stored in parts: the cotangent of what it reads lies as that does"
    return [Constraint(use.site, -1, spec, use.layer, why)]


def _left(graph: Graph, use: Use, used: Spec) -> list[SpecEntry] | None:
    """Returns the axes of the dims of a product's weight that it does not contract, which stand last in its result;
    None where they do not, or the weight is not read with the parameter's dims. `used`: how the weight is split.

    A derivative contracts other dims than the forward pass, and the derivative of that the same ones:
    `Use.weight_names` knows. The result's dims are in no local class with the weight's, so that they are counted."""
    places = _places(graph, use)
    if use.weight != 1 or places is None or "expert" in use.weight_names:  # a dim of experts stands first
        return None
    num_contracted = (len(use.data_dims) + len(places) - len(use.out_dims)) // 2
    left = [
        used[place] if place < len(used) else None
        for place, name in zip(places, use.weight_names, strict=True)
        if name not in _READ
    ]
    return left if len(left) == len(places) - num_contracted else None


def _places(graph: Graph, use: Use) -> list[int] | None:
    """Returns which dim of its parameter each dim of a use's weight is: a table that is a head is transposed first.
    None where that is not known."""
    leaf = graph.leaf(use.param)
    if use.weight_dims == leaf.dims:
        return list(range(len(leaf.dims)))
    known = [tuple(graph.local[atom] for atom in dim) for dim in leaf.dims]
    own = [tuple(graph.local[atom] for atom in dim) for dim in use.weight_dims]
    if len(set(known)) < len(known) or sorted(own) != sorted(known):
        return None
    return [known.index(dim) for dim in own]


def _without(entry: SpecEntry, axes: Collection[str]) -> SpecEntry:
    return spec_entry([axis for axis in spec_axes((entry,)) if axis not in axes])


def _free_entries(graph: Graph, use: Use, weight_spec: Spec) -> dict[int, SpecEntry]:
    """Maps the position of every free dim of a use's weight in its result to the axes of that dim."""
    free = _by_class(graph, use, weight_spec, ())
    read = {graph.local[dim[0]] for dim in use.data_dims if dim}
    return {
        position: free[graph.local[dim[0]]]
        for position, dim in enumerate(use.out_dims)
        if dim and not graph.is_example(dim) and graph.local[dim[0]] in free.keys() - read
    }


def _crossing(
    graph: Graph, use: Use, data_operand: int, weight_spec: Spec, axes: tuple[str, ...], batch_axes: tuple[str, ...]
) -> list[Constraint]:
    """Pins what enters and leaves a layer that is split over `axes`. `data_operand`: the position of the
    activations."""
    rest = tuple(axis for axis in batch_axes if axis not in axes)
    spec = example_spec(graph, use.data_dims, rest)
    if spec is None:
        return []
    if use.primitive == "gather":
        # The indices of a lookup: whole in every dim but the examples.
        return [
            Constraint(
                use.site, data_operand, tuple(None if e == FREE else e for e in spec), use.layer, "crossing of a lookup"
            )
        ]
    contracted = contracted_entries(graph, use, weight_spec)
    full = tuple(contracted.get(position, FREE) if entry == FREE else entry for position, entry in enumerate(spec))
    why = f"crossing: examples over {_text(rest)}, layer over {_text(axes)}"
    out = _result_spec(graph, use, weight_spec, rest)
    # In a step whose backward pass is already traced, the weight's gradient reads the same data: in another layout XLA
    # reshards it once more, and jax 0.12.0.1 aborts ("ReplicateOnLastTileDim should not be called for HloShardingV3").
    twins = [Constraint(site, operand, full, use.layer, why) for site, operand in use.data_twins]
    return [
        Constraint(use.site, data_operand, full, use.layer, why),
        Constraint(use.site, -1, out, use.layer, why),
        *twins,
    ]


def _result_spec(graph: Graph, use: Use, weight_spec: Spec, rest: tuple[str, ...]) -> Spec:
    """Returns the result's layout: examples over the axes that are left, features like the weight's free dims. It pins
    the backward pass too: a cotangent with another layout would make XLA reshard through a full copy."""
    free = _by_class(graph, use, weight_spec, ("in",))
    entry = spec_entry(rest)
    return tuple(
        entry if graph.is_example(dim) else free.get(graph.local[dim[0]], FREE) if dim else None for dim in use.out_dims
    )


def _by_class(graph: Graph, use: Use, weight_spec: Spec, read: Collection[str]) -> dict[int, SpecEntry]:
    """Maps the local classes of a use's weight dims to the axes of these, without those dims whose names are `read`."""
    leaf = graph.leaf(use.param)
    return {
        graph.local[dim[0]]: weight_spec[d] if d < len(weight_spec) else None
        for d, dim in enumerate(leaf.dims)
        if dim and leaf.dim_names[d] not in read
    }


def contracted_entries(
    graph: Graph, use: Use, weight_spec: Spec, names: Collection[str] | None = ("in",)
) -> dict[int, SpecEntry]:
    """Maps the position of every contracted dim of the data to the axes of the weight dim that it meets. `names`: of
    the weight's contracted dims; None for any, as a derivative of the product contracts others."""
    leaf = graph.leaf(use.param)
    by_atom = {
        atom: weight_spec[d] if d < len(weight_spec) else None
        for d, dim in enumerate(leaf.dims)
        if names is None or leaf.dim_names[d] in names
        for atom in (graph.local[a] for a in dim[:1])
    }
    kept = {graph.local[a] for dim in use.out_dims for a in dim}
    out: dict[int, SpecEntry] = {}
    for position, dim in enumerate(use.data_dims):
        if dim and not graph.is_example(dim) and graph.local[dim[0]] in by_atom and graph.local[dim[0]] not in kept:
            out[position] = by_atom[graph.local[dim[0]]]
    return out


def _text(axes: tuple[str, ...]) -> str:
    return " x ".join(axes) if axes else "no axis"
