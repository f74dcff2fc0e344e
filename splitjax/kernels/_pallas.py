"""Pallas, loaded when the first kernel is traced: `pl`, `pltpu` (TPU) and `plgpu` (Mosaic GPU).

Importing Pallas brings JAX's compilers for TPU and GPU with it, which takes longer than all of splitjax, and most steps
have no kernel. The three stand for the modules of these names, and load them when something of them is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas import tpu as pltpu
else:

    class _Deferred(ModuleType):
        """A module that is imported when an attribute of it is first used."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)  # the next use finds it without coming here
            return value

    pl = _Deferred("jax.experimental.pallas")
    plgpu = _Deferred("jax.experimental.pallas.mosaic_gpu")
    pltpu = _Deferred("jax.experimental.pallas.tpu")

__all__ = ["pl", "plgpu", "pltpu"]
