"""What it would take to train a step: the best layouts on several machines, none of which need be here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from splitjax.choosing import Choice
from splitjax.choosing.trade_off import TradeOff, trade_off
from splitjax.compile.recipes import read_budget
from splitjax.machines import Target, parse_target
from splitjax.parallelize import parallelize
from splitjax.rules.ruleset import AUTO
from splitjax.step.options import OptionError


def pareto(
    fn: Callable[..., Any],
    *args: Any,
    targets: Sequence[str | Target],
    memory_budget: int | str | None = None,
    most_points: int = 3,
    decorate: Callable[..., Any] = parallelize,
    **options: Any,
) -> TradeOff:
    """Compares machines for a training step: seconds of a step against memory of a device. Nothing runs or compiles.

    **Arguments:**

    - `fn`: the step as it is decorated, `step(state, batch) -> (state, metrics)`.
    - `args`: its arguments, or their shapes (`jax.ShapeDtypeStruct`).
    - `targets`: the machines, such as `"tpu:v5e:2x4"` or `"gpu:h200:1x8"`.
    - `memory_budget`: what a device may need, such as `"16GiB"`; by default what a device of each machine has.
    - `most_points`: layouts of each machine: the fastest, then the fastest that need less and less.
    - `decorate`: of the step: `splitjax.parallelize`, or that of `splitjax.nnx` or `splitjax.equinox`.
    - `options`: of `decorate`; `rules` and `mesh` are chosen where they are not given.

    Returns a `TradeOff`, which prints as a table. Seconds are lower bounds by published peaks; memory is an upper bound
    of what XLA needs (docs/reports.md says how sure). Raises `TargetError`, `OptionError`, and what `decorate` raises.
    """
    if not targets:
        raise OptionError(
            "there is no machine to compare", value=targets, place="targets", remedy='name one, such as "tpu:v5e:2x4"'
        )
    if "target" in options:
        raise OptionError(
            "the machines are named together", value=options["target"], place="target", remedy="name it in targets"
        )
    machines = [each if isinstance(each, Target) else parse_target(each, "targets") for each in targets]

    def choose(target: Target, allowed: int | None) -> Choice:
        step = decorate(fn, **{"mesh": AUTO, "rules": AUTO, **options, "target": str(target), "memory_budget": allowed})
        step.plan(*args)
        return step.choice

    budget = None if memory_budget is None else int(read_budget(memory_budget, "pareto"))
    return trade_off(choose, machines, budget, most_points)
