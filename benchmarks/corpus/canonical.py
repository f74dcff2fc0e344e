"""A plan as text that is equal where the decisions are equal: sentences left out, keys in order, numbers exactly."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# Sentences for people: they may be written better without a decision having changed. So may the purpose of a
# collective, of which the sentence `why` is rendered: what it moves, and for which layer, is in the other keys.
SENTENCES = ("why", "purpose", "note", "notes")
# What follows from the rest, and was not recorded when the corpus was taken.
DERIVED = ("boundaries", "compute", "warnings")
# Of a digest of 64 hexadecimal digits so many are kept: two texts of a million share them with a chance of 1 in 10^7.
NUM_DIGITS = 16


def canonical_plan(text: str) -> str:
    """The canonical text of a plan's JSON (`Plan.to_json`): one leaf, layer or collective a line."""
    plan = {name: value for name, value in _without(json.loads(text)).items() if name not in DERIVED}
    # "primitive at file:line": the line is where a model happens to stand.
    plan["gathered"] = [one.partition(" at ")[0] for one in plan.get("gathered", ())]
    lines = []
    for name in sorted(plan):
        value = plan[name]
        if isinstance(value, list):
            lines += [f"{name} {number} {_line(entry)}" for number, entry in enumerate(value)] or [f"{name} none"]
        else:
            lines.append(f"{name} {_line(value)}")
    return "\n".join(lines) + "\n"


def digest(text: str) -> str:
    """The first digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(one) for name, one in value.items() if name not in SENTENCES}
    return [_without(one) for one in value] if isinstance(value, list) else value


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
