"""How the rows of one table are added up over its workers, as one value: decided while planning, kept in the plan.

A scheme with its capacities (`ByScheme`), or the workers that own the rows (`ByOwners`): both are an `Exchange`, which
planning asks for bytes, and the evaluation of a step (`lower.tables`) for what to run. Plans and checkpoints hold it as
plain values: a name, the options that are not the usual ones, the sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from splitjax.errors import SyncError
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.owner import OwnerShardedCosts, plan_owner
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.costs.shipped import COSTS
from splitjax.sync.profile import Sparsity, Table

OWNED: str = "owner_sharded"


class Exchange(Protocol):
    """Says how the rows of one table are added up over its workers."""

    @property
    def name(self) -> str:
        """Returns what plans call it: the name of its scheme, or `owner_sharded`."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """Returns its options that are not the usual ones, as JSON values."""
        ...

    @property
    def capacities(self) -> Capacities | None:
        """Returns the room there is; None while steps are observed, in which there is room for everything."""
        ...

    @property
    def wire_dtype(self) -> str | None:
        """Returns the dtype to which values are rounded on the wire; then each worker has a residual."""
        ...

    @property
    def pulls(self) -> bool:
        """Returns whether the rows that a step reads are pulled before its forward pass, for no worker has all."""
        ...

    @property
    def is_dense(self) -> bool:
        """Returns whether the whole table is all-reduced, as if nothing were known of its rows."""
        ...

    def planned(self, sparsity: Sparsity) -> Exchange:
        """Returns the same with capacities for steps such as those of `sparsity`, with some room for chance."""
        ...

    def predicted_bytes(self, table: Table) -> int:
        """Returns what a worker of `table` sends within the capacities, padding included; 0 while there are none."""
        ...

    def reason(self, sparsity: Sparsity) -> str:
        """Returns why it is taken, where nothing was chosen, and what `sparsity` says about it."""
        ...


@dataclasses.dataclass(frozen=True)
class ByScheme:
    """Every worker gets the sum of all workers' rows, by a scheme.

    - `scheme`: with its options. `capacities`: the room there is; None while steps are observed.
    """

    scheme: SchemeCosts
    capacities: Capacities | None = None

    @property
    def pulls(self) -> bool:
        """Whether rows are pulled: every worker reads the table by itself."""
        return False

    @property
    def name(self) -> str:
        """The name of the scheme."""
        return self.scheme.name

    @property
    def options(self) -> dict[str, Any]:
        """The scheme's options that are not the defaults."""
        return _given(self.scheme, {})

    @property
    def wire_dtype(self) -> str | None:
        """The dtype to which the scheme rounds values."""
        return getattr(self.scheme, "wire_dtype", None)

    @property
    def is_dense(self) -> bool:
        """Whether it is the dense scheme."""
        return isinstance(self.scheme, DenseCosts)

    def planned(self, sparsity: Sparsity) -> ByScheme:
        """Returns the same with the capacities that its scheme gives to steps such as those of `sparsity`."""
        return dataclasses.replace(self, capacities=self.scheme.plan(sparsity))

    def predicted_bytes(self, table: Table) -> int:
        """Returns what a worker of `table` sends by the scheme within the capacities."""
        return 0 if self.capacities is None else self.scheme.predicted_bytes(self.capacities, table)

    def reason(self, sparsity: Sparsity) -> str:
        """Returns that it was asked for, and what was seen (`sparsity`)."""
        return f"asked for; {seen(sparsity)}"


