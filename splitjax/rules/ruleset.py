"""Defines rule sets and reads their TOML files (the schema is in `sharding_rules/README.md`).

The name of a shipped set, a path or TOML text goes in, a validated `RuleSet` comes out, or a `RuleError` that
names file, line and key.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import os
import pathlib
import re
import tomllib
from typing import Any

from splitjax._registry import NamedRegistry, is_reference, load_reference
from splitjax.codec.toml_text import parse_toml
from splitjax.errors import RuleError, UnavailableError
from splitjax.mesh import MeshShape
from splitjax.roles import Role
from splitjax.rules.rule import Mistake, Rule, closest

BATCH: tuple[str, ...] = ("all", "data")
_SUFFIX = ".toml"
# The name of rule sets that are chosen (`rules="auto"`), which no other set has.
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """Holds rules in order (the first that matches a parameter decides) and what applies to the set as a whole.

    **Arguments:**

    - `name`: what plans and errors call it.
    - `rules`: the rules, each name once.
    - `replicated_batch`: where the batch of replicated layers goes: `"all"` spreads it over every mesh axis,
      `"data"` over the axes of the roles data and storage only; a list of axes or roles over those.
    - `description`, `source`: text for people.
    - `allow_replicated`: whether leaving every parameter whole is what the set is for.
    - `sync`: how gradients of tables with row lookups are exchanged where `parallelize(sync=)` is left at
      `"dense"`: one of its names.
    - `saved`: axes or roles over which the inputs of rematerialised layers lie in parts from the forward to the
      backward pass, which gathers them: those that split weights, and no examples.
    - `axes`: axes or roles, besides every axis of another role than data, over which some parameter has to be sharded.

    Raises `RuleError` for a value of the wrong type, or a rule name that occurs twice.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    replicated_batch: str | tuple[str, ...] = "all"
    description: str = ""
    source: str = ""
    allow_replicated: bool = False
    axes: tuple[str, ...] = ()
    sync: str = "dense"
    saved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            self._fail("name", "a rule set needs a name", 'write name = "mine"')
        for key in ("description", "source", "sync"):
            if not isinstance(getattr(self, key), str):
                self._fail(key, f"{key} is text", "write it in a string")
        batch = self.replicated_batch
        if not isinstance(batch, str) and isinstance(batch, (list, tuple)):
            batch = tuple(batch)
            object.__setattr__(self, "replicated_batch", batch)
        named = isinstance(batch, tuple) and all(isinstance(axis, str) and axis for axis in batch)
        if not named and batch not in BATCH:
            self._fail(
                "replicated_batch",
                f"replicated_batch is one of {', '.join(BATCH)}, or a list of mesh axes and roles",
                'write replicated_batch = "all", "data" or ["data", "storage", "expert"]',
            )
        if not isinstance(self.allow_replicated, bool):
            self._fail("allow_replicated", "allow_replicated is true or false", "write allow_replicated = true")
        if not isinstance(self.axes, (list, tuple)) or not all(isinstance(axis, str) and axis for axis in self.axes):
            self._fail("axes", "axes is a list of mesh axis names", 'write axes = ["data"]')
        object.__setattr__(self, "axes", tuple(self.axes))
        if not isinstance(self.saved, (list, tuple)) or not all(isinstance(axis, str) and axis for axis in self.saved):
            self._fail("saved", "saved is a list of mesh axes and roles", 'write saved = ["tensor"]')
        object.__setattr__(self, "saved", tuple(self.saved))
        if not isinstance(self.rules, (list, tuple)) or not all(isinstance(rule, Rule) for rule in self.rules):
            self._fail("rules", "rules is a sequence of splitjax.Rule", "make each entry with splitjax.Rule(name, ...)")
        object.__setattr__(self, "rules", tuple(self.rules))
        seen: set[str] = set()
        for position, rule in enumerate(self.rules, 1):
            if rule.name in seen:
                raise Mistake(
                    "two rules have one name",
                    value=rule.name,
                    owner=f"rule set {self.name!r}, rule {position}",
                    key="name",
                    remedy="give every rule its own name, so that a plan can say which one decided",
                )
            seen.add(rule.name)

        crossing = next((rule for rule in self.rules if rule.shard and rule.store), None)
        if crossing is not None and self.replicated_batch == "all":
            raise Mistake(
                "a weight is computed over some axes and stored over others only where the devices of the first share"
                f" their examples, and under this batch every device has its own (rule {crossing.name!r})",
                value=self.replicated_batch,
                owner=f"rule set {self.name!r}",
                key="replicated_batch",
                remedy='write replicated_batch = "data", or a list of axes and roles',
            )

    def batch_axes(self, mesh: MeshShape) -> tuple[str, ...]:
        """Returns the axes of `mesh`, of a size above 1, over which the set lays the batch of replicated layers. Raises
        `MeshError` for an axis that the mesh lacks."""
        if self.replicated_batch == "all":
            return tuple(axis for axis in mesh.sizes if axis in mesh.wide)
        named = (Role.DATA, Role.STORAGE) if self.replicated_batch == "data" else self.replicated_batch
        wanted = mesh.meant(tuple(map(str, named)))
        return tuple(axis for axis in mesh.sizes if axis in wanted)

    def saving_axes(self, mesh: MeshShape) -> tuple[str, ...]:
        """Returns the axes of `mesh`, of a size above 1, over which the inputs of rematerialised layers lie in parts.
        Raises `MeshError` for an axis that the mesh lacks."""
        wanted = mesh.meant(self.saved) if self.saved else ()
        return tuple(axis for axis in mesh.sizes if axis in wanted and axis in mesh.wide)

    @property
    def batch_mode(self) -> str:
        """Returns what plans say of `replicated_batch`: "all", or "data" where the batch does not lie over every axis
        on principle."""
        return "all" if self.replicated_batch == "all" else "data"

    def _fail(self, key: str, message: str, remedy: str) -> None:
        raise Mistake(message, value=getattr(self, key), owner=f"rule set {self.name!r}", key=key, remedy=remedy)


