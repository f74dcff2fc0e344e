"""Kinds of defects of XLA's partitioner that the search has met, and which kind an outcome is of."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.partitioner.draw import Draw
from benchmarks.partitioner.run import Outcome


@dataclasses.dataclass(frozen=True)
class Kind:
    """`name`: what the page calls it; `covers`: whether an outcome is of this kind; `row`: the name of its row in
    `splitjax.partitioner.DEFECTS`."""

    name: str
    covers: Callable[[Draw, Outcome], bool]
    row: str = ""


def _convolves(draw: Draw, outcome: Outcome) -> bool:
    layers = draw.settings.get("layers", ())
    return (
        draw.family == "conv"
        or "conv_general_dilated" in outcome.primitives
        or any("conv" in layer or "depthwise" in layer for layer in layers)
    )


def _has(draw: Draw, key: str, least: int = 2) -> bool:
    value = draw.settings.get(key, 1)
    return max(value if isinstance(value, tuple) else (value,), default=1) >= least


def _reversed(draw: Draw) -> bool:
    """Whether some dim is split over axes in another order than the mesh's."""
    order = [axis for axis, _ in draw.mesh]
    return any(list(axes) != sorted(axes, key=order.index) for layout in draw.layouts for axes in layout)


KINDS = (
    Kind(
        "reduction that the backend's all-reduce has not",
        lambda draw, outcome: "Unsupported reduction computation" in outcome.message,
        row="reduction-without-collective",
    ),
    Kind(
        "high half of an integer product",
        lambda draw, outcome: "mulhi" in outcome.primitives and "MHLO" in outcome.message,
        row="high-half-of-product",
    ),
    Kind(
        "Fourier transform",
        lambda draw, outcome: "fft" in outcome.primitives or draw.family == "fft",
        row="fourier-transform",
    ),
    Kind(
        "result whose parts are uneven (JAX cannot put them together)",
        lambda draw, outcome: any(
            words in outcome.message
            for words in ("could not broadcast input array", "IndivisibleError", "during ToLiteral conversion")
        ),
    ),
    Kind(
        "convolution: the compiler dies",
        lambda draw, outcome: _convolves(draw, outcome) and outcome.status == "crash",
        row="convolution",
    ),
    Kind(
        "transposed convolution",
        lambda draw, outcome: _convolves(draw, outcome) and _has(draw, "lhs_dilation"),
        row="convolution",
    ),
    Kind(
        "convolution with feature groups",
        lambda draw, outcome: _convolves(draw, outcome) and (_has(draw, "groups") or draw.family == "chain"),
        row="grouped-convolution",
    ),
    Kind(
        "convolution with batch groups",
        lambda draw, outcome: _convolves(draw, outcome) and _has(draw, "batch_groups"),
        row="grouped-convolution",
    ),
    Kind("convolution: other", lambda draw, outcome: _convolves(draw, outcome), row="convolution"),
    Kind(
        "scatter with an uneven split of its updates",
        lambda draw, outcome: draw.settings.get("form") == "dlrm",
        row="unevenly-split-indices",
    ),
    Kind(
        "gradient with a layout of two axes in reverse order",
        lambda draw, outcome: (
            draw.family in ("attention", "dot", "experts", "recurrent", "ragged_dot") and _reversed(draw)
        ),
        row="axes-out-of-mesh-order",
    ),
    Kind(
        "update of one element beyond the end",
        lambda draw, outcome: (
            draw.family == "slice" and "dynamic" in str(draw.settings["form"]) + " ".join(outcome.primitives)
        ),
        row="start-index-out-of-range",
    ),
    Kind(
        "strided slice of one element",
        lambda draw, outcome: draw.family == "slice" and _has(draw, "stride", 3),
        row="strided-slice-of-one-element",
    ),
    Kind(
        "pad with a negative edge between interior padding",
        lambda draw, outcome: draw.settings.get("form") == "pad" and _has(draw, "interior", 1),
        row="dilated-pad-with-negative-edge",
    ),
)


# Whatever else GSPMD gets wrong: no condition is known for it, and plans for GSPMD are refused.
GSPMD = Kind("with GSPMD alone", lambda draw, outcome: True, row="gspmd")


def kind_of(draw: Draw, outcome: Outcome, partitioner: str = "shardy") -> str:
    """The kind of what went wrong with a `partitioner`, or "new: " with the family and form where no kind covers it."""
    for kind in KINDS if partitioner == "shardy" else (*KINDS, GSPMD):
        if kind.covers(draw, outcome):
            return kind.name
    return f"new: {draw.family} {draw.settings.get('form', '')} {outcome.status}".strip()


def rows() -> dict[str, Any]:
    """The package's own table of defects, by name; empty where the package has none."""
    if importlib.util.find_spec("splitjax.partitioner") is None:
        return {}
    from splitjax.partitioner import DEFECTS

    return {defect.name: defect for defect in DEFECTS}
