"""Draws words for a sampled softmax: some for each example of a training batch, as a further array of it.

The keys of a batch's examples go in, word numbers come out.

Which words an example gets depends on seed, epoch and the example's number alone (`splitjax.data.augment`): they are
the same on any number of processes and after a resume, a worker draws those of its own examples only, and a position in
the stream says all there is to save. Every draw is independent of the others, so a word may come twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np

from splitjax.data.augment import random_bits
from splitjax.data.batches import check_whole
from splitjax.errors import DataError


class Sampler(Protocol):
    """Draws from a distribution over the words of a vocabulary."""

    def words(self, uniform: np.ndarray) -> np.ndarray:
        """Returns the words, i32[...], at the quantiles `uniform`, f64[...] in [0, 1)."""
        ...


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """Draws word k of `vocab_size` with probability log((k + 2) / (k + 1)) / log(vocab_size + 1).

    Near Zipf's law for words by falling frequency, as those of a `Vocabulary`. (TensorFlow's
    `log_uniform_candidate_sampler`.) Raises `DataError` for a size below 1.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        check_whole(vocab_size=self.vocab_size)
        if not self.vocab_size:
            raise DataError("there is no word to draw", value=0, place="LogUniform", remedy="give the number of words")

    def words(self, uniform: np.ndarray) -> np.ndarray:
        """Returns the words, i32[...], at the quantiles `uniform`, f64[...] in [0, 1)."""
        words = np.expm1(uniform * np.log1p(self.vocab_size)).astype(np.int32)
        return np.minimum(words, self.vocab_size - 1)  # where rounding up lands on the end


@dataclasses.dataclass(frozen=True, eq=False)
class ByCounts:
    """Draws words by how often each is in the text, whatever their order.

    **Arguments:**

    - `counts`: [vocab_size], above 0.
    - `power`: of the counts; below 1 rare words come more often than in the text (0.75 in Mikolov et al. 2013, arXiv
      1310.4546).

    Raises `DataError` for counts that are not above 0: a word that is never drawn would have no expected count.
    """

    counts: np.ndarray
    power: float = 1.0

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, np.float64)
        if counts.ndim != 1 or not counts.size or not np.all(np.isfinite(counts) & (counts > 0)):
            wrong = np.flatnonzero(~(counts > 0)) if counts.ndim == 1 else np.zeros(0, np.int64)
            raise DataError(
                "counts are one number above 0 for each word",
                value=counts.shape if not len(wrong) else float(counts[wrong[0]]),
                place="ByCounts" + (f", word {wrong[0]}" if len(wrong) else ""),
                remedy="leave words that never occur out of the vocabulary",
            )
        object.__setattr__(self, "counts", counts)

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """Probabilities of the words in a single draw, f64[vocab_size]."""
        weights = self.counts**self.power
        return weights / weights.sum()

    def words(self, uniform: np.ndarray) -> np.ndarray:
        """Returns the words, i32[...], at the quantiles `uniform`, f64[...] in [0, 1)."""
        words = np.searchsorted(self._below, uniform, side="right")
        return np.minimum(words, len(self._below) - 1).astype(np.int32)

    @functools.cached_property
    def _below(self) -> np.ndarray:
        return np.cumsum(self.probabilities)


@dataclasses.dataclass(frozen=True)
class Negatives:
    """Draws `num` words of `sampler` for each example; called with the examples' keys: uint64[b] -> i32[b, num].

    It is made to be among the `draws` of a `Dataset`.
    """

    sampler: Sampler
    num: int

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        bits = random_bits(keys[:, None], _FIRST_DRAW + np.arange(self.num))
        return self.sampler.words((bits >> np.uint64(11)) * 2.0**-53)


# Draws before this one of an example's key are its augmentation's.
_FIRST_DRAW = 16
