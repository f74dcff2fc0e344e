"""Tells the sizes that leaves are stored with from those that the step knows, of calls and of traced steps.

A traced call and the padded sizes of its leaves come in; the same call over the stored leaves comes out
(`padded_traced`). Of a call with arrays, the one that the step knows (`logical_bound`) and the arrays as they are
stored (`stored_array`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from splitjax import _compat
from splitjax.step.arguments import Bound, abstract
from splitjax.step.padding.rewriting import LeafSizes, padded_step
from splitjax.step.padding.values import grown
from splitjax.step.traced import Traced, resized_trace
from splitjax.trace.tracer import build_graph

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # path of a leaf -> the shape that the step knows


def padded_traced(traced: Traced, leaves: LeafSizes) -> Traced:
    """Returns the call of a traced step over padded leaves: its trace, and those that are made of it later. `leaves`:
    position of a flat argument -> its padded dims."""
    known = abstract(traced.bound.leaves, traced.bound.signature.avals)
    bound = _with_shapes(traced.bound, {n: grown(tuple(known[n].shape), sizes) for n, sizes in leaves.items()})

    def retrace(stored: Sequence[jax.ShapeDtypeStruct]) -> Any:
        given = [known[n] if n in leaves else leaf for n, leaf in enumerate(stored)]
        return padded_step(traced.retrace(given), leaves, traced.matched)

    results, tree = jax.tree.flatten(traced.result)
    for source, target in traced.matched.items():
        if source in leaves:
            leaf = results[target]
            shape = grown(tuple(leaf.shape), leaves[source])
            results[target] = jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)
    jaxpr = padded_step(traced.jaxpr, leaves, traced.matched)
    graph = build_graph(jaxpr, bound.arguments, traced.matched)
    resized = resized_trace(bound, retrace, [leaf.example_dim for leaf in graph.leaves])
    return dataclasses.replace(
        traced,
        bound=bound,
        jaxpr=jaxpr,
        graph=graph,
        result=jax.tree.unflatten(tree, results),
        retrace=retrace,
        resized=resized,
        known=traced.bound,
    )


def logical_bound(bound: Bound, stored: Mapping[str, Mapping[Shape, Shape]]) -> Bound:
    """Returns a call as the step knows it.

    **Arguments:** `bound`: the call, taken apart. `stored`: by path of a leaf, the shape that it is stored with -> the
    one that the step knows."""
    shapes = {
        number: stored[argument.path][aval[0]]
        for number, (argument, aval) in enumerate(zip(bound.arguments, bound.signature.avals, strict=True))
        if argument.is_state and aval[0] in stored.get(argument.path, ())
    }
    return _with_shapes(bound, shapes) if shapes else bound


def _with_shapes(bound: Bound, shapes: Mapping[int, Shape]) -> Bound:
    """Returns a call with leaves of other shapes, by position."""
    avals = tuple(
        (shapes.get(number, shape), dtype, weak) for number, (shape, dtype, weak) in enumerate(bound.signature.avals)
    )
    described = abstract(bound.leaves, avals)
    leaves = tuple(described[number] if number in shapes else leaf for number, leaf in enumerate(bound.leaves))
    static = dict(bound.signature.static)
    args = tuple(
        arg if number in static else jax.tree.unflatten(jax.tree.structure(arg), leaves[slice(*bound.spans[number])])
        for number, arg in enumerate(bound.args)
    )
    return dataclasses.replace(
        bound, args=args, leaves=leaves, signature=dataclasses.replace(bound.signature, avals=avals)
    )


def padding_of(shape: Shape, stored: Shape) -> list[tuple[int, int]]:
    """Returns what is added at the end of each dim of an array of `shape` to make it `stored`."""
    return [(0, large - small) for small, large in zip(shape, stored, strict=True)]


def with_padding(leaf: jax.Array, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a leaf as it is stored, within a program: with zeros behind its entries where it is larger then."""
    return leaf if leaf.shape == stored.shape else jax.numpy.pad(leaf, padding_of(leaf.shape, stored.shape))


def stored_array(leaf: Any, stored: Shape, where: NamedSharding) -> Any:
    """Returns an array as it is stored: with zeros behind its entries up to the shape `stored`, laid out as `where`
    says. Of a description the description of that."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(stored, leaf.dtype, weak_type=leaf.weak_type)
    widths = padding_of(tuple(leaf.shape), stored)
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set == where.device_set:
        return jax.jit(lambda x: jax.numpy.pad(_untyped(x), widths), out_shardings=where)(leaf)
    host = np.pad(np.asarray(leaf), widths)
    return jax.make_array_from_callback(stored, where, lambda index: host[index])


def logical_array(leaf: Any, shape: Shape, where: NamedSharding) -> Any:
    """Returns a stored array without its padding: its first entries, as many as `shape` has, laid out as `where` says.
    Of a description the description of that."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[tuple(map(slice, shape))]
    return jax.jit(lambda x: jax.lax.slice(_untyped(x), (0,) * len(shape), shape), out_shardings=where)(leaf)


def _untyped(array: jax.Array) -> jax.Array:
    """Returns an array without types that split its dims over Explicit axes: its size may not divide by them."""
    return _compat.forget_mesh(array, explicit_only=True)
