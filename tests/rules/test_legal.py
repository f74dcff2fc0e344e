"""Any assignment is legal, whatever the rules and however dims are linked."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.mesh import MeshShape
from splitjax.rules import Rule, RuleSet, assign, lint
from splitjax.rules.match import divides
from splitjax.trace.graph import KINDS, Graph, Layer, Leaf

NAMES = ("in", "out", "vocab", "expert")
AXES = ("data", "model", "extra")


@st.composite
def graphs(draw):
    """Layers of one to three parameters and some state, with arbitrary links between atoms of any two arrays."""
    sizes, local, hard, leaves, layers = [], [], [], [], []

    def array(path, role, layer=None, follows=None):
        dims = []
        for _ in range(draw(st.integers(0, 3))):
            factors = draw(st.lists(st.sampled_from((2, 3, 4, 6, 8, 16)), max_size=2))
            dims.append(tuple(range(len(sizes), len(sizes) + len(factors))))
            for size in factors:
                sizes.append(size)
                local.append(draw(st.integers(0, 6)))
                hard.append(local[-1] * 100 + draw(st.integers(0, 3)))
        shape = tuple(math.prod(sizes[atom] for atom in dim) for dim in dims)
        names = tuple(draw(st.sampled_from((*NAMES, None))) for _ in dims)
        leaves.append(Leaf(len(leaves), path, shape, "float32", role, True, tuple(dims), names, layer, follows))
        return path

    for number in range(draw(st.integers(1, 4))):
        name = f"l{number}"
        paths = tuple(array(f"params/{name}/p{i}", "param", name) for i in range(draw(st.integers(1, 3))))
        layers.append(Layer(name, draw(st.sampled_from(KINDS)), paths, 0, 0, "step.py:1"))
    array("params/loose", "param")
    for number in range(draw(st.integers(0, 2))):
        array(f"opt/{number}", "optimizer", follows=draw(st.sampled_from((None, "params/l0/p0"))))
    return Graph(
        tuple(leaves),
        tuple(layers),
        (),
        (),
        tuple(sizes),
        tuple(hard),
        tuple(local),
        tuple(local),
        frozenset(),
        None,
        1,
        0,
        0,
    )


def alternatives():
    refs = st.sampled_from((*NAMES, 0, 1, -1, "largest"))
    axes = st.lists(st.sampled_from(AXES), min_size=1, max_size=2, unique=True)
    return st.lists(st.dictionaries(refs, axes, min_size=1, max_size=2), max_size=3)


@st.composite
def rule_sets(draw):
    rules = [
        Rule(
            f"r{number}",
            draw(st.none() | st.sampled_from(KINDS)),
            draw(st.sampled_from((None, "**/p0", "**/p1", "**"))),
            shard=draw(alternatives()),
            ties=draw(st.sampled_from(("local", "hard"))),
            min_size=draw(st.none() | st.integers(0, 64)),
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    return RuleSet("any", tuple(rules), allow_replicated=True)


meshes = st.fixed_dictionaries({axis: st.sampled_from((1, 2, 3, 4)) for axis in AXES}).map(MeshShape.of)


def names(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@settings(deadline=None, max_examples=300)
@given(graphs(), rule_sets(), meshes)
def test_any_assignment_is_legal(graph, rules, mesh):
    found = assign(graph, rules, mesh)
    assert [leaf.path for leaf in found.leaves] == [leaf.path for leaf in graph.leaves]
    classes: dict[int, set] = {}
    for leaf, plan in zip(graph.leaves, found.leaves, strict=True):
        used = [axis for entry in plan.spec for axis in names(entry)]
        assert len(used) == len(set(used)) and all(mesh.size(axis) > 1 for axis in used)
        assert len(plan.spec) == len(leaf.shape) and plan.rule
        for size, atoms, entry in zip(leaf.shape, leaf.dims, plan.spec, strict=True):
            assert size % mesh.size(names(entry)) == 0
            assert divides([graph.atom_sizes[atom] for atom in atoms], mesh.size(names(entry)))
            if atoms and (leaf.role == "param" or not plan.note):
                classes.setdefault(graph.hard[atoms[0]], set()).add(entry)
        assert plan.bytes_per_device * mesh.size(used) == leaf.num_bytes
    # State of a class without parameter is whole, so one entry holds for parameters and state alike.
    assert all(len(entries) == 1 for entries in classes.values())
    assert found == assign(graph, rules, mesh)
    assert all(
        layer.specs == tuple(found.leaves[graph.leaf(path).index].spec for path in layer.params)
        for layer in found.layers
    )


@settings(deadline=None, max_examples=100)
@given(graphs(), rule_sets(), meshes)
def test_lint_never_raises_and_sees_every_misfit(graph, rules, mesh):
    findings = lint(rules, graph, mesh)
    misfits = {one.message.split()[0] for one in findings if one.check == "non-dividing"}
    conflicts = {one.message.split()[0] for one in findings if one.check == "conflicting" and one.severity == "warning"}
    params = {leaf.path for leaf in graph.params}
    noted = {note.split(":")[0] for note in assign(graph, rules, mesh).notes} & params
    assert noted == misfits | conflicts
    assert lint(rules, graph) is not None and lint(rules) is not None


@settings(deadline=None, max_examples=100)
@given(graphs(), meshes)
def test_a_dim_that_fits_is_sharded(graph, mesh):
    """Without ties, links or other rules in the way, the largest dim that divides is sharded: nothing stays whole
    silently."""
    unlinked = Graph(
        **{**graph.__dict__, "hard": tuple(range(len(graph.hard))), "local": tuple(range(len(graph.hard)))}
    )
    rules = RuleSet("all", (Rule("r", shard={"largest": "model"}, ties="hard"),), allow_replicated=True)
    if mesh.size("model") == 1:
        return
    for leaf, plan in zip(unlinked.leaves, assign(unlinked, rules, mesh).leaves, strict=True):
        sizes = [[graph.atom_sizes[atom] for atom in atoms] for atoms in leaf.dims]
        fits = [math.prod(factors) for factors in sizes if divides(factors, mesh.size("model"))]
        split = [size for size, entry in zip(leaf.shape, plan.spec, strict=True) if entry]
        assert leaf.role != "param" or split == ([max(fits)] if fits else [])
