"""Defines what is known of an operation that XLA's partitioner may compute wrongly: which, where, and its dims."""

from __future__ import annotations

import dataclasses

Dim = tuple[int, ...]  # the atoms of a tensor dim, major first; see `splitjax.trace.graph`


@dataclasses.dataclass(frozen=True)
class ConvolutionDims:
    """Names the atoms behind the dims of a convolution; a kind of dim that it lacks, or whose size is 1, has none.

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
class TransformDims:
    """Describes what a Fourier transform reads and gives, for the whole batch.

    - `num_transformed`: how many dims it transforms: the last ones.
    - `operand_shape`, `result_shape`: sizes of its dims.
    - `operand_dtype`: of what it reads; of real numbers where they are converted to complex ones right before it.
    - `result_dtype`: of what is used of its result; of real numbers where that is the real part alone.
    - `trips`: how often it runs per step.
    """

    num_transformed: int
    operand_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    operand_dtype: str
    result_dtype: str
    trips: int


@dataclasses.dataclass(frozen=True)
class TouchedDims:
    """Selects some dims of an operand or a result of an operation.

    - `position`: of the operand; -1 is the first result, -2 the second.
    - `dims`: the selected dims.
    - `atoms`: the atoms of all dims of that operand or result.
    """

    position: int
    dims: tuple[int, ...]
    atoms: tuple[Dim, ...]

    @property
    def chosen(self) -> tuple[Dim, ...]:
        """The atoms of the chosen dims."""
        return tuple(self.atoms[dim] for dim in self.dims)


@dataclasses.dataclass(frozen=True)
class Suspect:
    """Describes an operation that a row of `splitjax.partitioner.DEFECTS` covers: XLA's partitioner may compute it
    wrongly.

    - `defect`: the name of the row; `primitive`, `site`, `source`: of the operation.
    - `touched`: the dims that must not be split while XLA partitions it.
    - `editable`: whether lowering can reach it: it does not stand inside a custom derivative rule.
    - `rule_at`: otherwise the site of the `custom_jvp` or `custom_vjp` call that it stands in; None in another kind
      of call.
    - `backward`: whether it belongs to a backward pass that plain JAX already traced.
    - `convolution`: the atoms of a convolution that lowering evaluates device by device; None for other operations.
    - `transform`: the sizes of a Fourier transform; None for other operations.
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
    transform: TransformDims | None = None
