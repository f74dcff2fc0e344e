"""splitjax: decorate a JAX training step; it trains sharded on many devices with the same numbers.

Importing it starts no JAX backend and imports neither Flax NNX nor Equinox: `splitjax.nnx` and `splitjax.equinox` are
imported when they are first used. In a process that `splitjax launch` started, and in no other, it joins the run's
other processes.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from splitjax.errors import SplitjaxError
from splitjax.lower.gradient import grad, value_and_grad
from splitjax.parallelize import parallelize
from splitjax.partial import Advice, PartialBackprop
from splitjax.plan import Plan
from splitjax.report.registration import register_documents
from splitjax.report.value import Report
from splitjax.rules import Rule, RuleSet
from splitjax.runtime.launch.initialize import initialize, join_launched
from splitjax.step.processes import global_batch
from splitjax.sync.analysis import Profile
from splitjax.trace.dims import register_dims

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "PartialBackprop",
    "Plan",
    "Profile",
    "Report",
    "Rule",
    "RuleSet",
    "SplitjaxError",
    "__version__",
    "global_batch",
    "grad",
    "initialize",
    "parallelize",
    "register_dims",
    "value_and_grad",
]

_ON_FIRST_USE = ("data", "equinox", "models", "nnx", "schedule")


register_documents()  # how plans, reports, profiles and advices look; loads none of them
join_launched()  # in a worker of `splitjax launch`, and nowhere else; touches no device


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"splitjax.{name}")
    raise AttributeError(f"module 'splitjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "errors", *_ON_FIRST_USE])
