"""Measures how sparse the gradients of every worker are, one worker at a time on one device.

It is behind `step.profile`: a step and batches come in, a `sync.analysis.Profile` comes out. Gradients (see
`worker_gradients.py`) are reduced on the device to where they are not zero. No worker's dense gradient leaves the
device: the host gets one bit a row of a table, or an element of another tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import BatchError, ProfileError
from splitjax.measure.worker_gradients import abstract_leaves, worker_gradients
from splitjax.mesh import inside_mesh
from splitjax.step.arguments import bind
from splitjax.sync import masks
from splitjax.sync.analysis import MeasuredSparsity, Profile, StepMasks, Tensor, analyse_step, collect

# Elements that are not zero are counted in int32 over so many rows, and added up on the host.
_ROWS_COUNTED = 1024


def per_batch(
    args: Sequence[Any], batch_argnums: Sequence[int], name: str, method: str = "profile"
) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of one call per batch.

    **Arguments:** `args`: the step's arguments; those at `batch_argnums` are iterables of batches, of equal lengths.
    `name`: of the step, `method`: what the user called of it, for messages.

    Raises `BatchError` for an argument that is a batch itself, and for iterables of different lengths."""
    numbers = [number for number in batch_argnums if number < len(args)]
    if not numbers:
        raise BatchError(
            "the step has no batch, so its gradients cannot be divided among workers",
            value=f"{len(args)} arguments",
            place=f"{name}.{method}",
            remedy="name the arguments that hold examples in batch_argnums, and pass their batches",
        )
    for number in numbers:
        given = args[number]
        if isinstance(given, (Mapping, str)) or hasattr(given, "shape") or not isinstance(given, Iterable):
            raise BatchError(
                f"{method} takes several batches in place of one",
                value=type(given).__name__,
                place=f"{name}.{method}, argument {number}",
                remedy="pass a list or an iterator of batches; for a single one, [batch]",
            )
    iterators, missing = [iter(args[number]) for number in numbers], object()
    while True:
        batches = [next(iterator, missing) for iterator in iterators]
        if all(batch is missing for batch in batches):
            return
        if any(batch is missing for batch in batches):
            shortest = next(number for number, batch in zip(numbers, batches, strict=True) if batch is missing)
            raise BatchError(
                "the batch arguments hold different numbers of batches",
                value=f"argument {shortest} ends first",
                place=f"{name}.{method}",
                remedy="give as many batches for every batch argument",
            )
        by_number = dict(zip(numbers, batches, strict=True))
        yield tuple(by_number.get(number, arg) for number, arg in enumerate(args))


def profile_calls(
    recipe: Recipe,
    mesh: Mesh,
    entry_of: Callable[[tuple[Any, ...]], CompiledEntry],
    calls: Iterable[tuple[Any, ...]],
    num_workers: int | None,
) -> Profile:
    """Measures the gradients of calls of a step, each of whose batches is divided among workers.

    **Arguments:**

    - `recipe`: the step. `mesh`: its devices.
    - `entry_of`: gives the entry (plan and trace) for a call's arguments.
    - `calls`: the arguments of every call. In a run of several processes all of them make the same calls, together.
    - `num_workers`: into how many equal slices each batch is cut; None for the plan's workers.

    Raises `ProfileError` for a step without gradient boundary or with one in a loop, for no batch, and for arguments
    without values; `BatchError` for batches without examples, or that do not divide.
    """
    place = f"{recipe.name}.profile"
    check_number(num_workers, place)
    programs: dict[int, _Program] = {}
    steps: list[list[MeasuredSparsity]] = []
    tensors: tuple[Tensor, ...] = ()
    sizes: list[int] = []
    notes: list[str] = []
    on_device = OnDevice(mesh)
    for args in calls:
        entry = entry_of(args)
        if num_workers is None:
            num_workers = entry.plan.mesh.size(entry.plan.batch_axes)
        num_examples = check_examples(entry, num_workers, place)
        program = programs.get(id(entry)) or _Program.of(entry, mesh, num_workers, place)
        programs[id(entry)] = program
        if tensors and program.tensors != tensors:
            raise ProfileError(
                "the step has other gradients for this batch than for the first",
                value=num_examples,
                place=place,
                remedy="profile batches of different kinds apart",
            )
        tensors = program.tensors
        bound = bind(recipe.fn, recipe.options, entry.stored(args)[0])
        values = [
            on_device.put(bound.leaves[i], bound.arguments[i].path, not bound.arguments[i].is_batch, place)
            for i in program.used
        ]
        of_tensors = program.measure(values, num_workers)
        steps.append([analyse_step(tensor, its_masks) for tensor, its_masks in zip(tensors, of_tensors, strict=True)])
        sizes.append(num_examples)
        notes += [note for note in program.notes if note not in notes]
    if not steps or num_workers is None:
        raise ProfileError("there is no batch to profile", place=place, remedy="pass at least one batch")
    collected = tuple(collect(tensor, [step[i] for step in steps]) for i, tensor in enumerate(tensors))
    return Profile(recipe.name, int(num_workers), tuple(sizes), collected, tuple(notes))


def check_number(num_workers: object, place: str) -> None:
    """Raises `ProfileError`, at `place`, where `num_workers` is neither a positive whole number nor None."""
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, (int, np.integer)) or num_workers < 1
    ):
        raise ProfileError(
            "num_workers must be a positive whole number, or None for the plan's",
            value=num_workers,
            place=place,
            remedy="give the number of workers among which a batch is divided",
        )


