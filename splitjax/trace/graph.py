"""Defines the immutable picture of a traced training step that rules, costs and lowering read.

A tensor *dim* is an ordered tuple of *atoms* (factors), major first: a fused QKV output of 96 may be atoms of sizes
(4, 8, 3). Atoms are numbered; `Graph.atom_sizes[a]` is the size of atom `a`. Which atoms must, should or may be
sharded together is kept as one label per atom in each of three strengths:

- `hard`: the same storage (a parameter, its optimizer state, its new value, an accumulator): always sharded alike;
- `local`: linked by the computation inside a layer or between neighbours (first dense out, its bias, second dense
  in): shared by default, a rule may override;
- `soft`: linked through residual and carry edges: a possible reshard, never forced.

Equal labels mean linked; hard classes are finer than local ones, and local ones finer than soft ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from splitjax.trace.activations.joined import Joined
from splitjax.trace.activations.outputs import Output
from splitjax.trace.activations.picks import Pick
from splitjax.trace.activations.reductions import Reduction
from splitjax.trace.activations.saved import Saved
from splitjax.trace.activations.statistics import Statistic
from splitjax.trace.activations.streams import Stream
from splitjax.trace.cuts import BatchCut
from splitjax.trace.dealt import DealtWeight
from splitjax.trace.stepping import TurnedBatch
from splitjax.trace.suspect_dims import Dim, Suspect
from splitjax.trace.tables import LookupTable

Given = ParamSpec("Given")
Made = TypeVar("Made")
KINDS: tuple[str, ...] = ("conv", "dense", "embedding", "norm", "attention", "recurrent", "expert", "other")
ROLES: tuple[str, ...] = ("param", "optimizer", "statistic", "batch", "input")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Describes an array among the step's flat arguments.

    - `index`: its position among the step's flat arguments.
    - `path`: such as "params/Dense_0/kernel".
    - `shape`, `dtype`: its sizes per dim and the name of its dtype.
    - `role`: `param` (the model reads it together with examples), `optimizer` (only updates read it), `statistic`
      (state that follows a layer's activations, such as batch norm's running mean), `batch` (leading dim is the
      example dim), `input` (keys, step numbers, anything else). State is what has role `param`, `optimizer` or
      `statistic`.
    - `is_state`: whether it belongs to one of the state arguments.
    - `dims`: per dim its atoms, major first; a dim of size 1 has none.
    - `dim_names`: per dim "in", "out", "vocab", "features", "height", "width", "expert", "stack", ... or None.
    - `layer`: for a parameter, the layer that uses it.
    - `follows`: for optimizer state, the path of its parameter.
    - `example_dim`: for a batch, the dim that holds examples: 1 where the first counts steps or microbatches of a loop.
    - `turns`: for a parameter, how often per step its gradient is taken: more than once in a loop around the gradient.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    is_state: bool
    dims: tuple[Dim, ...]
    dim_names: tuple[str | None, ...] = ()
    layer: str | None = None
    follows: str | None = None
    example_dim: int = 0
    turns: int = 1

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return itemsize(self.dtype)

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole array."""
        return self.size * self.itemsize


@dataclasses.dataclass(frozen=True)
class Use:
    """Describes an operation of a layer that mixes dims: a dot, a convolution, a lookup. Constraints and costs attach
    to it.

    - `layer`: the name of the layer.
    - `primitive`, `site`: of the operation; a site is equation indices from the outermost jaxpr inwards
      (`trace.flatten`).
    - `param`: path of the weight. `beside`: of parameters of the same shape that the weight operand is made of, too:
      the gates of a cell, which are concatenated.
    - `weight`, `data`: operand positions of the weight and of the activations; `data` is None for a lookup of
      constant ids.
    - `data_shape`, `data_dims`, `data_dtype`: of the activations; of the result for a lookup of constant ids.
    - `out_shape`, `out_dims`, `out_dtype`: of the result.
    - `flops`: forward flops of all repetitions.
    - `trips`: how often it runs per step (scan lengths multiplied).
    - `source`: the user's file:line.
    - `backward`: whether it belongs to a backward pass that plain JAX already traced.
    - `editable`: whether lowering can reach it: it is not inside a custom derivative rule.
    - `fed_by`: batch leaves whose values reach the data without passing another use.
    - `data_twins`: (site, operand) of products that read the same data: weight gradients.
    - `weight_dims`: dims of the weight operand, which may be a reshaped or stacked parameter's part. `weight_dtype`:
      of the operand: not the parameter's where that is cast. `weight_names`: what this operation does with each of
      these dims (`in`: contracts it), or None: a backward pass, and that of a backward pass, contract others than the
      forward pass, by which the parameter's are named.
    - `in_boundary`: whether a `splitjax.value_and_grad` differentiates it, so that lowering says how.
    - `by_labels`: whether the labels of its dims say how it is split (`primitives.operation.Weights`), each dim one.
    - `adds_up`: whether what the parts of a contracted dim give adds up to the result, as the product is linear in
      either operand.
    - `data_value`: the number of the activations among the step's values: uses that have the same number read the very
      same value. None where that is not known.
    - `repeated`: how often rematerialisation computes its result again. `reread`: how often its operands.
    - `reads_state`: whether it reads, in every iteration of a loop, what it gave in the iteration before.
    - `reads_learned`: whether parameters reach the activations, so that somebody asks for their cotangent.
    - `copied`: whether the weight operand holds columns of a fused weight that are copied to all devices.
    """

    layer: str
    primitive: str
    site: tuple[int, ...]
    param: str
    weight: int
    data: int | None
    data_shape: tuple[int, ...]
    data_dims: tuple[Dim, ...]
    data_dtype: str
    out_shape: tuple[int, ...]
    out_dims: tuple[Dim, ...]
    out_dtype: str
    flops: int
    trips: int
    source: str
    backward: bool = False
    editable: bool = True
    fed_by: tuple[str, ...] = ()
    data_twins: tuple[tuple[tuple[int, ...], int], ...] = ()
    weight_dims: tuple[Dim, ...] = ()
    weight_names: tuple[str | None, ...] = ()
    in_boundary: bool = False
    data_value: int | None = None
    by_labels: bool = False
    adds_up: bool = False
    weight_dtype: str = ""
    repeated: int = 0
    reread: int = 0
    beside: tuple[str, ...] = ()
    reads_state: bool = False
    reads_learned: bool = False
    copied: bool = False


