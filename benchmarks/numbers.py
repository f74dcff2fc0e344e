"""Whether every shipped model under every rule set trains with the numbers of one device.

    python -m benchmarks numbers            the whole matrix (about half an hour on two cores), and its page
    python -m benchmarks numbers --quick    one small model, printed only
    python -m benchmarks numbers --only vgg16 --rules megatron --checks float32

Each cell trains a narrow version of a model twice, from the same numbers on the same batches: by `jax.jit` on one
device, and under `splitjax.parallelize` on eight virtual devices. It passes where every loss and every parameter agree,
absolutely.

A ReLU or a max-pooling may stand so near its edge that rounding decides which way it falls, and its gradient jumps. In
float32 that happens to one device as well: the batches are therefore the first ones that one device trains on alike
when the last bit of every weight is changed. How many were passed over stands on the page; what is compared, and how
strictly, does not change.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import splitjax
from benchmarks._common import table, virtual_devices, write_stored
from splitjax.models import build, make_nnx_step, make_step

RULES = ("splitbrain", "data_parallel", "fsdp", "megatron")
MESH = {"data": 2, "model": 4}
BATCH = 16
RATE = 0.05

# Narrow, so that a cell is mostly compilation; every kind of layer is there, and dropout, whose bits must be the global
# ones. No dense weight is too small for fsdp to split (1024 values), save the last layers.
NARROW = {"width": 1 / 16, "head_features": (64, 64), "dropout": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"features": (64, 64), "input_shape": (8, 8, 3), "dropout": 0.2},
    "vgg11": {**NARROW, "batch_norm": True},
    "vgg16": NARROW,
    "resnet18": {"width": 1 / 16, "dropout": 0.2},
    "mobilenet_v2": {"width": 1 / 8, "depth": 0.3, "head_features": 64, "dropout": 0.2},
    "efficientnet_b0": {"width": 1 / 8, "depth": 0.3, "dropout": 0.2, "drop_path": 0.2},
    "convnext_tiny": {
        "width": 1 / 12,
        "stage_sizes": (1, 2),
        "stage_channels": (96, 192),
        "dropout": 0.2,
        "drop_path": 0.2,
    },
    "transformer": {"vocab_size": 64, "max_len": 16, "d_model": 32, "num_heads": 4, "dropout": 0.2},
}


@dataclasses.dataclass(frozen=True)
class Check:
    """A precision with its number of steps, its optimizer, and how far apart the runs may be. `of_state`: whether
    parameters and batch statistics count too; under Adam noise in a gradient that is truly zero becomes a whole
    step."""

    name: str
    dtype: str
    num_steps: int
    tolerance: float
    optimizer: Callable[[], optax.GradientTransformation]
    of_state: bool = True


def _momentum() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE, momentum=0.9))


CHECKS = (
    Check("float64", "float64", 20, 1e-10, _momentum),
    Check("float32", "float32", 3, 1e-5, _momentum),
    Check("float64-adam", "float64", 20, 1e-10, lambda: optax.adam(1e-3), of_state=False),
)


# Of the tolerance: how far a changed last bit may move one device's own run.
STEADY = 0.25


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run came to."""

    losses: list[float]
    params: dict[str, np.ndarray]  # and batch statistics, by path
    num_sharded: int = 0  # of the parameters
    num_programs: int = 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model under one rule set in one check."""

    model: str
    library: str
    rules: str
    check: Check
    loss_difference: float
    state_difference: float
    worst: str  # path of the parameter that differs most
    num_sharded: int
    seconds: float
    error: str = ""
    draw: int = 0  # of the batches

    @property
    def ok(self) -> bool:
        compared = max(self.loss_difference, self.state_difference if self.check.of_state else 0.0)
        return not self.error and compared <= self.check.tolerance


def main(argv: list[str] | None = None) -> int:
    """Runs the chosen cells; returns 1 where one misses."""
    virtual_devices()
    options = _options(argv)
    cells = []
    for cell in _cells(options):
        cells.append(cell)
        print(_line(cell), flush=True)
    missed = [cell for cell in cells if not cell.ok]
    print(f"{len(cells) - len(missed)} of {len(cells)} cells equal one device")
    whole = not (options.quick or options.only or options.rules or options.checks or options.libraries)
    if whole or options.output:
        from benchmarks import machine

        header = machine.header(machine.this_machine(), "python -m benchmarks numbers").rstrip()
        stored = {"header": header, "cells": [{**vars(cell), "check": cell.check.name} for cell in cells]}
        print("wrote", write_stored("numbers", stored, page_lines, options.output))
    return 1 if missed else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "numbers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the mlp in float32 alone")
    parser.add_argument("--only", nargs="*", choices=tuple(MODELS), default=[], help="models")
    parser.add_argument("--libraries", nargs="*", choices=("linen", "nnx"), default=[])
    parser.add_argument("--rules", nargs="*", choices=RULES, default=[])
    parser.add_argument("--checks", nargs="*", choices=[check.name for check in CHECKS], default=[])
    parser.add_argument(
        "--output", type=pathlib.Path, help="folder of the page; a whole run writes to benchmarks/results"
    )
    return parser.parse_args(argv)


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    libraries = ["linen", "nnx"] if importlib.util.find_spec("splitjax.nnx") else ["linen"]
    checks = [check for check in CHECKS if not options.checks or check.name in options.checks]
    names = options.only or list(MODELS)
    if options.quick:
        names, checks, libraries = ["mlp"], [check for check in checks if check.name == "float32"], ["linen"]
    for name in names:
        for library in libraries:
            if options.libraries and library not in options.libraries:
                continue
            for check in checks:
                with jax.enable_x64(check.dtype == "float64"):
                    yield from _row(name, library, check, options.rules or RULES)
                jax.clear_caches()


def _row(name: str, library: str, check: Check, rules: tuple[str, ...]) -> Iterator[Cell]:
    """One model in one check: the reference once, then each rule set."""
    run = _run_linen if library == "linen" else _run_nnx
    for draw in range(20):
        batches = list(_batches(name, check, draw))
        want = run(name, check, batches, None)
        if (
            check.dtype == "float64"
            or max(_distances(run(name, check, batches, None, last_bit=True), want)[:2]) <= STEADY * check.tolerance
        ):
            break
    if not np.isfinite(want.losses).all() or len(set(want.losses)) == 1:
        raise RuntimeError(f"{name} does not train on one device: losses {want.losses}")
    for rule in rules:
        started = time.perf_counter()
        try:
            got = run(name, check, batches, rule)
        except Exception as error:  # a cell that raises is a cell that misses, and the others still run
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            yield Cell(name, library, rule, check, np.inf, np.inf, "", 0, time.perf_counter() - started, text, draw)
            continue
        error = "" if got.num_programs == 1 else f"planned {got.num_programs} times"
        seconds = time.perf_counter() - started
        yield Cell(name, library, rule, check, *_distances(got, want), got.num_sharded, seconds, error, draw)


def _distances(got: Run, want: Run) -> tuple[float, float, str]:
    """The largest differences of any loss and of any parameter, and the path of the latter."""
    loss = float(np.max(np.abs(np.subtract(got.losses, want.losses))))
    differences = {path: float(np.max(np.abs(got.params[path] - value))) for path, value in want.params.items()}
    worst = max(differences, key=differences.get)
    return loss, differences[worst], worst


def _spec(name: str, library: str, check: Check) -> Any:
    return build(name, library=library, dtype=check.dtype, param_dtype=check.dtype, **MODELS[name])


def _batches(name: str, check: Check, draw: int, num_examples: int = BATCH) -> Iterator[dict[str, np.ndarray]]:
    spec, rng = _spec(name, "linen", check), np.random.default_rng(draw)
    for _ in range(check.num_steps):
        if spec.input_name == "tokens":
            yield {"tokens": rng.integers(0, spec.num_classes, (num_examples, *spec.input_shape)).astype(np.int32)}
        else:
            images = rng.normal(size=(num_examples, *spec.input_shape)).astype(check.dtype)
            yield {"image": images, "label": rng.integers(0, spec.num_classes, num_examples).astype(np.int32)}


def _numbers(path: str, leaf: Any, dtype: str, last_bit: bool) -> jax.Array:
    """First values from numpy, which draws the same everywhere and compiles nothing: weights of He's scale, scales near
    one, biases that are not zero, running variances of one. All of one dtype: Flax begins batch statistics in float32
    whatever the model's, and a first step would change them. `last_bit`: every value moved to a neighbour."""
    rng, name = np.random.default_rng(zlib.crc32(path.encode())), path.rsplit("/", 1)[-1]
    values = rng.normal(size=leaf.shape)
    if name in ("scale", "var"):
        values = 1 + (0.1 if name == "scale" else 0.0) * values
    elif name == "kernel":
        values = values * (2 / max(1, int(np.prod(leaf.shape[:-1])))) ** 0.5
    else:
        values = values * (0.02 if "embedding" in name else 0.1)
    values = values.astype(dtype)
    if last_bit:
        values = np.nextafter(values, np.where(rng.random(leaf.shape) < 0.5, -np.inf, np.inf).astype(dtype))
    return jnp.asarray(values)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _run_linen(
    name: str, check: Check, batches: list[Any], rules: str | None, last_bit: bool = False, **options: Any
) -> Run:
    """`options`: further ones of `parallelize`."""
    spec, tx = _spec(name, "linen", check), check.optimizer()
    init_fn, step, _ = make_step(spec, tx, value_and_grad=splitjax.value_and_grad)
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    weights = {
        part: jax.tree_util.tree_map_with_path(lambda p, x: _numbers(_path(p), x, check.dtype, last_bit), shapes[part])
        for part in ("params", "batch_stats")
        if part in shapes
    }
    state = {**weights, "opt": tx.init(weights["params"]), "step": jnp.zeros((), jnp.int32)}
    if "key" in shapes:
        state["key"] = jax.random.key(3)
    if rules is None:
        step, parallel = jax.jit(step), None
    else:
        step = parallel = splitjax.parallelize(step, rules=rules, **{"mesh": MESH, **options})
        state = step.place(state, example=(batches[0],))
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    arrays = jax.tree_util.tree_leaves_with_path({part: state[part] for part in weights})
    return _result(losses, {_path(path): leaf for path, leaf in arrays}, parallel)


