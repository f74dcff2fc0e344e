"""Chooses the smaller mesh with which a run goes on when workers do not come back.

What the run was laid out on comes in (`RunLayout`, which the training loop notes for the launcher); a mesh for fewer
workers and the reason for it come out (`SmallerMesh`). Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence

from splitjax.errors import LaunchError
from splitjax.roles import MeshRoles, Role
from splitjax.runtime.launch import variables
from splitjax.runtime.launch.whereabouts import Board, StepRecorder

_LAYOUT_AT = 2048  # where it is on a worker's page, behind its stages
_LAYOUT_BYTES = 2040
_LENGTH = struct.Struct("=q")
# Axes along which devices have examples of their own, in the order in which they are shrunk.
_BATCH_ROLES = (Role.DATA, Role.STORAGE)


@dataclasses.dataclass(frozen=True)
class RunLayout:
    """Holds what a run was laid out on.

    - `axes`: pairs of a mesh axis and its size, major first.
    - `roles`: of the axes of which the user said a role that their name does not tell.
    - `batch_size`: examples of the global batch.
    - `stored`: axes over which parts of the state are stored: with fewer devices along them each holds more.
    - `num_processes`: of the run; each has as many devices.
    """

    axes: tuple[tuple[str, int], ...]
    roles: tuple[tuple[str, str], ...]
    batch_size: int
    stored: tuple[str, ...]
    num_processes: int

    def role(self, axis: str) -> Role | None:
        """Returns what a mesh `axis` is for; None where nobody knows."""
        said = {name: Role(role) for name, role in self.roles}
        return MeshRoles.of([name for name, _ in self.axes], said).role(axis)

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of the mesh."""
        return math.prod(size for _, size in self.axes)

    def note(self, recorder: StepRecorder) -> None:
        """Writes it on the page of `recorder`, for the launcher. What does not fit on the page is not written: the run
        is then not shrunk."""
        data = json.dumps(dataclasses.asdict(self)).encode()
        if len(data) <= _LAYOUT_BYTES - _LENGTH.size:
            recorder.write_at(_LAYOUT_AT + _LENGTH.size, data)
            recorder.write_at(_LAYOUT_AT, _LENGTH.pack(len(data)))

    @classmethod
    def read(cls, board: Board, rank: int) -> RunLayout | None:
        """Returns what worker `rank` noted on the `board`; None where it noted nothing."""
        (length,) = _LENGTH.unpack(board.bytes_at(rank, _LAYOUT_AT, _LENGTH.size))
        if not length:
            return None
        found = json.loads(board.bytes_at(rank, _LAYOUT_AT + _LENGTH.size, length))
        pairs = lambda values: tuple((name, value) for name, value in values)
        return cls(
            pairs(found["axes"]),
            pairs(found["roles"]),
            found["batch_size"],
            tuple(found["stored"]),
            found["num_processes"],
        )


@dataclasses.dataclass(frozen=True)
class SmallerMesh:
    """Holds a mesh for fewer workers.

    - `axes`: pairs of an axis and its size, in the order of the old mesh.
    - `num_processes`: how many workers it takes.
    - `reason`: what was chosen and why, as a sentence.
    """

    axes: tuple[tuple[str, int], ...]
    num_processes: int
    reason: str


