"""Names what verification compares, and the classes of dims that it shrinks, as a reader knows them.

A step's plan and trace (`compile.entry.CompiledEntry`) and a value or class go in; a path, a label or a line of the
source comes out.
"""

from __future__ import annotations

from splitjax.compile.entry import CompiledEntry
from splitjax.verify.dim_classes import Analysis
from splitjax.verify.taps import Tap


def tap_name(tap: Tap, entry: CompiledEntry) -> tuple[str, str]:
    """Returns kind and name of what a gradient boundary gives. `tap`: the value that was tapped. `entry`: the step."""
    if tap.gradient_of is not None:
        path = next(
            (it.param for it in entry.graph.gradients if (it.site, it.result) == (tap.site, tap.result)),
            tap.gradient_of,
        )
        return "gradient", path
    label = tap.eqn.params["label"].split(" at ")[0]
    return ("loss", label) if tap.result == 0 else ("auxiliary", f"{label} {tap.result}")


def class_names(analysis: Analysis, entry: CompiledEntry) -> dict[int, str]:
    """Names each class of dims by a leaf and its dim that has it; by the operation that has it first, for those that
    are in no leaf.

    `analysis`: the step's classes. `entry`: the step, whose leaves have paths and names of dims.
    """
    names: dict[int, str] = {}
    roles = ("param", "batch", "statistic", "input", "optimizer")
    leaves = sorted(
        zip(entry.graph.leaves, analysis.flat.inputs, strict=True), key=lambda pair: roles.index(pair[0].role)
    )
    for leaf, value in leaves:
        for number, dim in enumerate(analysis.dims[value]):
            label = (
                leaf.dim_names[number] if number < len(leaf.dim_names) and leaf.dim_names[number] else f"dim {number}"
            )
            for dim_class in dim:
                names.setdefault(dim_class, f"{leaf.path} {label}" + (" (a factor)" if len(dim) > 1 else ""))
    for op in analysis.flat.ops:
        for value in op.outputs:
            for dim in analysis.dims[value]:
                for dim_class in dim:
                    names.setdefault(dim_class, f"{op.primitive}" + (f" at {op.source}" if op.source else ""))
    return names