def _run_nnx(name: str, check: Check, batches: list[Any], rules: str | None, last_bit: bool = False) -> Run:
    import splitjax.nnx as parallel_nnx

    _, step, _ = make_nnx_step(_spec(name, "nnx", check), check.optimizer(), value_and_grad=parallel_nnx.value_and_grad)
    model = _spec(name, "nnx", check).make(nnx.Rngs(params=0, dropout=3))
    weights = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))

    def numbers(path, leaf):
        return _numbers(_path(path).removesuffix("/value"), leaf, check.dtype, last_bit)

    nnx.update(model, jax.tree_util.tree_map_with_path(numbers, weights))
    optimizer = nnx.Optimizer(model, check.optimizer(), wrt=nnx.Param)
    if rules is None:
        step, parallel = nnx.jit(step), None
    else:
        step = parallel = parallel_nnx.parallelize(step, mesh=MESH, rules=rules)
        model, optimizer = step.place(model, optimizer, example=(batches[0],))
    losses = [float(step(model, optimizer, batch)["loss"]) for batch in batches]
    arrays = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    return _result(losses, {_path(path): leaf for path, leaf in arrays}, parallel)


def _result(losses: list[float], arrays: dict[str, jax.Array], parallel: Any) -> Run:
    sharded = sum(not leaf.sharding.is_fully_replicated for leaf in arrays.values()) if parallel is not None else 0
    values = {path: np.asarray(leaf, np.float64) for path, leaf in arrays.items()}
    return Run(losses, values, sharded, 1 if parallel is None else len(parallel.compiles))


