"""Bytes that a worker sends a step as the number of workers grows: compiled ahead of time for TPUs, against
SplitBrain's formula."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from collections.abc import Sequence

from benchmarks._common import table
from benchmarks.splitbrain import hlo
from benchmarks.splitbrain.common import Goal, Section, have_tpu_compiler, mib, planned
from benchmarks.state import count_params, tpu_mesh
from splitjax.mesh import MeshShape
from splitjax.models import ModelSpec, build
from splitjax.report.hlo import CompiledCollective

TOPOLOGIES = {8: "v5e:2x4", 16: "v5e:4x4", 32: "v5e:4x8", 64: "v5e:8x8"}
GROUPS = (8, 4)
MODEL = "vgg16"
EXAMPLES = 8  # a worker
TERMS = ("convolutions", "dense", "crossing", "features")
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Measured:
    """One size. Bytes at four a value, by term, and `sent`: as the compiled step really sends them (some as
    bfloat16)."""

    num_workers: int
    group: int
    formula: dict[str, float]
    found: dict[str, int]
    sent: int
    seconds: float


def formula_bytes(
    num_conv: int, num_dense: int, inputs: int, gathered: Sequence[int], examples: int, workers: int, group: int
) -> dict[str, float]:
    """What a worker sends a step by SplitBrain's terms, four bytes a value. `inputs`: features at the crossing;
    `gathered`: widths of the layers that exchange their results over the group."""
    groups = workers // group
    return {
        "convolutions": 4 * 2 * (workers - 1) / workers * num_conv,
        "dense": 4 * 2 * (groups - 1) / groups * num_dense / group,
        "crossing": 4 * 2 * (group - 1) * examples * inputs,
        "features": 4 * 2 * (group - 1) * examples * sum(gathered),
    }


def term_of(one: CompiledCollective, group: int, workers: int) -> str | None:
    """The term of the formula that a collective belongs to; None for scalars, labels and what else has no term."""
    if "splitjax:enter:" in one.op_name:
        return "crossing" if "dense1" in one.op_name else "features"
    if len(one.shape) < 1 or not one.dtype.startswith(("float", "bfloat")):
        return None
    if one.op not in ("all_reduce", "reduce_scatter", "all_gather"):
        return None
    if one.group_size == workers // group and workers != group and one.group_size != workers and one.axis == "data":
        return "dense"
    if "splitjax:product:" in one.op_name and one.axis == "model":
        return "features"
    if one.group_size == workers and "transpose" in one.op_name:
        return "convolutions"
    return None


def gathered_widths(spec: ModelSpec, group: int) -> tuple[int, ...]:
    """Of the layers that exchange their results: all hidden ones but the last, which the classes read by rows where
    they do not divide."""
    hidden = spec.config.head_features
    return hidden if spec.num_classes % group == 0 else (*hidden[:-1], spec.num_classes)


def measure(workers: int, group: int, examples: int = EXAMPLES) -> Measured:
    started = time.perf_counter()
    spec, shape = build(MODEL), {"data": workers // group, "model": group}
    step, state, batch, _ = planned(spec, tpu_mesh(shape, TOPOLOGIES[workers]), examples * workers, group_comm="gather")
    compiled = step.lower(state, batch).compile()
    found, sent = collections.Counter(), 0
    for one in hlo.collectives(compiled, MeshShape.of(shape)):
        term = term_of(one, group, workers)
        sent += one.bytes
        width = 2 if one.dtype == "bfloat16" else 4
        found[term or "rest"] += one.bytes * 4 // width
    formula = formula_bytes(
        *count_params(state["params"]), spec.config.head_inputs, gathered_widths(spec, group), examples, workers, group
    )
    return Measured(workers, group, formula, dict(found), sent, time.perf_counter() - started)


def section(quick: bool = False) -> Section:
    """The section on bytes as workers are added."""
    if not have_tpu_compiler():
        return Section("Bytes as workers are added", ["No libtpu here (`pip install 'splitjax[tpu]'`).", ""], [])
    found = []
    for group in GROUPS[:1] if quick else GROUPS:
        for workers in (8, 16) if quick else TOPOLOGIES:
            found.append(measure(workers, group))
            print(_line(found[-1]), flush=True)
    goals = []
    for one in found:
        worst, off = max(((term, _off(one, term)) for term in TERMS), key=lambda pair: abs(pair[1]))
        goals.append(
            Goal(
                f"N={one.num_workers}, K={one.group}: farthest term off the formula ({worst})",
                abs(off),
                TOLERANCE,
                True,
                ".2%",
            )
        )
    for group in dict.fromkeys(one.group for one in found):
        mine = [one for one in found if one.group == group]
        total = [sum(one.found.get(term, 0) for term in TERMS) for one in mine]
        limit = _limit(mine[0])
        goals.append(
            Goal(
                f"K={group}: bytes a worker at N={mine[-1].num_workers} over their limit for endless N",
                total[-1] / limit,
                1 + TOLERANCE,
                True,
            )
        )
    return Section("Bytes as workers are added", _lines(found), goals)


def _off(one: Measured, term: str) -> float:
    """How far a compiled term is from the formula, as a share of it (of all terms where the formula has none of it)."""
    expected = one.formula[term]
    return (one.found.get(term, 0) - expected) / (expected or sum(one.formula.values()))


def _limit(one: Measured) -> float:
    """The formula's sum as the number of workers goes to infinity."""
    parts = dict(one.formula)
    parts["convolutions"] *= one.num_workers / (one.num_workers - 1)
    spec = build(MODEL)
    dense = sum(
        (a + 1) * b
        for a, b in zip(
            (spec.config.head_inputs, *spec.config.head_features),
            (*spec.config.head_features, spec.num_classes),
            strict=True,
        )
    )
    parts["dense"] = 4 * 2 * dense / one.group
    return sum(parts.values())


