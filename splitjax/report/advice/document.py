"""Makes the document of an advice on partial backpropagation: the ways to train side by side, the layers, and what to
do."""

from __future__ import annotations

from splitjax.display.document import Document, Pairs, Section, Table
from splitjax.partial.advice import Advice
from splitjax.report.advice.rows import (
    COLUMNS,
    LAYER_COLUMNS,
    LEGEND,
    headline,
    layer_rows,
    recommendation,
    remarks,
    rows,
    ways,
)


def advice_document(advice: Advice) -> Document:
    """Makes the document of `advice`."""
    figures = Table.of(COLUMNS, rows(advice), range(1, len(COLUMNS)))
    layers = Table.of(LAYER_COLUMNS, layer_rows(advice), range(1, len(LAYER_COLUMNS)), code=(0,))
    return Document(
        headline(advice),
        (
            Section("ways to train", (figures, _pairs(ways(advice)))),
            Section("layers, input side first", (layers,)),
            Section("what the columns say", (_pairs(LEGEND),)),
            _pairs(remarks(advice)),
        ),
        verdict=recommendation(advice),
    )


def _pairs(lines: tuple[tuple[str, str], ...]) -> Pairs:
    return Pairs(tuple((title, (text,)) for title, text in lines))
