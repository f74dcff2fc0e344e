"""Bytes by formula at narrow and wide rows, beside OmniReduce with its best block: nothing is timed, so that other work
on the machine changes nothing."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from benchmarks.sparse.data import Workload, named

TABLES = ("lm1b_input", "lm1b_softmax", "criteo", "wikitext", "wikitext_in_order")
WIDTHS = (32, 512)
BLOCK_ROWS = (1, 2, 4, 8, 16, 32, 64)
OBSERVED, COUNTED = range(3), range(100, 112)  # steps that capacities come from, and steps that are counted


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is counted with."""
    return {f"widths, {num_workers} workers": {"num_workers": num_workers} for num_workers in options.workers}


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes that a worker sends a step for one table at one width. `ours`: of `row_exchange` with its room, padding
    included; the others by their published formulas, without padding. `block`: values of OmniReduce's best block."""

    name: str
    width: int
    dense: float
    ours: float
    sparcml: float
    zen_rows: float
    omnireduce: float
    omnireduce_best: float
    block: int
    bound: float

    @property
    def rival(self) -> tuple[str, float]:
        """The rival that sends least, and its bytes."""
        rivals = {
            "SparCML": self.sparcml, "Zen by row": self.zen_rows, "OmniReduce, best block": self.omnireduce_best,
        }  # fmt: skip
        name = min(rivals, key=lambda name: rivals[name])
        return name, rivals[name]


def count(workload: Workload, width: int, num_workers: int) -> Bytes:
    """Counts the bytes of a workload as if its rows had `width` values."""
    from splitjax import sync

    seen, unseen = (
        sync.measure(workload.sets(steps, num_workers), workload.num_rows, width) for steps in (OBSERVED, COUNTED)
    )
    blocks = {rows * width: sync.Blocks(block_values=rows * width).formula_bytes(unseen) for rows in BLOCK_ROWS}
    best = min(blocks, key=lambda values: blocks[values])
    ours = sync.RowExchange()
    return Bytes(
        workload.name,
        width,
        2 * (num_workers - 1) / num_workers * unseen.table.num_bytes,
        ours.predicted_bytes(ours.plan(seen), unseen.table),
        sync.RecursiveDoubling().formula_bytes(unseen),
        sync.Zen("row", "pack").formula_bytes(unseen),
        sync.Blocks().formula_bytes(unseen),
        blocks[best],
        best,
        unseen.bound_bytes(),
    )


def section(quick: bool, data_dir: pathlib.Path, num_workers: int) -> Any:
    """The section of one number of workers."""
    return report(
        [
            count(named(name, data_dir), width, num_workers)
            for name in (TABLES[-3:] if quick else TABLES)
            for width in WIDTHS
        ],
        num_workers,
    )


def report(found: list[Bytes], num_workers: int) -> Any:
    """What was counted, as a section."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    rows = [
        [
            one.name,
            str(one.width),
            *(_mb(value) for value in (one.ours, one.sparcml, one.zen_rows, one.omnireduce, one.omnireduce_best)),
            f"{one.block:,}",
            _mb(one.bound),
            f"{one.rival[0]}: **{one.rival[1] / one.ours:.2f}**",
            f"{one.omnireduce_best / one.ours:.2f}",
            f"{one.dense / one.ours:.1f}",
        ]
        for one in found
    ]
    lines = [
        (
            f"{num_workers} workers. MB (10^6 bytes) that a worker sends a step, counted by formula on"
            f" {len(COUNTED)} steps; nothing is timed. `row_exchange` has room by {len(OBSERVED)} other steps, and its"
            " padding is counted; the rivals are counted as published, without padding. A block of OmniReduce has 256"
            " values, as published: at 32 columns that is eight rows, of which few were touched, at 512 columns half a"
            f" row, which is a row here. *Best*: the block of {', '.join(map(str, BLOCK_ROWS))} rows that sends least."
            " The last columns are bytes of rivals over bytes of `row_exchange`: the rival that sends least, OmniReduce"
            " with its best block, a dense all-reduce. WikiText-2 stands twice: sequences from places drawn at random,"
            " and its text in its order, worker after worker."
        ),
        "",
        *table(
            [
                "table", "columns", "row_exchange", "SparCML", "Zen by row", "OmniReduce, 256 values",
                "OmniReduce, best", "best block, values", "bound", "strongest rival over row_exchange",
                "OmniReduce, best, over row_exchange", "dense over row_exchange",
            ],
            rows,
        ),
    ]  # fmt: skip
    return Section(f"Bytes at narrow and wide rows, by formula: {num_workers} workers", lines, [])


def _mb(count: float) -> str:
    return f"{count / 1e6:.3f}"
