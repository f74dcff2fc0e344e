"""The programs of a step whose workers run programs of their own (`rows.py`), as one callable."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.lower.partial.hooks import PartialHooks
from splitjax.lower.partial.lowered import Evaluated, Lowered
from splitjax.lower.partial.rows import Capture, Captured, Given, RowPrograms, Specs
from splitjax.lower.partial.step import PartialStep


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerPrograms:
    """Takes the number of the turn, then the step's arguments. `programs`: `entry.Programs`."""

    step: PartialStep
    hooks: PartialHooks
    lowered: Lowered
    programs: Any

    def __call__(self, turn: Any, *args: Any) -> Any:
        inputs = self.before(*args)
        sums = self.rows(inputs, self.slots(int(turn)))
        return self.after(Specs.of(inputs))(turn, sums, *args)

    def lower(self, turn: Any, *args: Any) -> LoweredPrograms:
        """All programs of one turn, as `jax.jit`'s `lower` gives one."""
        parts = {"before": self.before.lower(*args)}
        specs = Specs.of(parts["before"].compile().output_shardings)
        local = self.rows.local_inputs(self.rows.input_types)
        for place, slot in self.slots(int(turn)).items():
            if place in self.rows.mine:
                mesh = self.rows.rows[place]
                typed = jax.tree.map(
                    lambda one, spec, mesh=mesh: jax.ShapeDtypeStruct(
                        one.shape, one.dtype, sharding=NamedSharding(mesh, spec)
                    ),
                    local,
                    specs.tree,
                )
                parts[f"worker {place}"] = self.rows.program(place, slot, specs).lower(*typed)
        sums = self.rows.sum_types_everywhere(self.rows.sum_specs(specs.tree))
        parts["after"] = self.after(specs).lower(turn, sums, *args)
        return LoweredPrograms(parts)

    def slots(self, turn: int) -> dict[int, int]:
        """By worker the slot that it is in."""
        return {worker: self.step.depths.slot(worker, turn) for worker in range(self.step.depths.num_slots)}

    @functools.cached_property
    def rows(self) -> RowPrograms:
        leaves = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _compat.open_jaxpr(self.hooks.jaxpr)[0].invars
        ]
        found: list[Captured] = []

        residuals = (
            {}
            if self.lowered.sparse is None
            else {one.param: jax.ShapeDtypeStruct(one.residual_shape, one.dtype) for one in self.lowered.sparse.rounded}
        )

        def inputs(*values: Any) -> Any:
            found.append(
                self._captured(values, {name: jnp.zeros(one.shape, one.dtype) for name, one in residuals.items()})
            )
            return found[-1].places.inputs()

        types = jax.eval_shape(inputs, *leaves)
        return RowPrograms(found[-1].places.without_values(), found[-1].truncation, self.hooks.mesh, types)

    def _captured(self, leaves: Sequence[Any], residuals: Any) -> Captured:
        """What the boundary meets."""
        try:
            self.lowered.run(self.hooks.apart(np.int32(0), Capture), leaves, residuals)
        except Captured as met:
            return met
        raise AssertionError("a step with partial backpropagation has its boundary")

    @functools.cached_property
    def before(self) -> Any:
        """What crosses into the loops lies over the workers as their loops want it; over other axes as it is used."""

        def run(leaves: Sequence[Any], residuals: Any) -> Any:
            return jax.tree.map(self._pinned, self._captured(leaves, residuals).places.inputs(), self.rows.in_specs)

        return self.programs.part(run, None)

    def _pinned(self, value: Any, spec: PartitionSpec) -> Any:
        if set(self.step.axes) >= set(self.hooks.mesh.axis_names):
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.hooks.mesh, spec))
        # A constraint cannot say what lies over the workers' axes and leave the others open; a shard_map over the
        # former can.
        return jax.shard_map(
            lambda one: one,
            mesh=self.hooks.mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=frozenset(self.step.axes),
            check_vma=False,
        )(value)

    @functools.cache  # noqa: B019 (lives as long as the step's programs)
    def after(self, specs: Specs) -> Any:
        """`specs`: of what `before` gives."""
        kept = self.step.kept_leaves(min(self.step.depths.first))
        here = lambda spec: NamedSharding(self.hooks.mesh, spec)
        shardings = jax.tree.map(
            here, self.rows.sum_specs(specs.tree), is_leaf=lambda one: isinstance(one, PartitionSpec)
        )

        def run(leaves: Sequence[Any], residuals: Any, turn: Any, sums: Any) -> Evaluated:
            return self.lowered.run_keeping(
                self.hooks.apart(turn, lambda truncation: Given(truncation, sums)), kept, leaves, residuals
            )

        return self.programs.whole(run, (here(PartitionSpec()), shardings), (1,))


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredPrograms:
    """Several programs that make one step, by name."""

    parts: Mapping[str, Any]

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        return _joined(self.parts, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledPrograms:
        return CompiledPrograms({name: part.compile(*args, **kwargs) for name, part in self.parts.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledPrograms:
    """The same, compiled."""

    parts: Mapping[str, Any]

    def as_text(self) -> str:
        return _joined(self.parts)

    def memory_analysis(self) -> Any:
        """That of the program that needs most: they run one after the other."""
        return max((part.memory_analysis() for part in self.parts.values()), key=peak_bytes)


def peak_bytes(memory: Any) -> int:
    """Bytes that a program holds at most: arguments, temporaries, and results that are not written over arguments."""
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _joined(parts: Mapping[str, Any], *args: Any, **kwargs: Any) -> str:
    return "\n".join(f"# {name}\n{part.as_text(*args, **kwargs)}" for name, part in parts.items())
