"""Makes the document of a check of a target: memory, what is sent and what is gathered for nothing, predicted beside
compiled, and whether it fits."""

from __future__ import annotations

import dataclasses

from splitjax.display.document import Document, Paragraph, Section, Table
from splitjax.display.figures import bytes_text, seconds_text
from splitjax.plan import Memory
from splitjax.report.blame.rows import COLUMNS, rematerialised_rows
from splitjax.report.target.value import TargetCheck, predicted_fit
from splitjax.report.value import Total

_NONE_FOUND = "none: every array that is gathered whole is read whole"


def target_document(check: TargetCheck) -> Document:
    """Makes the document of `check`."""
    run = check.run
    did = "refused after" if run.needed_bytes is not None else "compiled in"
    title = (
        f"{check.step} on {check.target}: {check.mesh}, rules {check.rules}; {did} {seconds_text(run.seconds)} by"
        f" {run.compiler}"
    )
    memory = Table.of(("memory per device", "predicted", "compiled"), memory_rows(check), (1, 2))
    sent = Table.of(("collective", "predicted", "bytes", "compiled", "bytes"), _sent_rows(check), range(1, 5))
    found = () if check.report is None else rematerialised_rows(check.report)
    whole = Table.of(COLUMNS, found, (), code=(0, 1, 3, 4))
    none = "" if found or check.report is None else _NONE_FOUND
    held = ""
    if run.limit_bytes is not None:
        held = f"the compiler was held to {bytes_text(run.limit_bytes)}, by which it also decides what to compute again"
        if check.report is not None:
            held += f"; the same program is compiled there by .compile(compiler_options={dict(run.options)})"
    return Document(
        title,
        (
            memory,
            Paragraph(held),
            Section("sent per device and step", (sent,)),
            Section("gathered whole to keep a part (involuntary full rematerialization)", (whole, Paragraph(none))),
        ),
        verdict=verdict(check),
    )


def memory_rows(check: TargetCheck) -> tuple[tuple[str, str, str], ...]:
    """Returns the memory of a device in `check`: (what, predicted, compiled)."""
    mine, theirs = check.memory, check.compiled
    on_tpu = check.report is not None and check.report.platform == "tpu"
    space = " (HBM)" if check.device_bytes else ""
    rows: list[tuple[str, int | None, int | None]] = [
        ("arguments", mine.argument_bytes, theirs and theirs.argument_bytes),
        ("temporaries", mine.activation_bytes, theirs and theirs.temporary_bytes),
        ("results in buffers of their own", None, theirs and theirs.output_bytes - theirs.alias_bytes),
        (f"in all{space}", mine.peak_bytes, check.needed_bytes),
        ("upper bound", mine.bound_bytes, None),
        ("allowed", check.allowed_bytes, check.run.limit_bytes or check.allowed_bytes),
    ]
    if on_tpu and theirs is not None and theirs.peak_bytes is not None:
        rows.append(("peak by the compiler, VMEM among it", None, theirs.peak_bytes))
    if theirs is not None and theirs.vector_bytes is not None:
        rows.append(("in VMEM, at most at a time", None, theirs.vector_bytes))
    size = lambda number: "" if number is None else bytes_text(number)
    return tuple((name, size(predicted), size(compiled)) for name, predicted, compiled in rows)


def verdict(check: TargetCheck) -> str:
    """Returns whether `check` fits, as compiled and before, in a sentence."""
    allowed, run = check.allowed_bytes, check.run
    needs = "the backend does not say what a device needs"
    if check.needed_bytes is not None:
        needs = f"as compiled a device needs {bytes_text(check.needed_bytes)}"
    if allowed is None:
        return f"{needs}; no budget was given, and how much memory these devices have is not known"
    of = f"{bytes_text(allowed)} ({'the budget' if check.budget_bytes == allowed else 'what it has'})"
    if run.needed_bytes is not None:
        needs = f"the compiler refuses it, for a device would need {bytes_text(run.needed_bytes)}"
        if run.limit_bytes is None and run.available_bytes is not None:
            of = f"the {bytes_text(run.available_bytes)} that are left of {of}"
    lead = {True: "fits", False: "does not fit", None: "not known"}[check.fits]
    return f"{lead}: {needs}, of {of}; by the prediction {predicted_verdict(check.memory, allowed)}"


def predicted_verdict(memory: Memory, allowed: int | None) -> str:
    """Returns whether a step fits by its predicted `memory`, as the end of a sentence. `allowed`: the bytes that a
    device may need; None where that is not known."""
    at_most = "" if memory.bound_bytes is None else f", {bytes_text(memory.bound_bytes)} at most"
    expected = f"{bytes_text(memory.peak_bytes)} are expected"
    if allowed is None:
        return f"{expected}{at_most}"
    verdicts = {True: f"it fits{at_most}", False: f"it does not: {expected}", None: f"it may fit: {expected}{at_most}"}
    return verdicts[predicted_fit(memory, allowed)]


def _sent_rows(check: TargetCheck) -> tuple[tuple[str, ...], ...]:
    """Returns what a device sends: (op over axis, predicted number and bytes, compiled number and bytes)."""
    is_compiled = check.report is not None
    totals = [(f"{op} over {axis}", total) for (op, axis), total in check.sent.items()]
    if totals:
        columns = zip(*(dataclasses.astuple(total) for _, total in totals), strict=True)
        totals.append(("all", Total(*map(sum, columns))))
    rows = []
    for name, total in totals:
        compiled = (str(total.compiled_count), bytes_text(total.compiled_bytes)) if is_compiled else ("", "")
        rows.append((name, str(total.predicted_count), bytes_text(total.predicted_bytes), *compiled))
    return tuple(rows)
