"""Runs replicated layers in a loop over microbatches by each worker for itself, so that their gradients are exchanged
once.

Where some layers are split over axes that split the batch of the others (SplitBrain's `model`), the loop cannot handle
those axes as a whole: split layers need XLA, or `groups.py`, to communicate over them. The operations of replicated
layers are gathered into *islands*: `shard_map`s over the group inside the loop, traced with the examples of one worker.
A parameter comes into an island as *copies* (one more leading dim, one entry per worker of the group), so that its
gradients stay unsummed from microbatch to microbatch.

An operation's *stage* counts how often its data changed from replicated layers (even) to split layers (odd) and back;
the stages run in order. What depends on no example is computed wherever it is needed.

`microbatch.prepare` finds the islands of a boundary (`stages`, `find_island`) from a `Request`; what comes out, an
`Archipelago`, evaluates a microbatch in place of the plain evaluator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.lower.microbatch.accumulate import LOOP, Env, Evaluator
from splitjax.lower.microbatch.batch_split import LoopPosition, Split
from splitjax.lower.microbatch.classify import PART, WHOLE, BodyAnalysis
from splitjax.lower.microbatch.liveness import Marked
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.example_relation import EXAMPLES, SAME
from splitjax.primitives.walk import Site


def stages(
    analysis: BodyAnalysis,
    split_sites: Collection[Site],
    whole_sites: Collection[Site],
    leaving_sites: Collection[Site],
) -> dict[int, int]:
    """Returns by index the stage of each operation whose results are differentiated and hold examples or sums of them.

    `analysis`: of the forward; `split_sites`, `whole_sites`: where split and replicated layers use their weights;
    `leaving_sites`: those whose results return to the workers whose examples they are."""
    level: dict[int, int] = {}
    stage_of: dict[int, int] = {}
    for index, node in enumerate(analysis.body.nodes):
        infos = [analysis.infos[v] for v in node.outputs if analysis.infos[v].live]
        if all(info.kind == SAME for info in infos):
            continue
        stage = max((level[v] for v in node.inputs if isinstance(v, int) and v in level), default=0)
        holds = lambda sites, at=node.site: any(site[: len(at)] == at for site in sites)
        if holds(split_sites) or any(info.kind != EXAMPLES for info in infos):
            stage += stage % 2 == 0
        elif holds(whole_sites):
            stage += stage % 2
        stage_of[index] = stage
        level.update(dict.fromkeys(node.outputs, stage + (stage % 2 if holds(leaving_sites) else 0)))
    return stage_of


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Tells a loop of its replicated layers.

    - `axes`: the mesh axes of the group.
    - `forward`: the boundary's forward (a closed jaxpr), traced with the examples that one worker has in a microbatch.
    - `split_sites`, `whole_sites`: where split and replicated layers use their weights, within the forward.
      `leaving_sites`: those whose results return from split layers to the workers whose examples they are.
    """

    axes: tuple[str, ...]
    forward: Any
    split_sites: tuple[Site, ...]
    whole_sites: tuple[Site, ...]
    leaving_sites: tuple[Site, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Island:
    """Holds the operations of one even stage. Values are named by number, as in the analysis of the whole loop.

    - `nodes`: the operations, and those that they need which depend on no example.
    - `inputs`: values from outside that it reads as parts; `known`: those that it reads whole; `params`: the
      differentiated operands that it reads.
    - `outputs`: values that are read outside of it.
    """

    nodes: frozenset[int]
    inputs: tuple[int, ...]
    known: tuple[int, ...]
    params: tuple[int, ...]
    outputs: tuple[int, ...]


def find_island(
    analysis: BodyAnalysis, marked: Marked, stage_of: Mapping[int, int], stage: int, wanted: Collection[int]
) -> Island | None:
    """Finds the island of a `stage`; None where no parameter is read in it.

    `analysis`, `marked`: of the forward; `stage_of`: the stages by node; `wanted`: values that the loop returns."""
    own = {index for index, s in stage_of.items() if s == stage}
    writer = {v: index for index, node in enumerate(analysis.body.nodes) for v in node.outputs}
    read_elsewhere = set(wanted)
    for index, node in enumerate(analysis.body.nodes):
        if index not in own and index in stage_of:
            read_elsewhere.update(ref for ref in node.inputs if isinstance(ref, int))
    outputs = [
        v
        for index in sorted(own)
        for v in analysis.body.nodes[index].outputs
        if v in read_elsewhere and (v, PART) in marked.needed
    ]
    nodes: set[int] = set()
    inputs: dict[int, None] = {}
    known: dict[int, None] = {}
    params: dict[int, None] = {}
    waiting: list[int] = list(outputs)
    seen: set[int] = set()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        info, index = analysis.infos[v], writer.get(v)
        if (v, PART) not in marked.needed:
            known[v] = None
        elif index is None or (index in stage_of and index not in own):
            (params if info.live and info.kind == SAME else inputs)[v] = None
        elif not info.live and not info.local:
            inputs[v] = None  # made for the whole batch, and cut
        else:
            nodes.add(index)
            waiting += [ref for ref in analysis.body.nodes[index].inputs if isinstance(ref, int)]
    if not params or not outputs:
        return None
    return Island(frozenset(nodes), tuple(inputs), tuple(known), tuple(params), tuple(outputs))


@dataclasses.dataclass(frozen=True, eq=False)
class Archipelago:
    """Holds the islands of one loop, and runs them.

    - `axes`: the mesh axes of the group.
    - `marked`, `evaluator`: those of the trace with one worker's examples.
    - `islands`: the islands by stage. `stage_of`: the stages by node.
    """

    axes: tuple[str, ...]
    marked: Marked
    evaluator: Evaluator
    islands: Mapping[int, Island]
    stage_of: Mapping[int, int]

    @property
    def where(self) -> MeshContext:
        """The mesh, and the axes of it that the loop handles: those of the workers but the group's own."""
        split = self.evaluator.split
        assert split.mesh is not None, "islands are evaluated on a mesh"
        return MeshContext(split.mesh, tuple(axis for axis in split.workers.axes if axis not in self.axes))

    @property
    def params(self) -> tuple[int, ...]:
        """The differentiated operands that islands read."""
        return tuple(sorted({v for island in self.islands.values() for v in island.params}))

    @property
    def inputs(self) -> set[int]:
        """The values that islands read as parts."""
        return {v for island in self.islands.values() for v in island.inputs}

    @property
    def num_stages(self) -> int:
        """The number of stages, those without an island included."""
        return max(self.stage_of.values(), default=0) + 1

    def evaluate(
        self, outer: Evaluator, marked: Marked, env: Env, copies: Mapping[int, Any], slot: LoopPosition
    ) -> None:
        """Computes what `outer.run(marked, env, LOOP, slot)` computes, into `env`, replicated layers in islands.

        `outer`: the evaluator of the loop; `marked`: the forward, with what is needed of it; `copies`: by value number
        the parameters that islands read, as `copies()` makes them; `slot`: the microbatch and the worker."""
        read = self.read_outside(marked.analysis)
        nodes = enumerate(marked.analysis.body.nodes)
        outer.run(
            marked, env, LOOP, slot, {i for i, node in nodes if i not in self.stage_of and read & set(node.outputs)}
        )
        for stage in range(self.num_stages):
            if stage in self.islands:
                self.run(stage, env, copies, outer.split, slot)
            else:
                outer.run(marked, env, LOOP, slot, {i for i, own in self.stage_of.items() if own == stage})

    def read_outside(self, analysis: BodyAnalysis) -> set[int]:
        """Returns the values of the forward of `analysis` that are read outside of islands.

        Those among them that have no stage bring along everything that they are computed with."""
        writer = {v: index for index, node in enumerate(analysis.body.nodes) for v in node.outputs}
        waiting = [
            ref
            for index, node in enumerate(analysis.body.nodes)
            for ref in node.inputs
            if isinstance(ref, int) and index in self.stage_of and self.stage_of[index] not in self.islands
        ]
        waiting += [ref for ref in analysis.body.outputs if isinstance(ref, int)]
        read: set[int] = set()
        while waiting:
            v = waiting.pop()
            if v not in read:
                read.add(v)
                index = writer.get(v)
                if index is not None and index not in self.stage_of:
                    waiting += [ref for ref in analysis.body.nodes[index].inputs if isinstance(ref, int)]
        return read

    def copies(self, value: Any) -> Any:
        """Returns a parameter, the whole `value`, as copies (one more leading dim); no data moves."""
        return self._map(lambda whole: whole[None], PartitionSpec(), PartitionSpec(self.axes))(value)

    def run(self, stage: int, env: Env, copies: Mapping[int, Any], split: Split, slot: LoopPosition) -> None:
        """Runs the island of a `stage`, from and into the loop's values `env`.

        `copies`: as for `evaluate`; `split`: how the loop cuts the batch; `slot`: the microbatch and the worker."""
        island, outside, types = self.islands[stage], self.evaluator.split, self.evaluator.program.types
        shape = {v: types[v][0].shape for v in (*island.inputs, *island.outputs)}
        layout = {v: self.marked.analysis.infos[v].required_layout for v in shape}
        size = {v: shape[v][layout[v].dim] for v in shape}
        names = [name for name, _ in split.axes if name in self.axes]

        def local(params, inputs, known, number, places, own_places, held):
            own = outside.holding(held)
            here: Env = {(v, PART): value[0] for v, value in zip(island.params, params, strict=True)}
            here.update(
                {(v, PART): own.together(value, layout[v]) for v, value in zip(island.inputs, inputs, strict=True)}
            )
            here.update({(v, WHOLE): value for v, value in zip(island.known, known, strict=True)})
            numbers = {**places, **{name: place[0] for name, place in zip(names, own_places, strict=True)}}
            dataclasses.replace(self.evaluator, split=own).run(
                self.marked, here, LOOP, LoopPosition(number, numbers), island.nodes
            )
            return [own.apart(here[v, PART], layout[v], size[v]) for v in island.outputs]

        def spec(v: int) -> PartitionSpec:
            entries: list[Any] = [None] * (len(shape[v]) + len(split.axes) + 2)
            for i, (name, _) in enumerate(split.axes):
                if name in self.axes:
                    entries[layout[v].dim + 1 + i] = name
            return PartitionSpec(*entries)

        whole = PartitionSpec()
        results = self._map(
            local,
            (
                [PartitionSpec(self.axes)] * len(island.params),
                [spec(v) for v in island.inputs],
                [whole] * len(island.known),
                whole,
                dict.fromkeys(slot.places, whole),
                [PartitionSpec(name) for name in names],
                tuple(whole for _ in outside.held),
            ),
            [spec(v) for v in island.outputs],
        )(
            [copies[v] for v in island.params],
            [split.apart(env[v, PART], layout[v], size[v]) for v in island.inputs],
            [env[v, WHOLE] for v in island.known],
            slot.microbatch,
            dict(slot.places),
            [jnp.arange(dict(split.axes)[name], dtype=jnp.int32) for name in names],
            outside.held,
        )
        env.update(
            {(v, PART): split.together(value, layout[v]) for v, value in zip(island.outputs, results, strict=True)}
        )

    def total(self, gradients: Sequence[Any], manual: Sequence[str]) -> list[Any]:
        """Returns the sums of unsummed `gradients`: one exchange over the group, and over what else the loop handled.

        Gradients come with a leading dim per set of axes: those in `manual` (if any), then the group."""
        axes = (*manual, *self.axes)
        lead = [PartitionSpec(tuple(manual), self.axes) if manual else PartitionSpec(self.axes)] * len(gradients)
        sizes = 2 if manual else 1
        run = jax.shard_map(
            lambda parts: lax.psum([part.reshape(part.shape[sizes:]) for part in parts], axes),
            mesh=self.where.mesh,
            in_specs=(lead,),
            out_specs=[PartitionSpec()] * len(gradients),
            axis_names=frozenset(axes),
            check_vma=False,
        )
        return run(list(gradients))

    def _map(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """Returns `fn` as a `shard_map` over the group, inside of the loop's."""
        return self.where.shard_map(fn, self.axes, in_specs, out_specs)