@dataclasses.dataclass(frozen=True)
class Spread:
    """Describes an elementwise operation of a boundary's forward in which a parameter meets every example alike: a
    bias, a scale.

    - `site`: of the operation.
    - `layer`: the name of the parameter's layer.
    - `param`: path of the parameter that the operand is made of.
    - `operand`, `dims`: the operand's position and its dims.
    - `example_dim`: the result's dim of examples; the operand has size 1 there, or no such dim.
    - `num_examples`: the size of that dim.
    - `trips`: how often it runs per step.
    """

    site: tuple[int, ...]
    layer: str
    param: str
    operand: int
    dims: tuple[Dim, ...]
    example_dim: int
    num_examples: int
    trips: int


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Describes a result of a gradient boundary: the gradient of a parameter, or of what is computed from it alone (a
    cast).

    - `site`: of the boundary's equation.
    - `result`: the position among its results.
    - `param`: path of the parameter.
    - `shape`: of the gradient.
    """

    site: tuple[int, ...]
    result: int
    param: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ScannedBatch:
    """Describes what a loop around the gradient reads turn by turn: its microbatches, or the batches of its steps.

    - `site`, `operand`: of the scan, or of the operation that picks a turn's part; and the operand's position.
    - `dims`: of the operand; the first counts the loop's turns. `fed_by`: the batch leaves that it is made of.
    """

    site: tuple[int, ...]
    operand: int
    dims: tuple[Dim, ...]
    fed_by: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Layer:
    """Describes the operations that use one parameter set.

    - `name`: such as "params/Dense_0".
    - `kind`: one of `KINDS`.
    - `params`: leaf paths, the weight's first.
    - `flops`: forward flops per step.
    - `num_bytes`: bytes of its parameters.
    - `source`: the user's file:line of its first use.
    """

    name: str
    kind: str
    params: tuple[str, ...]
    flops: int
    num_bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Describes an operation that has to run replicated if something sharded reaches it, because its primitive has no
    dim rule.

    - `primitive`, `site`, `source`: of the operation; `source` is the user's file:line.
    - `operand_dims`, `result_dims`: the dims of every operand and of every result.
    """

    primitive: str
    site: tuple[int, ...]
    source: str
    operand_dims: tuple[tuple[Dim, ...], ...]
    result_dims: tuple[tuple[Dim, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignCall:
    """Describes an operation that runs code which is not partitioned like the rest of the step: a kernel, a callback, a
    user's own `shard_map`.

    - `primitive`, `site`, `source`: of the operation; `source` is the user's file:line.
    - `eqn`: its equation.
    - `operand_dims`, `result_dims`: the dims of every operand and of every result.
    - `editable`: whether lowering can reach it: it does not stand inside a custom derivative rule.
    - `rule`: the equation of the outermost function with such a rule that it stands in; None for none.
    """

    primitive: str
    site: tuple[int, ...]
    source: str
    eqn: Any
    operand_dims: tuple[tuple[Dim, ...], ...]
    result_dims: tuple[tuple[Dim, ...], ...]
    editable: bool
    rule: Any = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """Holds a traced step: its leaves in flat order, its layers in program order, and the dim classes.

    - `leaves`, `layers`, `uses`: what the step's arguments and operations are.
    - `unknown`: operations whose primitive has no dim rule.
    - `atom_sizes`: the size of every atom.
    - `hard`, `local`, `soft`: per atom the label of its class of that strength.
    - `example_atoms`: atoms that are (part of) the example dim.
    - `num_examples`: the size of the example dim; None where no batch argument has one, or where they disagree (the
      nodes and the edges of graphs).
    - `num_boundaries`: how many splitjax.value_and_grad equations the step holds.
    - `flops`: forward flops of all layers.
    - `activation_bytes`: bytes of forward values that a backward pass may keep alive, for the whole batch.
    - `notes`: lines for the plan.
    - `suspects`: operations that XLA's partitioner may compute wrongly, in program order.
    - `gradients`: gradients of parameters, by every boundary.
    - `spreads`: where parameters meet every example alike, in program order.
    - `reductions`: of activations, with a result for each example, in program order.
    - `statistics`: sums of activations over all examples that running averages are made of, by leaf.
    - `picks`: where rows of activations are picked from all examples, or put among them, in program order.
    - `tables`: parameters that rows are looked up in.
    - `scanned`: what loops around the gradient read turn by turn and holds examples. `turned`: where the batch is cut
      into such turns. `cuts`: where a part of its examples is taken, in program order.
    - `foreign`: kernels, callbacks and `shard_map`s of the user's own, in program order.
    - `dealt`: fused weights whose columns are dealt out to devices, in program order.
    - `inside_heads`: local labels of the atoms that lie inside of a head of an attention.
    - `joined`: what reads activations that are concatenated with others, in program order.
    - `streams`: uses whose outputs meet earlier ones element by element. `outputs`: by site of a use, the biases
      behind it.
    - `saved`: activations that are stored for rematerialised calls, in program order.
    - `added`: the paths of parameters that the forward computation reads as summands alone, such as biases.

    Iterating over a graph gives its layers.
    """

    leaves: tuple[Leaf, ...]
    layers: tuple[Layer, ...]
    uses: tuple[Use, ...]
    unknown: tuple[Unknown, ...]
    atom_sizes: tuple[int, ...]
    hard: tuple[int, ...]
    local: tuple[int, ...]
    soft: tuple[int, ...]
    example_atoms: frozenset[int]
    num_examples: int | None
    num_boundaries: int
    flops: int
    activation_bytes: int
    notes: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    spreads: tuple[Spread, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    statistics: tuple[Statistic, ...] = ()
    picks: tuple[Pick, ...] = ()
    tables: tuple[LookupTable, ...] = ()
    scanned: tuple[ScannedBatch, ...] = ()
    turned: tuple[TurnedBatch, ...] = ()
    cuts: tuple[BatchCut, ...] = ()
    foreign: tuple[ForeignCall, ...] = ()
    dealt: tuple[DealtWeight, ...] = ()
    inside_heads: frozenset[int] = frozenset()
    joined: tuple[Joined, ...] = ()
    streams: tuple[Stream, ...] = ()
    outputs: Mapping[tuple[int, ...], Output] = dataclasses.field(default_factory=dict)
    saved: tuple[Saved, ...] = ()
    added: frozenset[str] = frozenset()

    @functools.cached_property
    def _by_path(self) -> Mapping[str, Leaf]:
        return {leaf.path: leaf for leaf in reversed(self.leaves)}

    @functools.cached_property
    def _made(self) -> dict[Hashable, object]:
        return {}

    def once(self, make: Callable[Concatenate[Graph, Given], Made], *given: Given.args, **named: Given.kwargs) -> Made:
        """Returns `make(graph, *given, **named)`, and the same value again when it is asked for the same again: for
        what is derived of the graph alone and is never changed, such as tables that every layout of it is decided by.
        `given`, `named`: can be hashed."""
        key = make, given, tuple(named.items())
        if key not in self._made:
            self._made[key] = make(self, *given, **named)
        return cast("Made", self._made[key])

    def leaf(self, path: str) -> Leaf:
        """Returns the leaf at `path`. Raises `KeyError` where there is none."""
        return self._by_path[path]

    @property
    def params(self) -> tuple[Leaf, ...]:
        """The parameters, in flat order."""
        return tuple(leaf for leaf in self.leaves if leaf.role == "param")

    @property
    def state(self) -> tuple[Leaf, ...]:
        """The leaves that belong to state arguments, in flat order."""
        return tuple(leaf for leaf in self.leaves if leaf.is_state)

    def layer(self, name: str) -> Layer:
        """Returns the layer called `name`. Raises `KeyError` where there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def is_example(self, dim: Dim) -> bool:
        """Tells whether the leading atom of `dim` is the example dim."""
        return bool(dim) and dim[0] in self.example_atoms

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)


@functools.cache
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element of the dtype called `dtype`; a PRNG key (`key<fry>`) is two 32-bit words."""
    import numpy as np

    if dtype.startswith("key<"):  # a typed PRNG key array: threefry keys are two 32-bit words
        return 8
    import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 family with numpy)

    return np.dtype(dtype).itemsize