# Stands in a recipe for rules that are chosen when the step is traced (`compile.choosing`).
TO_BE_CHOSEN = RuleSet(AUTO, allow_replicated=True)


def available() -> dict[str, Any]:
    """Returns the shipped rule sets: name -> file, from the wheel (`splitjax/_sharding_rules`) or the repository
    beside the package.

    Raises `RuleError` where neither has them.
    """
    packaged = importlib.resources.files("splitjax").joinpath("_sharding_rules")
    folder = packaged if packaged.is_dir() else pathlib.Path(__file__).resolve().parents[2] / "sharding_rules"
    if not folder.is_dir():
        raise RuleError(
            "the shipped rule sets are not installed",
            value=str(folder),
            place="splitjax's installation",
            remedy="install splitjax again from its wheel or its repository, or give a path to a TOML file",
        )
    files = sorted((file for file in folder.iterdir() if file.name.endswith(_SUFFIX)), key=lambda file: file.name)
    return {file.name.removesuffix(_SUFFIX): file for file in files}


def register_rules(rules: RuleSet) -> RuleSet:
    """Makes the rule set `rules` known by its name, as `rules="name"` takes it, and returns it.

    Raises `RuleError` for what is no rule set, and for a name that is taken.
    """
    if not isinstance(rules, RuleSet):
        raise RuleError(
            "a rule set is a splitjax.RuleSet",
            value=rules,
            place=_REGISTER,
            remedy="make it with splitjax.RuleSet(name, rules)",
        )
    if rules.name in available():
        raise RuleError(
            "splitjax has a rule set of this name",
            value=rules.name,
            place=_REGISTER,
            remedy="choose another name",
        )
    RULE_SETS.add(rules.name, rules, same=lambda known, again: known == again)
    return rules


def _accept(name: str, loaded: Any) -> None:
    """Registers the rule set that an entry point called `name` has loaded, where importing it did not."""
    if not isinstance(loaded, RuleSet):
        raise TypeError(f"it names {loaded!r}, which is no splitjax.RuleSet")
    RULE_SETS.add(name, loaded)


_REGISTER = "splitjax.rules.register_rules"
RULE_SETS: NamedRegistry[RuleSet] = NamedRegistry(
    "rule set", group="splitjax.rules", error=RuleError, register=_REGISTER, accept=_accept
)


