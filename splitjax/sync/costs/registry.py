"""The schemes that planning knows, by name: what each costs.

Shipped ones are there from the beginning (`costs.shipped`); `sync.register_scheme` adds those of other packages, which
are also found by their entry points.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from splitjax._registry import NamedRegistry
from splitjax.errors import SyncError
from splitjax.sync.costs.schemes import SchemeCosts

CostsClass = TypeVar("CostsClass", bound=type[SchemeCosts])
# What `sync=` takes besides the names of schemes, and what plans call tables whose workers own the rows.
_TAKEN = ("auto", "owner_sharded")
GROUP: str = "splitjax.schemes"  # of entry points
REGISTER: str = "splitjax.sync.register_scheme"


def register_costs(cls: CostsClass) -> CostsClass:
    """Makes what a shipped scheme costs known by its `name`; a decorator of the class `cls`."""
    COSTS.add(cls.name, cls, same=same_class)
    return cls


def check_scheme(cls: type[SchemeCosts]) -> None:
    """Raises `SyncError` for a class `cls` that lacks something of a scheme: a name of its own, a method, or a default
    of an option."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name in _TAKEN:
        raise unfit(name, f"{cls.__name__} needs a name of its own", 'write name: ClassVar[str] = "my_scheme"')
    unwritten = sorted(getattr(cls, "__abstractmethods__", ()))
    if unwritten:
        raise unfit(cls, f"{cls.__name__} lacks {', '.join(unwritten)}", "write what splitjax.sync.Scheme declares")
    if "__dataclass_params__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
        raise unfit(
            cls, f"{cls.__name__} is no frozen dataclass", "decorate it with @dataclasses.dataclass(frozen=True)"
        )
    for field in dataclasses.fields(cls):
        if field.init and field.default is dataclasses.MISSING:
            raise unfit(field.name, f"an option of {cls.__name__} has no default", "give every option a default")


def unfit(value: Any, message: str, remedy: str) -> SyncError:
    """Returns the error for a class that is no scheme. `value`, `message`, `remedy`: of the error."""
    return SyncError(message, value=value, place=REGISTER, remedy=remedy)


def same_class(known: type, again: type) -> bool:
    """Tells whether `again` is the class `known`, of a module that was loaded again."""
    return (known.__module__, known.__qualname__) == (again.__module__, again.__qualname__)


def check_loaded(name: str, loaded: Any) -> None:
    """Raises `TypeError` for an object `loaded` by the entry point called `name` that is no scheme of this name."""
    if not (
        isinstance(loaded, type) and issubclass(loaded, SchemeCosts) and callable(getattr(loaded, "attempt", None))
    ):
        raise TypeError(f"it names {loaded!r}, which is no class derived from splitjax.sync.Scheme")
    if loaded.name != name:
        raise TypeError(f"it names {loaded.__name__}, whose name is {loaded.name!r}")


def _accept(name: str, loaded: Any) -> None:
    """Registers the class that an entry point called `name` has loaded, where importing it did not."""
    check_loaded(name, loaded)
    check_scheme(loaded)
    register_costs(loaded)


COSTS: NamedRegistry[type[SchemeCosts]] = NamedRegistry(
    "scheme", group=GROUP, error=SyncError, register=REGISTER, accept=_accept
)
