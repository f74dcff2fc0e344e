"""Numbers the words, or characters, of a text: made from a text alone, the same each time.

Lines go in, a `Vocabulary` comes out, which turns text into numbers and back, and can be saved beside a model.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import io
import json
import os
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np

from splitjax.codec import Codec, Form, Wording
from splitjax.errors import DataError

Level: TypeAlias = Literal["word", "char"]
LEVELS: tuple[str, ...] = ("word", "char")
UNKNOWN: str = "<unk>"
END_OF_LINE: str = "<eos>"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Holds words and their numbers: word `words[i]` has number i.

    **Attributes:**

    - `words`: `<unk>`, which stands for every other word, then words by falling frequency.
    - `level`: `"word"`: a text is split at white space, and `<eos>` ends each line; `"char"`: into its characters, of
      which a line's end is one.

    Raises `DataError` for words that are no distinct texts, or that lack `<unk>`.
    """

    words: tuple[str, ...]
    level: Level = "word"

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        texts = all(isinstance(word, str) for word in self.words)
        if (
            self.level not in LEVELS
            or not texts
            or len(set(self.words)) != len(self.words)
            or UNKNOWN not in self.words
        ):
            raise DataError(
                f"a vocabulary has distinct words, {UNKNOWN!r} among them, and a level, 'word' or 'char'",
                value=(self.level, self.words[:10]),
                place="Vocabulary",
                remedy="make it from a text with Vocabulary.of",
            )

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} {self.level}s, digest {self.digest[:12]})"

    @classmethod
    def of(cls, lines: Iterable[str], *, size: int | None = None, level: Level = "word") -> Vocabulary:
        """Makes the vocabulary of a text.

        **Arguments:**

        - `lines`: the text's lines, with their ends.
        - `size`: at most this many words, `<unk>` included, the most frequent first; among equally frequent ones those
          that appear first. None: all.
        - `level`: `"word"` or `"char"`.

        Raises `DataError` for a size below 2, and what `Vocabulary` raises.
        """
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 2):
            raise DataError(
                f"a vocabulary has at least one word beside {UNKNOWN}",
                value=size,
                place="argument 'vocab_size'",
                remedy="pass a whole number of at least 2, or None for all words",
            )
        counts: collections.Counter[str] = collections.Counter()
        for line in lines:
            counts.update(split_line(line, level))
        del counts[UNKNOWN]
        # sorted by count alone, and stable: ties stay as they appeared
        words = [word for word, _ in counts.most_common()]
        return cls((UNKNOWN, *words)[:size], level)

    def encode(self, text: str) -> np.ndarray:
        """Returns the numbers of the words of `text`, int32[T]; a word that the vocabulary lacks becomes `<unk>`."""
        return self.encode_lines(split_lines(text))

    def encode_lines(self, lines: Iterable[str]) -> np.ndarray:
        """Returns what `encode` does, int32[T], for a text that comes as `lines` with their ends."""
        numbers, unknown = self._numbers, self._numbers[UNKNOWN]
        # numpy takes what it is given as it comes: the words of a large text never stand in memory at once
        return np.fromiter(
            (numbers.get(word, unknown) for line in lines for word in split_line(line, self.level)), np.int32
        )

    def decode(self, numbers: Iterable[int]) -> str:
        """Returns the text of `numbers`: words joined by spaces, `<eos>` as a line's end; characters as they are.

        Raises `DataError` for a number that the vocabulary does not have.
        """
        chosen = [self._word(int(number)) for number in numbers]
        if self.level == "char":
            return "".join(chosen)
        return (
            " ".join("\n" if word == END_OF_LINE else word for word in chosen).replace(" \n", "\n").replace("\n ", "\n")
        )

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256, in hex, of level and words: two vocabularies have one digest exactly if they are equal."""
        return hashlib.sha256(json.dumps([self.level, self.words], ensure_ascii=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """`{"level": ..., "words": [...], "digest": ...}`, for `json.dumps`."""
        return _JSON.values(self)

    @classmethod
    def from_json(cls, value: Any) -> Vocabulary:
        """Returns the vocabulary that `to_json` wrote as `value`.

        Raises `DataError` for anything else, and for words that do not fit their digest.
        """
        return _JSON.read(value)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes it as JSON to `file`, in one piece: a file that is there stays whole until the new one replaces it.

        Raises `DataError` when it cannot be written."""
        _JSON.save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Vocabulary:
        """Reads the vocabulary that `save` wrote to `file`. Raises `DataError` for a missing file, or any other."""
        return _JSON.load(file)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def _word(self, number: int) -> str:
        if not 0 <= number < len(self.words):
            raise DataError(
                f"the vocabulary has words 0 to {len(self.words) - 1}",
                value=number,
                place="Vocabulary.decode",
                remedy="decode with the vocabulary that the text was encoded with",
            )
        return self.words[number]


@dataclasses.dataclass(frozen=True)
class _FileEntry:
    """Holds what JSON has of a vocabulary."""

    level: Level
    words: tuple[str, ...]
    digest: str


class _FileWords(Wording):
    """Says of every value that has not the keys of a vocabulary that it is none."""

    def not_json(self, why: str) -> str:
        return f"the vocabulary cannot be read: {why}"

    def needs_object(self, kind: type) -> str:
        return "not a vocabulary"

    unknown = missing = needs_object


def _read(codec: Codec[Any], values: Any, place: str) -> Vocabulary:
    entry = codec.instance(_FileEntry, values, place)
    vocabulary = Vocabulary(entry.words, entry.level)
    if vocabulary.digest != entry.digest:
        codec.fail("a damaged vocabulary: its words do not fit its digest", entry.digest, place)
    return vocabulary


_JSON = Codec(
    Vocabulary,
    DataError,
    _FileWords("a vocabulary", "make it anew from the training text: load_text gives the same vocabulary each time"),
    forms={
        Vocabulary: Form(lambda vocabulary: _FileEntry(vocabulary.level, vocabulary.words, vocabulary.digest), _read)
    },
    indent=0,
)


def split_line(line: str, level: Level) -> Iterable[str]:
    """Splits a `line` with its end into words, or by `level` into characters."""
    if level == "char":
        return line
    return (*line.split(), END_OF_LINE) if line.endswith("\n") else line.split()


def split_lines(text: str) -> list[str]:
    """Splits `text` into lines with their ends, which are "\\n" or "\\r\\n" and become "\\n".

    (`str.splitlines` knows eight more.)
    """
    return list(io.StringIO(text.replace("\r\n", "\n")))
