"""Says what cannot be taken over the examples of each microbatch by itself.

A call that `splitjax.per_microbatch` marks comes in with the relations of its operands; the reason comes out why a
microbatch cannot evaluate it alone, where there is one.
"""

from __future__ import annotations

import jax.numpy as jnp

from splitjax.lower.microbatch.pairing import Const, Node, PairedProgram
from splitjax.primitives.example_relation import PARTIAL, Batch, Info


def not_apart(program: PairedProgram, batch: Batch, apart: bool, node: Node, infos: tuple[Info, ...]) -> str | None:
    """Returns why `node`, a call that is marked so, cannot be taken over the examples of each microbatch; None where it
    can. `apart`: as for `classify`; `infos`: the relations of its operands."""
    taken, results = "it is taken over the examples of a microbatch", program.types_of(node.outputs)
    if not apart:
        return f"{taken}, and this loss runs in none"
    if not batch.is_exact:
        return f"{taken}, of which it needs two"
    if any(info.kind == PARTIAL for info in infos):
        return f"{taken}, and is given a total over the batch"
    if any(
        isinstance(ref, Const) and ref.differs and batch.example_dim(program.type_of(ref)) is None
        for ref in node.inputs
    ):
        return f"{taken}, and is given a number that comes from the size of the batch"
    if any(batch.sliced_dims(result) != () for result in results):
        return f"{taken}, and returns values of single ones"
    if not all(jnp.issubdtype(result[0].dtype, jnp.inexact) for result in results):
        return f"{taken}, and returns whole numbers, which have no mean"
    return None
