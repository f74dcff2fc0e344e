"""Loads plain text as windows of word numbers, for models that predict the next word.

A file or a folder goes in, a `Dataset` of windows and the vocabulary come out.

The words are those of the corpora that come split at spaces, such as WikiText (Merity et al. 2016, arXiv 1609.07843):
whatever white space separates; the end of each line, empty ones too, is the word `<eos>`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from splitjax.data.batches import is_whole
from splitjax.data.dataset import Dataset
from splitjax.data.vocabulary import LEVELS, Level, Vocabulary, split_lines
from splitjax.errors import DataError

SUFFIXES: tuple[str, ...] = (".txt", ".tokens", ".raw")
# Which file of a folder is which split: the part of its name before the suffix, such as wiki.train.tokens.
TRAIN: tuple[str, ...] = ("train",)
TEST: tuple[str, ...] = ("test", "valid", "validation")  # the first that is there
TEST_SHARE: int = 10  # of a single file, one in so many lines


def load_text(
    path: str | os.PathLike[str],
    *,
    seq_len: int = 128,
    vocab_size: int | None = None,
    level: Level = "word",
    vocabulary: Vocabulary | None = None,
) -> Dataset:
    """Loads plain text in UTF-8, a file or a folder.

    **Arguments:**

    - `path`: a folder with files for training and for testing, `train.txt` and `test.txt` (or `valid.txt`), or named
      like `wiki.train.tokens`; or one file, of which the last tenth of the lines is for testing.
    - `seq_len`: T, how many words an example has a model predict.
    - `vocab_size`: at most this many words, the most frequent of the training text; the others are `<unk>`. None: all.
    - `level`: `"word"`, or `"char"` for single characters.
    - `vocabulary`: one from an earlier run, in place of the training text's own.

    **Returns:** a `Dataset` of windows `{"tokens": int32[N, T + 1]}`, of which position t predicts t + 1: the last word
    of a window is the first of the next, so that each word is predicted once. What is left at the end is dropped. The
    words are in memory once, 4 bytes each; windows share them. `vocabulary` is the data set's, `class_names` are its
    words.

    Raises `DataError` for files that are missing, not UTF-8 (naming the byte), or too short for one window.
    """
    if not is_whole(seq_len) or seq_len < 1:
        raise DataError(
            "seq_len must be a whole number above 0",
            value=seq_len,
            place="argument 'seq_len'",
            remedy="pass seq_len=128",
        )
    if level not in LEVELS:
        raise DataError(
            "no such level of a text", value=level, place="argument 'level'", remedy="pass 'word' or 'char'"
        )
    path = pathlib.Path(path)
    if path.is_dir():
        train_file, test_file = _split_file(path, TRAIN), _split_file(path, TEST)
        train, test = _read_lines(train_file), _read_lines(test_file)
    else:
        train_file = test_file = path
        lines = _read_lines(path)
        num_train = len(lines) - len(lines) // TEST_SHARE
        train, test = lines[:num_train], lines[num_train:]
    if vocabulary is None:
        vocabulary = Vocabulary.of(train, size=vocab_size, level=level)
    return Dataset(
        name=path.stem or "text",
        train={"tokens": _windows(vocabulary.encode_lines(train), seq_len, f"{train_file}, for training")},
        test={"tokens": _windows(vocabulary.encode_lines(test), seq_len, f"{test_file}, for testing")},
        class_names=vocabulary.words,
        vocabulary=vocabulary,
    )


def _windows(numbers: np.ndarray, seq_len: int, place: str) -> np.ndarray:
    """Returns windows that overlap in a word, int32[T] -> int32[N, seq_len + 1], which share the memory."""
    if len(numbers) <= seq_len:
        raise DataError(
            f"a text of {len(numbers)} words is too short for one window of {seq_len + 1}",
            value=seq_len,
            place=place,
            remedy="pass a smaller seq_len, or give more text",
        )
    return np.lib.stride_tricks.sliding_window_view(numbers, seq_len + 1)[::seq_len]


def _read_lines(file: pathlib.Path) -> list[str]:
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(
            f"the text cannot be read: {error.strerror or error}",
            place=str(file),
            remedy="give a file, or a folder with train.txt and test.txt",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text is not UTF-8: {error.reason}",
            value=error.object[error.start : error.end],
            place=f"{file}, byte offset {error.start}",
            remedy="copy the file again, or convert it: iconv -f latin1 -t utf-8",
        ) from error
    if "\x00" in text:
        raise DataError(
            "not a text: it holds the byte 0",
            place=f"{file}, byte offset {len(text[: text.index(chr(0))].encode())}",
            remedy="copy the file again, or give plain text",
        )
    return split_lines(text)


def _split_file(folder: pathlib.Path, splits: tuple[str, ...]) -> pathlib.Path:
    """Returns the file of the first of `splits` that is there."""
    for split in splits:
        files = sorted(_named(folder, split))
        if len(files) > 1:
            raise DataError(
                f"several files for the split {split!r}",
                value=[file.name for file in files],
                place=str(folder),
                remedy="leave one of them in the folder",
            )
        if files:
            return files[0]
    raise DataError(
        f"no text for the split {splits[0]!r}",
        value=sorted(file.name for file in folder.iterdir())[:20],
        place=str(folder),
        remedy=(
            f"name it {splits[0]}.txt or wiki.{splits[0]}.tokens, or give the path of one file in place of the folder"
        ),
    )


def _named(folder: pathlib.Path, split: str) -> Iterator[pathlib.Path]:
    for file in folder.iterdir():
        if file.suffix in SUFFIXES and file.stem.rpartition(".")[2] == split and file.is_file():
            yield file