def smaller_mesh(layout: RunLayout, num_left: int, *, least: int = 1) -> SmallerMesh:
    """Returns the mesh with which a run goes on, with the same global batch, when `num_left` of its workers are left.

    The product of its batch axes (roles data and storage) divides the batch. Axes over which nothing is stored in parts
    are shrunk first, as then no device holds more than before; among those that keep what is stored as it was the mesh
    with most devices is taken. Only where there is none the axes that hold the state in parts are shrunk too: storage
    axes first, the others to a divisor of their size, which the layout then divides by as well; the reason says so.
    Names, order and roles of the axes stay.

    **Arguments:** `layout`: of the run so far. `num_left`: workers that are left. `least`: fewest workers to go on
    with.

    Raises `LaunchError` where no mesh fits.
    """
    per_process = layout.num_devices // layout.num_processes
    wanted = [per_process * count for count in range(num_left, least - 1, -1)]
    if num_left >= 1 and least <= 1:
        # A process that is alone may leave devices unused; several need every one of theirs in the mesh.
        wanted += [count for count in range(per_process - 1, 0, -1)]
    sizes = [size for size in _candidates(layout) if math.prod(size) in wanted]
    if not sizes or num_left < 1:
        raise LaunchError(
            f"no mesh for {num_left} of {layout.num_processes} workers divides the batch of"
            f" {layout.batch_size} examples",
            value=dict(layout.axes),
            place="--rejoin-timeout-seconds",
            remedy="bring the missing workers back, allow fewer with --least-processes, or choose a batch size that"
            " more numbers divide",
        )
    best = min(sizes, key=lambda chosen: _cost(layout, chosen))
    axes = tuple((name, size) for (name, _), size in zip(layout.axes, best, strict=True))
    num_processes = max(1, math.prod(best) // per_process)
    return SmallerMesh(axes, num_processes, _reason(layout, axes, num_left, num_processes))


def mesh_text(axes: Sequence[tuple[str, int]]) -> str:
    """Returns the `axes` of a mesh in words: `data=2 x model=2`."""
    return " x ".join(f"{name}={size}" for name, size in axes)


def _candidates(layout: RunLayout) -> Iterator[tuple[int, ...]]:
    """Yields sizes of the axes that a smaller mesh may have."""
    choices = [
        range(1, size + 1)
        if layout.role(name) in _BATCH_ROLES
        else [part for part in range(1, size + 1) if size % part == 0]
        for name, size in layout.axes
    ]
    batch = [number for number, (name, _) in enumerate(layout.axes) if layout.role(name) in _BATCH_ROLES]
    for sizes in itertools.product(*choices):
        if layout.batch_size % math.prod(sizes[number] for number in batch) == 0:
            yield sizes


def _cost(layout: RunLayout, sizes: Sequence[int]) -> tuple[float, ...]:
    """What is worst first: how much more a device holds because of axes that are no batch axes, of storage axes and of
    data axes; how many other axes are shrunk although they are not stored over; and how few devices there are."""
    more: dict[Role | None, float] = {None: 1.0, Role.STORAGE: 1.0, Role.DATA: 1.0}
    shrunk_others = 0
    for (name, old), new in zip(layout.axes, sizes, strict=True):
        role = layout.role(name)
        kind = role if role in _BATCH_ROLES else None
        shrunk_others += kind is None and new < old
        if name in layout.stored:
            more[kind] *= old / new
    return (more[None], more[Role.STORAGE], more[Role.DATA], shrunk_others, -math.prod(sizes))


def _reason(layout: RunLayout, axes: Sequence[tuple[str, int]], num_left: int, num_processes: int) -> str:
    old = dict(layout.axes)
    parts = [
        f"mesh {mesh_text(axes)} in place of {mesh_text(layout.axes)}: {num_left} of {layout.num_processes} workers are"
        f" left, and the batch stays at {layout.batch_size} examples"
    ]
    if num_processes < num_left:
        parts.append(f"{num_left - num_processes} of them not used, because no mesh with all of them fits")
    for name, size in axes:
        if name in layout.stored and size < old[name]:
            parts.append(
                f"axis {name!r}, over which the state is stored in parts, goes from {old[name]} to {size}: each device"
                f" holds {old[name] / size:g} times as much of it"
            )
    return "; ".join(parts)


def layout_environment(chosen: SmallerMesh) -> Mapping[str, str]:
    """Returns the mesh that was `chosen`, and why, as the values of `SPLITJAX_MESH` and `SPLITJAX_MESH_REASON`."""
    return {variables.MESH: json.dumps(dict(chosen.axes)), variables.MESH_REASON: chosen.reason}
