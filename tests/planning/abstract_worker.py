"""Plans cells of the corpus on abstract meshes in a process whose backends cannot be made. Prints a line of JSON for
each: its name with the digest of its plan, or what it was refused with.

Its arguments: models, and how many cells to leave out between two that are planned.
"""

from __future__ import annotations

import json
import sys

from jax._src import xla_bridge
from jax.sharding import AbstractMesh

from benchmarks.corpus import cells, steps
from benchmarks.corpus.canonical import canonical_plan, digest
from splitjax.compile.building import plan_request
from splitjax.errors import SplitjaxError
from splitjax.lower.strategies import CHOOSER
from splitjax.planning.draft import KnownTables
from splitjax.planning.passes import draft_step, with_tables
from splitjax.planning.predict import predict
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("planning asked for a backend")


def plan_cell(cell: cells.Cell, made: steps.Ready) -> str:
    sizes = cells.MESHES[cell.mesh]
    recipe = steps.parallel(cell, made)._recipe
    traced = trace_step(recipe, bind(recipe.fn, recipe.options, made.arguments))
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    draft = with_tables(draft_step(traced, mesh, plan_request(recipe, "cpu"), CHOOSER), KnownTables())
    return digest(canonical_plan(predict(draft).to_json()))


def main(models: list[str], stride: int) -> None:
    xla_bridge.backends = refuse
    for unit in cells.units():
        if unit.model not in models or unit.library != "linen" or unit.microbatches != "1":
            continue
        made = steps.ready(unit)
        for cell in cells.cells_of(unit)[::stride]:
            try:
                said = plan_cell(cell, made)
            except SplitjaxError as error:
                said = type(error).__name__
            print(json.dumps([cell.name, said]))
    assert not xla_bridge._backends, xla_bridge._backends


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]))
