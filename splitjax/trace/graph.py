"""The immutable picture of a traced training step that rules, costs and lowering read.

A tensor *dim* is an ordered tuple of *atoms* (factors), major first: a fused QKV output of 96 may be atoms of sizes
(4, 8, 3). Atoms are numbered; `Graph.atom_sizes[a]` is the size of atom `a`. Which atoms must, should or may be sharded
together is kept as one label per atom in each of three strengths:

- `hard`: the same storage (a parameter, its optimizer state, its new value, an accumulator): always sharded alike;
- `local`: linked by the computation inside a layer or between neighbours (first dense out, its bias, second dense in):
  shared by default, a rule may override;
- `soft`: linked through residual and carry edges: a possible reshard, never forced.

Equal labels mean linked; hard classes are finer than local ones, and local ones finer than soft ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

Dim = tuple[int, ...]
KINDS = ("conv", "dense", "embedding", "norm", "attention", "recurrent", "expert", "other")
ROLES = ("param", "optimizer", "statistic", "batch", "input")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among the step's flat arguments.

    `role`: `param` (the model reads it together with examples), `optimizer` (only updates read it), `statistic` (state
    that follows a layer's activations, such as batch norm's running mean), `batch` (leading dim is the example dim),
    `input` (keys, step numbers, anything else). State is what has role `param`, `optimizer` or `statistic`.
    """

    index: int  # position among the step's flat arguments
    path: str  # such as "params/Dense_0/kernel"
    shape: tuple[int, ...]
    dtype: str
    role: str
    is_state: bool  # it belongs to one of the state arguments
    dims: tuple[Dim, ...]  # per dim its atoms, major first; a dim of size 1 has none
    # per dim "in", "out", "vocab", "features", "height", "width", "expert", "stack", ... or None
    dim_names: tuple[str | None, ...] = ()
    layer: str | None = None  # the layer that uses it, for parameters
    follows: str | None = None  # for optimizer state: the path of its parameter

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize


@dataclasses.dataclass(frozen=True)
class Use:
    """One operation of a layer that mixes dims: a dot, a convolution, a lookup. What constraints and costs attach
    to."""

    layer: str
    primitive: str
    site: tuple[int, ...]  # equation indices from the outermost jaxpr inwards: see `trace.flatten`
    param: str  # path of the weight
    weight: int  # operand position of the weight
    data: int | None  # operand position of the activations; None for a lookup of constant ids
    data_shape: tuple[int, ...]
    data_dims: tuple[Dim, ...]
    data_dtype: str
    out_shape: tuple[int, ...]
    out_dims: tuple[Dim, ...]
    out_dtype: str
    flops: int  # forward flops of all repetitions
    trips: int  # how often it runs per step (scan lengths multiplied)
    source: str  # user's file:line
    backward: bool = False  # it belongs to a backward pass that plain JAX already traced
    editable: bool = True  # lowering can reach it: it is not inside a custom derivative rule
    fed_by: tuple[str, ...] = ()  # batch leaves whose values reach the data without passing another use
    # (site, operand) of products that read the same data: weight gradients
    data_twins: tuple[tuple[tuple[int, ...], int], ...] = ()
    weight_dims: tuple[Dim, ...] = ()  # of the weight operand, which may be a reshaped or stacked parameter's part
    # a `splitjax.value_and_grad` differentiates it, so that lowering says how it is differentiated
    in_boundary: bool = False


@dataclasses.dataclass(frozen=True)
class Spread:
    """An elementwise operation of a boundary's forward in which a parameter meets every example alike: a bias, a
    scale."""

    site: tuple[int, ...]
    layer: str
    param: str  # path of the parameter that the operand is made of
    operand: int
    dims: tuple[Dim, ...]  # of the operand
    example_dim: int  # of the result; the operand has size 1 there, or no such dim
    num_examples: int  # size of that dim
    trips: int


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One result of a gradient boundary: the gradient of a parameter, or of what is computed from it alone (a cast)."""

    site: tuple[int, ...]  # of the boundary's equation
    result: int  # position among its results
    param: str  # path of the parameter
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The operations that use one parameter set."""

    name: str
    kind: str
    params: tuple[str, ...]  # leaf paths, weight first
    flops: int  # forward flops per step
    num_bytes: int  # of its parameters
    source: str


@dataclasses.dataclass(frozen=True)
class Unknown:
    """An operation that has to run replicated if something sharded reaches it, because its primitive has no dim
    rule."""

    primitive: str
    site: tuple[int, ...]
    source: str
    operand_dims: tuple[tuple[Dim, ...], ...]
    result_dims: tuple[tuple[Dim, ...], ...]