def _line(one: Measured) -> str:
    terms = ", ".join(
        f"{term} {mib(one.found.get(term, 0))} (formula {mib(one.formula[term])}, {_off(one, term):+.2%})"
        for term in TERMS
    )
    return (
        f"N={one.num_workers} K={one.group}: {terms}; rest {mib(one.found.get('rest', 0))}; sent {mib(one.sent)} MiB,"
        f" {one.seconds:.0f} s"
    )


def _lines(found: list[Measured]) -> list[str]:
    rows = []
    for one in found:
        total = sum(one.found.get(term, 0) for term in TERMS)
        rows.append(
            [
                str(one.num_workers),
                str(one.group),
                *(f"{mib(one.found.get(term, 0))} ({_off(one, term):+.2%})" for term in TERMS),
                mib(one.found.get("rest", 0)),
                f"**{mib(total)}**",
                mib(sum(one.formula.values())),
                mib(one.sent),
            ]
        )
    return [
        f'VGG-16 with a head of 4096, CIFAR-10 shapes, {EXAMPLES} examples a worker, `group_comm="gather"`, '
        f"compiled ahead of time for {', '.join(TOPOLOGIES.values())}: MiB that a worker sends a step at four bytes a"
        " value, by term, in brackets off the formula. "
        "Convolutions: 2(N-1)/N of their parameters; dense: 2(G-1)/G of its parameters over K, G = N/K; crossing:"
        " 2(K-1)Bd; features: 2(K-1)B times the widths that "
        "layers exchange (4096 between the hidden layers; the classes, which do not divide and are summed over rows)."
        " *Sent* is what the compiled step moves, "
        "rest included: the compiler narrows what enters a product to bfloat16.",
        "",
        *table(["N", "K", *TERMS, "rest", "all terms", "formula", "sent"], rows),
        "",
        (
            "As workers are added, none of them sends more, but for the factors (N-1)/N and (G-1)/G: a group"
            " stays as large as it is, and so do the bytes of the crossing and of the features. As far as"
            " links go, scaling is near-linear by construction."
        ),
        "",
    ]


if __name__ == "__main__":
    sys.exit("run python -m benchmarks splitbrain --only bytes")
