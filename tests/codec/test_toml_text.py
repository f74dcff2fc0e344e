"""TOML without trust: what Python's reader would follow as deep as it goes, or pay for by the square."""

from __future__ import annotations

import time
import tomllib

import pytest

from splitjax.codec.toml_text import MAX_DEPTH, parse_toml


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = " + "[" * 5000, "nested too deeply"),
        ("x = " + "{a=" * 5000, "nested too deeply"),
        ("x = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ("a." * 20_000 + "a = 1", "more than 64 parts"),
        ("[" + "a . " * 20_000 + "a]", "more than 64 parts"),
        ('"a" .' * 20_000 + "a = 1", "more than 64 parts"),
        ("x = " + "9" * 5000, "digits"),
        ("x = [0x" + "f" * 9000 + "]", "64 bits"),
        ("x = 1\nx = 2", "overwrite"),
        ("." * MAX_DEPTH + "A" * 30_000, "statement"),
        ("." * MAX_DEPTH + "\"'" * 15_000, "statement"),
    ],
)
def test_what_is_deep_or_long_is_an_error_at_once(text, why):
    began = time.process_time()
    with pytest.raises(tomllib.TOMLDecodeError, match=why):
        parse_toml(text)
    assert time.process_time() - began < 1


def test_other_text_is_read_as_python_reads_it():
    text = 'a.b.c = [[1, 2], {d = "x.y.z"}]\ndescription = "' + "a.b " * 100 + "\"\n[[rule]]\nregex = '^a\\.b\\.c'\n"
    assert parse_toml(text) == tomllib.loads(text)
