"""Evaluates convolutions that XLA's partitioner is not asked about: each device its own part, in a `shard_map`.

Goes in: an equation that a row of `splitjax.partitioner.DEFECTS` covers, and by the plan the mesh axes over which its
examples, groups and features are split. Comes out: its result, differentiable, with the numbers of one device. It
exists because XLA multiplies weight gradients of grouped convolutions by the size of an axis over which the examples
are whole, or gathers all examples on every device (xla#47945), or ends the process.

With the kinds of dims of `cost.convolutions`, `data[b, g i] * weight[g o, i] -> result[b, g o]`: what is split over an
axis along any of them is convolved by each device for itself; what is summed over a split dim (`i` forward, `o` in the
data's gradient, `b` in the weight's) leaves by an all-reduce over its axes. Along a dim of two kinds, such as `g i`,
only the groups can be split: each device's part has to be in one piece.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.cost.convolutions import LocalConvolution
from splitjax.cost.flow import Axes
from splitjax.lower.products.groups import scope
from splitjax.mesh import MeshShape
from splitjax.planning.sites.mesh_context import MeshContext

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """Joins an equation with the axes that split it here. Specs are of whole values.

    - `split`: the axes that its sizes allow, less those that a surrounding `shard_map` handles already.
    - `where`: the mesh of the evaluation. `eqn`: the equation.
    - `rank`: of data, weight and result.
    """

    split: LocalConvolution
    where: MeshContext
    eqn: Any
    rank: int

    @property
    def data_spec(self) -> PartitionSpec:
        """The data, of which each device convolves a part."""
        numbers, params = self.eqn.params["dimension_numbers"], self.eqn.params
        batch, feature = numbers.lhs_spec[:2]
        examples = self.split.groups if params["batch_group_count"] > 1 else self.split.batch
        features = self.split.groups if params["feature_group_count"] > 1 else self.split.contracted
        return _spec(self.rank, {batch: examples, feature: features})

    @property
    def weight_features(self) -> int:
        """The weight's dim of groups and free features."""
        return self.eqn.params["dimension_numbers"].rhs_spec[0]

    @property
    def result_features(self) -> int:
        """The result's dim of groups and free features."""
        return self.eqn.params["dimension_numbers"].out_spec[1]

    def gathered(self, gradient: jax.Array, dim: int) -> jax.Array:
        """Gathers a weight's gradient inside the `shard_map`: the groups of all devices along `dim`, where the weight
        is whole."""
        return lax.all_gather(gradient, self.split.gathered, axis=dim, tiled=True) if self.split.gathered else gradient

    @property
    def weight_spec(self) -> PartitionSpec:
        """The weight, of which each device convolves with a part."""
        out, into = self.eqn.params["dimension_numbers"].rhs_spec[:2]
        return _spec(self.rank, {out: self.split.groups or self.split.features, into: self.split.contracted})

    @property
    def result_spec(self) -> PartitionSpec:
        """The result, in parts."""
        batch, feature = self.eqn.params["dimension_numbers"].out_spec[:2]
        return _spec(self.rank, {batch: self.split.batch, feature: self.split.groups or self.split.features})

    def local(self, data: jax.Array, weight: jax.Array) -> jax.Array:
        """Convolves a device's part of data with its part of the weight; the results are summands over the axes of
        `contracted`."""
        num_parts, params = MeshShape.of(self.where.mesh).size(self.split.groups), self.eqn.params
        kind = "feature_group_count" if params["feature_group_count"] > 1 else "batch_group_count"
        eqn = _compat.with_params(self.eqn, **{kind: params[kind] // num_parts}) if num_parts > 1 else self.eqn
        return _compat.bind_equation(eqn, (data, weight))[0]


def _spec(rank: int, entries: Mapping[int, Axes]) -> PartitionSpec:
    return PartitionSpec(*(entries.get(dim) or None for dim in range(rank)))


def evaluate_local(
    split: LocalConvolution, eqn: Any, operands: Sequence[jax.Array], where: MeshContext
) -> list[jax.Array]:
    """Evaluates a convolution device by device over all mesh axes that `where` leaves, and returns its result in a
    list.

    **Arguments:**

    - `split`: the mesh axes over which the plan splits its dims, by kind of dim.
    - `eqn`: the equation, a `conv_general_dilated`.
    - `operands`: data and weight, of the same rank.
    - `where`: the mesh, and the axes of it that are handled already.
    """
    data, weight = operands
    left = tuple(axis for axis in where.mesh.axis_names if axis not in where.manual)
    if not left:
        return _compat.bind_equation(eqn, operands)
    with jax.named_scope(scope("convolve", split.layer)):
        here = _dividing(split, eqn, (data.shape, weight.shape), where)
        return [convolve(_Convolution(here, where, eqn, data.ndim), data, weight)]


def is_whole(split: LocalConvolution, eqn: Any, shapes: tuple[Shape, Shape], where: MeshContext) -> bool:
    """Tells whether no axis that `where` leaves splits the convolution `eqn` of data and weight of these `shapes`, as
    `split` has it: every device along these axes computes all of it then."""
    here = _dividing(split, eqn, shapes, where)
    return not (here.groups or here.gathered or here.batch or here.contracted or here.features)


def _dividing(split: LocalConvolution, eqn: Any, shapes: tuple[Shape, Shape], where: MeshContext) -> LocalConvolution:
    """Returns the axes that split an equation here, whose data and weight have these shapes. A dim that does not divide
    by its axes is whole, and so is a dim of two kinds whose groups are not split in one piece."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    data, weight = shapes
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    num_groups = feature_groups * batch_groups
    size = MeshShape.of(where.mesh).size
    fits = lambda axes, count: axes if (axes := where.left(axes)) and count % size(axes) == 0 else ()
    groups = fits(split.groups, num_groups) if num_groups > 1 else ()
    return dataclasses.replace(
        split,
        groups=groups,
        gathered=where.left(split.gathered) if groups else (),
        batch=fits(split.batch, data[numbers.lhs_spec[0]]) if batch_groups == 1 else (),
        contracted=fits(split.contracted, weight[numbers.rhs_spec[1]]) if feature_groups == 1 else (),
        features=fits(split.features, weight[numbers.rhs_spec[0]]) if num_groups == 1 else (),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolve(convolution: _Convolution, data: jax.Array, weight: jax.Array) -> jax.Array:
    """Evaluates `convolution` of whole `data` and `weight`, each device's part by itself; its derivative likewise."""
    split = convolution.split

    def local(data: jax.Array, weight: jax.Array) -> jax.Array:
        result = convolution.local(data, weight)
        result = lax.psum(result, split.contracted) if split.contracted else result
        return convolution.gathered(result, convolution.result_features) if split.param is None else result

    specs = (convolution.data_spec, convolution.weight_spec)
    out_spec = PartitionSpec() if split.param is None and split.gathered else convolution.result_spec
    return _map(convolution, local, specs, out_spec)(data, weight)


def _forward(
    convolution: _Convolution, data: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolve(convolution, data, weight), (data, weight)


def _backward(
    convolution: _Convolution, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    split = convolution.split

    def local(data: jax.Array, weight: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        to_data, to_weight = jax.vjp(convolution.local, data, weight)[1](cotangent)
        to_data = lax.psum(to_data, split.features) if split.features else to_data
        to_weight = lax.psum(to_weight, split.batch) if split.batch else to_weight
        return to_data, convolution.gathered(to_weight, convolution.weight_features)

    specs = (convolution.data_spec, convolution.weight_spec)
    gradient = PartitionSpec() if split.gathered else convolution.weight_spec
    return _map(convolution, local, (*specs, convolution.result_spec), (convolution.data_spec, gradient))(
        *kept, cotangent
    )


def _map(convolution: _Convolution, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps `local` over the parts of devices, over every axis that is left, so that the partitioner has nothing to
    decide."""
    return convolution.where.shard_map(local, convolution.where.mesh.axis_names, in_specs, out_specs)


convolve.defvjp(_forward, _backward)
