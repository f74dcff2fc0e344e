"""Finds the operation that a wrong value begins at: the first in program order, or backward the last, that differs.

Two runs of a step with taps go in, under the plan and on one device; a `Finding` comes out, in words that a user can
act upon: operation, layer, line and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry
from splitjax.plan import spec_text
from splitjax.primitives.calls import call_body
from splitjax.primitives.walk import equation_at
from splitjax.trace.flatten import BACKWARD, derivative_phase
from splitjax.trace.graph import Use
from splitjax.verify.comparing import Difference, compare
from splitjax.verify.result import Finding
from splitjax.verify.taps import CotangentTaps, ResultTaps, Tap, Taps

# Runs both programs with taps: (maker of taps) -> (what was tapped, values under the plan, values on one device).
RunTapped: TypeAlias = Callable[[Callable[[], Taps]], tuple[list[Tap], list[Any], list[Any]]]


def locate(entry: CompiledEntry, run_tapped: RunTapped, record: Callable[[Taps], None]) -> Finding | None:
    """Returns the operation where values begin to differ; None where nothing differs any more once they are looked at.

    **Arguments:**

    - `entry`: the step as the user calls it.
    - `run_tapped`: runs both programs with taps of a kind.
    - `record`: evaluates the step abstractly with taps that take note.
    """
    taps, values, references = run_tapped(ResultTaps)
    forward = _first(taps, values, references)
    if forward is None:
        return None
    tap, difference = forward
    if tap.gradient_of is None:
        return describe(entry, tap, difference)
    recorder = CotangentTaps()
    record(recorder)
    back, values, references = run_tapped(lambda: CotangentTaps(wanted=recorder.noted))
    last = _last(back, values, references)
    return describe(entry, *(last or forward))


def _differing(
    taps: Sequence[Tap], values: Sequence[Any], references: Sequence[Any]
) -> list[tuple[int, Tap, Difference]]:
    compared = [(number, tap, compare(values[number], references[number])) for number, tap in enumerate(taps)]
    return [(number, tap, difference) for number, tap, difference in compared if difference.exceeds()]


def _first(taps: Sequence[Tap], values: Sequence[Any], references: Sequence[Any]) -> tuple[Tap, Difference] | None:
    """Returns the first difference in program order; of those in one loop, of its first iteration that has one."""
    differing = _differing(taps, values, references)
    return (
        _in_loop(min(differing, key=lambda item: item[0]), differing, values, references, backward=False)
        if differing
        else None
    )


def _last(taps: Sequence[Tap], values: Sequence[Any], references: Sequence[Any]) -> tuple[Tap, Difference] | None:
    """Returns the last difference in program order: cotangents behind it agree, so that it is where they go wrong."""
    differing = _differing(taps, values, references)
    return (
        _in_loop(max(differing, key=lambda item: item[1].site), differing, values, references, backward=True)
        if differing
        else None
    )


def _in_loop(
    chosen: tuple[int, Tap, Difference],
    differing: Sequence[tuple[int, Tap, Difference]],
    values: Sequence[Any],
    references: Sequence[Any],
    backward: bool,
) -> tuple[Tap, Difference]:
    """Returns the operation to name for the difference `chosen`: in a loop that which is first (or, `backward`, last)
    to differ, in the iteration that runs first (last)."""
    _, tap, difference = chosen
    if not tap.loops:
        return tap, difference
    outer = tap.site[: -2 * tap.loops]
    order = []
    for number, candidate, _ in differing:
        if candidate.loops == tap.loops and candidate.site[: len(outer)] == outer:
            value, reference = values[number], references[number]
            wrong = [k for k in range(len(reference)) if compare(value[k], reference[k]).exceeds()]
            if wrong:
                k = wrong[-1] if backward else wrong[0]
                order.append(((k, candidate.site, number), candidate, compare(value[k], reference[k])))
    if not order:
        return tap, difference
    _, tap, difference = (max if backward else min)(order, key=lambda item: item[0])
    return tap, difference


def describe(entry: CompiledEntry, tap: Tap, difference: Difference) -> Finding:
    """Says what is known of an operation whose value, or whose contribution to a cotangent, is off by `difference`.

    `entry` is the step as the user calls it, `tap` says which operation.
    """
    use = _use_at(entry, tap)
    layer, source = _layer(entry, tap, use), _source(entry, tap)
    operand = _operand(tap, use)
    layout = _layout(entry, tap, use)
    name = _name(tap.eqn)
    what = "value" if tap.operand is None and tap.gradient_of is None else "gradient"
    subject = f"the value of {name}" if what == "value" else f"the {operand} gradient of {name}"
    if what == "value" and derivative_phase(_compat.name_stack(tap.eqn)) == BACKWARD:
        subject += " in the backward pass"
    if difference.ratio is not None:
        amount = f"{difference.ratio:.6g} times one device's{_axes_of(entry, difference.ratio)}"
    elif difference.replicas:
        amount = "devices that should hold the same numbers hold different ones"
    else:
        amount = f"off by {difference.relative:.2g} of its largest entry"
    where = [layer, f"at {source}" if source else "", layout]
    text = f"{subject} {', '.join(part for part in where if part)}: {amount}"
    return Finding(
        name,
        what,
        operand if what == "gradient" else "",
        layer,
        source,
        layout,
        difference.relative,
        difference.ratio,
        text,
    )


def _name(eqn: Any) -> str:
    """Returns the primitive; of a function with a derivative rule of its own, the function."""
    if not eqn.primitive.name.startswith("custom_"):
        return eqn.primitive.name
    inner, _ = _compat.open_jaxpr(call_body(eqn))
    return f"{inner.debug_info.func_name} ({eqn.primitive.name})"


def _use_at(entry: CompiledEntry, tap: Tap) -> Use | None:
    return next((use for use in entry.graph.uses if use.site == tap.site), None)


def _operand(tap: Tap, use: Use | None) -> str:
    if tap.gradient_of is not None and use is None:
        return tap.gradient_of
    if use is not None and tap.operand == use.weight:
        return "weight"
    if use is not None and tap.operand == use.data:
        return "data"
    if len([atom for atom in tap.eqn.invars if not isinstance(atom, _compat.Literal)]) == 1:
        return "operand"
    return "" if tap.operand is None else f"operand {tap.operand}"


def _layer(entry: CompiledEntry, tap: Tap, use: Use | None) -> str:
    """Returns the layer of an operation, as "in layer NAME"; of one without weights, the scope it stands in, or the
    layer of the last product before it.
    """
    if use is not None:
        return f"in layer {use.layer}"
    scope = _compat.name_stack(tap.eqn)
    if scope and "(" not in scope:
        return f"in {scope}"
    before = [earlier for earlier in entry.graph.uses if earlier.site < tap.site]
    return f"behind layer {max(before, key=lambda earlier: earlier.site).layer}" if before else ""


def _source(entry: CompiledEntry, tap: Tap) -> str:
    """Returns the user's line: the equation's, or that of the innermost call it stands in that has one."""
    line = _compat.source_line(tap.eqn)
    site = tap.site
    while not line and len(site) > 2:
        site = site[:-2]
        outer = equation_at(entry.jaxpr, site)
        line = "" if outer is None else _compat.source_line(outer)
    return line


def _layout(entry: CompiledEntry, tap: Tap, use: Use | None) -> str:
    """Says how the operands of an operation lie on the mesh, as far as the plan says."""
    plan = entry.plan
    parts = []
    if use is not None:
        batch = (
            spec_text((plan.batch_axes if len(plan.batch_axes) != 1 else plan.batch_axes[0],))
            if plan.batch_axes
            else "replicated"
        )
        parts.append(f"batch {batch}")
        parts.append(f"weight {use.param} {spec_text(tuple(plan.spec(use.param)))}")
    for constraint in plan.constraints:
        if constraint.site == tap.site:
            side = f"operand {constraint.operand}" if constraint.operand >= 0 else f"result {-1 - constraint.operand}"
            parts.append(f"{side} pinned to {spec_text(constraint.spec)}")
    if not parts and plan.batch_axes:
        parts.append(f"batch over {' and '.join(plan.batch_axes)}")
    return ", ".join(parts)


def _axes_of(entry: CompiledEntry, ratio: float) -> str:
    """Names the mesh axes whose sizes make a ratio, or its inverse."""
    axes = entry.plan.mesh.axes
    for size, of in ((ratio, ""), (1 / ratio if ratio else 0.0, "1 over ")):
        for name, length in axes:
            if length > 1 and abs(size - length) < 1e-6 * length:
                return f" ({of}the size of axis {name})"
        if len(axes) > 1 and abs(size - entry.plan.mesh.num_devices) < 1e-6 * size:
            return f" ({of}the number of devices)"
    return ""