def _line(cell: Cell) -> str:
    verdict = "pass" if cell.ok else "MISS"
    what = cell.error or f"loss {cell.loss_difference:.1e} state {cell.state_difference:.1e} ({cell.worst})"
    return (f"{verdict} {cell.model:15} {cell.library:5} {cell.check.name:12} {cell.rules:13} {cell.seconds:5.1f} s "
            f"{cell.num_sharded:3} sharded  {what}")  # fmt: skip


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `numbers.json` holds."""
    checks = {check.name: check for check in CHECKS}
    cells = [Cell(**{**fields, "check": checks[fields["check"]]}) for fields in stored["cells"]]
    passed = sum(cell.ok for cell in cells)
    skipped = list(dict.fromkeys(f"{cell.model} {cell.library} (seed {cell.draw})" for cell in cells if cell.draw))
    lines = [
        "# Numbers: the same as on one device",
        "",
        f"**{passed} of {len(cells)} cells equal one device.**",
        "",
        stored["header"],
        "",
        (
            f"Each cell trains a narrow model twice from the same numbers, batches of {BATCH}, dropout on: by `jax.jit`"
            " on one device, and under `splitjax.parallelize` on a mesh of"
            f" {' x '.join(f'{axis}={size}' for axis, size in MESH.items())}. A cell is the largest absolute difference"
            " of any loss, then of any parameter or batch statistic after the last step. `vgg11` has batch norm,"
            " `vgg16` has none."
        ),
        "",
        "In float32 the batches of a row are the first draw (of seeds 0, 1, ...) on which one device itself moves by"
        f" no more than {STEADY:g} of the tolerance when the last bit of every weight is changed: where a ReLU stands"
        " on its edge, rounding decides its gradient on one device, too. Not the first draw: "
        + (", ".join(skipped) or "none")
        + ".",
        "",
    ]
    for check in CHECKS:
        mine = [cell for cell in cells if cell.check == check]
        if not mine:
            continue
        what = "losses and parameters" if check.of_state else "losses (parameters, in brackets, are not held to it)"
        lines += [f"## {check.name}: {check.num_steps} steps, {what} to {check.tolerance:.0e}", ""]
        rules = list(dict.fromkeys(cell.rules for cell in mine))
        rows = []
        for key in dict.fromkeys((cell.model, cell.library) for cell in mine):
            found = {cell.rules: cell for cell in mine if (cell.model, cell.library) == key}
            rows.append([*key, *(_text(found[rule]) if rule in found else "" for rule in rules)])
        lines += [*table(["model", "library", *rules], rows), ""]
    missed = [cell for cell in cells if not cell.ok]
    if missed:
        lines += ["## What misses", "", *(f"- {_line(cell)}" for cell in missed)]
    return lines


def _text(cell: Cell) -> str:
    if cell.error:
        return f"**{cell.error}**"
    state = f"{cell.state_difference:.0e}"
    text = f"{cell.loss_difference:.0e}, {state}" if cell.check.of_state else f"{cell.loss_difference:.0e} ({state})"
    return text if cell.ok else f"**{text}**"


if __name__ == "__main__":
    sys.exit(main())
