"""How long a choice of mesh and rules takes over all factorisations of 64 devices, and how good it is proven to be.

    python -m benchmarks planner --only search [--quick]

Every model is traced, every mesh priced and the most promising searched, for 64 chips of a TPU v5e (`tpu:v5e:8x8`),
from shapes. Seconds are of processor time, trace included; lowering the best few, whose programs decide in the end, is
timed apart, as it checks what the search answers. The median of some repeats, each with a step that JAX has not traced
yet.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._common import table, virtual_devices, write_stored
from benchmarks.machine import header, this_machine

TARGET, REPEATS = "tpu:v5e:8x8", 3
_LARGE = {"layers": 32, "width": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq": 2048,
          "examples": 64, "dtype": "bfloat16"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Searched:
    """A model whose choice is timed: what makes its step and the shapes of its arguments, the goal in seconds, and the
    largest certified gap of an answer."""

    name: str
    make: Callable[[], tuple[Any, Any, Any]]
    seconds: float
    gap: float


def _decoder(**options: Any) -> tuple[Any, Any, Any]:
    import splitjax
    from benchmarks.modern.models import Decoder, make_step, state_of

    decoder = Decoder(**options)
    return make_step(decoder, splitjax.value_and_grad), state_of(decoder), decoder.batch()


def _unrolled() -> tuple[Any, Any, Any]:
    from benchmarks.planning_time import transformer

    return transformer()


def _vgg16() -> tuple[Any, Any, Any]:
    from benchmarks.planning_time import vgg16

    return vgg16()


MODELS = (
    Searched("LLaMA-8B, scanned", lambda: _decoder(vocab=128256, **_LARGE), 5.0, 0.01),
    Searched("LLaMA-7B, unrolled", _unrolled, 30.0, 0.01),
    Searched("mixture of 8 experts, scanned", lambda: _decoder(vocab=32000, experts=8, **_LARGE), 10.0, 0.01),
    Searched("VGG-16", _vgg16, 1.0, 0.0),
)
QUICK = (Searched("a small decoder", lambda: _decoder(examples=64), 5.0, 0.01),)


def measure(model: Searched, repeats: int = REPEATS) -> dict[str, Any]:
    """Times the choice for a model, and says what was chosen."""
    import jax

    import splitjax
    from splitjax.choosing import Prices, choose_mesh
    from splitjax.machines import parse_target
    from splitjax.step.arguments import bind
    from splitjax.step.traced import trace_step

    target = parse_target(TARGET)
    searches, wholes = [], []
    for _ in range(repeats):
        step, state, batch = model.make()
        decorated = splitjax.parallelize(step, mesh="auto", rules="auto", target=TARGET)
        recipe = decorated._recipe
        jax.clear_caches()  # the shapes of the state came from a trace of the model
        began = time.process_time()
        bound = bind(recipe.fn, recipe.options, (state, batch))
        graph = trace_step(recipe, bound).graph
        searched = choose_mesh(graph, target.num_devices, lambda mesh: Prices.of_target(target, mesh))
        searches.append(time.process_time() - began)
        jax.clear_caches()
        began = time.process_time()
        decorated.plan(state, batch)
        wholes.append(time.process_time() - began)
    choice = decorated.choice
    assert choice is not None, "a choice was asked for"
    return {
        "model": model.name, "goal_seconds": model.seconds, "goal_gap": model.gap,
        "search_seconds": statistics.median(searches), "whole_seconds": statistics.median(wholes),
        "meshes": len(searched.meshes), "searched": len({each.candidate.mesh for each in searched.answers}),
        "candidates": len(searched.candidates),
        "variables": max(len(each.variables) for each in searched.answers),
        "gap": max((each.gap for each in searched.answers), default=math.inf),
        "clock_struck": searched.clock_struck, "mesh": str(choice.mesh), "rules": choice.best.name,
        "program_ms": 1e3 * (choice.best.program_seconds or math.nan), "sum_ms": 1e3 * choice.best.seconds,
        "lowered": sum(each.program_seconds is not None for each in choice.candidates),
    }  # fmt: skip


def is_met(found: Mapping[str, Any]) -> bool:
    """Whether the goals of a model are met."""
    return found["search_seconds"] <= found["goal_seconds"] and found["gap"] <= found["goal_gap"]


def lines_of(stored: Mapping[str, Any]) -> list[str]:
    """The lines of the page."""
    mark = lambda met: "" if met else " (missed)"
    rows = [
        [
            each["model"],
            f"{each['search_seconds']:.2f} s of {each['goal_seconds']:g} s"
            + mark(each["search_seconds"] <= each["goal_seconds"]),
            f"{each['whole_seconds']:.2f} s", str(each["lowered"]), str(each["meshes"]), str(each["searched"]),
            str(each["variables"]),
            f"{each['gap']:.2%} of {each['goal_gap']:.0%}" + mark(each["gap"] <= each["goal_gap"]),
            each["mesh"], each["rules"], f"{each['program_ms']:.4g}", f"{each['sum_ms']:.4g}",
        ]
        for each in stored["models"]
    ]  # fmt: skip
    return [
        "# Time to choose a mesh and rules", "",
        f"What `mesh=\"auto\", rules=\"auto\"` takes for `{TARGET}`, in processor time, trace included, and the largest"
        " certified gap of its searches. All factorisations over the axes `data` and `model` are searched, and the most"
        " promising ones with a third axis. The search goes by sums of seconds; the best few by these are then lowered,"
        " and the program that is predicted to be fastest is taken: the second time has both. Nothing is compiled.", "",
        stored["header"], "",
        *table(
            ["model", "trace and search", "with the programs of the best few", "programs", "meshes", "meshes searched",
             "variables", "certified gap", "chosen mesh", "chosen rules", "program, ms", "sum of parts, ms"],
            rows,
        ),
    ]  # fmt: skip


def main(quick: bool, output: pathlib.Path | None) -> int:
    """Measures; returns 1 where a goal is missed. `output`: folder of the page; without it a page is written of a whole
    run only."""
    import jax

    virtual_devices()
    found = []
    for model in QUICK if quick else MODELS:
        kept = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)  # no repeat reads what the one before it chose
        try:
            found.append(measure(model, 1 if quick else REPEATS))
        finally:
            jax.config.update("jax_enable_compilation_cache", kept)
        one = found[-1]
        print(f"{model.name}: {one['search_seconds']:.2f} s, with programs {one['whole_seconds']:.2f} s, {one['mesh']}")
    command = "python -m benchmarks planner --only search" + (" --quick" if quick else "")
    content = {"header": header(this_machine(), command), "models": found}
    if output or not quick:
        print("wrote", write_stored("planner_search", content, lines_of, output))
    return 0 if all(map(is_met, found)) else 1
