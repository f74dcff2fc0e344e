"""Lets process 0 of a run choose for all of its processes.

Each of them could choose alike, but for what it measured of the machine (`target="calibration.json"`), and all of them
would search for the same. So process 0 leaves its choice in the key-value store of JAX's coordination service, and the
others take it from there. Who asks for something else than process 0 chooses for itself, and is told so before
anything runs (`step.agreement.agree_on_choice`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import Choice
from splitjax.compile.choosing.asked import Asked
from splitjax.compile.choosing.document import JSON, choice_of, document_of
from splitjax.errors import SplitjaxError
from splitjax.roles import Role
from splitjax.step.agreement import come_to_decision, leave_decision, wait_for_decision

logger: logging.Logger = logging.getLogger("splitjax")


@dataclasses.dataclass(frozen=True)
class SharedChoice:
    """Is where process 0 leaves its choice for the others. `name`: of the step. `folder`: in the store. `roles`,
    `budget_bytes`: of the step. `is_ours`: whether this is process 0."""

    name: str
    folder: str
    roles: Mapping[str, Role]
    budget_bytes: float
    is_ours: bool

    @classmethod
    def of(cls, asked: Asked, mesh: Mesh | AbstractMesh) -> SharedChoice | None:
        """Comes to where the choice for what is `asked` is shared; None where this process chooses for itself, as the
        devices of the `mesh`, one of those that could be taken, are all its own, or not here."""
        if not isinstance(mesh, Mesh) or not mesh.is_multi_process:
            return None
        recipe = asked.recipe
        folder = come_to_decision(recipe.name, asked.digest_for_all)
        return cls(recipe.name, folder, recipe.roles, recipe.memory_budget_bytes, jax.process_index() == 0)

    def leave(self, choice: Choice | None) -> None:
        """Leaves the `choice` of process 0 for the others; None where it has none, or found no layout that fits."""
        text = "" if choice is None else JSON.text(document_of(choice, self.folder))
        leave_decision(self.folder, text)

    def read(self) -> Choice | None:
        """Waits for the choice of process 0 and returns it; None where there is none to take, so that this process has
        to choose, too. Raises `ProcessError` where process 0 does not come."""
        text = wait_for_decision(self.folder, self.name)
        if not text:
            return None
        try:
            return choice_of(JSON.parse(text), self.roles, self.budget_bytes)
        except (SplitjaxError, IndexError) as error:
            logger.warning("splitjax: what process 0 chose for %s cannot be read (%s)", self.name, error)
            return None
