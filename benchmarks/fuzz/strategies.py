"""The ways to change an input, by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from benchmarks.fuzz.mutating import (
    Strategy,
    bytes_changed,
    deep,
    json_changed,
    lines_changed,
    packed,
    toml_changed,
)
from benchmarks.fuzz.mutating_files import (
    arrays_changed,
    pickle_changed,
    sealed_changed,
    tar_changed,
    wire_changed,
)

STRATEGIES: Mapping[str, Strategy] = {
    "bytes": bytes_changed,
    "deep": deep,
    "json": json_changed,
    "lines": lines_changed,
    "toml": toml_changed,
    "packed json": packed(json_changed),
    "packed lines": packed(lines_changed),
    "packed bytes": packed(bytes_changed),
    "packed deep": packed(deep),
    "sealed": sealed_changed,
    "tar": packed(tar_changed),
    "arrays": arrays_changed,
    "pickle": pickle_changed,
    "wire": wire_changed,
}


def changed(data: bytes, names: Sequence[str], max_bytes: int, draw: random.Random) -> bytes:
    """Returns `data` changed by one of the strategies `names`, or as bytes, at most `max_bytes` of it."""
    return STRATEGIES[draw.choice(names)](data, draw)[:max_bytes]