@dataclasses.dataclass(frozen=True)
class ConvolutionDims:
    """The atoms behind the dims of a convolution; a kind of dim that it lacks, or whose size is 1, has none.

    - `groups`: of feature groups or batch groups; data, weight and result share them.
    - `batch`: of the data (in each batch group) that the result keeps.
    - `contracted`: of the features (in each feature group) that data and weight share and the result lacks.
    - `features`: of the weight's output (in each group) that the result keeps.
    """

    groups: Dim
    batch: Dim
    contracted: Dim
    features: Dim


@dataclasses.dataclass(frozen=True)
class TouchedDims:
    """Some `dims` of an operand (by its position) or a result (-1 is the first) of an operation; `atoms`: of all of its
    dims."""

    position: int
    dims: tuple[int, ...]
    atoms: tuple[Dim, ...]

    @property
    def chosen(self) -> tuple[Dim, ...]:
        """The atoms of the chosen dims."""
        return tuple(self.atoms[dim] for dim in self.dims)


@dataclasses.dataclass(frozen=True)
class Suspect:
    """An operation that a row of `splitjax.partitioner.DEFECTS` covers: XLA's partitioner may compute it wrongly.

    - `defect`: the name of the row; `primitive`, `site`, `source`: of the operation.
    - `touched`: the dims that must not be split while XLA partitions it.
    - `editable`: whether lowering can reach it: it does not stand inside a custom derivative rule.
    - `rule_at`: otherwise the site of the `custom_jvp` or `custom_vjp` call that it stands in; None in another kind of
      call.
    - `backward`: whether it belongs to a backward pass that plain JAX already traced.
    - `convolution`: the atoms of a convolution that lowering evaluates device by device; None for other operations.
    """

    defect: str
    primitive: str
    site: tuple[int, ...]
    source: str
    touched: tuple[TouchedDims, ...]
    editable: bool
    rule_at: tuple[int, ...] | None
    backward: bool
    convolution: ConvolutionDims | None = None


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One gather of rows from a table."""

    site: tuple[int, ...]
    operand_dtype: str  # of the table as the gather reads it
    num_ids: int  # rows picked, with all repetitions of a loop
    trips: int
    mode: str  # what ids outside the table mean: clip, fill_or_drop, promise_in_bounds
    source: str  # user's file:line


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """An update that can run on the rows alone that a step touched.

    - `leaves`: the flat arguments whose rows it reads or writes, the table first.
    - `totals`: values behind the gradient that are sums over its rows (a norm): fillers of zero add nothing to them.
    """

    leaves: tuple[int, ...]
    totals: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A parameter with row lookups.

    - `param`: its path; `boundary`: the site of the gradient boundary that differentiates it.
    - `num_rows`: its rows.
    - `lookups`: all of them.
    - `update`: how its update runs on touched rows alone; None if it cannot, or if the gradient is dense.
    - `reason`: why the table's gradient stays dense, with the line; empty if it need not.
    - `lazy_update`: how its update runs on touched rows where it changes others too, and these are to be left alone all
      the same, which changes the numbers.
    """

    param: str
    boundary: tuple[int, ...]
    num_rows: int
    lookups: tuple[Lookup, ...]
    update: RowUpdate | None
    reason: str = ""
    lazy_update: RowUpdate | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether its gradient can stay rows from lookup to update."""
        return not self.reason


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced step: its leaves in flat order, its layers in program order, and the dim classes."""

    leaves: tuple[Leaf, ...]
    layers: tuple[Layer, ...]
    uses: tuple[Use, ...]
    unknown: tuple[Unknown, ...]
    atom_sizes: tuple[int, ...]
    hard: tuple[int, ...]  # label per atom
    local: tuple[int, ...]
    soft: tuple[int, ...]
    example_atoms: frozenset[int]  # atoms that are (part of) the example dim
    num_examples: int | None  # size of the example dim, None where no batch argument has one
    num_boundaries: int  # how many splitjax.value_and_grad equations the step holds
    flops: int  # forward flops of all layers
    activation_bytes: int  # forward values that a backward pass may keep alive, whole batch
    notes: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()  # operations that XLA's partitioner may compute wrongly, in program order
    gradients: tuple[Gradient, ...] = ()  # of parameters, by every boundary
    spreads: tuple[Spread, ...] = ()  # in program order
    tables: tuple[Table, ...] = ()  # parameters that rows are looked up in

    def leaf(self, path: str) -> Leaf:
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(path)

    @property
    def params(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.role == "param")

    @property
    def state(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.is_state)

    def layer(self, name: str) -> Layer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def is_example(self, dim: Dim) -> bool:
        """Whether a dim's leading atom is the example dim."""
        return bool(dim) and dim[0] in self.example_atoms

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)


def itemsize(dtype: str) -> int:
    import numpy as np

    if dtype.startswith("key<"):  # a typed PRNG key array: threefry keys are two 32-bit words
        return 8
    import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 family with numpy)

    return np.dtype(dtype).itemsize
