"""Describes schemes and capacities as plain values, as plans and checkpoints hold them: a name, the options that are
not the usual ones, the sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from splitjax.errors import SyncError
from splitjax.sync.owner import OwnerSharded
from splitjax.sync.scheme import SCHEMES, Capacities, Scheme

OWNED: str = "owner_sharded"
# What an owner-sharded exchange takes from the table, and not from whoever chose it.
_OF_THE_TABLE = ("num_rows", "capacities")

Exchange = Scheme | OwnerSharded  # how one table's rows are added up: a scheme, or by the workers that own them


def name_of(exchange: Exchange) -> str:
    """Returns the name of an `exchange`: a scheme's own; `owner_sharded` for tables whose workers own the rows."""
    return exchange.name if isinstance(exchange, Scheme) else OWNED


def options_of(exchange: Exchange) -> dict[str, Any]:
    """Returns the options of an `exchange` that are not the defaults, as JSON values."""
    usual = {"ownership": "range"} if isinstance(exchange, OwnerSharded) else {}
    fields = [
        (field.name, usual.get(field.name, field.default), getattr(exchange, field.name))
        for field in dataclasses.fields(exchange)
    ]
    options = {name: value for name, default, value in fields if name not in _OF_THE_TABLE and value != default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def sizes_of(capacities: Capacities) -> dict[str, Any]:
    """Returns the `capacities` that are not 0, as JSON values."""
    sizes = {field.name: getattr(capacities, field.name) for field in dataclasses.fields(capacities)}
    return {
        name: list(map(int, value)) if isinstance(value, tuple) else int(value)
        for name, value in sizes.items()
        if value
    }


def by_owners(num_rows: int, capacities: Capacities | None = None, wire_dtype: str | None = None) -> OwnerSharded:
    """Returns the exchange of a table that lies split by rows over its workers as a `NamedSharding` has it.

    `num_rows` is the table's, `capacities` the room there is (None: none was planned), `wire_dtype` the dtype of
    rows on the wire.
    """
    return OwnerSharded(num_rows, capacities or Capacities(), wire_dtype=wire_dtype, ownership="range")


def exchange_of(
    name: str, options: Mapping[str, Any], sizes: Mapping[str, Any], num_rows: int
) -> tuple[Exchange, Capacities]:
    """Builds an exchange and its capacities from what `name_of`, `options_of` and `sizes_of` gave.

    `name`, `options` and `sizes` are theirs, `num_rows` is the table's. Raises `SyncError` for names and options
    that there are not.
    """
    known = {field.name for field in dataclasses.fields(Capacities)}
    for size, value in sizes.items():
        if size not in known or isinstance(value, list) != (size == "levels"):
            raise SyncError(
                "capacities have no such size",
                value={size: value},
                place="capacities",
                remedy=f"one of {', '.join(sorted(known))}",
            )
    fields: dict[str, Any] = {size: tuple(value) if isinstance(value, list) else value for size, value in sizes.items()}
    capacities = Capacities(**fields)
    given = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    cls = OwnerSharded if name == OWNED else SCHEMES.find(name, place="scheme", also=(OWNED,))
    allowed = [field.name for field in dataclasses.fields(cls) if field.name not in _OF_THE_TABLE]
    for option in given:
        if option not in allowed:
            remedy = f"one of {', '.join(allowed)}" if allowed else "give none"
            raise SyncError(f"{name} has no such option", value=option, place="options", remedy=remedy)
    if name == OWNED:
        return dataclasses.replace(by_owners(num_rows, capacities), **given), capacities
    return SCHEMES[name](**given), capacities
