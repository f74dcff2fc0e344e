"""Keeps what was chosen for a step beside JAX's compiled programs, so that the next process does not search again.

A traced call and what it is chosen for come in; the file of its choice comes out, and what was read from it. There is
one only where JAX keeps programs (`jax_compilation_cache_dir`, switched off by `jax_enable_compilation_cache`). Its
name is a digest of everything that a choice depends on, the sources of splitjax and the version of JAX included: what
is kept is what a search would find, and anything else in its place is left aside.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from splitjax.choosing import Choice
from splitjax.compile.choosing.asked import Asked
from splitjax.compile.choosing.document import JSON, choice_of, document_of
from splitjax.errors import SplitjaxError
from splitjax.roles import Role

logger: logging.Logger = logging.getLogger("splitjax")


@dataclasses.dataclass(frozen=True)
class KeptChoice:
    """Is where the choice for a call is kept. `path`: its file, which need not be there. `key`: the digest of what it
    depends on. `roles`, `budget_bytes`: of the step."""

    path: pathlib.Path
    key: str
    roles: Mapping[str, Role]
    budget_bytes: float

    @classmethod
    def of(cls, asked: Asked) -> KeptChoice | None:
        """Returns where the choice for what is `asked` is kept; None where nothing is kept, or it depends on what has
        no text."""
        flags: Any = jax.config  # most of whose flags type checkers do not know
        folder = flags.jax_compilation_cache_dir
        if not folder or not flags.jax_enable_compilation_cache or not asked.has_text:
            return None
        key, recipe = asked.digest, asked.recipe
        return cls(pathlib.Path(folder) / f"splitjax-choice-{key}.json", key, recipe.roles, recipe.memory_budget_bytes)

    def read(self) -> Choice | None:
        """Returns the kept choice; None where there is none, or it cannot be read."""
        if not self.path.exists():
            return None
        try:
            found = JSON.load(self.path)
            if found.key == self.key:
                return choice_of(found, self.roles, self.budget_bytes)
            logger.warning("splitjax: the kept choice %s is another step's: it is made anew", self.path)
        except (SplitjaxError, IndexError) as error:
            logger.warning("splitjax: the kept choice %s cannot be read (%s): it is made anew", self.path, error)
        return None

    def write(self, choice: Choice) -> None:
        """Keeps a `choice`. What the clock decided is not kept, nor what would be read as another one; a folder that
        cannot be written is no error."""
        if choice.clock_struck:
            return
        try:
            document = document_of(choice, self.key)
            if choice_of(document, self.roles, self.budget_bytes) != choice:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            JSON.save(document, self.path)
        except (SplitjaxError, OSError) as error:
            logger.debug("splitjax: a choice is not kept: %s", error)
