"""Finds schemes by name, shipped ones and those of other packages, with what each costs."""

from __future__ import annotations

from splitjax.sync.costs.all_gather import AllGatherCosts
from splitjax.sync.costs.blocks import BlocksCosts
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.hierarchical import HierarchicalCosts
from splitjax.sync.costs.parameter_server import ParameterServerCosts
from splitjax.sync.costs.recursive_doubling import RecursiveDoublingCosts
from splitjax.sync.costs.registry import COSTS
from splitjax.sync.costs.row_exchange import RowExchangeCosts
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.costs.zen import ZenCosts

__all__ = ["COSTS", "SHIPPED", "costs_by_name"]

SHIPPED: tuple[type[SchemeCosts], ...] = (
    AllGatherCosts,
    BlocksCosts,
    DenseCosts,
    RowExchangeCosts,
    HierarchicalCosts,
    ParameterServerCosts,
    RecursiveDoublingCosts,
    ZenCosts,
)


def costs_by_name(which: str | SchemeCosts) -> SchemeCosts:
    """Returns what the scheme called `which` costs, with its default options; a scheme is itself. Raises `SyncError`
    for an unknown name, `ExtensionError` for one whose package cannot be loaded."""
    return which if isinstance(which, SchemeCosts) else COSTS.find(which, place="sync")()
