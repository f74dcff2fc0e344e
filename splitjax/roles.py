"""Defines what a mesh axis is for: its role, known by the axis's name or said by the user.

Names of axes, and the roles that were said of them, come in; a `MeshRoles` comes out, which rule sets are read with:
they speak of roles, so that one set fits meshes whose axes are called otherwise.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax.errors import MeshError, Refusal


class Role(enum.StrEnum):
    """Says what a mesh axis is for.

    - `DATA`: devices along it have examples of their own.
    - `STORAGE`: as `DATA`, and weights are stored in parts over it, gathered where they are used (fully sharded data
      parallelism).
    - `TENSOR`: layers are computed in parts over it.
    - `EXPERT`: experts are distributed over it.
    - `SEQUENCE`: positions of a sequence are distributed over it.
    - `STAGE`: the layers of a model are distributed over it.
    """

    DATA = "data"
    STORAGE = "storage"
    TENSOR = "tensor"
    EXPERT = "expert"
    SEQUENCE = "sequence"
    STAGE = "stage"


# The names that people give to axes, and what they mean by them.
ROLE_BY_NAME: Mapping[str, Role] = {
    "data": Role.DATA,
    "replica": Role.DATA,
    "fsdp": Role.STORAGE,
    "model": Role.TENSOR,
    "tensor": Role.TENSOR,
    "tp": Role.TENSOR,
    "expert": Role.EXPERT,
    "ep": Role.EXPERT,
    "sequence": Role.SEQUENCE,
    "context": Role.SEQUENCE,
    "cp": Role.SEQUENCE,
    "stage": Role.STAGE,
}
# Axes that a rule may name although the mesh lacks them: they then have size 1. Roles may be absent as well.
KNOWN_AXES: tuple[str, ...] = ("data", "model")
ROLE_NAMES: tuple[str, ...] = tuple(str(role) for role in Role)
# Roles over which no set of rules lays anything out yet.
LATER: frozenset[Role] = frozenset({Role.SEQUENCE, Role.STAGE})


@dataclasses.dataclass(frozen=True)
class MeshRoles:
    """Holds the role of every axis of a mesh, in the mesh's order; None for an axis of which no role is known.

    - `by_axis`: pairs of an axis and its role.
    """

    by_axis: tuple[tuple[str, Role | None], ...]

    @classmethod
    def of(cls, axes: Sequence[str], said: Mapping[str, Role]) -> MeshRoles:
        """Returns the roles of `axes`: what was `said` of them, else what their names mean."""
        return cls(tuple((axis, said.get(axis, ROLE_BY_NAME.get(axis))) for axis in axes))

    def role(self, axis: str) -> Role | None:
        """Returns the role of `axis`; None where none is known, or the mesh lacks it."""
        return dict(self.by_axis).get(axis)

    def having(self, *roles: Role) -> tuple[str, ...]:
        """Returns the axes that have one of these `roles`, in the mesh's order."""
        return tuple(axis for axis, role in self.by_axis if role in roles)

    def store(self, axes: Sequence[str]) -> bool:
        """Tells whether some of `axes` are such that what is split over them is stored in parts and gathered where it
        is used: axes of the role data or storage."""
        return any(self.role(axis) in (Role.DATA, Role.STORAGE) for axis in axes)

    def resolve(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the axes that `names` mean, each once, in the order of the names.

        A name is a role, which means all axes that have it (none, perhaps), or an axis. Raises `MeshError` for an axis
        that the mesh lacks, unless it is one of `KNOWN_AXES`.
        """
        unknown = self.unknown(names)
        if unknown is not None:
            raise unknown.error()
        axes: list[str] = []
        present = [axis for axis, _ in self.by_axis]
        for name in names:
            if name in ROLE_NAMES:
                axes += self.having(Role(name))
            elif name in present:
                axes.append(name)
        return tuple(dict.fromkeys(axes))

    def unknown(self, names: Sequence[str]) -> Refusal | None:
        """Returns the refusal, a `MeshError`, of the first of `names` that `resolve` does not know; None where it knows
        all."""
        present = [axis for axis, _ in self.by_axis]
        for name in names:
            if name not in ROLE_NAMES and name not in present and name not in KNOWN_AXES:
                return Refusal(
                    f"the mesh has no axis {name!r}",
                    value=present,
                    place="mesh",
                    remedy=f"name one of {', '.join(present)}, a role ({', '.join(ROLE_NAMES)}), or add {name!r} to the"
                    " mesh",
                    kind=MeshError,
                )
        return None


def read_roles(said: Any, place: str) -> dict[str, Role]:
    """Returns the roles that a user said of axes, as values.

    **Arguments:** `said`: what the option `roles` was given, such as `{"x": "tensor"}`; None for nothing. `place`: of
    the option, for messages.

    Raises `MeshError` for what is no mapping from names of axes to roles, and for an unknown role."""
    if said is None:
        return {}
    if not isinstance(said, Mapping) or not all(isinstance(axis, str) and axis for axis in said):
        raise MeshError(
            "roles maps mesh axes to what they are for", value=said, place=place, remedy='write roles={"x": "tensor"}'
        )
    roles: dict[str, Role] = {}
    for axis, role in said.items():
        if not isinstance(role, str) or role not in ROLE_NAMES:
            near = difflib.get_close_matches(str(role), [*ROLE_NAMES, *ROLE_BY_NAME], n=1)
            meant = ROLE_BY_NAME.get(near[0], near[0]) if near else ""
            raise MeshError(
                f"there is no role {role!r}" + (f"; did you mean {str(meant)!r}?" if meant else ""),
                value=role,
                place=f"{place}, axis {axis!r}",
                remedy=f"use one of {', '.join(ROLE_NAMES)}",
            )
        roles[axis] = Role(role)
    return roles
