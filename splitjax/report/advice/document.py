"""Makes the document of an advice on partial backpropagation: the ways to train side by side, the layers, and what to
do."""

from __future__ import annotations

from splitjax.display.document import Document, Pairs, Section, Table
from splitjax.partial.advice import Advice
from splitjax.report.advice.rows import COLUMNS, LAYER_COLUMNS, LEGEND, headline, layer_rows, remarks, rows


def advice_document(advice: Advice) -> Document:
    """Makes the document of `advice`."""
    ways = Table.of(COLUMNS, rows(advice), range(1, len(COLUMNS)))
    layers = Table.of(LAYER_COLUMNS, layer_rows(advice), range(1, len(LAYER_COLUMNS)))
    lines = Pairs(tuple((title, (text,)) for title, text in (*remarks(advice), *LEGEND)))
    return Document(
        headline(advice), (Section("ways to train", (ways,)), Section("layers, input side first", (layers,)), lines)
    )
