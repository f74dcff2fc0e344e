"""Steps and graphs for the tracer's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from splitjax import _compat
from splitjax.lower.gradient import value_and_grad
from splitjax.trace.flow import Argument
from splitjax.trace.graph import Graph, Layer, Leaf
from splitjax.trace.tracer import build_graph

VALUE_AND_GRAD = {"boundary": value_and_grad, "plain": jax.value_and_grad}


def path_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def graph_of(step: Callable, state: Any, *batch: Any, extra: tuple = ()) -> Graph:
    """The graph of `step(state, *batch, *extra) -> (new state, anything)`; arrays may be abstract."""
    args = (state, *batch, *extra)
    arguments = [Argument(path_of(path), True, False) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for number, one in enumerate((*batch, *extra)):
        for path, _ in jax.tree_util.tree_leaves_with_path(one):
            arguments.append(Argument(f"batch{number}/{path_of(path)}".rstrip("/"), False, number < len(batch)))
    leaves, tree = jax.tree.flatten(args)
    closed, _ = _compat.trace(lambda *flat: step(*jax.tree.unflatten(tree, flat)), *leaves)
    num_state = len(jax.tree.leaves(state))
    return build_graph(closed, arguments, {i: i for i in range(num_state)})


def train_step(
    loss: Callable, tx: optax.GradientTransformation | None = None, gradient: str = "boundary"
) -> tuple[Callable, Callable]:
    """`(step, init)` for `loss(params, batch)`: state is `{"params", "opt"}`."""
    tx = tx or optax.sgd(0.1)

    def init(params):
        return {"params": params, "opt": tx.init(params)}

    def step(state, batch):
        value, grads = VALUE_AND_GRAD[gradient](lambda p: loss(p, batch))(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, init


def trace_loss(loss: Callable, params: Any, batch: Any, tx=None, gradient: str = "boundary") -> Graph:
    step, init = train_step(loss, tx, gradient)
    return graph_of(step, jax.eval_shape(init, params), batch)


def zeros(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def kinds(graph: Graph) -> dict[str, str]:
    """Layer name (without a leading `params/`) -> kind."""
    return {layer.name.removeprefix("params/"): layer.kind for layer in graph.layers}


def labels(graph: Graph, path: str, dim: int, strength: str = "local") -> tuple[int, ...]:
    """The classes of one dim's atoms."""
    table = getattr(graph, strength)
    return tuple(table[atom] for atom in leaf_of(graph, path).dims[dim])


def leaf_of(graph: Graph, path: str) -> Leaf:
    """The leaf whose path is, or ends in, `path`."""
    found = [leaf for leaf in graph.leaves if leaf.path == path] or [
        leaf for leaf in graph.leaves if leaf.path.endswith("/" + path)
    ]
    assert len(found) == 1, f"{path} names {[leaf.path for leaf in found]}"
    return found[0]


def layer_of(graph: Graph, path: str) -> Layer:
    return graph.layer(leaf_of(graph, path).layer)


def names_of(graph: Graph, path: str) -> tuple[str | None, ...]:
    return leaf_of(graph, path).dim_names


def check(graph: Graph) -> Graph:
    """What holds of every graph: finer classes lie in coarser ones, dims multiply up, layers and uses name real
    leaves."""
    num_atoms = len(graph.atom_sizes)
    for fine, coarse in ((graph.hard, graph.local), (graph.local, graph.soft)):
        assert len(fine) == len(coarse) == num_atoms
        groups: dict[int, int] = {}
        for a, b in zip(fine, coarse, strict=True):
            assert groups.setdefault(a, b) == b
    for leaf in graph.leaves:
        assert [int(np.prod([graph.atom_sizes[a] for a in dim])) for dim in leaf.dims] == list(leaf.shape)
        assert len(leaf.dim_names) in (0, len(leaf.shape))
        assert (leaf.layer is not None) == (leaf.role == "param")
    paths = {leaf.path for leaf in graph.params}
    listed = [path for layer in graph.layers for path in layer.params]
    assert sorted(listed) == sorted(paths)
    for use in graph.uses:
        assert use.param in paths and use.layer in {layer.name for layer in graph.layers}
        assert len(use.data_dims) == len(use.data_shape) and len(use.out_dims) == len(use.out_shape)
    return graph
