"""Says which operations on a sum over examples can run before all of the sum is known.

These are the linear ones: their results on the contributions of the microbatches add up to the result on the whole sum.
A `Question` about an operation with such an operand comes in; its `RuleOutcome` comes out, or `Mixed` is raised.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from splitjax.lower.microbatch.example_relation import PARTIAL, Fact, Info, Mixed
from splitjax.lower.microbatch.example_rules import SIZES, Question, RuleOutcome, require_same_params

_UNARY = frozenset(
    "neg reshape squeeze expand_dims transpose broadcast_in_dim reduce_sum cumsum real imag conj copy copy_p rev slice"
    " name sharding_constraint stop_gradient pvary split unstack tile device_put reduce_window_sum".split()
)
_SUMS = frozenset({"add", "sub", "add_any", "concatenate", "stack", "pad"})
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# Operands that may be sums (and get a share of what is not); the others choose entries.
_PLACED = {
    "select_n": lambda n: range(1, n),
    "dynamic_slice": lambda n: range(1),
    "gather": lambda n: range(1),
    "dynamic_update_slice": lambda n: range(2),
    "scatter": lambda n: (0, 2),
    "scatter-add": lambda n: (0, 2),
    "scatter_add": lambda n: (0, 2),
}


def answer_partial(question: Question) -> RuleOutcome:
    """Answers `question`, in which some operand is a sum over examples.

    Raises `Mixed` unless the operation is linear in all such operands together, and mixes them with no examples."""
    sums = [i for i, info in enumerate(question.infos) if info.kind == PARTIAL]
    if any(info.layout is not None for info in question.infos):
        raise Mixed("it combines a total over the batch with single examples, as batch statistics do")
    if any(question.batch.sliced_dims(types) for types in question.types_out):
        raise Mixed("it spreads a total over the batch to single examples, as batch statistics do")
    require_same_params(question.node, SIZES - {"slice_sizes", "start_indices", "limit_indices"})
    shares = _shares(question, sums)
    zeros = {i for i, info in enumerate(question.infos) if info.fact is Fact.ZERO}
    return RuleOutcome(tuple(Info(False, PARTIAL) for _ in question.types_out), shares=shares - zeros)


def _shares(q: Question, sums: list[int]) -> frozenset[int]:
    """Returns the operands of which each microbatch adds its share, where the operands at `sums` are sums.

    Raises `Mixed` for an operation that is not linear in these."""
    name, count = q.node.name, len(q.infos)
    if name in _UNARY:
        return frozenset()
    if name == "optimization_barrier":
        if len(sums) == count:
            return frozenset()
    elif name == "convert_element_type":
        old, new = q.types_in[0][0].dtype, np.dtype(q.params["new_dtype"])
        if jnp.issubdtype(new, np.inexact) or (jnp.issubdtype(old, np.integer) and jnp.issubdtype(new, np.integer)):
            return frozenset()
    elif name in _SUMS:
        return frozenset(range(count)) - set(sums)
    elif name in _PRODUCTS:
        if len(sums) == 1:
            return frozenset()
    elif name == "div":
        if sums == [0] and jnp.issubdtype(q.types_out[0][0].dtype, np.inexact):
            return frozenset()
    elif name in _PLACED:
        if (
            name == "gather"
            and "FILL" in str(q.params["mode"])
            and not _adds_up(q.params["fill_value"], q.types_out[0][0].dtype)
        ):
            raise Mixed("it fills in values that would be added once a microbatch")
        placed = frozenset(_PLACED[name](count))
        if placed.issuperset(sums):
            return placed - set(sums)
    raise Mixed("it is not linear in a total over the batch, which is known only after all microbatches")


def _adds_up(fill: float | None, dtype: np.dtype) -> bool:
    """Tells whether adding a fill value once a microbatch gives the fill value: zero does, and NaN (the default of
    floats)."""
    if fill is None:
        return bool(jnp.issubdtype(dtype, np.inexact))
    return bool(fill == 0) or bool(fill != fill)
