"""Which operation a wrong value begins at: the first in program order, or backward the last, whose value differs from one device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitjax import _compat
from splitjax.lower.entry import Entry
from splitjax.plan import spec_text
from splitjax.trace.graph import Use
from splitjax.verify.comparing import Difference, compare
from splitjax.verify.result import Finding
from splitjax.verify.taps import CotangentTaps, ResultTaps, Tap, Taps

# Runs both programs with taps: (maker of taps) -> (what was tapped, values under the plan, values on one device).
RunTapped = Callable[[Callable[[], Taps]], tuple[list[Tap], list[Any], list[Any]]]


def locate(entry: Entry, run_tapped: RunTapped, record: Callable[[Taps], None]) -> Finding | None:
    """The operation where values begin to differ; None where nothing differs any more once operations are looked at.

    **Arguments:** `entry`: the step as the user calls it. `record(taps)` evaluates the step abstractly with taps that take note."""
    taps, values, references = run_tapped(ResultTaps)
    found = _first(taps, values, references)
    if found is None:
        return None
    tap, difference = found
    if tap.gradient_of is None:
        return _describe(entry, tap, difference)
    recorder = CotangentTaps()
    record(recorder)
    back, values, references = run_tapped(lambda: CotangentTaps(wanted=recorder.found))
    last = _last(back, values, references)
    return _describe(entry, *(last or found))


def _differing(taps: Sequence[Tap], values: Sequence[Any], references: Sequence[Any]) -> list[tuple[int, Tap, Difference]]:
    compared = [(number, tap, compare(values[number], references[number])) for number, tap in enumerate(taps)]
    return [(number, tap, one) for number, tap, one in compared if one.exceeds()]


def _first(taps: Sequence[Tap], values: Sequence[Any], references: Sequence[Any]) -> tuple[Tap, Difference] | None:
    """The first difference in program order; of those in one loop, of its first iteration that has one."""
    found = _differing(taps, values, references)
    if not found:
        return None
    number, tap, difference = found[0]
    if tap.loops:
        outer = tap.site[: -2 * tap.loops]
        inside = [(k, one, d) for k, one, d in found if one.loops == tap.loops and one.site[: len(outer)] == outer]
        _, tap, difference = min(inside, key=lambda item: (_iterations(values[item[0]], references[item[0]])[0], item[0]))
    return tap, difference


def _last(taps: Sequence[Tap], values: Sequence[Any], references: Sequence[Any]) -> tuple[Tap, Difference] | None:
    """The last difference in program order: cotangents behind it agree, so that it is where they go wrong."""
    found = _differing(taps, values, references)
    if not found:
        return None
    number, tap, difference = max(found, key=lambda item: item[1].site)
    if tap.loops:
        outer = tap.site[: -2 * tap.loops]
        inside = [(k, one, d) for k, one, d in found if one.loops == tap.loops and one.site[: len(outer)] == outer]
        _, tap, difference = max(inside, key=lambda item: (_iterations(values[item[0]], references[item[0]])[-1], item[1].site))
    return tap, difference


def _iterations(value: Any, reference: Any) -> list[int]:
    """The iterations of the outermost loop in which a stacked value differs."""
    value, reference = np.asarray(value), np.asarray(reference)
    scale = np.max(np.abs(reference), initial=0.0)
    gaps = np.abs(value - reference).reshape(len(value), -1).max(axis=1)
    return [k for k, gap in enumerate(gaps) if not gap <= 1e-9 * scale] or [0]


def _describe(entry: Entry, tap: Tap, difference: Difference) -> Finding:
    use = _use_at(entry, tap)
    layer, source = _layer(entry, tap, use), _source(entry, tap)
    operand = _operand(tap, use)
    layout = _layout(entry, tap, use)
    name = tap.eqn.primitive.name
    what = "value" if tap.operand is None and tap.gradient_of is None else "gradient"
    subject = f"the value of {name}" if what == "value" else f"the {operand} gradient of {name}"
    if difference.ratio is not None:
        amount = f"{difference.ratio:.6g} times one device's{_axes_of(entry, difference.ratio)}"
    elif difference.replicas:
        amount = "devices that should hold the same numbers hold different ones"
    else:
        amount = f"off by {difference.relative:.2g} of its largest entry"
    where = [f"in layer {layer}" if layer else "", f"at {source}" if source else "", layout]
    text = f"{subject} {', '.join(one for one in where if one)}: {amount}"
    return Finding(name, what, operand if what == "gradient" else "", layer, source, layout, difference.relative, difference.ratio, text)


def _use_at(entry: Entry, tap: Tap) -> Use | None:
    return next((use for use in entry.graph.uses if use.site == tap.site), None)


def _operand(tap: Tap, use: Use | None) -> str:
    if tap.gradient_of is not None and use is None:
        return tap.gradient_of
    if use is not None and tap.operand == use.weight:
        return "weight"
    if use is not None and tap.operand == use.data:
        return "data"
    return "" if tap.operand is None else f"operand {tap.operand}"


def _layer(entry: Entry, tap: Tap, use: Use | None) -> str:
    """The layer of an operation; of one without weights, the scope it stands in, or the layer of the last product before it."""
    if use is not None:
        return use.layer
    scope = _compat.name_stack(tap.eqn)
    before = [one for one in entry.graph.uses if one.site < tap.site]
    nearest = f"(behind layer {max(before, key=lambda one: one.site).layer})" if before else ""
    return scope if scope and "(" not in scope else nearest


def _source(entry: Entry, tap: Tap) -> str:
    """The user's line: the equation's, or that of the innermost call it stands in that has one."""
    line = _compat.source_line(tap.eqn)
    site = tap.site
    while not line and len(site) > 2:
        site = site[:-2]
        outer = _compat_equation(entry.jaxpr, site)
        line = "" if outer is None else _compat.source_line(outer)
    return line


def _compat_equation(jaxpr: Any, site: tuple[int, ...]) -> Any:
    from splitjax.trace.flatten import equation_at

    return equation_at(jaxpr, site)


def _layout(entry: Entry, tap: Tap, use: Use | None) -> str:
    """How the operands of an operation lie on the mesh, as far as the plan says."""
    plan = entry.plan
    parts = []
    if use is not None:
        batch = spec_text((plan.batch_axes if len(plan.batch_axes) != 1 else plan.batch_axes[0],)) if plan.batch_axes else "replicated"
        parts.append(f"batch {batch}")
        parts.append(f"weight {use.param} {spec_text(plan.spec(use.param))}")
    for one in plan.constraints:
        if one.site == tap.site:
            side = f"operand {one.operand}" if one.operand >= 0 else f"result {-1 - one.operand}"
            parts.append(f"{side} pinned to {spec_text(one.spec)}")
    if not parts and plan.batch_axes:
        parts.append(f"batch over {' and '.join(plan.batch_axes)}")
    return ", ".join(parts)


def _axes_of(entry: Entry, ratio: float) -> str:
    """The mesh axes whose sizes make a ratio, or its inverse."""
    axes = entry.plan.mesh.axes
    for size, of in ((ratio, ""), (1 / ratio if ratio else 0.0, "1 over ")):
        for name, length in axes:
            if length > 1 and abs(size - length) < 1e-6 * length:
                return f" ({of}the size of axis {name})"
        if len(axes) > 1 and abs(size - entry.plan.mesh.num_devices) < 1e-6 * size:
            return f" ({of}the number of devices)"
    return ""
