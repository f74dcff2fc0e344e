"""Writes dataclasses as JSON and reads them back, by the types of their fields.

A dataclass goes in and its text comes out, or the other way round. Files that people edit and keep come back in, so
that reading trusts nothing: a key that is unknown, missing or there twice, a value of another type, NaN where a number
is needed, each is a typed error with the value, its key path (`leaves[3].spec[1]`) and a remedy. A `Codec` says for a
kind of document what its type does not: the error, its words, the format number, how the text is laid out, and forms
of types that are no plain object of their fields.

What the hints of a dataclass mean:

- `bool`, `int`, `float`, `str`, `None`, `Any` are JSON's own. A whole number is a `float` too, and stays as it stands,
  so that what was read is written alike. `true` is no number.
- `tuple[X, ...]`, `tuple[X, Y]` and `list[X]` are lists, `Mapping[str, X]` and `dict[str, X]` are objects. Unions are
  told apart by the type of the JSON value. `Literal`, `Annotated[str, OneOf(...)]` and enums of strings are names of a
  given set.
- A dataclass is an object with a key for each field; keys of fields with defaults may be left out, which is how a
  document that an earlier version saved is read. A `Form` of the codec overrides that.
- `Annotated` narrows a type down (`Where`, `OneOf`), names it in errors (`Called`), or says what `Any` is (`ReadAs`).

It is code of our own because the libraries for this do not do what documents edited by hand need. msgspec 0.22 ignores
unknown keys of dataclasses, takes the last of repeated ones, and says what is wrong only as a text, without the value;
cattrs 26.2 turns `"3"` into 3 and wants a hook for every union. With either, types, unions, errors and places would
still be written here, and every text would still be laid out here.
"""

from splitjax.codec.codec import Codec, Form, fields_of, without_nones
from splitjax.codec.hints import Called, Count, OneOf, ReadAs, Where
from splitjax.codec.wording import Wording, similar

__all__ = [
    "Called",
    "Codec",
    "Count",
    "Form",
    "OneOf",
    "ReadAs",
    "Where",
    "Wording",
    "fields_of",
    "similar",
    "without_nones",
]
