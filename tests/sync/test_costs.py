"""Planning asks for what schemes cost, and loads nothing that runs them."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from typing import ClassVar

import pytest

from splitjax import sync
from splitjax.errors import SyncError
from splitjax.sync.costs.choose import candidates
from splitjax.sync.costs.exchange import ByOwners, ByScheme, exchange_of, sizes_of
from splitjax.sync.costs.shipped import COSTS, SHIPPED, costs_by_name
from splitjax.sync.scheme import by_name, runnable

SPARSITY = sync.measure([[[1, 5, 9], [2, 5, 11], [5, 40, 41], [3]]] * 3, 200, 8)


@pytest.mark.parametrize("name", sorted(cls.name for cls in SHIPPED))
def test_both_halves_of_a_scheme_say_the_same(name):
    costs, whole = costs_by_name(name), by_name(name)
    assert isinstance(whole, sync.Scheme) and not isinstance(costs, sync.Scheme)
    assert isinstance(whole, type(costs)) and runnable(costs) == whole and runnable(whole) is whole
    capacities = costs.plan(SPARSITY)
    assert capacities == whole.plan(SPARSITY)
    for figure in ("predicted_bytes", "num_messages"):
        ours, theirs = (getattr(one, figure)(capacities, SPARSITY.table) for one in (costs, whole))
        assert ours == theirs > 0
    assert dict(COSTS) | {name: type(costs)} == dict(COSTS)


def test_what_planning_weighs_runs_with_the_same_options():
    for costs in candidates():
        scheme = runnable(costs)
        assert scheme.name == costs.name
        assert all(getattr(scheme, field.name) == getattr(costs, field.name) for field in dataclasses.fields(costs))


def test_options_that_are_refused_are_refused_while_planning():
    with pytest.raises(SyncError, match="unknown way to choose owners"):
        exchange_of("row_exchange", {"ownership": "nobody"}, {}, 10)


def test_an_exchange_is_read_back_from_a_plan():
    for exchange in (
        *(ByScheme(costs).planned(SPARSITY) for costs in candidates()),
        ByOwners(200, wire_dtype="bfloat16").planned(SPARSITY),
    ):
        again = exchange_of(exchange.name, exchange.options, sizes_of(exchange.capacities), 200)
        assert again == exchange
        assert again.predicted_bytes(SPARSITY.table) == exchange.predicted_bytes(SPARSITY.table) > 0


def test_nothing_is_predicted_for_an_exchange_that_has_no_capacities_yet():
    for exchange in (ByScheme(costs_by_name("zen")), ByOwners(200)):
        assert exchange.capacities is None and exchange.predicted_bytes(SPARSITY.table) == 0
        assert sizes_of(exchange.capacities) == {}


def test_a_scheme_of_another_package_is_one_class_for_planning_too():
    @dataclasses.dataclass(frozen=True)
    class Own(sync.AllGather):
        name: ClassVar[str] = "own"

    try:
        sync.register_scheme(Own)
        assert COSTS["own"] is sync.SCHEMES["own"] is Own and runnable(costs_by_name("own")) == Own()
        assert any(type(costs) is Own for costs in candidates())
    finally:
        for registry in (COSTS, sync.SCHEMES):
            registry.remove("own")


def test_planning_loads_nothing_that_runs_a_scheme():
    worker = pathlib.Path(__file__).parent / "planning_worker.py"
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    schemes, *loaded = done.stdout.split()
    assert schemes in COSTS
    run = {f"splitjax.sync.{file.stem}" for file in pathlib.Path(sync.__file__).parent.glob("*.py")}
    known = {f"splitjax.sync.{name}" for name in ("__init__", "analysis", "masks", "profile")}
    assert set(loaded) & (run - known) == set() and not any("lower.tables" in name for name in loaded)
    assert "splitjax.sync.costs.exchange" in loaded
