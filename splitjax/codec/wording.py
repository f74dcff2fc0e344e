"""Words the errors of a kind of document.

What does not fit goes in, a sentence comes out: the same mistakes are called alike in plans, reports and profiles, and
kinds with words of their own override a method.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Wording:
    """Words the errors of a kind of document; kinds with words of their own override its methods.

    - `what`: the kind, with its article, such as `a plan`.
    - `source`: what to give instead, such as "pass what `plan.to_json()` returned".
    - `lead`: what every message begins with; the rest of it then calls the document "it".
    - `remake`: how to make the document anew; empty: `source`.
    - `whole`: the place of an error about all of it; empty: the kind without its article.
    """

    what: str
    source: str
    lead: str = ""
    remake: str = ""
    whole: str = ""

    @classmethod
    def of_result(cls, what: str, name: str) -> Wording:
        """Makes the words for a result, `what`, whose method `to_json` users call on a variable `name`."""
        return cls(what, f"pass what `{name}.to_json()` returned", lead=f"this is not the JSON of {what}: ")

    @property
    def bare(self) -> str:
        """The kind without its article."""
        return self.what.partition(" ")[2]

    @property
    def subject(self) -> str:
        """Returns what the messages call the document."""
        return "it" if self.lead else f"the {self.bare}"

    def not_json(self, why: str) -> str:
        """Says that a text is no JSON, and `why`."""
        return f"{self.subject} is not JSON: {why}"

    def not_a_document(self) -> str:
        """Says that JSON is no object with a format number."""
        return f"{self.subject} has no format number" if self.lead else f"this JSON is not {self.what}"

    def needs_object(self, kind: type) -> str:
        """Says that JSON values of a `kind` are an object."""
        return f"{self.subject} needs an object here"

    def unknown(self, kind: type) -> str:
        """Says that a `kind` has no such key."""
        return f"{self.subject} has an unknown key"

    def missing(self, kind: type) -> str:
        """Says that a key of a `kind` is missing."""
        return f"{self.subject} lacks a key"

    def wrong(self, name: str, words: str) -> str:
        """Says that the value of the key `name` is not what `words` say."""
        return f"{self.subject} needs {words} here"


def similar(name: str, known: Iterable[str]) -> str:
    """Returns a remedy for an unknown `name`: those of the `known` ones that it may mean."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {', '.join(map(repr, close))}?" if close else f"use one of {', '.join(known[:12])}"
