"""Which commands walk through a benchmark at a tiny size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

# Where a command's options name these, the walk's own folders stand in their places: results of the walk, what it keeps
# between its commands, the data of all benchmarks, CIFAR-10's binary files, and checkouts of other people's examples.
PLACES = ("{output}", "{work}", "{data}", "{images}", "{sources}")


@dataclasses.dataclass(frozen=True)
class Walk:
    """Commands that run one after the other through a benchmark, or through a part of it.

    **Arguments:** `benchmark`: its name in the registry. `commands`: the options of each, with `PLACES`. `part`: tells
    the walks of one benchmark apart; empty where there is one."""

    benchmark: str
    commands: tuple[Sequence[str], ...]
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.benchmark} {self.part}".strip()


def _by_parts(name: str, options: str, parts: Sequence[str]) -> tuple[Walk, ...]:
    return tuple(Walk(name, (f"{options} --only {part} --quick --output {{output}}".split(),), part) for part in parts)


_CORPUS = "--jobs 1 --hash-seed 0"
_CELL = "mlp/linen/megatron/2x4/dense/full/gather/1/sharded"
# Benchmarks whose quick run is something else than `NAME --quick --output FOLDER`, or is long enough to be walked in
# parts: the two lanes then end at about the same time. They are run in this order, the longest first.
WALKS: Mapping[str, tuple[Walk, ...]] = {
    "faults": (Walk("faults", (("--quick", "--output", "{output}"),)),),
    "sparse": _by_parts(
        "sparse",
        "--data-dir {data}",
        (
            "end_to_end",
            "schemes",
            "choice",
            "messages",
            "local",
            "big_table",
            "widths",
            "overflow",
            "overflow_time",
            "overflow_tried",
        ),
    ),
    "jigsaw": _by_parts(
        "jigsaw",
        "--data-dir {data}",
        (
            "efficiency",
            "switches",
            "real",
            "real_accuracy",
            "switch_cost",
            "packings",
            "fidelity",
            "honesty",
            "scale",
            "exact",
            "accuracy",
        ),
    ),
    "planner": _by_parts("planner", "", ("quality", "time", "compiled", "search", "memory")),
    "splitbrain": _by_parts(
        "splitbrain", "", ("memory", "speed", "crossings", "crossing-speed", "scaling", "bytes", "numbers")
    ),
    "training": _by_parts("training", "--data-dir {images}", ("accuracy", "input", "checkpoints", "scaling")),
    "partial": (
        Walk(
            "partial",
            (
                ("--data-dir", "{images}", "--quick", "--output", "{output}"),
                ("--data-dir", "{images}", "--page", "--output", "{output}"),  # the page again, from what was kept
            ),
        ),
    ),
    "accelerator": (Walk("accelerator", (("--quick", "--only", "time", "--output", "{output}"),)),),
    "corpus": (
        Walk(
            "corpus",
            (
                f"record --plans --output {{work}}/corpus --models mlp {_CORPUS}".split(),
                f"record --programs --output {{work}}/corpus --cells {_CELL} {_CORPUS}".split(),
                ("compare", "{work}/corpus", "{work}/corpus"),
                ("store", "{work}/corpus", "--results", "{output}"),
            ),
        ),
    ),
    "curves": (
        Walk(
            "curves",
            (
                (
                    "--quick",
                    "--dtypes",
                    "float64",
                    "float32",
                    "--data-dir",
                    "{data}",
                    "--steps",
                    "2",
                    "--output",
                    "{output}",
                ),
            ),
        ),
    ),
    "fuzz": (Walk("fuzz", (("--inputs", "20", "--no-page"),)),),
    "house": (Walk("house", (("--imports", "1", "--output", "{output}"), ("--list", "unnamed_arguments"))),),
    "iopddl": (Walk("iopddl", (("{data}/iopddl", "--only", "B", "--share", "0.1", "--json", "{work}/answers.json"),)),),
    "kernels": (Walk("kernels", (("--rows", "1000", "--width", "8", "--repeats", "1"),)),),
    "modern": (
        Walk(
            "modern",
            (
                ("--quick", "--output", "{output}"),
                ("--only", "numbers", "--quick", "--output", "{output}"),
            ),
        ),
    ),
    "mutants": (
        Walk(
            "mutants",
            (
                ("--list",),
                "--only figures-on-the-left --jobs 1 --work {work}/mutants --output {output}".split(),
            ),
        ),
    ),
    "partitioner": (
        Walk(
            "partitioner",
            (
                ("--quick", "--way", "both", "--output", "{output}", "--work", "{work}/partitioner"),
                ("--program", "1:1", "--way", "splitjax", "--partitioner", "shardy"),
            ),
        ),
    ),
    "strangers": (
        Walk(
            "strangers",
            (
                ("--sources", "{sources}", "--list"),
                ("--sources", "{sources}", "--only", "jax-mnist-fromscratch", "--output", "{output}"),
            ),
        ),
    ),
    "product": (Walk("product", (("--only", "site", "--output", "{output}"),)),),
    "walk": (Walk("walk", (("--output", "{output}"),)),),
    "claims": (Walk("claims", ((),)),),
}
