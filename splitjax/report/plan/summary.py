"""Makes the titled lines and the rows beneath a plan's table: batch, computing, boundaries, memory, what is stored at
the peak, what is sent.

A `Plan` goes in; rows and lines come out that say nothing of how they are laid out.
"""

from __future__ import annotations

import re

from splitjax._plan_purpose import PurposeKind
from splitjax.display.figures import bytes_text, flops_text, percent_saved
from splitjax.plan import BoundaryPlan, LeafPlan, Plan, StoredArray, spec_text
from splitjax.sync.costs.exchange import OWNED

# So many kinds of arrays at the peak are shown.
MOST_AT_PEAK = 8


def summary(plan: Plan) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the titled lines of `plan` that stand below its table, in reading order; titles with nothing to say are
    left out."""
    sections = (
        ("mesh", [f"{plan.mesh} ({plan.mesh.num_devices} devices)"]),
        ("rules", [f"{plan.rules}; {examples_text(plan)}"]),
        ("warnings", [str(warning) for warning in plan.warnings]),
        ("compute", _compute(plan)),
        ("crossing", [_CROSSINGS[plan.group_comm]] if plan.group_comm != "gather" else []),
        ("gradient", [_boundary(boundary) for boundary in plan.boundaries if boundary.how != "whole" or boundary.why]),
        ("remat", [f"{each}; the backward pass computes the rest again" for each in plan.remat]),
        ("saved", _saved(plan)),
        ("optimizer", _optimizer(plan)),
        ("statistics", _arrays(plan, "statistic")),
        ("tables", _tables(plan)),
        ("backprop", _partial(plan)),
        ("constraints", [f"shardings pinned inside the step: {len(plan.constraints)}"] if plan.constraints else []),
        ("batch", [_batch(plan, leaf) for leaf in plan.leaves if leaf.role == "batch"]),
        (
            "inputs",
            [f"{leaf.path} {leaf.shape} {spec_text(leaf.spec)}" for leaf in plan.leaves if leaf.role == "input"],
        ),
        ("gathered", [f"replicated around {operation}: no dim rule" for operation in plan.gathered]),
        ("exceptions", _exceptions(plan)),
        ("notes", list(plan.notes)),
    )
    return tuple((title, tuple(lines)) for title, lines in sections if lines)


def _saved(plan: Plan) -> list[str]:
    over = " x ".join(plan.saved)
    return [f"inputs of rematerialised layers lie in parts over {over} until the backward pass"] if over else []


def examples_text(plan: Plan) -> str:
    """Says over which axes of the mesh the examples of a batch lie, in layers that are whole and in layers that are
    split."""
    whole = " x ".join(plan.batch_axes)
    arrays = [leaf for leaf in plan.leaves if leaf.role == "batch" and leaf.shape]
    numbers = {leaf.shape[leaf.example_dim or 0] for leaf in arrays}
    if len(numbers) > 1 and any(set(leaf.axes) - set(plan.batch_axes) for leaf in arrays):
        return "arrays of the batch lie one by one; what is sent over axes of some of them alone is not predicted"
    if not whole:
        return "every device has all examples"
    computed = computing_axes(plan)
    together = [axis for axis in plan.batch_axes if axis not in computed]
    if plan.replicated_batch != "all" or len(together) == len(plan.batch_axes):
        return f"examples lie over {whole}"
    of_split = f"over {' x '.join(together)}" if together else "on every device"
    return f"examples of whole layers lie over {whole}, of split layers {of_split}"


def is_together(plan: Plan, leaf: LeafPlan) -> bool:
    """Returns whether an array of the batch comes in as split layers take it: over fewer axes than whole layers'
    examples."""
    together = set(plan.batch_axes) - computing_axes(plan)
    fewer = together < set(plan.batch_axes)
    return plan.replicated_batch == "all" and fewer and set(leaf.axes) == together and not leaf.note


def splitting_axes(plan: Plan) -> set[str]:
    """Returns the mesh axes over which `plan` splits a parameter."""
    return {axis for leaf in plan.leaves if leaf.role == "param" for axis in leaf.axes}


def computing_axes(plan: Plan) -> set[str]:
    """Returns the mesh axes over which `plan` computes layers in parts: those that split a parameter which is neither
    gathered over them where it is used, nor a table whose owners send its rows."""
    gathered: dict[str, set[str]] = {}
    for collective in plan.collectives:
        if collective.purpose.kind is PurposeKind.STORED_WEIGHT and collective.purpose.leaf:
            gathered.setdefault(collective.purpose.leaf, set()).update(collective.axis.split("+"))
    owned = {table.param for table in plan.syncs if table.scheme == OWNED}
    parameters = (leaf for leaf in plan.leaves if leaf.role == "param" and leaf.path not in owned)
    return {axis for leaf in parameters for axis in set(leaf.axes) - gathered.get(leaf.path, set())}


def _batch(plan: Plan, leaf: LeafPlan) -> str:
    text = f"{leaf.path} {leaf.shape} {spec_text(leaf.spec)}"
    return f"{text}, as the split layers have their examples" if is_together(plan, leaf) else text


def _compute(plan: Plan) -> list[str]:
    compute = plan.compute
    if not compute.ideal_flops:
        return []
    return [
        f"{flops_text(compute.flops)} per device and step in products with weights, {compute.over_ideal:.2f} times an"
        " even share"
    ]


def _boundary(boundary: BoundaryPlan) -> str:
    """Returns how a gradient boundary runs, as a sentence without its full stop."""
    number = boundary.num_parts
    how = {
        "whole": "with all examples at once",
        "microbatches": "in one loop for each worker" if number == 1 else f"in {number} microbatches",
        "turns": f"in {number} turns behind the crossing",
        "truncated": f"to {number} depths, each worker to its own",
        "own loss": f"to {number} depths, each worker with the loss of its own examples",
    }[boundary.how]
    return f"{boundary.label} is differentiated {how}" + (f": {boundary.why}" if boundary.why else "")


_CROSSINGS = {
    "modulo": "modulo: split layers run in turns, each with a slice of every worker's examples",
    "turns": "turns: split layers run in turns, each with one worker's examples",
}


def memory_rows(plan: Plan) -> tuple[tuple[str, str, str, str], ...]:
    """(what takes memory, its bytes on a device, on a single device that holds all, what is saved): the state and its
    parts, then what the plan predicts of a step, which has no other size to be compared with."""
    rows = []
    for title, leaves in (
        ("state", [leaf for leaf in plan.leaves if leaf.is_state]),
        ("of it optimizer", [leaf for leaf in plan.leaves if leaf.role == "optimizer"]),
        ("of it statistics", [leaf for leaf in plan.leaves if leaf.role == "statistic"]),
    ):
        held, whole = sum(leaf.bytes_per_device for leaf in leaves), sum(leaf.whole_bytes(plan.mesh) for leaf in leaves)
        if leaves:
            rows.append((title, bytes_text(held), bytes_text(whole), percent_saved(held, whole)))
    memory = plan.memory
    if memory.argument_bytes is not None and memory.bound_bytes is not None:
        rows += [
            ("arguments: state, batch, others", bytes_text(memory.argument_bytes), "", ""),
            ("beside them at the peak, estimated", bytes_text(memory.activation_bytes), "", ""),
            ("peak, estimated", bytes_text(memory.peak_bytes), "", ""),
            ("peak, at most (upper bound)", bytes_text(memory.bound_bytes), "", ""),
        ]
    elif memory.state_bytes or memory.activation_bytes or memory.peak_bytes:
        rows.append(("activations, if all of them live at once", bytes_text(memory.activation_bytes), "", ""))
        rows.append(("peak, if everything lives at once (no bound)", bytes_text(memory.peak_bytes), "", ""))
    return tuple(rows)


def peak_rows(plan: Plan) -> tuple[tuple[str, str, str, str], ...]:
    """(layer, what made the array, its shape, its bytes on a device) of the largest arrays beside the arguments that
    are stored at the predicted peak; equal ones are folded, and what is left is one row."""
    memory = plan.memory
    groups: dict[tuple[str, str, str], list[StoredArray]] = {}
    for array in memory.at_peak:
        groups.setdefault((re.sub(r"\d+", "*", array.layer), array.made_by, str(array.shape)), []).append(array)
    size_of = lambda arrays: sum(array.num_bytes for array in arrays)
    largest = sorted(groups.items(), key=lambda group: -size_of(group[1]))[:MOST_AT_PEAK]
    rows = [
        (
            pattern if len({array.layer for array in arrays}) > 1 else arrays[0].layer,
            f"{len(arrays)} x {made_by}" if len(arrays) > 1 else made_by,
            shape,
            bytes_text(size_of(arrays)),
        )
        for (pattern, made_by, shape), arrays in largest
    ]
    rest = memory.activation_bytes - sum(size_of(arrays) for _, arrays in largest)
    if rows and rest > 0:
        rows.append(("all else", "", "", bytes_text(rest)))
    return tuple(rows)


def collective_rows(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """Lists the collectives of `plan` by op and axis: what they are, their number in a step, and the bytes that a
    device sends, the largest first, then the sum."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for collective in plan.collectives:
        count, total = sums.get((collective.op, collective.axis), (0, 0))
        sums[collective.op, collective.axis] = count + 1, total + collective.bytes
    rows = [
        (f"{op} over {axis}", str(count), bytes_text(total))
        for (op, axis), (count, total) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    if len(rows) > 1:
        total = sum(collective.bytes for collective in plan.collectives)
        rows.append(("all", str(len(plan.collectives)), bytes_text(total)))
    return tuple(rows)


def _arrays(plan: Plan, role: str) -> list[str]:
    leaves = [leaf for leaf in plan.leaves if leaf.role == role]
    split = sum(leaf.num_shards(plan.mesh) > 1 for leaf in leaves)
    return [f"{len(leaves)} array{'s' * (len(leaves) != 1)}, {split} split"] if leaves else []


def _optimizer(plan: Plan) -> list[str]:
    lines = _arrays(plan, "optimizer")
    rules: dict[str, int] = {}
    for leaf in plan.leaves:
        if leaf.role == "optimizer":
            rule = "follow their parameter" if leaf.rule.startswith("follows ") else leaf.rule
            rules[rule] = rules.get(rule, 0) + 1
    return [*lines, ", ".join(f"{count} {rule}" for rule, count in rules.items())] if lines else []


def _tables(plan: Plan) -> list[str]:
    lines = []
    for sync in plan.syncs:
        over = f" over {sync.axis}" if sync.axis else ""
        size = (
            f", {bytes_text(sync.bytes)} sent per device instead of {bytes_text(sync.dense_bytes)}"
            if sync.bytes and sync.scheme != "dense"
            else ""
        )
        lines.append(f"{sync.param}, {sync.rows:,} rows: {sync.scheme}{over}{size}; {sync.why}")
    return lines


def _partial(plan: Plan) -> list[str]:
    partial = plan.partial
    if partial is None:
        return []
    num_slots = len(partial.first)
    shares = [sum(segment.backward for segment in partial.segments[first:]) for first in partial.first]
    who = (
        f"each of {num_slots} workers over {partial.axis} to its own depth"
        if partial.assignment == "spatial"
        else f"{num_slots} depths in turn, all workers alike"
    )
    rotation = ", moving on by one every step" if partial.rotate else ""
    differentiated = ", ".join(f"{100 * share:.0f} %" for share in shares)
    lines = [
        (
            f"partial, which changes the numbers: {who}{rotation}; {differentiated}"
            f" of the backward pass; {100 * partial.device_time:.1f} % of the device time of full backpropagation,"
            f" {partial.times}"
        ),
        f"estimator {partial.estimator}, execution {partial.execution}"
        + (", examples balanced" if partial.rebalance else "")
        + (f", {partial.warmup_steps} first steps in full" if partial.warmup_steps else "")
        + (", each worker with the loss and statistics of its own examples" if partial.statistics == "local" else ""),
    ]
    for segment in partial.segments:
        names = segment.layers[0] if len(segment.layers) == 1 else f"{segment.layers[0]} to {segment.layers[-1]}"
        size = f"{bytes_text(segment.summed_bytes)} sent per worker to add up {bytes_text(segment.num_bytes)}"
        size += f", {bytes_text(segment.handed_bytes)} to hand on the sum" if segment.handed_bytes else ""
        count = f"{segment.contributors} of {num_slots} {'workers' if partial.assignment == 'spatial' else 'depths'}"
        lines.append(
            f"{names}: {count}, {100 * segment.backward:.1f} % of the backward pass, {size}"
            if segment.contributors
            else f"{names}: never differentiated, kept as it is"
        )
    return lines


def _exceptions(plan: Plan) -> list[str]:
    """Returns the notes of leaves and layers, equal ones joined: `kernel, bias: 10 does not divide`. A layer repeats
    its weight's note."""
    notes: dict[str, list[str]] = {}
    for leaf in plan.leaves:
        if leaf.note:
            notes.setdefault(leaf.note, []).append(leaf.path)
    for layer in plan.layers:
        if layer.note and not any(
            layer.note == note and set(paths) & set(layer.params) for note, paths in notes.items()
        ):
            notes.setdefault(layer.note, []).append(layer.name)
    return [
        f"{', '.join(paths[:4])}{f' and {len(paths) - 4} more' if len(paths) > 4 else ''}: {note}"
        for note, paths in notes.items()
    ]
