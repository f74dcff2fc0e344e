"""Says what cannot be taken over the examples of each microbatch by itself.

A call that `splitjax.per_microbatch` marks comes in with the relations of its operands; the reason comes out why a
microbatch cannot evaluate it alone, where there is one.
"""

from __future__ import annotations

import jax.numpy as jnp

from splitjax.lower.microbatch.pairing import Const, Node, PairedProgram
from splitjax.primitives.example_relation import PARTIAL, Batch, Info, Reason
from splitjax.step.per_microbatch import marked_name

_WITHIN = "compute it inside of the function that splitjax.per_microbatch marks"


def not_apart(program: PairedProgram, batch: Batch, apart: bool, node: Node, infos: tuple[Info, ...]) -> Reason | None:
    """Returns why `node`, a call that is marked so, cannot be taken over the examples of each microbatch; None where it
    can. `apart`: as for `classify`; `infos`: the relations of its operands."""
    results = program.types_of(node.outputs)

    def because(why: str, remedy: str) -> Reason:
        why = f"it is taken over the examples of a microbatch, {why}"
        return Reason(marked_name(node.whole), node.source, why, remedy)

    if not apart:
        return because(
            "and this loss runs in none", "leave splitjax.per_microbatch away, or ask for microbatches=2 or more"
        )
    if not batch.is_exact:
        return because(
            "of which it needs two",
            "use fewer microbatches or a larger batch, so that every worker has two examples or more in each",
        )
    if any(info.kind == PARTIAL for info in infos):
        return because("and is given a total over the batch", _WITHIN)
    if any(
        isinstance(ref, Const) and ref.differs and batch.example_dim(program.type_of(ref)) is None
        for ref in node.inputs
    ):
        return because("and is given a number that comes from the size of the batch", _WITHIN)
    if any(batch.sliced_dims(result) != () for result in results):
        return because(
            "and returns values of single ones", "mark a function whose results have no dim of examples, such as a mean"
        )
    if not all(jnp.issubdtype(result[0].dtype, jnp.inexact) for result in results):
        return because("and returns whole numbers, which have no mean", "return numbers of floating point")
    return None
