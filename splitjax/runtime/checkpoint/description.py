"""`checkpoint.json`: what a checkpoint says about itself. Small, and readable without reading an array."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splitjax.codec import Codec, Wording, without_nones
from splitjax.codec.nesting import MAX_DEPTH, is_shallow
from splitjax.errors import CheckpointError, Refusal
from splitjax.runtime.checkpoint.folder import OWN
from splitjax.runtime.checkpoint.state_match import LEAF_FORM, StateLeaf


@dataclasses.dataclass(frozen=True)
class Description:
    """Describes a checkpoint.

    - `step`: the number of the step after which it was saved.
    - `leaves`: of the state, in the order of the pytree.
    - `extra`: JSON values that the training loop wanted kept.
    - `carried`: what the step carried, as `carrying` writes it; None for nothing.
    - `as_tree`: whether orbax stored the state as the pytree that it is, or flat by path. None in checkpoints of
      versions before this key: flat, and what the step carried in the same folder.
    """

    step: int
    leaves: tuple[StateLeaf, ...]
    extra: Mapping[str, Any]
    carried: Mapping[str, Any] | None = None
    as_tree: bool | None = None

    def to_json(self) -> str:
        """Returns the text of the file. Raises `CheckpointError` for an `extra` that would not come back equal."""
        check_json(self.extra, "extra")
        return _JSON.text(self)

    @staticmethod
    def read(file: Path) -> Description:
        """Reads the description in a `file` that `to_json` gave the text of. Raises `CheckpointError` for a file that
        cannot be read, and for another text."""
        return _JSON.load(file)


_JSON = Codec(
    Description,
    CheckpointError,
    Wording("a description of a checkpoint", "restore another checkpoint, or the file from a copy"),
    forms={StateLeaf: LEAF_FORM, Description: without_nones("carried", "as_tree")},
)


def checked_step(step: Any) -> int:
    """Returns the number of a `step`. Raises `CheckpointError` for anything but a whole number of at least 0."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            "a step is a whole number, 0 or more", value=step, place="save(step, ...)", remedy="count the steps done"
        )
    return number


def write_own(folder: Path, rank: int, own: Any) -> None:
    """Writes what process number `rank` has for itself, the JSON value `own`, into the checkpoint's `folder`. Raises
    `OSError`."""
    (folder / OWN).mkdir(exist_ok=True)
    (folder / OWN / f"{rank}.json").write_text(json.dumps(own), encoding="ascii")


def read_own(folder: Path) -> tuple[Any, ...]:
    """Returns what the processes had for themselves in the checkpoint's `folder`, by their numbers. Raises `OSError`,
    and `ValueError` for other text: files of a checkpoint are verified before."""
    files = sorted((folder / OWN).glob("*.json"), key=lambda file: int(file.stem))
    return tuple(json.loads(file.read_text(encoding="ascii")) for file in files)


def check_json(value: Any, place: str) -> None:
    """Raises `CheckpointError`, which names the `place`, for a `value` that would not come back equal from JSON: what
    is no dict by strings, list, string, number, boolean or None, tuples among it."""
    deepest = MAX_DEPTH - 2  # it stands in a larger document
    if not is_shallow(value, deepest):
        raise CheckpointError(
            f"more than {deepest} dicts and lists in each other",
            place=place,
            remedy="put what is nested as deeply into a file of its own",
        )
    refusal = not_json(value, place)
    if refusal is not None:
        raise refusal.error()


def not_json(value: Any, place: str) -> Refusal | None:
    """Returns the refusal of a `value` that `check_json` raises an error for; None for one that JSON holds. `place`:
    where it stands."""
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                message = "keys of JSON objects are strings"
                return Refusal(message, value=key, place=place, remedy="use str(key)", kind=CheckpointError)
        inside = ((f"{place}[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list):
        inside = ((f"{place}[{number}]", inner) for number, inner in enumerate(value))
    elif value is not None and type(value) not in (bool, int, float, str):
        return Refusal(
            "`extra` holds JSON values: dicts, lists, strings, numbers, booleans, None",
            value=value,
            place=place,
            remedy="convert it (int(x), x.tolist(), list(x)), or put arrays into the state",
            kind=CheckpointError,
        )
    return next((refusal for at, inner in inside if (refusal := not_json(inner, at)) is not None), None)
