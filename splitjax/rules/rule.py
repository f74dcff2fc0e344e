"""Defines a rule: which parameters it speaks of, and how it would shard them.

A rule is validated where it is made, so that a typing mistake in it is an error that names the key, and never a
rule that quietly matches nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, NoReturn

from splitjax.errors import RuleError
from splitjax.trace.graph import KINDS

# A dim of a parameter by name ("out"), by position (-1), or the largest one that divides.
DimRef = str | int
# What one alternative shards: pairs of a dim reference and the mesh axes it is split over, major first.
Alternative = tuple[tuple[DimRef, tuple[str, ...]], ...]
Shape = tuple[int | None | EllipsisType, ...]

LARGEST: str = "largest"
TIES: tuple[str, ...] = ("local", "hard")
# What a plan writes in place of a rule's name where no rule decided.
RESERVED: tuple[str, ...] = ("default", "batch", "input")
_POSITION = re.compile(r"[+-]?\d+")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Says which parameters it speaks of, and how to shard them. All matchers that are given must hold; none given
    matches everything.

    **Arguments:**

    - `name`: what a plan shows beside every parameter that the rule decided.
    - `kind`: layer kind, or several of them: one of `splitjax.trace.graph.KINDS`.
    - `path`: glob on the whole parameter path; `*` and `?` stay within one `/` component, `**` crosses them.
    - `regex`: regular expression, searched anywhere in the path.
    - `shape`: sizes per dim; None (in TOML `"*"`) is any size, one `...` (`"..."`) any number of dims.
    - `min_size`, `max_size`: number of elements, both inclusive.
    - `shard`: over which axes the parameter is computed: alternatives in order of preference, each a mapping from a
      dim reference to a mesh axis or a role, or several; one mapping alone is one alternative, an empty mapping
      replicates on purpose. Stored as tuples of pairs.
    - `ties`: `"local"` spreads the axis to parameters of other layers in the same local class (column then row),
      `"hard"` keeps to shared storage, and neither gives nor takes the axis between layers.
    - `source`: where the rule comes from: a paper and section.
    - `store`: axes or roles over which the parameter is stored in parts besides, and gathered where it is used: one, or
      several.

    Raises `RuleError` for a value of the wrong type or an unknown kind, an invalid pattern, or alternatives that
    can never apply.
    """

    name: str
    kind: str | tuple[str, ...] | None = None
    path: str | None = None
    regex: str | None = None
    shape: Shape | None = None
    min_size: int | None = None
    max_size: int | None = None
    shard: Any = ()
    ties: str = "local"
    source: str = ""
    store: Any = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            _fail("?", "name", "a rule needs a name", self.name, 'write name = "dense"')
        if self.name in RESERVED:
            _fail(
                self.name,
                "name",
                f"{self.name!r} is what plans write where no rule decided",
                self.name,
                "choose another name",
            )
        for key in ("path", "regex"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                _fail(
                    self.name,
                    key,
                    f"{key} is a pattern in a non-empty string",
                    value,
                    "leave the key out to match every path",
                )
        if not isinstance(self.source, str):
            _fail(self.name, "source", "source is text", self.source, "write the paper and its section in a string")
        if self.ties not in TIES:
            _fail(
                self.name,
                "ties",
                f"ties is one of {', '.join(TIES)}",
                self.ties,
                'write ties = "local" or ties = "hard"',
            )
        object.__setattr__(self, "kind", _kinds(self.name, self.kind))
        object.__setattr__(self, "shape", _shape(self.name, self.shape))
        object.__setattr__(self, "shard", _alternatives(self.name, self.shard))
        object.__setattr__(self, "store", _store(self.name, self.store))
        _check_regex(self.name, self.regex)
        _check_sizes(self.name, self.min_size, self.max_size)

    @property
    def replicates(self) -> bool:
        """Tells whether the rule keeps its parameters whole on purpose."""
        return not self.shard

    @property
    def is_explicit(self) -> bool:
        """Tells whether the rule names parameters by their path."""
        return self.path is not None or self.regex is not None

    @property
    def per_array(self) -> bool:
        """Tells whether some alternative speaks of one array (by position or size) instead of the layer's named
        dims."""
        return any(isinstance(ref, int) or ref == LARGEST for alternative in self.shard for ref, _ in alternative)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes and roles that the rule names, in order of appearance: those over which it computes first."""
        computed = (axis for alternative in self.shard for _, axes in alternative for axis in axes)
        return tuple(dict.fromkeys((*computed, *self.store)))

    @property
    def matchers(self) -> str:
        """The matchers as text, such as `kind=dense, min_size=1024`."""
        parts = []
        for key in ("kind", "path", "regex", "shape", "min_size", "max_size"):
            value = getattr(self, key)
            if value is None:
                continue
            if key == "kind":
                value = "|".join(value)
            if key == "shape":
                value = "(" + ", ".join("*" if n is None else "..." if n is ... else str(n) for n in value) + ")"
            parts.append(f"{key}={value}")
        return ", ".join(parts) or "everything"


def closest(word: object, words: Sequence[str]) -> str:
    """Returns `; did you mean 'dense'?` with the one of `words` nearest to `word`, or nothing where none is near."""
    near = difflib.get_close_matches(str(word), words, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Mistake(RuleError):
    """Reports a wrong key of a rule or rule set; a loader can raise it again with file and line as its place.

    **Arguments:**

    - `message`, `value`, `remedy`: as for every error of splitjax.
    - `owner`: the rule or the rule set.
    - `key`: the wrong key.
    """

    def __init__(self, message: str, *, value: object, owner: str, key: str, remedy: str) -> None:
        super().__init__(message, value=value, place=f"{owner}, key {key!r}", remedy=remedy)
        self.parts: tuple[str, object, str, str] = (message, value, key, remedy)

    def at(self, place: str) -> RuleError:
        """Returns the same error, placed at `place` in a file."""
        message, value, key, remedy = self.parts
        return RuleError(message, value=value, place=f"{place}, key {key!r}", remedy=remedy)


def _fail(name: str, key: str, message: str, value: object, remedy: str) -> NoReturn:
    raise Mistake(message, value=value, owner=f"rule {name!r}", key=key, remedy=remedy)


def _kinds(name: str, kind: Any) -> tuple[str, ...] | None:
    """Validates the kinds of a rule and returns them as a tuple; None where the rule names none."""
    if kind is None:
        return None
    kinds = (kind,) if isinstance(kind, str) else kind
    if not isinstance(kinds, Sequence) or not kinds or not all(isinstance(entry, str) for entry in kinds):
        _fail(name, "kind", "kind is a layer kind or a list of them", kind, f"use some of {', '.join(KINDS)}")
    for entry in kinds:
        if entry not in KINDS:
            _fail(
                name,
                "kind",
                f"there is no layer kind {entry!r}{closest(entry, KINDS)}",
                entry,
                f"use one of {', '.join(KINDS)}",
            )
    return tuple(dict.fromkeys(kinds))


def _shape(name: str, shape: Any) -> Shape | None:
    """Validates the shape pattern of a rule, of which `"*"` becomes None and `"..."` an ellipsis."""
    if shape is None:
        return None
    remedy = 'write for example shape = ["*", 4096] or shape = ["...", 4096]'
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        _fail(name, "shape", "shape is a list of sizes", shape, remedy)
    sizes = tuple(None if size == "*" else ... if size == "..." else size for size in shape)
    for size in sizes:
        if size is not None and size is not ... and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            _fail(name, "shape", "an entry of shape is a size, any size, or an ellipsis", size, remedy)
    if sizes.count(...) > 1:
        _fail(name, "shape", "shape may have one ellipsis", shape, remedy)
    return sizes


def _check_regex(name: str, regex: str | None) -> None:
    if regex is None:
        return
    try:
        re.compile(regex)
    except (re.error, RecursionError, OverflowError) as error:
        _fail(
            name,
            "regex",
            f"the regular expression is invalid: {error}",
            regex,
            "escape special characters with a backslash",
        )


def _check_sizes(name: str, smallest: Any, largest: Any) -> None:
    for key, size in (("min_size", smallest), ("max_size", largest)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            _fail(name, key, f"{key} is a number of elements", size, f"write {key} = 1024, or leave it out")
    if smallest is not None and largest is not None and smallest > largest:
        _fail(
            name,
            "min_size",
            f"min_size {smallest} is above max_size {largest}: the rule matches nothing",
            smallest,
            "exchange the two",
        )


def _store(name: str, store: Any) -> tuple[str, ...]:
    """Validates the axes over which a rule stores parameters and returns them as a tuple."""
    several = (store,) if isinstance(store, str) else store
    if not isinstance(several, Sequence) or not all(isinstance(axis, str) and axis for axis in several):
        _fail(name, "store", "store is a mesh axis or a role, or a list of them", store, 'write store = "storage"')
    if len(set(several)) < len(several):
        _fail(name, "store", "a parameter is stored over one axis twice", store, "name every axis once")
    return tuple(several)


def _alternatives(name: str, shard: Any) -> tuple[Alternative, ...]:
    """Validates the alternatives of a rule and returns them as tuples; none where the rule replicates."""
    if isinstance(shard, Mapping):
        shard = (shard,)
    if shard is None or isinstance(shard, str) or not isinstance(shard, Sequence):
        _fail(
            name,
            "shard",
            "shard is a mapping from dims to mesh axes, or a list of such alternatives",
            shard,
            'write shard = [{out = "model"}, {in = "model"}], or shard = [] to replicate',
        )
    alternatives = tuple(_alternative(name, entry) for entry in shard)
    for position, alternative in enumerate(alternatives[:-1]):
        if not alternative:
            _fail(
                name,
                "shard",
                f"alternative {position + 1} is empty and always fits, so the ones after it never apply",
                shard,
                "put the empty alternative last, or take it out",
            )
    return () if alternatives == ((),) else alternatives


def _alternative(name: str, alternative: Any) -> Alternative:
    """Validates one alternative of a rule and returns its pairs."""
    if not isinstance(alternative, Mapping):
        pairs = alternative if isinstance(alternative, tuple) else None
        if pairs is None or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            _fail(
                name,
                "shard",
                "an alternative is a mapping from dims to mesh axes",
                alternative,
                'write {out = "model"}',
            )
        alternative = dict(pairs)
    dims: dict[DimRef, tuple[str, ...]] = {}
    for ref, axes in alternative.items():
        if isinstance(ref, str) and _POSITION.fullmatch(ref):
            ref = int(ref)  # the keys of a TOML table are strings
        if isinstance(ref, bool) or not isinstance(ref, (str, int)) or ref == "":
            _fail(
                name,
                "shard",
                "a dim is a name, a position, or 'largest'",
                ref,
                'write {out = "model"} or {"-1" = "model"}',
            )
        several = (axes,) if isinstance(axes, str) else axes
        if (
            not isinstance(several, Sequence)
            or not several
            or not all(isinstance(axis, str) and axis for axis in several)
        ):
            _fail(
                name,
                "shard",
                f"the mesh axis of dim {ref!r} is a name or a list of names",
                axes,
                f'write {{{ref} = "model"}} or {{{ref} = ["data", "model"]}}',
            )
        if len(set(several)) < len(several):
            _fail(name, "shard", f"dim {ref!r} is split over one axis twice", axes, "name every axis once")
        dims[ref] = tuple(several)
    return tuple(dims.items())
