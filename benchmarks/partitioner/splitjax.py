"""Runs drawn programs under `splitjax.parallelize`, with the drawn layouts as a rule set of their own or under a
shipped one.

Programs that have the same number of examples and may share a rule set are compiled as one step; what is refused, fails
or differs there is run again alone, which decides.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

import splitjax
from benchmarks.partitioner.draw import Draw, names_of, step_of
from benchmarks.partitioner.references import NOTHING_KEPT, References
from benchmarks.partitioner.run import Outcome, Ready, fault_of_reference, on_one_device, prepare, verdict
from splitjax.errors import SplitjaxError
from splitjax.rules import Rule, RuleSet, load_rules


def run_under_splitjax(draws: Sequence[Draw], references: References = NOTHING_KEPT) -> list[Outcome]:
    """The outcome of every program; "refused" with the error's first line where splitjax says that it cannot. What
    differs from what `references` keep of one device is run again without them."""
    outcomes: dict[int, Outcome] = {}
    groups: dict[Any, list[tuple[int, Ready]]] = collections.defaultdict(list)
    for k, draw in enumerate(draws):
        ready = prepare(draw)
        if isinstance(ready, Outcome):
            outcomes[k] = ready
        else:
            groups[draw.mesh, draw.rules, draw.settings.get("batch")].append((k, ready))
    for members in groups.values():
        for (k, _), outcome in zip(members, _run([ready for _, ready in members], references), strict=True):
            outcomes[k] = outcome
    return [outcomes[k] for k in range(len(draws))]


def _run(members: Sequence[Ready], references: References = NOTHING_KEPT) -> list[Outcome]:
    alone = len(members) == 1
    expected: Any = None
    outcome = lambda ready, status, message="", wrong=(): Outcome(
        ready.draw.number, ready.draw.family, status, wrong, message, ready.primitives
    )
    try:
        expected = references.of(members, on_one_device)
        wrong = [
            verdict(ready, right, got) for ready, right, got in zip(members, expected, _on_mesh(members), strict=True)
        ]
    except Exception as error:  # whatever it is, it belongs to some of the programs
        if not alone:
            return [_run([ready], references)[0] for ready in members]
        message = (str(error).strip().splitlines() or [""])[0]
        status = "invalid" if expected is None else "refused" if isinstance(error, SplitjaxError) else "failed"
        return [outcome(members[0], status, f"{type(error).__name__}: {message}"[:300])]
    outcomes = []
    for ready, differs in zip(members, wrong, strict=True):
        if differs and (references.folder or not alone):
            outcomes.append(_run([ready])[0])
        elif differs and (fault := fault_of_reference(ready)):
            outcomes.append(outcome(ready, "invalid", fault))
        else:
            outcomes.append(outcome(ready, "wrong" if differs else "right", wrong=differs))
    return outcomes


def _on_mesh(members: Sequence[Ready]) -> list[Any]:
    functions = [
        step_of(ready.draw, ready.case, splitjax.value_and_grad if ready.draw.boundary else jax.value_and_grad)
        for ready in members
    ]

    def step(state: Any, batch: Any, others: Any) -> Any:
        results = [
            function(state[name], batch[name], others[name]) for name, function in zip(state, functions, strict=True)
        ]
        return dict(zip(state, (new for new, _ in results), strict=True)), [result for _, result in results]

    # A state without any array is none that a step could return: a number that stays goes along.
    names = [f"p{k}" for k in range(len(members))]
    state, batch, others = (
        dict(zip(names, parts, strict=True)) for parts in zip(*(ready.arguments for ready in members), strict=True)
    )
    parallel = splitjax.parallelize(step, mesh=dict(members[0].draw.mesh), rules=rules_of(members), donate=False)
    new, results = jax.device_get(parallel(state, batch, others))
    return [(new[name], result) for name, result in zip(names, results, strict=True)]


def rules_of(members: Sequence[Ready]) -> RuleSet:
    """The rule set of programs that share one: a shipped one by name, or one rule for each weight with the layout drawn
    for it."""
    draw = members[0].draw
    own, _, batch = draw.rules.partition("/")
    if own != "own":
        return dataclasses.replace(load_rules(draw.rules), allow_replicated=True, axes=())
    rules = []
    for k, ready in enumerate(members):
        for name, layout in zip(names_of(ready.case), ready.draw.layouts, strict=True):
            split = {d: axes for d, axes in enumerate(layout) if axes}
            if name.startswith("w"):
                rules.append(Rule(f"p{k}-{name}", path=f"p{k}/{name}", shard=split or (), ties="hard"))
    return RuleSet("drawn", tuple(rules), replicated_batch=batch, allow_replicated=True)
