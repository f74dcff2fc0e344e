"""Values that all processes must have alike are told apart by what a program sees of them."""

from __future__ import annotations

import jax
import numpy as np

from splitjax.step.processes import host_digests, value_digest


def test_digests_tell_shapes_and_dtypes_apart():
    value = np.arange(6, dtype=np.int32)
    alike = [value, value.copy(), np.arange(12, dtype=np.int32)[::2] // 2]
    assert len(set(map(value_digest, alike))) == 1
    different = [value, value.reshape(2, 3), value.reshape(3, 2), value.view(np.float32), value[::-1]]
    assert len(set(map(value_digest, different))) == 5


def test_random_keys_have_the_digests_of_their_words():
    names = ("key", "again", "other")
    keys = [jax.random.key(1), jax.random.key(1), jax.random.key(2)]
    digests = dict(host_digests(keys, names))
    assert digests["key"] == digests["again"] != digests["other"]