@dataclasses.dataclass(frozen=True)
class ByOwners:
    """Each worker owns a part of the rows: those that a step reads are pulled, gradients pushed to their owners.

    - `num_rows`: of the table. `capacities`: the room there is; None while steps are observed.
    - `pattern`, `wire_dtype`, `ownership`: as in `OwnerShardedCosts`. A table that is split by rows over its workers,
      as a `NamedSharding` has it, has ranges of them.
    """

    num_rows: int
    capacities: Capacities | None = None
    pattern: str = "auto"
    wire_dtype: str | None = None
    ownership: str = "range"

    @property
    def name(self) -> str:
        """What plans call it."""
        return OWNED

    @property
    def pulls(self) -> bool:
        """Whether rows are pulled: no worker has all of them."""
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the whole table is all-reduced: no worker has it."""
        return False

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not those of every table whose workers own the rows."""
        return _given(self, {"num_rows": self.num_rows, "capacities": self.capacities})

    @property
    def costs(self) -> OwnerShardedCosts:
        """What it costs, within the capacities."""
        room = self.capacities or Capacities()
        return OwnerShardedCosts(self.num_rows, room, self.pattern, self.wire_dtype, self.ownership)

    def planned(self, sparsity: Sparsity) -> ByOwners:
        """Returns the same with capacities for steps such as those of `sparsity`."""
        return dataclasses.replace(self, capacities=plan_owner(sparsity, self.ownership))

    def predicted_bytes(self, table: Table) -> int:
        """Returns what a worker of `table` sends for a request, a pull and a push within the capacities."""
        return 0 if self.capacities is None else self.costs.predicted_bytes(table)

    def row_bytes(self, table: Table) -> int:
        """Returns what a worker sends of a `table` whose rows travel with those of another: no ids."""
        return 0 if self.capacities is None else self.costs.row_bytes(table)

    def reason(self, sparsity: Sparsity) -> str:
        """Returns what is done, and how evenly the owners are loaded in steps such as those of `sparsity`."""
        busiest = max(sparsity.skewness, 1.0)
        hint = "; ids that are sorted by frequency load the first owners: hash them once" if busiest > 2 else ""
        return (
            "each worker owns its rows: those read are pulled, gradients pushed; the busiest owner has"
            f" {busiest:.2f} times the mean{hint}"
        )


def seen(sparsity: Sparsity) -> str:
    """Says what capacities are taken from: the observed steps of `sparsity`."""
    return f"capacities from {len(sparsity.samples)} steps, density {sparsity.density:.3g}"


def sizes_of(capacities: Capacities | None) -> dict[str, Any]:
    """Returns the `capacities` that are not 0, as JSON values; nothing for None."""
    if capacities is None:
        return {}
    sizes = {field.name: getattr(capacities, field.name) for field in dataclasses.fields(capacities)}
    return {
        name: list(map(int, value)) if isinstance(value, tuple) else int(value)
        for name, value in sizes.items()
        if value
    }


def exchange_of(name: str, options: Mapping[str, Any], sizes: Mapping[str, Any], num_rows: int) -> Exchange:
    """Builds an exchange from what its `name` and `options`, and `sizes_of` its capacities, gave.

    `num_rows` is the table's. Raises `SyncError` for names, options and sizes that there are not.
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
    given: dict[str, Any] = {
        option: tuple(value) if isinstance(value, list) else value for option, value in options.items()
    }
    cls = ByOwners if name == OWNED else COSTS.find(name, place="scheme", also=(OWNED,))
    of_table = ("num_rows", "capacities")  # what it takes from the table, and not from whoever chose it
    allowed = [field.name for field in dataclasses.fields(cls) if field.name not in of_table]
    for option in given:
        if option not in allowed:
            remedy = f"one of {', '.join(allowed)}" if allowed else "give none"
            raise SyncError(f"{name} has no such option", value=option, place="options", remedy=remedy)
    if name == OWNED:
        return ByOwners(num_rows, capacities, **given)
    return ByScheme(COSTS[name](**given), capacities)


def _given(options: Any, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a dataclass with other values than the defaults, or than `usual` says, as JSON values."""
    fields = [
        (field.name, usual.get(field.name, field.default), getattr(options, field.name))
        for field in dataclasses.fields(options)
    ]
    different = {name: value for name, default, value in fields if value != default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in different.items()}
