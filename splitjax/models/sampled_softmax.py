"""Trains the softmax over a large vocabulary on the words of the batch and some drawn ones in place of all.

Logits of the words to predict and of the drawn ones go in, losses come out; a step then reads and changes only as many
rows of the softmax table as it compares.

Source: Jean, Cho, Memisevic and Bengio 2015, "On using very large target vocabulary for neural machine translation"
(arXiv 1412.2007), section 3; the estimator as TensorFlow's `sampled_softmax_loss`: the logarithm of how often a word
was to be expected among the drawn ones is taken from its logit, and a drawn word that is the very one to predict does
not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.models._common import at_least_float32

# i32[...] words -> f32[...], the logarithm of the probability that one draw gives each
LogProbability: TypeAlias = Callable[[jax.Array], jax.Array]


def log_uniform(vocab_size: int) -> LogProbability:
    """Returns the log-probability of words drawn near Zipf's law, in a vocabulary by falling frequency.

    The probability of word k of `vocab_size` is log((k + 2) / (k + 1)) / log(vocab_size + 1). Draw them with
    `splitjax.data.LogUniform`.
    """

    def log_probability(words: jax.Array) -> jax.Array:
        return jnp.log(jnp.log1p(1 / (words.astype(jnp.float32) + 1))) - math.log(math.log1p(vocab_size))

    return log_probability


def tabled(probabilities: np.ndarray) -> LogProbability:
    """Returns the log-probability of words drawn with these `probabilities`, [vocab_size].

    Such as `splitjax.data.ByCounts(counts).probabilities`.
    """
    logs = np.log(np.asarray(probabilities, np.float64)).astype(np.float32)
    return lambda words: jnp.asarray(logs)[words]


def sampled_cross_entropy(
    true_logits: jax.Array,
    sampled_logits: jax.Array,
    labels: jax.Array,
    negatives: jax.Array,
    log_probability: LogProbability | None,
) -> jax.Array:
    """Returns the sampled cross-entropy, in nats: [..., N] in at least float32.

    **Arguments:**

    - `true_logits`: [..., N], of the words to predict.
    - `sampled_logits`: [..., N, S], of the drawn words at each position.
    - `labels`: i32[..., N], the words to predict.
    - `negatives`: i32[..., S], the words that were drawn, each independently of the others (so that one may come
      twice).
    - `log_probability`: of a word in one draw. S draws are expected to hold it S times as often. None: no correction,
      for draws of equal probability, where it would cancel out, and for a sample that is the whole vocabulary: the
      result then is the full cross-entropy.
    """
    true_logits, sampled_logits = at_least_float32(true_logits), at_least_float32(sampled_logits)
    if log_probability is not None:
        log_draws = math.log(negatives.shape[-1])
        true_logits = true_logits - (log_probability(labels) + log_draws)
        sampled_logits = sampled_logits - (log_probability(negatives) + log_draws)[..., None, :]
    hit = labels[..., None] == negatives[..., None, :]
    # Not -inf: where every draw is a hit the maximum would be one, and its derivative no number.
    sampled_logits = jnp.where(hit, jnp.finfo(sampled_logits.dtype).min, sampled_logits)
    of_negatives = jax.nn.logsumexp(sampled_logits, axis=-1)
    return jnp.logaddexp(true_logits, of_negatives) - true_logits
