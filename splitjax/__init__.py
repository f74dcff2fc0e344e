"""splitjax: decorate a JAX training step; it trains sharded on many devices with the same numbers.

Importing it starts no JAX backend, and neither Flax NNX nor Equinox: `splitjax.nnx` and `splitjax.equinox` are imported
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "parallelize": "splitjax.parallelize",
    "value_and_grad": "splitjax.lower.gradient",
    "grad": "splitjax.lower.gradient",
    "Plan": "splitjax.plan",
    "Rule": "splitjax.rules",
    "RuleSet": "splitjax.rules",
    "register_dims": "splitjax.trace.dims",
    "SplitjaxError": "splitjax.errors",
}
_MODULES = ("data", "errors", "equinox", "models", "nnx")

__all__ = sorted([*_EXPORTS, *_MODULES, "__version__"])

if TYPE_CHECKING:
    from splitjax.errors import SplitjaxError
    from splitjax.lower.gradient import grad, value_and_grad
    from splitjax.parallelize import parallelize
    from splitjax.plan import Plan
    from splitjax.rules import Rule, RuleSet
    from splitjax.trace.dims import register_dims


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"splitjax.{name}")
    raise AttributeError(f"module 'splitjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
