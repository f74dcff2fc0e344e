"""Makes a callable of the programs of a step whose workers run programs of their own (`rows.py`).

A lowered step and the ways of its boundaries go in, a `DispatchedStep` comes out, which is called and lowered as
what `jax.jit` returns. So whoever runs, measures or prints a step's program need not know that it is several.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.lower.partial.lowered import Evaluated, Lowered
from splitjax.lower.partial.rows import Capture, Captured, Given, RowPrograms, Specs
from splitjax.lower.partial.truncated import PartialWays
from splitjax.mesh import with_devices
from splitjax.planning.partial_step import PartialStep


class JittedProgram(Protocol):
    """A program as `jax.jit` gives it: it can be called, and lowered without being run."""

    def __call__(self, *args: Any) -> Any:
        """Runs the program on `args`."""
        ...

    def lower(self, *args: Any) -> Any:
        """Lowers the program for `args`, arrays or `ShapeDtypeStruct`s."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """A program that knows by itself how it is made ready to run."""

    def prepare(self, *args: Any) -> None:
        """Compiles the program for its operands `args`, or reads it from where it is kept, and runs nothing."""
        ...


def prepare(program: JittedProgram, *args: Any) -> None:
    """Makes a `program` ready to run on its operands `args`: what `jax.jit` compiles here it does not compile again
    when it is called."""
    if isinstance(program, Preparable):
        program.prepare(*args)
    else:
        program.lower(*args).compile()


class ProgramMaker(Protocol):
    """Makes programs of a signature of a step: what this room needs of `compile.programs.Programs`."""

    def whole(
        self,
        evaluate_step: Callable[..., Evaluated],
        extra: tuple[Any, ...] = (),
        donate_extra: tuple[int, ...] = (),
    ) -> JittedProgram:
        """Makes the program of a whole step.

        **Arguments:** `evaluate_step(leaves, residuals, *extra)`: evaluates it. `extra`: shardings of its further
        operands. `donate_extra`: the numbers of those that it consumes.
        """
        ...

    @property
    def layouts(self) -> Sequence[NamedSharding]:
        """The layouts of the flat arguments."""
        ...

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """Gives the flat arguments among the operands `args` of a program from `part`."""
        ...

    def part(self, evaluate_part: Callable[[list[Any], Any], Any], out_shardings: Any) -> JittedProgram:
        """Makes a program that takes the step's operands and consumes none.

        **Arguments:** `evaluate_part(leaves, residuals)`: evaluates it. `out_shardings`: of its results; None: as they
        come.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class DispatchedStep:
    """A step whose workers run programs of their own.

    It is called with its number in the cycle of the depths, then with its arguments.

    - `step`: its depths and its workers.
    - `ways`: how its boundaries run.
    - `lowered`: the step, ready to be evaluated.
    - `programs`: makes the programs.
    """

    step: PartialStep
    ways: PartialWays
    lowered: Lowered
    programs: ProgramMaker

    def __call__(self, cycle_step: Any, *args: Any) -> Any:
        leaves, layouts = self.programs.leaves(args), self.programs.layouts
        passed = {number: _laid_out(leaves[number], layouts[number]) for number in self.passed if number is not None}
        inputs = self._joined(self.before(*args), passed)
        specs, sums = Specs.of(inputs), self.rows(inputs, self.slots(int(cycle_step)))
        del inputs, passed, leaves  # the workers have read it: nothing of it is held while the state is updated
        return self.after(specs)(cycle_step, sums, *args)

    def prepare(self, cycle_step: Any, *args: Any) -> None:
        """Does nothing: each of its programs is compiled for what the one before it gave."""

    def lower(self, cycle_step: Any, *args: Any) -> LoweredPrograms:
        """Lowers all programs of step `cycle_step` of a cycle for the step's `args`, as `lower` of `jax.jit` does."""
        parts = {"before": self.before.lower(*args)}
        layouts = dict(enumerate(self.programs.layouts))
        specs = Specs.of(self._joined(parts["before"].compile().output_shardings, layouts))
        local = self.rows.local_inputs(self.rows.input_types)
        for place, slot in self.slots(int(cycle_step)).items():
            if place in self.rows.mine:
                mesh = self.rows.rows[place]
                typed = jax.tree.map(
                    lambda value, spec, mesh=mesh: jax.ShapeDtypeStruct(
                        value.shape, value.dtype, sharding=NamedSharding(mesh, spec)
                    ),
                    local,
                    specs.tree,
                )
                parts[f"worker {place}"] = self.rows.program(place, slot, specs).lower(*typed)
        sums = self.rows.sum_types_everywhere(self.rows.sum_specs(specs.tree))
        parts["after"] = self.after(specs).lower(cycle_step, sums, *args)
        return LoweredPrograms(parts)

    def slots(self, cycle_step: int) -> dict[int, int]:
        """Gives by worker the slot that it is in, in step `cycle_step` of a cycle."""
        return dict(enumerate(self.step.depths.slots(cycle_step)))

    @property
    def rows(self) -> RowPrograms:
        """The programs of the workers."""
        return self._traced[0]

    @property
    def passed(self) -> tuple[int | None, ...]:
        """By flat input of the workers' programs, the flat argument that it is; None for what `before` computes.

        Arguments such as parameters go to the workers as they are: a result of `before` would be a copy, held beside
        the state while the workers' programs run."""
        return self._traced[1]

    @functools.cached_property
    def _traced(self) -> tuple[RowPrograms, tuple[int | None, ...]]:
        leaves = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _compat.open_jaxpr(self.lowered.jaxpr)[0].invars
        ]
        captured: list[Captured] = []
        passed: list[int | None] = []
        axes = frozenset(self.step.workers.axes)
        layouts = [_over(layout.spec, axes) for layout in self.programs.layouts]

        residuals = (
            {}
            if self.lowered.sparse is None
            else {
                table.param: jax.ShapeDtypeStruct(table.residual_shape, table.dtype)
                for table in self.lowered.sparse.rounded
            }
        )

        def inputs(*values: Any) -> Any:
            zeros = {name: jnp.zeros(residual.shape, residual.dtype) for name, residual in residuals.items()}
            captured.append(self._captured(values, zeros))
            places, number_of = captured[-1].places, {id(value): number for number, value in enumerate(values)}
            given = places.inputs()
            for value, spec in zip(jax.tree.leaves(given), _specs_like(given, places.in_specs()), strict=True):
                number = number_of.get(id(value))
                passed.append(None if number is None or layouts[number] != _over(spec, axes) else number)
            return given

        types = jax.eval_shape(inputs, *leaves)
        mesh = with_devices(self.lowered.mesh, "programs of single workers")
        return RowPrograms(captured[-1].places.without_values(), captured[-1].truncation, mesh, types), tuple(passed)

    def _joined(self, computed: Sequence[Any], leaves: Mapping[int, Any]) -> Any:
        """Joins what `before` gives and the arguments among the workers' inputs (`passed`), of the flat arguments
        `leaves` by number; or the same of their shardings."""
        rest = iter(computed)
        return jax.tree.unflatten(
            jax.tree.structure(self.rows.input_types),
            [next(rest) if number is None else leaves[number] for number in self.passed],
        )

    def _captured(self, leaves: Sequence[Any], residuals: Any) -> Captured:
        """Evaluates the step as far as its boundary, and gives what crosses into the boundary's loops."""
        try:
            self.lowered.run(self.ways.apart(np.int32(0), Capture), leaves, residuals)
        except Captured as met:
            return met
        raise AssertionError("a step with partial backpropagation has its boundary")

    @functools.cached_property
    def before(self) -> JittedProgram:
        """The program that ends at the boundary, and gives what crosses into the loops and is no argument of the step.
        That lies over the workers as their loops want it, and over other axes as it is used."""

        def run(leaves: Sequence[Any], residuals: Any) -> Any:
            inputs = self._captured(leaves, residuals).places.inputs()
            specs = _specs_like(inputs, self.rows.in_specs)
            return [
                self._pinned(value, spec)
                for value, spec, number in zip(jax.tree.leaves(inputs), specs, self.passed, strict=True)
                if number is None
            ]

        return self.programs.part(run, None)

    def _pinned(self, value: Any, spec: PartitionSpec) -> Any:
        """Constrains how a value lies over the axes of the workers."""
        if set(self.step.workers.axes) >= set(self.lowered.mesh.axis_names):
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.lowered.mesh, spec))
        # A constraint cannot say what lies over the workers' axes and leave the others open; a shard_map over the
        # former can.
        return jax.shard_map(
            lambda part: part,
            mesh=self.lowered.mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=frozenset(self.step.workers.axes),
            check_vma=False,
        )(value)

    @functools.cache  # noqa: B019 (lives as long as the step's programs)
    def after(self, specs: Specs) -> JittedProgram:
        """Makes the program that goes on from the boundary with the workers' sums. `specs`: of what `before` gives."""
        kept = self.step.kept_leaves(min(self.step.depths.first))
        here = lambda spec: NamedSharding(self.lowered.mesh, spec)
        shardings = jax.tree.map(
            here, self.rows.sum_specs(specs.tree), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )

        def run(leaves: Sequence[Any], residuals: Any, cycle_step: Any, sums: Any) -> Evaluated:
            return self.lowered.run_keeping(
                self.ways.apart(cycle_step, lambda truncation: Given(truncation, sums)), kept, leaves, residuals
            )

        return self.programs.whole(run, (here(PartitionSpec()), shardings), (1,))


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredPrograms:
    """Several lowered programs that make a step.

    - `parts`: the programs by name.
    """

    parts: Mapping[str, Any]

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        """Gives the text of all programs, each under its name. `args`, `kwargs`: as for
        `jax.stages.Lowered.as_text`."""
        return _joined(self.parts, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledPrograms:
        """Compiles all programs. `args`, `kwargs`: as for `jax.stages.Lowered.compile`."""
        return CompiledPrograms({name: part.compile(*args, **kwargs) for name, part in self.parts.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledPrograms:
    """Several compiled programs that make a step.

    - `parts`: the programs by name.
    """

    parts: Mapping[str, Any]

    def as_text(self) -> str:
        """Gives the text of all programs, each under its name."""
        return _joined(self.parts)

    def memory_analysis(self) -> Any:
        """Gives XLA's figures of the program that needs most memory: the programs run one after the other."""
        return max((part.memory_analysis() for part in self.parts.values()), key=peak_bytes)


def peak_bytes(memory: Any) -> int:
    """Counts the bytes that a program holds at most: arguments, temporaries, and results that are not written over
    arguments. `memory`: the program's `memory_analysis()`."""
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _joined(parts: Mapping[str, Any], *args: Any, **kwargs: Any) -> str:
    return "\n".join(f"# {name}\n{part.as_text(*args, **kwargs)}" for name, part in parts.items())


def _specs_like(inputs: Any, specs: Any) -> list[PartitionSpec]:
    """Gives the `specs` of the leaves of `inputs`, in their order."""
    return jax.tree.structure(inputs).flatten_up_to(specs)


def _over(spec: PartitionSpec, axes: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """Gives by dim the `axes` that split it, up to the last dim that is split; a dim that is left to XLA has an axis of
    no mesh."""
    open_ = PartitionSpec.UNCONSTRAINED
    names = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    dims = [("?",) if entry is open_ else tuple(axis for axis in names(entry) if axis in axes) for entry in spec]
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


def _laid_out(leaf: Any, layout: NamedSharding) -> jax.Array:
    """Gives an argument as an array of just this layout; one that lies so already is not copied."""
    if not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(layout, leaf.ndim):
        return jax.device_put(leaf, layout)
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, layout, shards)
