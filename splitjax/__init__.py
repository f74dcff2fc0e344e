"""Decorate a JAX training step; it trains sharded on many devices with the same numbers.

```python
@splitjax.parallelize(mesh={"data": 2, "model": 4}, rules="splitbrain")
def train_step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_fn)(state["params"], batch)
    ...


state = train_step.init(init_fn, jax.random.key(0), example=(batch,))
print(train_step.plan(state, batch))
state, metrics = train_step(state, batch)
```

- To train: `parallelize`, `value_and_grad`, `grad`, `per_microbatch`; `splitjax.nnx` and `splitjax.equinox` for steps
  over their modules.
- To look: a step's `plan`, `report`, `memory`, `profile`, `advise` and `verify`; `Plan` and `Report`.
- To decide yourself: `Rule`, `RuleSet` and `splitjax.rules`; `AutoMesh`; `splitjax.sync`; `PartialBackprop`.
- What it does not know: `kernel`, `register_dims`, `register_primitive`.
- Around the step: `splitjax.data`, `splitjax.models`, `splitjax.runtime` (loop, checkpoints, processes), `initialize`,
  `global_batch`, `splitjax.schedule` (many jobs on one cluster).
- From a shell: `splitjax --help`.

Importing it starts no JAX backend and takes little longer than importing JAX: every name is imported when it is first
used, and with it what it needs (Flax NNX and Equinox with `splitjax.nnx` and `splitjax.equinox` only). In a process
that `splitjax launch` started, and in no other, it joins the run's other processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from splitjax.errors import SplitjaxError
from splitjax.parallelize import parallelize
from splitjax.report.registration import register_documents
from splitjax.runtime.launch.initialize import initialize, join_launched

if TYPE_CHECKING:
    from splitjax import choosing as choosing
    from splitjax import data as data
    from splitjax import equinox as equinox
    from splitjax import jax_kernels as jax_kernels
    from splitjax import models as models
    from splitjax import nnx as nnx
    from splitjax import schedule as schedule
    from splitjax import sync as sync
    from splitjax.choosing import AutoMesh
    from splitjax.lower.gradient import grad, value_and_grad
    from splitjax.partial import Advice, PartialBackprop
    from splitjax.plan import Plan
    from splitjax.primitives.register import register_dims, register_primitive
    from splitjax.report.value import Report
    from splitjax.rules import Rule, RuleSet
    from splitjax.step.kernel import kernel
    from splitjax.step.per_microbatch import per_microbatch
    from splitjax.step.processes import global_batch
    from splitjax.sync.analysis import Profile
    from splitjax.trade_offs import pareto

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AutoMesh",
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
    "kernel",
    "parallelize",
    "pareto",
    "per_microbatch",
    "register_dims",
    "register_primitive",
    "value_and_grad",
]

_PLACES = {
    "Advice": "partial",
    "AutoMesh": "auto_mesh",
    "PartialBackprop": "partial",
    "Plan": "plan",
    "Profile": "sync.analysis",
    "Report": "report.value",
    "Rule": "rules",
    "RuleSet": "rules",
    "global_batch": "step.processes",
    "grad": "lower.gradient",
    "kernel": "step.kernel",
    "pareto": "trade_offs",
    "per_microbatch": "step.per_microbatch",
    "register_dims": "primitives.register",
    "register_primitive": "primitives.register",
    "value_and_grad": "lower.gradient",
}
# What `dir` shows of them: the modules that users name.
_SHOWN = ("data", "equinox", "errors", "jax_kernels", "models", "nnx", "rules", "runtime", "schedule", "sync")
_SUBMODULES = (
    "choosing",
    "compile",
    "cost",
    "data",
    "display",
    "equinox",
    "jax_kernels",
    "kernels",
    "lower",
    "machines",
    "measure",
    "mesh",
    "models",
    "nnx",
    "partial",
    "partitioner",
    "plan",
    "planning",
    "primitives",
    "report",
    "rules",
    "schedule",
    "sync",
    "trace",
    "verify",
)


register_documents()  # how plans, reports, profiles and advices look; loads none of them
join_launched()  # in a worker of `splitjax launch`, and nowhere else; touches no device


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"splitjax.{name}")
    if name in _PLACES:
        value = getattr(importlib.import_module(f"splitjax.{_PLACES[name]}"), name)
        globals()[name] = value  # the next use finds it without coming here
        return value
    raise AttributeError(f"module 'splitjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SHOWN])