def check_examples(entry: CompiledEntry, num_workers: int, place: str) -> int:
    """Returns the number of examples of a batch of the step `entry`, which divides among `num_workers`.

    Raises `ProfileError`, at `place`, for a step without gradient boundary, `BatchError` for a step without a batch and
    for a batch that does not divide."""
    num_examples = entry.graph.num_examples
    if entry.graph.num_boundaries == 0:
        raise ProfileError(
            "the step takes no gradients, or takes them with plain JAX, where a profile cannot see them",
            place=place,
            remedy="take them with splitjax.value_and_grad or splitjax.grad",
        )
    if num_examples is None:
        raise BatchError(
            "the step has no batch, so its gradients cannot be divided among workers",
            place=place,
            remedy="name the arguments that hold examples in batch_argnums: arrays with a leading example dim",
        )
    if num_examples % num_workers or num_examples < num_workers:
        below, above = num_examples // num_workers * num_workers, -(-num_examples // num_workers) * num_workers
        raise BatchError(
            f"a batch of {num_examples} examples does not divide among {num_workers} workers",
            value=num_examples,
            place=place,
            remedy=(
                f"use {f'{below} or {above}' if below else max(above, num_workers)} examples, or another num_workers="
            ),
        )
    return num_examples


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """Copies arguments to one device of this process.

    **Attributes:** `mesh`: whose first local device it is. `kept`: by `id` of an argument that comes again, the
    argument itself (which keeps the `id` its own) and its copy.
    """

    mesh: Mesh
    kept: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def put(self, leaf: Any, path: str, keep: bool, place: str) -> Any:
        """Returns a copy of `leaf`, an array or a number, on the device.

        `keep`: whether the argument comes again with every batch, so that the copy is kept. `path`, `place`: of the
        leaf and of the call, for messages. Raises `ProfileError` for a `ShapeDtypeStruct`."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ProfileError(
                "a profile needs values, and an argument is only a shape",
                value=leaf,
                place=f"{place}, {path}",
                remedy="pass arrays",
            )
        if id(leaf) in self.kept:
            return self.kept[id(leaf)][1]
        whole = leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:  # every process of the run gets all of it
            whole = jax.device_put(leaf, NamedSharding(self.mesh, PartitionSpec())).addressable_data(0)
        elif isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            # JAX keeps the type that Explicit axes gave an array even when it is put on one device.
            whole = jax.device_put(leaf, NamedSharding(inside_mesh(leaf.sharding.mesh), leaf.sharding.spec))
        copy = jax.device_put(whole, self.mesh.local_devices[0]) if hasattr(whole, "shape") else whole
        if keep:
            self.kept[id(leaf)] = leaf, copy
        return copy


@dataclasses.dataclass(frozen=True)
class _Program:
    """Measures a signature of a step.

    **Attributes:**

    - `tensors`: what is measured.
    - `used`: the flat arguments that the gradients depend on.
    - `run`: (worker, *used arguments) -> for every tensor, packed units and counts of elements, in one flat list.
    - `notes`: in which way the gradients are not summands of the global gradient.
    """

    tensors: tuple[Tensor, ...]
    used: tuple[int, ...]
    run: Callable[..., Sequence[jax.Array]]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, entry: CompiledEntry, mesh: Mesh, num_workers: int, place: str) -> _Program:
        """Traces the reduced gradients of a worker, by the worker's number."""
        of_worker = worker_gradients(entry, mesh, num_workers, place)
        tensors = tuple(gradient.tensor for gradient in of_worker.gradients)

        def reduced(worker: jax.Array, *leaves: Any) -> list[tuple[jax.Array, jax.Array]]:
            values = of_worker.run(*leaves, worker)
            return [_reduce(tensor, value) for tensor, value in zip(tensors, values, strict=True)]

        closed = _compat.trace(reduced, jax.ShapeDtypeStruct((), jnp.int32), *abstract_leaves(entry))[0]
        closed, (_, *used) = _compat.drop_unused(closed, keep=1)
        run = jax.jit(_compat.named_evaluator(closed, "gradients_of_a_worker"))
        return cls(tensors, tuple(i for i, is_used in enumerate(used) if is_used), run, of_worker.notes)

    def measure(self, values: Sequence[Any], num_workers: int) -> list[StepMasks]:
        """Returns the masks of all workers, by tensor. All masks without a hole are the same array, since most dense
        gradients have none with holes. `values`: the `used` arguments."""
        full = [masks.full(tensor.num_units) for tensor in self.tensors]
        collected: list[tuple[list[np.ndarray], list[int]]] = [([], []) for _ in self.tensors]
        for worker in range(num_workers):
            results = iter(self.run(np.int32(worker), *values))
            for (units, numbers), tensor, whole in zip(collected, self.tensors, full, strict=True):
                mask, counts = np.asarray(next(results)), np.asarray(next(results))
                number = masks.count(mask)
                units.append(whole if number == tensor.num_units else mask)
                numbers.append(int(counts.sum(dtype=np.int64)) if tensor.is_table else number)
        return [StepMasks(tuple(units), tuple(numbers)) for units, numbers in collected]


def _reduce(tensor: Tensor, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which units of a gradient are not zero, packed (u8), and for a table how many elements are not (i32, to
    be added up)."""
    nonzero = value != 0
    if not tensor.is_table:
        return jnp.packbits(nonzero.reshape(-1)), jnp.zeros((0,), jnp.int32)
    counts = nonzero.reshape(tensor.num_units, -1).sum(axis=1, dtype=jnp.int32)
    padded = jnp.pad(counts, (0, -tensor.num_units % _ROWS_COUNTED))
    return jnp.packbits(counts > 0), padded.reshape(-1, _ROWS_COUNTED).sum(axis=1, dtype=jnp.int32)
