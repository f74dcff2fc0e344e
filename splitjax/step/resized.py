"""Traces a step with another number of examples than a call has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from splitjax import _compat
from splitjax.errors import Refusal, SplitjaxError
from splitjax.step.arguments import Bound, abstract

Resized = Callable[[int], _compat.ClosedJaxpr | Refusal]


def resized_trace(bound: Bound, trace: Callable[[list[Any]], _compat.ClosedJaxpr]) -> Resized:
    """Returns a function that traces the step with another number of examples: number -> closed jaxpr.

    **Arguments:**

    - `bound`: the call of the step: its arguments, and which of them are the batch.
    - `trace(leaves)`: traces the step for other flat arguments (`ShapeDtypeStruct`s) and returns its closed jaxpr.

    The function remembers what it traced, and returns a refusal where the step cannot be traced.
    """

    @functools.cache
    def resized(num_examples: int) -> _compat.ClosedJaxpr | Refusal:
        leaves = [
            jax.ShapeDtypeStruct((num_examples, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type)
            if argument.is_batch and leaf.shape
            else leaf
            for leaf, argument in zip(abstract(bound.leaves, bound.signature.avals), bound.arguments, strict=True)
        ]
        try:
            return trace(leaves)
        except SplitjaxError:
            raise
        except Exception as error:
            return Refusal(
                f"the step cannot be traced with {num_examples} examples: {error}",
                value=num_examples,
                place="microbatches",
                remedy="write the step for any batch size, or use microbatches=None",
                cause=error,
            )

    return resized
