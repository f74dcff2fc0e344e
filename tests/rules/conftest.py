"""Small graphs written by hand. A parameter's dims are one string: `in:784 out:4096@h` is a dim named "in" of 784
elements and one named "out" of 4096 in the local class `h`; `out:4x8@h#t` has atoms of 4 and 8 and the hard class `t`,
and `_:10` no name, as the dims of biases that tracing gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest

from splitjax.trace.graph import Graph, Layer, Leaf


@dataclasses.dataclass
class Builder:
    """Collects leaves and layers, numbering atoms and classes."""

    sizes: list[int] = dataclasses.field(default_factory=list)
    hard: list[int] = dataclasses.field(default_factory=list)
    local: list[int] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    leaves: list[Leaf] = dataclasses.field(default_factory=list)
    layers: list[Layer] = dataclasses.field(default_factory=list)

    def atom(self, size: int, hard: str, local: str) -> int:
        label = self.labels.setdefault("hard " + hard, len(self.labels))
        near = self.labels.setdefault("local " + (local or hard), len(self.labels))
        for other, one in enumerate(self.hard):
            assert one != label or self.local[other] == near, "hard classes are finer than local ones"
        self.sizes.append(size)
        self.hard.append(label)
        self.local.append(near)
        return len(self.sizes) - 1

    def leaf(
        self, path: str, dims: str, role: str = "param", layer: str | None = None, follows: str | None = None
    ) -> Leaf:
        names, shape, atoms = [], [], []
        for position, text in enumerate(dims.split()):
            text, _, hard = text.partition("#")
            text, _, local = text.partition("@")
            name, _, sizes = text.partition(":")
            factors = [int(size) for size in sizes.split("x")]
            names.append(None if name == "_" else name)
            shape.append(math.prod(factors))
            atoms.append(
                tuple(
                    self.atom(size, (hard or f"{path} {position}") + f" {i or ''}", local and local + f" {i or ''}")
                    for i, size in enumerate(factors)
                    if size > 1
                )
            )
        leaf = Leaf(
            len(self.leaves),
            path,
            tuple(shape),
            "float32",
            role,
            role not in ("batch", "input"),
            tuple(atoms),
            tuple(names),
            layer,
            follows,
        )
        self.leaves.append(leaf)
        return leaf

    def layer(self, name: str, kind: str, **params: str) -> None:
        """A layer whose parameters are keywords, weight first."""
        leaves = [self.leaf(f"params/{name}/{key}", dims, layer=name) for key, dims in params.items()]
        self.layers.append(
            Layer(
                name, kind, tuple(leaf.path for leaf in leaves), 0, sum(leaf.num_bytes for leaf in leaves), "step.py:1"
            )
        )

    def moments(self, *paths: str) -> None:
        """Optimizer state in the storage classes of these parameters (all without arguments)."""
        for leaf in [leaf for leaf in self.leaves if leaf.role == "param" and (not paths or leaf.path in paths)]:
            dims = []
            for dim in leaf.dims:
                start = len(self.sizes)
                for atom in dim:
                    self.sizes.append(self.sizes[atom])
                    self.hard.append(self.hard[atom])
                    self.local.append(self.local[atom])
                dims.append(tuple(range(start, len(self.sizes))))
            path = leaf.path.replace("params", "opt/mu", 1)
            self.leaves.append(
                Leaf(
                    len(self.leaves),
                    path,
                    leaf.shape,
                    leaf.dtype,
                    "optimizer",
                    True,
                    tuple(dims),
                    leaf.dim_names,
                    None,
                    leaf.path,
                )
            )

    def graph(self, batch: int | None = 32) -> Graph:
        example = frozenset()
        if batch is not None:
            image = self.leaf("batch/image", f"example:{batch} _:3", role="batch")
            example = frozenset(image.dims[0])
        return Graph(
            leaves=tuple(self.leaves),
            layers=tuple(self.layers),
            uses=(),
            unknown=(),
            atom_sizes=tuple(self.sizes),
            hard=tuple(self.hard),
            local=tuple(self.local),
            soft=tuple(self.local),
            example_atoms=example,
            num_examples=batch,
            num_boundaries=1,
            flops=0,
            activation_bytes=0,
        )


Layers = Sequence[tuple[str, str, dict[str, str]]]


def make(layers: Layers, batch: int | None = 32) -> Graph:
    """A graph of layers (name, kind, parameters weight first) with Adam's first moments and one batch argument."""
    builder = Builder()
    for name, kind, params in layers:
        builder.layer(name, kind, **params)
    builder.moments()
    return builder.graph(batch)


VGG: Layers = [
    ("conv", "conv", {"kernel": "height:3 width:3 in:3 out:64@c", "bias": "_:64@c"}),
    ("norm", "norm", {"scale": "_:64@c", "bias": "_:64@c"}),
    ("fc1", "dense", {"kernel": "in:7x7x64 out:4096@h1", "bias": "_:4096@h1"}),
    ("fc2", "dense", {"kernel": "in:4096@h1 out:4096@h2", "bias": "_:4096@h2"}),
    ("fc3", "dense", {"kernel": "in:4096@h2 out:10@k", "bias": "_:10@k"}),
]
BLOCK: Layers = [
    ("embed", "embedding", {"table": "vocab:1000@v features:64@d"}),
    ("ln", "norm", {"scale": "_:64@d1"}),
    ("q", "attention", {"kernel": "in:64@d1 out:8x8@heads", "bias": "_:8x8@heads"}),
    ("k", "attention", {"kernel": "in:64@d1 out:8x8@heads", "bias": "_:8x8@heads"}),
    ("v", "attention", {"kernel": "in:64@d1 out:8x8@heads", "bias": "_:8x8@heads"}),
    ("o", "attention", {"kernel": "in:8x8@heads out:64@d2", "bias": "_:64@d2"}),
    ("fc1", "dense", {"kernel": "in:64@d3 out:256@f", "bias": "_:256@f"}),
    ("fc2", "dense", {"kernel": "in:256@f out:64@d4", "bias": "_:64@d4"}),
]
MOE: Layers = [
    ("router", "dense", {"kernel": "in:64@d out:8@r"}),
    (
        "experts",
        "expert",
        {
            "w1": "expert:8@e in:64@d out:256@f",
            "b1": "_:8@e _:256@f",
            "w2": "expert:8@e in:256@f out:64@d2",
            "b2": "_:8@e _:64@d2",
        },
    ),
]
FLAT: Layers = [("w1", "dense", {"w": "in:16 out:32@h"}), ("w2", "dense", {"w": "in:32@h out:4"})]


@pytest.fixture(scope="session")
def build() -> Callable[..., Graph]:
    return make


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture(scope="session")
def vgg() -> Graph:
    return make(VGG)


@pytest.fixture(scope="session")
def block() -> Graph:
    return make(BLOCK)


@pytest.fixture(scope="session")
def moe() -> Graph:
    return make(MOE)


@pytest.fixture(scope="session")
def flat() -> Graph:
    return make(FLAT)
