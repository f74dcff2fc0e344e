"""Writes figures and names, the same wherever splitjax shows them: bytes, seconds, shares, ratios, and names that
cannot break the table they stand in. Numbers go in with their unit in the argument's name; short texts come out. Bytes
are read, too, as people write them."""

from __future__ import annotations

import re

_WRITTEN_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) *(?:([KkMGT])(i)?)?B?")


def bytes_text(num_bytes: int) -> str:
    """Writes a number of bytes: `0 B`, `980 B`, `1.5 KiB`, `24.0 MiB`. `num_bytes` may be negative."""
    try:
        size = float(num_bytes)
    except OverflowError:  # a document can say anything, and is shown all the same
        return f"2^{num_bytes.bit_length() - 1} B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def bytes_of(text: str) -> int:
    """Reads a number of bytes as people write it: `14GiB`, `2 GB`, `1.5 MiB`, `4096`; units of 1024 end in iB, those of
    1000 in B. Raises `ValueError` for a `text` that is none, and for a number below 0."""
    found = _WRITTEN_BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no number of bytes")
    number, prefix, binary = found.groups()
    factor = (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1) if prefix else 1
    return round(float(number) * factor)


def flops_text(num_flops: int) -> str:
    """Writes a number of flops: `980 flops`, `1.50 Mflop`, `24.0 Gflop`. `num_flops` is not negative."""
    try:
        size = float(num_flops)
    except OverflowError:  # as for bytes
        return f"2^{num_flops.bit_length() - 1} flops"
    for unit in ("flops", "kflop", "Mflop", "Gflop", "Tflop", "Pflop"):
        if size < 1000 or unit == "Pflop":
            break
        size /= 1000
    return f"{num_flops} flops" if unit == "flops" else f"{_three_digits(size)} {unit}"


def seconds_text(seconds: float) -> str:
    """Writes a time in `seconds` to three digits: `812 us`, `3.20 ms`, `1.25 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{seconds / 1e-6:.0f} us"


def ratio_text(ratio: float) -> str:
    """Writes a number without unit, such as `ratio` of two others, to three digits: `0.312`, `7.40`, `1230`."""
    return _three_digits(ratio)


def share_text(share: float) -> str:
    """Writes `share`, 1 for all, in percent to three digits: `1.10 %`."""
    return f"{_three_digits(100 * share)} %"


def percent_saved(device_bytes: int, whole_bytes: int) -> str:
    """Writes how much less one device holds (`device_bytes`) than all of it (`whole_bytes`): `75.0 %`."""
    return f"{100 * (1 - device_bytes / whole_bytes):.1f} %" if whole_bytes else "0.0 %"


def _three_digits(number: float) -> str:
    """Three digits with their zeros, so that figures below each other line up; a zero, and what has more, is whole."""
    if not number or abs(number) >= 1000:
        return f"{number:.0f}"
    return f"{number:#.3g}".removesuffix(".")


def clean(text: str) -> str:
    """Makes the control characters of `text` (line ends, escapes) visible, so that a name cannot break the table it
    stands in."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