def load_rules(source: str | os.PathLike[str] | RuleSet) -> RuleSet:
    """Returns the rule set for what the user gave.

    `source` is a `RuleSet` (returned as it is); the name of a shipped one, of one that `register_rules` made known, or
    of one that an installed package declares; a reference to one, `package.module:RULES`; or a path to a TOML file.

    Raises `RuleError`, with file, rule and key as its place, for an unknown name, a file or module that cannot be read,
    or a mistake in it; `ExtensionError` for an installed package that cannot be loaded; `UnavailableError` for
    `"auto"`.
    """
    if isinstance(source, RuleSet):
        return source
    if source == "auto":
        raise UnavailableError(
            'rules="auto" is no rule set: rules are chosen for a step, by parallelize(rules="auto")',
            value=source,
            place="rules",
            remedy='name a rule set here, such as "splitbrain"',
        )
    if not isinstance(source, (str, os.PathLike)):
        raise RuleError(
            "rules is a name, a path to a TOML file, or a RuleSet",
            value=source,
            place="rules",
            remedy=f"use one of {', '.join(available())}, or splitjax.RuleSet(name, rules)",
        )
    if isinstance(source, str) and is_reference(source):
        named = load_reference(source, place="rules", error=RuleError)
        if not isinstance(named, RuleSet):
            raise RuleError(
                f"the reference names {type(named).__name__}, which is no rule set",
                value=source,
                place="rules",
                remedy="name a splitjax.RuleSet of the module",
            )
        return named
    if isinstance(source, str) and not source.endswith(_SUFFIX) and not re.search(r"[/\\]", source):
        shipped = available()
        if source not in shipped:
            if RULE_SETS.knows(source):
                return RULE_SETS[source]
            known = [*shipped, *RULE_SETS]
            raise RuleError(
                f"there is no rule set {source!r}{closest(source, known)}",
                value=source,
                place="rules",
                remedy=f"use one of {', '.join(known)}, give a path that ends in {_SUFFIX}, or make one known with"
                f" {_REGISTER}",
            )
        return _parsed(shipped[source].read_text(encoding="utf-8"), f"sharding_rules/{source}{_SUFFIX}")
    file = pathlib.Path(source)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(
            f"the rule file cannot be read: {error}",
            value=str(file),
            place="rules",
            remedy=f"give the path of a TOML file, or one of {', '.join(available())}",
        ) from error
    return parse_rules(text, str(file))


@functools.lru_cache(maxsize=32)
def _parsed(text: str, file: str) -> RuleSet:
    """Reads a shipped rule set as `parse_rules` does: a choice, and some errors, read all of them again and again."""
    return parse_rules(text, file)


def parse_rules(text: str, file: str) -> RuleSet:
    """Reads a rule set from TOML `text`; `file` is its name in errors, and its stem the default name of the set.

    Raises `RuleError`, with file, line, rule and key as its place, for a mistake in it.
    """
    try:
        table = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at (.*)\)", str(error))
        raise RuleError(
            f"the rule file is not valid TOML: {error}",
            place=f"{file}, {where[1]}" if where else file,
            remedy="correct that line; sharding_rules/README.md shows the schema",
        ) from error
    keys = [field.name for field in dataclasses.fields(RuleSet) if field.name != "rules"] + ["rule"]
    _check_keys(table, keys, file)
    entries = table.pop("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RuleError(
            "rules are tables", value=entries, place=f"{file}, key 'rule'", remedy="start every rule with [[rule]]"
        )
    places = _places(entries, text, file)
    rules = [_parse_rule(entry, place) for entry, place in zip(entries, places, strict=True)]
    for position, rule in enumerate(rules):
        if rule.name in (earlier.name for earlier in rules[:position]):
            raise RuleError(
                "two rules have one name",
                value=rule.name,
                place=f"{places[position]}, key 'name'",
                remedy="give every rule its own name, so that a plan can say which one decided",
            )
    try:
        return RuleSet(**{"name": pathlib.PurePath(file).stem, **table}, rules=tuple(rules))
    except Mistake as error:
        raise error.at(file) from None


def _parse_rule(entry: dict[str, Any], place: str) -> Rule:
    _check_keys(entry, [field.name for field in dataclasses.fields(Rule)], place)
    if "name" not in entry:
        raise RuleError(
            "the rule has no name", value=entry, place=f"{place}, key 'name'", remedy='write name = "dense"'
        )
    try:
        return Rule(**entry)
    except Mistake as error:
        raise error.at(place) from None


def _places(entries: list[dict[str, Any]], text: str, file: str) -> list[str]:
    """Says where each rule stands: file, line of its header, number and name."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    known = len(lines) == len(entries)  # otherwise written as an inline array, or quoted in some text
    return [
        f"{file}{f':{lines[i]}' if known else ''}, rule {i + 1} ({entry.get('name', 'without a name')!r})"
        for i, entry in enumerate(entries)
    ]


def _check_keys(table: dict[str, Any], keys: list[str], place: str) -> None:
    for key in table:
        if key not in keys:
            raise RuleError(
                f"there is no key {key!r}{closest(key, keys)}",
                value=key,
                place=f"{place}, key {key!r}",
                remedy=f"use some of {', '.join(keys)}",
            )
