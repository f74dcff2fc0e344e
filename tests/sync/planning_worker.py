"""Plans a step whose table goes by rows, as was decided from observed steps, and prints the scheme and what modules of
splitjax that loaded. How its boundary runs is nobody's matter here: nothing of lowering is asked."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from splitjax.lower.gradient import value_and_grad
from splitjax.planning.draft import KnownTables, PlanRequest
from splitjax.planning.observing import decide
from splitjax.planning.passes import draft_step, with_tables
from splitjax.planning.predict import predict
from splitjax.planning.tables.sync_request import parse
from splitjax.planning.ways import WayChooser
from splitjax.rules import load_rules
from splitjax.step.arguments import bind
from splitjax.step.positions import make_options
from splitjax.step.traced import trace_step
from splitjax.sync.costs.schemes import Link

MESH = AbstractMesh((4,), ("data",))
AS_THEY_COME = WayChooser(
    in_turns=lambda kind, step, jaxpr: {},
    choose=lambda step, jaxpr, choices: SimpleNamespace(planned={}, sums_within={}, gathered={}, left=frozenset()),
)


def step(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = value_and_grad(lambda table: jnp.mean(jnp.sin(table[ids])))(table)
    return table - 0.5 * grad, loss


def main() -> None:
    options = make_options(step, (0,), None, (), None, None)
    decorated = SimpleNamespace(fn=step, options=options, returns_state=True, name="step", microbatches=None, remat=())
    arguments = jax.ShapeDtypeStruct((4096, 8), jnp.float32), jax.ShapeDtypeStruct((16, 2), jnp.int32)
    traced = trace_step(decorated, bind(step, options, arguments))
    sync = parse("auto", "parallelize")
    request = PlanRequest(
        "step", True, load_rules("data_parallel"), {}, None, None, "error", "gather", False, sync, None, "cpu"
    )
    draft = with_tables(draft_step(traced, MESH, request, AS_THEY_COME), KnownTables())
    ids = np.random.default_rng(0).integers(0, 4096, (3, 4, 8)).astype(np.int32)
    decision = decide(draft.tables, sync, {draft.tables.tables[0].param: list(ids)}, {("data",): Link(1e-3, 1e6)})
    plan = predict(with_tables(draft, KnownTables(decision)))
    print(plan.syncs[0].scheme, *(name for name in sys.modules if name.startswith("splitjax")))


if __name__ == "__main__":
    main()
