"""Times a small computation that every device of a run does at once, over and over within one program.

What a device does in a turn comes in as a function of local arrays, the seconds of a turn come out. Turns run in a loop
inside the program, or are written one behind the other in it, so that a call's own time does not count, and all devices
run it at the same time, so that what they share (cores, memory, links) is shared as in a step. Of a GPU's operations
its kernels are timed instead (`kernel_time`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from splitjax.measure.calibrating.kernel_time import kernel_seconds
from splitjax.sync.link import of_process_0

Clock = Literal["wall", "processor"]
AXES = ("apart", "group")
_AMONG = PartitionSpec(None, AXES)  # of sets of arrays: each device has its own
_MOST_TURNS = 1 << 20
_WRITTEN_TURNS = 4  # at least, of what does not run in a loop
_MOST_WAITING = 32  # calls that are made before one is waited for
LEAST_SECONDS = 1e-9  # of a turn that no number of turns told from nothing: calibrations have no zeros
# Arrays up to this size are timed again and again; of larger ones so many sets that no cache has them all.
_WARM_BYTES, _MOST_SETS = 1 << 18, 12
_COLD_BYTES, _COLD_BYTES_OF_GPU = 24 << 20, 256 << 20


@dataclasses.dataclass(frozen=True)
class Timer:
    """Times what devices do.

    **Attributes:**

    - `devices`: all of the run, those of a process together.
    - `clock`: `wall`, or `processor`, which other work on the machine disturbs less, and which sees no waiting.
    - `enough_seconds`: how long a round should last. `rounds`: how many there are; they count as `typical` says.
    """

    devices: tuple[Any, ...]
    clock: Clock = "wall"
    enough_seconds: float = 0.01
    rounds: int = 6

    def mesh(self, group_size: int = 1, across: bool = False) -> Mesh:
        """Returns the mesh of all devices in groups of `group_size`, along the axis `group`: neighbours; or `across`,
        one of each process, where there are as many."""
        devices = np.asarray(self.devices, object)
        if across:
            return Mesh(devices.reshape(group_size, -1).T, AXES)
        return Mesh(devices.reshape(-1, group_size), AXES)

    def seconds(
        self,
        turn: Callable[..., Any],
        arrays: Sequence[Any],
        mesh: Mesh | None = None,
        cold: bool = True,
        in_loop: bool = True,
    ) -> float:
        """Returns the seconds of a turn.

        **Arguments:** `turn`: takes a device's arrays and returns one array. `arrays`: shapes and dtypes
        (`ShapeDtypeStruct`) of these. `mesh`: over whose axes the turn may communicate; by default each device is by
        itself. `cold`: whether large arrays are to come from memory; those of operations that compute long on what
        they read need not. `in_loop`: whether turns run in a loop of the program; otherwise one is written behind the
        other in it, for what compilers make otherwise in a loop than in a step (XLA's CPU compiler gives convolutions a
        form that its libraries have in a program's outermost computation alone)."""
        if mesh is None and self.devices[0].platform == "gpu":
            return self._by_kernels(turn, arrays, cold)
        mesh = mesh or self.mesh()
        result = jax.eval_shape(lambda *xs: _alone(turn, mesh)(*xs), *arrays)
        num_sets = _num_sets((*arrays, result), _COLD_BYTES) if cold else 1
        values = [_filled(array, num_sets, mesh, _AMONG) for array in arrays]
        program = (_in_a_loop if in_loop else _one_by_one)(turn, result, values, num_sets, mesh)
        run, without = (functools.partial(self._taken, each) for each in (program.run, program.without))
        without(1)
        run(1)
        num_turns = 1
        while True:
            (taken,) = of_process_0([run(num_turns)])
            if taken >= self.enough_seconds or num_turns >= _MOST_TURNS:
                break
            grown = math.ceil(num_turns * min(16.0, 1.3 * self.enough_seconds / max(taken, 1e-6)))
            num_turns = max(num_turns + 1, grown)
        while True:
            pairs = [(run(num_turns), without(num_turns)) for _ in range(self.rounds)]
            (taken,) = of_process_0([turns_alone(pairs)])
            # Where other work made the turns above look long enough, there are too few to be told from a call.
            if taken >= self.enough_seconds / 4 or num_turns >= _MOST_TURNS:
                return max(taken / (num_turns * program.num_turns), LEAST_SECONDS)
            num_turns = min(4 * num_turns, _MOST_TURNS)

    def _taken(self, run: Callable[[int], Any], times: int) -> float:
        """Returns the seconds until what `run` returns is there. `times`: its argument."""
        started = self._now()
        jax.block_until_ready(run(times))
        return self._now() - started

    def _by_kernels(self, turn: Callable[..., Any], arrays: Sequence[Any], cold: bool) -> float:
        """The seconds of a turn on the first device of this process, of its kernels; others do not disturb it."""
        device = next(each for each in self.devices if each.process_index == jax.process_index())
        mesh = Mesh(np.asarray([[device]], object), AXES)
        program = jax.jit(turn)
        num_sets = _num_sets((*arrays, jax.eval_shape(turn, *arrays)), _COLD_BYTES_OF_GPU) if cold else 1
        blocks = [_filled(array, num_sets, mesh, PartitionSpec(None, AXES)) for array in arrays]
        sets = [tuple(block[i, 0] for block in blocks) for i in range(num_sets)]
        jax.block_until_ready([program(*each) for each in sets])
        num_calls = 2 if num_sets > 1 else self.rounds
        taken = kernel_seconds(lambda: [program(*each) for each in sets], num_calls)
        (seconds,) = of_process_0([max(taken / num_sets, LEAST_SECONDS)])
        return seconds

    def call_seconds(self) -> float:
        """Returns what a call of a program that does nothing takes."""
        mesh, spec = self.mesh(), PartitionSpec(AXES)
        program = jax.jit(lambda x: x + 1.0)
        value = _filled(jax.ShapeDtypeStruct((1,), jnp.float32), 1, mesh, PartitionSpec(None, *spec))
        jax.block_until_ready(program(value))
        found = []
        for _ in range(4 * self.rounds):
            started = self._now()
            jax.block_until_ready(program(value))
            found.append(self._now() - started)
        (seconds,) = of_process_0([typical(found)])
        return seconds

    def new_memory_seconds(self, num_bytes: int) -> float:
        """Returns what a call takes longer when each device writes its result of so many bytes into memory that the
        call asks for, than into an argument's."""
        array = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32)
        mesh, spec = self.mesh(), PartitionSpec(None, AXES)
        kept, given = (
            jax.jit(lambda x: x * jnp.float32(0.999), donate_argnums=(0,) if donates else ())
            for donates in (True, False)
        )
        source, target = (_filled(array, 1, mesh, spec) for _ in range(2))
        pairs = []
        for _ in range(self.rounds + 1):
            started = self._now()
            jax.block_until_ready(given(source))
            between = self._now()
            target = jax.block_until_ready(kept(target))
            pairs.append((between - started, self._now() - between))
        (seconds,) = of_process_0([turns_alone(pairs[1:])])
        return max(seconds, LEAST_SECONDS)

    def _now(self) -> float:
        if self.clock == "wall":
            return time.perf_counter()
        own = sum(device.process_index == jax.process_index() for device in self.devices)
        return time.process_time() / min(own, num_cores())


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Holds programs of turns. `run`: calls them for so many times `num_turns` turns, and returns what they make.
    `without`: does the same but for the turns."""

    run: Callable[[int], Any]
    without: Callable[[int], Any]
    num_turns: int


def _in_a_loop(turn: Callable[..., Any], result: Any, values: Sequence[Any], num_sets: int, mesh: Mesh) -> _Turns:
    """Returns the program of one loop whose every round is a turn on each of `num_sets` sets of arrays.

    **Arguments:** `turn`, `mesh`: as of `Timer.seconds`. `result`: the shape of what a turn returns. `values`: the sets
    of each array, over all devices."""

    def loop(num_rounds: Any, *blocks: Any) -> Any:
        sets = [tuple(block[i, 0] for block in blocks) for i in range(num_sets)]

        def body(_: Any, carry: Any) -> Any:
            # What the last turn made goes into this one, so that no turn can be left out or moved.
            firsts = [_poke(first, last) for first, last in carry]
            return [(first, turn(first, *each[1:])) for first, each in zip(firsts, sets, strict=True)]

        begin = [(each[0], jnp.zeros(result.shape, result.dtype)) for each in sets]
        return [last[None] for _, last in lax.fori_loop(0, num_rounds, body, begin)]

    specs = (PartitionSpec(), *(_AMONG for _ in values))
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(AXES), check_vma=False))

    def run(num_rounds: int) -> Any:
        return program(jnp.asarray(num_rounds, jnp.int32), *values)

    return _Turns(run, lambda _: run(0), num_sets)


def _one_by_one(turn: Callable[..., Any], result: Any, values: Sequence[Any], num_sets: int, mesh: Mesh) -> _Turns:
    """Returns programs in which turns are written one behind the other, for what compilers make otherwise in a loop.
    The arguments are those of `_in_a_loop`."""
    num_turns = max(num_sets, _WRITTEN_TURNS)

    def program(count: int) -> Any:
        def turns(*blocks: Any) -> Any:
            last = jnp.zeros(result.shape, result.dtype)
            for number in range(count):
                first, *others = (block[number % num_sets, 0] for block in blocks)
                last = turn(_poke(first, last), *others)
            return last[None]

        specs = tuple(_AMONG for _ in values)
        return jax.jit(jax.shard_map(turns, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(AXES), check_vma=False))

    def called(each: Any) -> Callable[[int], Any]:
        def times(count: int) -> Any:
            last = None
            for number in range(count):
                # Results of many calls that nobody waits for would fill the memory.
                last = jax.block_until_ready(each(*values)) if number % _MOST_WAITING == 0 else each(*values)
            return last

        return times

    return _Turns(called(program(num_turns)), called(program(0)), num_turns)


def typical(seconds: Sequence[float]) -> float:
    """Returns what counts of several rounds, in their unit: the slowest of the fastest third, since other work on the
    machine only ever adds. `seconds`: of each round, at least one."""
    return sorted(seconds)[(len(seconds) - 1) // 3]


def turns_alone(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds of turns without the call that they are in. `pairs`: by round, the seconds of a call with
    turns, and of one without any. Each of the two is told by its own fastest rounds: of differences the smallest are
    those in which other work fell into the call without turns."""
    whole, empty = zip(*pairs, strict=True)
    return typical(whole) - typical(empty)


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _alone(turn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Returns a turn as a function whose result's shape can be asked for outside of a mesh."""
    specs = PartitionSpec()
    return jax.shard_map(turn, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)


def _poke(array: Any, last: Any) -> Any:
    """Returns an `array` whose first element depends on the array `last`, and is what it was."""
    where = (0,) * array.ndim
    seen = last[(0,) * last.ndim]
    zero = jnp.where(jnp.isnan(jnp.asarray(seen, jnp.float32)), 1, 0).astype(array.dtype)
    return array.at[where].add(zero)


def _num_sets(arrays: Sequence[Any], cold_bytes: int) -> int:
    """Returns on how many sets of `arrays` turns work one after the other: a step finds large arrays where the rest of
    it left them, in no cache, and a single set would stay in there. Small ones are read right after they are made."""
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    if size <= _WARM_BYTES:
        return 1
    return max(1, min(_MOST_SETS, round(cold_bytes / size)))


def _filled(array: Any, num_sets: int, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Returns an array of which every device has its own parts of the shape of `array`, `num_sets` of them, with values
    that are neither zeros nor denormal: some below one half, or row numbers."""
    count = mesh.size

    def fill() -> Any:
        numbers = lax.iota(jnp.int32, math.prod(array.shape))
        if jnp.issubdtype(array.dtype, jnp.integer):
            part = (numbers * 40503) % 1021
        else:
            part = ((numbers * 40503) % 1021).astype(jnp.float32) / 2048 + 0.001
        return jnp.broadcast_to(part.astype(array.dtype).reshape(array.shape), (num_sets, count, *array.shape))

    return jax.jit(fill, out_shardings=NamedSharding(mesh, spec))()
