"""Makes the rows of a plan's table: those of parameters, repeated blocks folded into one.

A `Plan` goes in; rows come out that say nothing of how they are laid out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from splitjax.plan import LayerPlan, LeafPlan, Plan, spec_text

# Fewer repetitions than this are shown by themselves: folding two layers hides more than it saves.
MIN_FOLD = 3
_NUMBER = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True)
class Row:
    """Describes a parameter, or the same parameter of several equal layers.

    **Attributes:**

    - `layer`, `kind`: the layer that uses it, and that layer's kind; empty for a parameter that no layer uses.
    - `param`: its path, relative to the layer.
    - `shape`, `spec`, `rule`: as in `splitjax.plan.LeafPlan`, the last two as text.
    - `device_bytes`: what a device holds of it.
    - `whole_bytes`: what all of it takes.
    - `repeat`: how many equal layers the row stands for; byte counts are of each of them.
    """

    layer: str
    param: str
    kind: str
    shape: tuple[int, ...]
    spec: str
    rule: str
    device_bytes: int
    whole_bytes: int
    repeat: int = 1


def table(plan: Plan) -> tuple[tuple[Row, ...], ...]:
    """Returns the parameters of `plan`, grouped by layer, in program order. Runs of equal blocks are folded into one
    (`blocks_[0-31]/mlp`); parameters that no layer uses come last."""
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    groups: list[tuple[Row, ...]] = []
    seen: set[str] = set()
    for layer in plan.layers:
        params = [leaves[path] for path in layer.params if path in leaves and path not in seen]
        seen.update(layer.params)
        if params:
            groups.append(tuple(_row(plan, layer, leaf) for leaf in params))
    loose = [leaf for leaf in plan.leaves if leaf.role == "param" and leaf.path not in seen]
    groups.extend((_row(plan, None, leaf),) for leaf in loose)
    return tuple(_fold(groups))


def _row(plan: Plan, layer: LayerPlan | None, leaf: LeafPlan) -> Row:
    name = layer.name if layer else ""
    param = leaf.path.removeprefix(name + "/") if name else leaf.path
    if leaf.path == name:  # a layer that is a single array: its last name is enough
        param = name.rpartition("/")[2]
    return Row(
        name,
        param,
        layer.kind if layer else "",
        leaf.shape,
        spec_text(leaf.spec),
        _rule_text(leaf.rule, name),
        leaf.bytes_per_device,
        leaf.whole_bytes(plan.mesh),
    )


def _rule_text(rule: str, layer: str) -> str:
    """Returns the rule without what the row says already: the path of a parameter of the same layer, the path that both
    layers share. So the blocks of a network read alike, and fold."""
    head, sep, path = rule.partition(" (with ")
    if sep and path.startswith(f"{layer}/"):
        return head
    head, sep, path = rule.partition("ties with ")
    if not sep:
        return rule
    mine, theirs = layer.split("/"), path.rstrip(")").split("/")
    shared = 0
    while shared < min(len(mine), len(theirs) - 1) and mine[shared] == theirs[shared]:
        shared += 1
    return f"{head}{sep}{'/'.join(theirs[shared:])}{')' if path.endswith(')') else ''}"


def _fold(groups: Sequence[tuple[Row, ...]]) -> Iterable[tuple[Row, ...]]:
    """Folds runs of blocks of layers that are equal but for one number in their names, counting up by one.

    At each position the block length that covers most layers wins, the shorter among equals: two equal convolutions
    within each of 32 equal blocks fold as 32 blocks, not 32 times as two convolutions."""
    names = [_NUMBER.split(group[0].layer or group[0].param) for group in groups]
    bodies = [
        tuple(dataclasses.replace(row, layer="", param=row.param if row.layer else "") for row in group)
        for group in groups
    ]
    i = 0
    while i < len(groups):
        length, times, varying = 1, 1, 0
        for period in range(1, (len(groups) - i) // MIN_FOLD + 1):
            num_repeats, candidate = _repetitions(names, bodies, i, period)
            if num_repeats >= MIN_FOLD and num_repeats * period > length * times:
                length, times, varying = period, num_repeats, candidate
        if times < MIN_FOLD:
            yield groups[i]
            i += 1
            continue
        last = int(names[i][varying]) + times - 1
        for j in range(i, i + length):
            parts = [*names[j][:varying], f"[{names[j][varying]}-{last}]", *names[j][varying + 1 :]]
            folded = "".join(parts)
            yield tuple(
                dataclasses.replace(
                    row, layer=folded if row.layer else "", param=row.param if row.layer else folded, repeat=times
                )
                for row in groups[j]
            )
        i += length * times


def _repetitions(
    names: Sequence[list[str]], bodies: Sequence[tuple[Row, ...]], start: int, period: int
) -> tuple[int, int]:
    """Returns how often the block of `period` groups at `start` repeats, and which part of the names counts up."""
    if start + period >= len(names):
        return 1, 0
    here, there = names[start], names[start + period]
    parts = [k for k in range(min(len(here), len(there))) if here[k] != there[k]]
    if len(here) != len(there) or len(parts) != 1 or parts[0] % 2 == 0:
        return 1, 0
    varying, times = parts[0], 1
    while all(
        _counts_up(names, bodies, start + j, start + times * period + j, varying, times, names[start][varying])
        for j in range(period)
    ):
        times += 1
    return times, varying


def _counts_up(
    names: Sequence[list[str]],
    bodies: Sequence[tuple[Row, ...]],
    base: int,
    target: int,
    varying: int,
    step: int,
    first: str,
) -> bool:
    """Tells whether the group at `target` is the same as at `base`, with its number increased by `step`. All of a block
    share the number, which is part `varying` of their names."""
    if (
        target >= len(names)
        or len(names[base]) <= varying
        or names[base][varying] != first
        or bodies[base] != bodies[target]
    ):
        return False
    return names[target] == [*names[base][:varying], str(int(first) + step), *names[base][varying + 1 :]]
