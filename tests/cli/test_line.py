"""Words of a command line: what is read, and what is said about what cannot be."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Literal

import pytest

from splitjax.cli.line.fields import Place, Shown, options_of
from splitjax.cli.line.reading import UsageError, command_named, read


@dataclasses.dataclass(frozen=True)
class Common:
    loud: bool = dataclasses.field(default=False, kw_only=True)
    """Say more."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Choose what."""

    shape: Literal["round", "square"] = "round"
    """Its shape."""
    widths: tuple[int, ...] | None = None
    """Widths,
    one for each."""


@dataclasses.dataclass(frozen=True)
class Make(Common):
    """Make it."""

    name: Annotated[str, Shown(metavar="NAME", place=Place.POSITIONAL)]
    """What to call it."""
    kind: Kind = dataclasses.field(default_factory=Kind)
    size: float = 0.5
    """How large."""
    num_parts: Annotated[int, Shown(short="-n")] = 1
    """How many."""
    folder: pathlib.Path | None = None
    """Where."""
    set: Annotated[tuple[str, ...], Shown(metavar="KEY=VALUE", adds_up=True)] = ()
    """With what."""
    tidy: bool = True
    """Leave a mess."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Start it."""

    command: Annotated[tuple[str, ...], Shown(metavar="-- COMMAND", place=Place.REST)] = ()
    """What."""
    times: int = 1
    """How often."""


def test_fields_become_options():
    by_flag = {option.flag: option for option in options_of(Make)}
    assert list(by_flag) == [
        "NAME",
        "--size",
        "--num-parts",
        "--folder",
        "--set",
        "--no-tidy",
        "--loud",
        "--shape",
        "--widths",
    ]
    assert by_flag["--widths"].text == "Widths, one for each." and by_flag["--widths"].path == ("kind", "widths")
    assert by_flag["--widths"].metavar == "INT ..." and by_flag["--shape"].metavar == "{round,square}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("it", Make("it")),
        ("it --size -2", Make("it", size=-2.0)),
        ("--size=1e3 it --loud", Make("it", size=1000.0, loud=True)),
        ("it -n 3 --folder a/b --no-tidy", Make("it", num_parts=3, folder=pathlib.Path("a/b"), tidy=False)),
        ("it --num_parts 2 --num-parts 4", Make("it", num_parts=4)),
        ("it --shape square --widths 1 2 --widths 3", Make("it", kind=Kind("square", (3,)))),
        ("it --set a=1 b=2 --loud --set c=3", Make("it", loud=True, set=("a=1", "b=2", "c=3"))),
        ("-- it", Make("it")),
        ("--folder - it", Make("it", folder=pathlib.Path("-"))),
    ],
)
def test_words_are_read(line, expected):
    assert read(line.split(), Make, "make") == expected


@pytest.mark.parametrize("line", ["--times 2 -- python x.py --times 3", "--times 2 python x.py --times 3"])
def test_the_rest_of_the_line_is_another_programs(line):
    assert read(line.split(), Start, "start") == Start(("python", "x.py", "--times", "3"), 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("it --sise 2", ["no option --sise", "did you mean '--size'?", "splitjax make --help"]),
        ("it --shape squrae", ["--shape cannot be this; did you mean 'square'?", "use one of round, square"]),
        ("it --num-parts two", ["takes a whole number", "value:  'two'", "write --num-parts 1"]),
        ("it --num-parts 1.5", ["takes a whole number"]),
        ("it --size much", ["takes a number", "write --size 0.5"]),
        ("it --size", ["--size lacks its value", "write --size NUMBER"]),
        ("it --size --loud", ["--size lacks its value"]),
        ("it --loud=1", ["--loud takes no value"]),
        ("it --tidy", ["no option --tidy", "did you mean '--no-tidy'?"]),
        ("--loud", ["lacks NAME", "give it: what to call it"]),
        ("it size", ["takes no word by itself here; did you mean '--size'?", "write --size VALUE"]),
        ("it there", ["value:  'there'", "name its option"]),
    ],
)
def test_a_mistake_is_told_with_a_remedy(line, said):
    with pytest.raises(UsageError) as caught:
        read(line.split(), Make, "make")
    assert caught.value.remedy and caught.value.place
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [("stat", "did you mean 'start'?"), ("--verson", "did you mean '--version'?"), ("xyzzy", "no such")],
)
def test_a_misspelt_command(word, said):
    with pytest.raises(UsageError, match="use one of make, start") as caught:
        command_named([word], {"make": Make, "start": Start})
    assert said in str(caught.value)
