"""Evaluates an analysed boundary: what comes before the loop over microbatches, what crosses into it, what comes after.

A `PreparedBoundary`, as `microbatch.prepare` makes it, comes in with the values of its operands; value, auxiliary
results and gradients come out. See `microbatch.py` for the whole, `worker_loop.py` for the loop of one worker,
`places.py` for those of all workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from splitjax.lower.microbatch.accumulate import AFTER, BEFORE, Bind, Env, Evaluator
from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.classify import PART, WHOLE, BodyAnalysis
from splitjax.lower.microbatch.islands import Archipelago
from splitjax.lower.microbatch.liveness import Marked
from splitjax.lower.microbatch.places import Runner, Together, WorkerLoops
from splitjax.lower.microbatch.worker_loop import Contribution, OperandFetch
from splitjax.primitives.example_relation import EXAMPLES, PARTIAL, ExampleDim, Info

# (how the batch is cut, where the operand's examples are, the size of that dim) -> how its slices are brought in.
MakeFetch = Callable[[Split, ExampleDim, int], OperandFetch]


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedBoundary:
    """Holds a boundary that is analysed and ready to be evaluated.

    - `analysis`: its forward with the relations of its values; `marked`: what has to be computed of it.
    - `evaluator`: what evaluates it. `holomorphic`: as in `jax.grad`.
    - `islands`: the islands of replicated layers; None where there are none.
    """

    analysis: BodyAnalysis
    marked: Marked
    evaluator: Evaluator
    holomorphic: bool
    islands: Archipelago | None

    @property
    def split(self) -> Split:
        """The way in which the batch is cut into microbatches."""
        return self.evaluator.split

    def info(self, v: int) -> Info:
        """Returns the relation of the value `v` to the examples."""
        return self.analysis.infos[v]

    def placed(self, mesh: Mesh | AbstractMesh, bind: Bind, island_bind: Bind) -> PreparedBoundary:
        """Returns the same boundary on a mesh.

        **Arguments:** `mesh`: of the evaluation; the boundary was prepared without devices. `bind`, `island_bind`:
        evaluate the equations of the loop, and those in islands."""

        def on_mesh(evaluator: Evaluator, its_bind: Bind) -> Evaluator:
            split = dataclasses.replace(evaluator.split, mesh=mesh)
            return dataclasses.replace(evaluator, split=split, bind=its_bind)

        islands = self.islands and dataclasses.replace(
            self.islands,
            evaluator=on_mesh(self.islands.evaluator, island_bind),
        )
        return dataclasses.replace(self, evaluator=on_mesh(self.evaluator, bind), islands=islands)

    def results(
        self,
        operands: Sequence[Any],
        positions: Sequence[int],
        fetches: Mapping[int, MakeFetch],
        known_whole_over: Sequence[str],
        runner: Runner[WorkerLoops] | None = None,
    ) -> list[Any]:
        """Evaluates the boundary: its value, aux leaves and gradients.

        **Arguments:**

        - `operands`: the values of the boundary's operands; `positions`: those of them that are differentiated.
        - `fetches`: for operands (by position) whose slices are brought in one microbatch ahead, how.
        - `known_whole_over`: batch axes over which slices that are not differentiated (labels) are wanted whole.
        - `runner`: how the loops of the workers run; None for all alike.
        """
        env: Env = {(v, WHOLE): value for v, value in zip(self.analysis.body.inputs, operands, strict=True)}
        self.evaluator.run(self.marked, env, BEFORE)
        differentiated = [self.analysis.body.inputs[p] for p in positions]
        value, totals, grads = self.loop(
            env, differentiated, self.fetches(fetches), known_whole_over, runner or Together()
        )
        env.update({(v, WHOLE): total for v, total in zip(self.marked.returned, totals, strict=True)})
        self.evaluator.run(self.marked, env, AFTER)
        types = self.evaluator.program.type_of
        loss, *aux = self.analysis.body.outputs
        leaves = [self.evaluator.read(self.analysis, ref, WHOLE, env, None) for ref in aux]
        return [
            value.astype(types(loss)[0].dtype),
            *(jnp.asarray(leaf) for leaf in leaves),
            *(grad.astype(types(v)[0].dtype) for v, grad in zip(differentiated, grads, strict=True)),
        ]

    def summands(self, operands: Sequence[Any], positions: Sequence[int], number: Any) -> dict[int, Any]:
        """Returns a microbatch's contribution to the gradient, by position of the differentiated operand.

        For a boundary without manual axes and islands; operands that hold examples are left out. `operands`,
        `positions`: as for `results`; `number`: that of the microbatch (i32[])."""
        inputs = self.analysis.body.inputs
        env: Env = {(v, WHOLE): value for v, value in zip(inputs, operands, strict=True)}
        self.evaluator.run(self.marked, env, BEFORE)
        differentiated = {inputs[p]: p for p in positions}
        sliced = [v for v in differentiated if self.info(v).kind == EXAMPLES]
        same = [v for v in differentiated if v not in sliced]
        shared = sorted({v for v, form in self.marked.loop if form == WHOLE} - set(differentiated))
        parts = [
            v for v, form in self.marked.loop if form == PART and (v, WHOLE) in env and self.info(v).kind == EXAMPLES
        ]
        cuts = sorted({*parts, *sliced})
        slices = [self.split.cut(env[v, WHOLE], self.info(v).required_layout)[number] for v in cuts]
        contribution = Contribution(self, same, (), sliced, shared, cuts, (), (), {})
        params, constants = [env[v, WHOLE] for v in same], [env[v, WHOLE] for v in shared]
        totals, _, _ = contribution.microbatch((params, []), constants, {}, contribution.zeros(), number, slices, [])
        return {differentiated[v]: summand for v, summand in zip(same, totals[2], strict=True)}

    def fetches(self, makers: Mapping[int, MakeFetch]) -> dict[int, OperandFetch]:
        """Makes the fetches of the operands that the loop reads, by value number; `makers`: by operand position."""
        inputs, types = self.analysis.body.inputs, self.evaluator.program.types
        read = {v for v, _ in self.marked.needed}
        chosen = {
            inputs[p]: make for p, make in makers.items() if inputs[p] in read and self.info(inputs[p]).kind == EXAMPLES
        }
        layouts = {v: self.info(v).required_layout for v in chosen}
        return {v: make(self.split, layouts[v], types[v][0].shape[layouts[v].dim]) for v, make in chosen.items()}

    def loop(
        self,
        env: Env,
        differentiated: Sequence[int],
        fetches: dict[int, OperandFetch],
        known_whole_over: Sequence[str],
        runner: Runner[WorkerLoops],
    ) -> tuple[Any, list[Any], list[Any]]:
        """Runs the microbatches, and returns the loss, the returned values for the whole batch, and the gradients.

        `env`: the values before the loop; `differentiated`: the values to differentiate with respect to; `fetches`: by
        value number; `known_whole_over`, `runner`: as for `results`."""
        sliced = [v for v in differentiated if self.info(v).kind == EXAMPLES and v not in fetches]
        # What crosses into the loop: slices for each microbatch, and values that are the same for all.
        cuts = sorted(
            v for v, form in self.marked.loop if form == PART and (v, WHOLE) in env and self.info(v).kind == EXAMPLES
        )
        cuts = sorted({*cuts, *sliced} - set(fetches))
        shared = sorted({v for v, form in self.marked.loop if form == WHOLE} - set(differentiated))
        same = [v for v in differentiated if v not in sliced and v not in fetches]
        on_islands = list(self.islands.params) if self.islands else []
        if self.islands:
            outside = self.islands.read_outside(self.analysis)
            same = [v for v in same if v in outside or v not in on_islands]
        stacked = [v for v in self.marked.returned if self.info(v).kind == EXAMPLES]
        summed = [v for v in self.marked.returned if self.info(v).kind == PARTIAL]
        contribution = Contribution(self, same, on_islands, sliced, shared, cuts, summed, stacked, fetches)
        # What only split layers and the loss read is wanted as they see it (labels).
        loops = WorkerLoops(self, contribution, env, self.islands.axes if self.islands else known_whole_over)
        value, whole, by_operand = loops.joined(*runner.run(loops), runner)
        return value, [whole[v] for v in self.marked.returned], [by_operand[v] for v in differentiated]
