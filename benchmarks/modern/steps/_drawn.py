"""Draws the numbers of a step, with a fixed seed and in one dtype."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

Tree = Any


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Draws numpy arrays of `dtype` one after another, so that the order of the calls decides the numbers."""

    dtype: str
    rng: np.random.Generator

    @classmethod
    def of(cls, dtype: str, seed: int) -> Drawn:
        """Starts at `seed`."""
        return cls(dtype, np.random.default_rng(seed))

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Normal numbers of this shape, with standard deviation `scale`."""
        return (scale * self.rng.standard_normal(shape)).astype(self.dtype)

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers from 0 to 1."""
        return self.rng.random(shape).astype(self.dtype)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        """Whole numbers from 0 to `below - 1`, int32."""
        return self.rng.integers(below, size=shape).astype(np.int32)

    def dense(self, inputs: int, outputs: int) -> dict[str, np.ndarray]:
        """The kernel `[inputs, outputs]` and bias `[outputs]` of a dense layer."""
        return {"kernel": self.normal(inputs, outputs, scale=inputs**-0.5), "bias": self.normal(outputs, scale=0.02)}

    def weights(self, shapes: Tree) -> Tree:
        """Fills a tree of `jax.ShapeDtypeStruct`s with what weights are after some training: kernels by their fan in,
        scales and variances around one, biases around zero. Nothing is zero, so that every weight has a gradient, also
        behind a gate that starts closed."""

        def fill(path: Any, leaf: Any) -> np.ndarray:
            name = jax.tree_util.keystr(path).lower()
            if "scale" in name or "var" in name:
                return (1 + self.normal(*leaf.shape, scale=0.1) ** 2).astype(self.dtype)
            if len(leaf.shape) < 2:
                return self.normal(*leaf.shape, scale=0.02)
            return self.normal(*leaf.shape, scale=math.prod(leaf.shape[:-1]) ** -0.5)

        return jax.tree_util.tree_map_with_path(fill, shapes)

    def linen(self, model: Any, *inputs: Any, **options: Any) -> Tree:
        """The variables of a Linen model, by collection, that is called with `inputs`."""
        key = jax.random.key(0)
        shapes = jax.eval_shape(
            lambda *arrays: model.init({"params": key, "dropout": key}, *arrays, **options), *inputs
        )
        return self.weights(shapes)
