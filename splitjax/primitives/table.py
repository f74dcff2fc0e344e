"""Holds the one table of operations: what is stated by splitjax's own modules, and what users teach on top of it.

The table is complete once `splitjax.primitives` is imported. Analyses ask it by the name of a primitive and its
parameters, and get an `OperationFacts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from splitjax._registry import broken, entry_points, load_entry_point
from splitjax.primitives.dims import DimRule
from splitjax.primitives.example_question import ExampleRule
from splitjax.primitives.operation import OperationFacts, Trait

# Primitives that stand for many operations, and the parameter that says which.
_NAME_PARAMS: Mapping[str, str] = {
    "pallas_call": "name",
    "ffi_call": "target_name",
    "composite": "name",
    "splitjax_kernel": "name",
}
STAND_FOR_MANY: frozenset[str] = frozenset(_NAME_PARAMS)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(OperationFacts)}


class Operations:
    """Maps names to operations. What users teach stands before what splitjax states, which comes back when the former
    is forgotten.

    `group`: the group of entry points of installed packages that teach further operations, each under the operation's
    name; "" for none.
    """

    def __init__(self, group: str = "") -> None:
        self._group = group
        self._stated: dict[str, OperationFacts] = {}
        self._taught: dict[str, OperationFacts] = {}
        self._with_trait: dict[Trait, frozenset[str]] = {}  # what was asked for, until a fact changes

    def state(self, names: str, *traits: Trait, **facts: Any) -> None:
        """States `facts` (fields of `OperationFacts`) and `traits` of splitjax's own operations, in addition to what is
        stated of them elsewhere.

        `names` are separated by blanks. Raises `ValueError` where a fact of an operation is stated twice: two modules
        would disagree on it.
        """
        for name in names.split():
            known = self._stated.get(name, OperationFacts(name))
            twice = [fact for fact in facts if getattr(known, fact) != _DEFAULTS[fact]]
            if twice:
                raise ValueError(f"{twice[0]!r} of {name!r} is stated twice")
            self._stated[name] = dataclasses.replace(known, **facts, traits=known.traits | set(traits))
        self._with_trait.clear()

    def teach(self, operation: OperationFacts) -> None:
        """Puts a user's `operation` into the table, in place of what is known under its name."""
        self._taught[operation.name] = operation
        self._with_trait.clear()

    def forget(self, name: str) -> None:
        """Takes out what a user has taught of the operation `name`; what splitjax states of it holds again."""
        self._taught.pop(name, None)
        self._with_trait.clear()

    def get(self, name: str) -> OperationFacts | None:
        """Returns the operation called `name`, None where there is none."""
        return self._taught.get(name) or self._stated.get(name)

    def of(self, primitive: str, params: Mapping[str, Any]) -> OperationFacts:
        """Returns the operation of an equation of `primitive` with these `params`; where nothing is known of it, one
        without facts.

        A kernel that is known by its own name ("pallas_call:my_kernel") is asked for under it first. What nobody has
        taught is looked for among the entry points. Raises `ExtensionError` for one that cannot be loaded.
        """
        name = qualified_name(primitive, params)
        known = self.get(name) or self.get(primitive)
        if known is None and self._group:
            known = self._declared(name) or self._declared(primitive)
        return known or OperationFacts(name)

    def _declared(self, name: str) -> OperationFacts | None:
        """Returns the operation `name` after loading the entry point that declares it, None where there is none."""
        for point in entry_points(self._group):
            if point.name == name:
                load_entry_point(point)
                if name not in self:
                    raise broken(point, "it teaches no primitive of the entry point's name")
                return self[name]
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._taught or name in self._stated

    def __getitem__(self, name: str) -> OperationFacts:
        return self._taught.get(name) or self._stated[name]

    def names(self) -> tuple[str, ...]:
        """Returns the names of all operations of which anything is known, sorted."""
        return tuple(sorted({*self._stated, *self._taught}))

    def with_dims(self) -> tuple[str, ...]:
        """Returns the names of all operations with a dim rule, sorted."""
        return tuple(name for name in self.names() if self[name].dims is not None)

    def with_trait(self, trait: Trait) -> frozenset[str]:
        """Returns the names of all operations of which `trait` holds."""
        if trait not in self._with_trait:
            self._with_trait[trait] = frozenset(name for name in self.names() if trait in self[name].traits)
        return self._with_trait[trait]


OPERATIONS: Operations = Operations("splitjax.primitives")


def qualified_name(primitive: str, params: Mapping[str, Any]) -> str:
    """Returns `primitive:name` for an equation whose `primitive` stands for many operations (a Pallas kernel, a
    foreign call), by the `params` that name it, else the name of the primitive."""
    name = params.get(_NAME_PARAMS.get(primitive, ""))
    return f"{primitive}:{name}" if name else primitive


def dim_rule(*names: str) -> Callable[[DimRule], DimRule]:
    """Returns a decorator that states a function as the dim rule of splitjax's own operations `names`."""

    def state(rule: DimRule) -> DimRule:
        OPERATIONS.state(" ".join(names), dims=rule)
        return rule

    return state


def example_rule(*names: str) -> Callable[[ExampleRule], ExampleRule]:
    """Returns a decorator that states a function as what the operations `names` do with the dim of examples."""

    def state(rule: ExampleRule) -> ExampleRule:
        OPERATIONS.state(" ".join(names), examples=rule)
        return rule

    return state
